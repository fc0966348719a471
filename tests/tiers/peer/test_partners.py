"""Placement of copies: any hosts, any domains."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tierstate.tiers.peer.members import partners

_DOMAINS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=24)
_COPIES = st.integers(0, 5)


@given(_DOMAINS, _COPIES)
def test_partners_are_as_many_others_as_there_are(domains: list[str], copies: int) -> None:
    """So any ``copies`` hosts lost leave one that has the object, where there are enough hosts."""
    for me in range(len(domains)):
        found = partners(domains, me, copies)
        assert len(found) == len(set(found)) == min(copies, len(domains) - 1)
        assert me not in found
        assert set(found) <= set(range(len(domains)))


@given(_DOMAINS, _COPIES)
def test_other_domains_come_first(domains: list[str], copies: int) -> None:
    for me, domain in enumerate(domains):
        others = sum(d != domain for d in domains)
        far = [domains[host] != domain for host in partners(domains, me, copies)]
        assert sum(far) == min(copies, others)
        assert far == sorted(far, reverse=True)


@given(_DOMAINS, _COPIES)
def test_balanced_where_no_domain_has_more_than_half(domains: list[str], copies: int) -> None:
    widest = max(Counter(domains).values())
    load = Counter(host for me in range(len(domains)) for host in partners(domains, me, copies))
    if copies <= len(domains) - 2 * widest + 1:
        assert [load[host] for host in range(len(domains))] == [copies] * len(domains)


@given(st.integers(2, 12), st.integers(1, 12), st.integers(1, 4))
def test_a_wide_domain_burdens_the_others_evenly(wide: int, others: int, copies: int) -> None:
    domains = ["wide"] * wide + [f"{n}" for n in range(others)]
    load = Counter(host for me in range(wide) for host in partners(domains, me, copies) if host >= wide)
    if copies <= others < wide and copies > len(domains) - 2 * wide + 1:
        loads = [load[host] for host in range(wide, wide + others)]
        assert max(loads) - min(loads) <= copies


@given(st.permutations("aabbccdd"), st.integers(1, 3))
def test_equal_racks_lose_nothing_when_one_is_lost(domains: list[str], copies: int) -> None:
    for me in range(len(domains)):
        keep = {domains[me], *(domains[host] for host in partners(domains, me, copies))}
        assert len(keep) >= 2


def test_one_domain_and_one_host() -> None:
    assert [partners(["r"] * 4, me, 1) for me in range(4)] == [(1,), (2,), (3,), (0,)]
    assert partners(["r"], 0, 3) == ()
