"""Who reads which chunk, and to whom it is passed on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstate.engine.ranks.restore import exchange_plan
from tierstate.engine.ranks.restore.exchange_plan import (
    FEW_HOSTS,
    HOST,
    LINK,
    NO_ROWS,
    PROCESS,
    SITE,
    SLOW,
    HostGrid,
    RankRows,
    decode_runs,
    encode_runs,
    plan_exchange,
    reach_kind,
    runs_in,
    sets_with,
)
from tierstate.manifest.errors import FormatError
from tierstate.tiers.base import Traits

KINDS = (PROCESS, HOST, SITE, SLOW)


@st.composite
def worlds(draw):
    """Hosts of ranks, chunk lengths, and masks ``[rank, row]`` of what is wanted and, by kind, reached."""
    hosts = sorted(draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)))
    rows = draw(st.integers(1, 12))
    bools = lambda: np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))  # noqa: E731
    nbytes = np.array(draw(st.lists(st.integers(1, 100), min_size=rows, max_size=rows)))
    wants = np.array([bools() for _ in hosts])
    of_host = {host: bools() for host in set(hosts)}
    site = [bools() for _ in range(2)]
    reach = {
        PROCESS: np.array([bools() & bools() for _ in hosts]),
        # What is the same for all who should see it, but for those who could not read its record.
        HOST: np.array([of_host[host] & draw(st.booleans()) for host in hosts]),
        SITE: np.array([site[0] & draw(st.booleans()) for _ in hosts]),
        SLOW: np.array([site[1] & draw(st.booleans()) for _ in hosts]),
    }
    return hosts, nbytes, wants, reach


def offers_of(wants, reach):
    return [RankRows(runs_in(wants[r]), tuple(runs_in(reach[kind][r]) for kind in KINDS)) for r in range(len(wants))]


def plans(hosts, nbytes, wants, reach, **how):
    offers = offers_of(wants, reach)
    return [plan_exchange(offers, hosts, nbytes, me, **how) for me in range(len(hosts))]


def arrivals(every):
    """By rank and row, how often it gets there: passed along the edges that senders and receivers both plan."""
    edges = {(source, to): rows.tolist() for source, plan in enumerate(every) for to, rows in plan.sends.items()}
    taken = {(source, to): rows.tolist() for to, plan in enumerate(every) for source, rows in plan.receives.items()}
    assert edges == taken, "a sender and a receiver plan otherwise"
    there = [dict.fromkeys(plan.reads.tolist(), 1) for plan in every]
    todo = [(source, row) for source, rows in enumerate(there) for row in rows]
    while todo:
        source, row = todo.pop()
        for (a, b), rows in edges.items():
            if a == source and row in rows:
                there[b][row] = there[b].get(row, 0) + 1
                todo.append((b, row))
    passed = {(a, b, row) for (a, b), rows in edges.items() for row in rows}
    assert all(row in there[a] for a, _, row in passed), "a rank is to pass on what it never gets"
    return there


@given(worlds(), st.booleans())
def test_every_wanted_chunk_arrives_once_and_is_read_by_who_reaches_it(world, apart):
    _, _, wants, reach = world
    every = plans(*world, apart=apart)
    anyone = np.logical_or.reduce([reach[kind].any(0) for kind in KINDS])
    there = arrivals(every)
    for rank, plan in enumerate(every):
        assert all(any(reach[kind][rank, row] for kind in KINDS) for row in plan.reads)
        for row in np.flatnonzero(wants[rank]).tolist():
            assert there[rank].get(row, 0) == int(anyone[row])
        lacks = np.flatnonzero(wants[rank] & ~anyone).tolist()
        assert all(p.lacking.get(rank, np.zeros(0)).tolist() == lacks for p in every)
        useless = set(there[rank]) - set(np.flatnonzero(wants[rank]).tolist())
        assert all(row in plan.reads for row in useless), "a chunk is passed to who does not want it"


@given(worlds())
def test_a_chunk_is_read_once_a_host_and_once_in_all_where_it_is_far(world):
    hosts, nbytes, wants, reach = world
    every = plans(*world)
    for row in range(len(nbytes)):
        readers = [rank for rank, plan in enumerate(every) if row in plan.reads]
        own = [r for r in range(len(hosts)) if wants[r, row] and reach[PROCESS][r, row]]
        assert set(own) <= set(readers)
        rest = [r for r in range(len(hosts)) if wants[r, row] and r not in own]
        near = {
            hosts[r]
            for r in rest
            if any(reach[k][q, row] for k in (PROCESS, HOST, SITE) for q in range(len(hosts)) if hosts[q] == hosts[r])
        }
        others = [r for r in readers if r not in own]
        assert len(others) <= max(len(near), bool(rest))
        # Not two of a host, nor any that lacks what would have been nearer.
        assert len({hosts[r] for r in others}) == len(others)


@given(worlds())
def test_where_many_hosts_want_a_chunk_one_rank_reads_it_from_the_site(world):
    hosts, nbytes, wants, reach = world
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_plan, "FEW_HOSTS", 1)
        every = plans(*world)
    there = arrivals(every)
    anyone = np.logical_or.reduce([reach[kind].any(0) for kind in KINDS])
    for row in range(len(nbytes)):
        wanting = np.flatnonzero(wants[:, row]).tolist()
        assert all(there[rank].get(row, 0) == int(anyone[row]) for rank in wanting)
        far = [r for r, plan in enumerate(every) if row in plan.reads and not (reach[PROCESS] | reach[HOST])[r, row]]
        others = {hosts[rank] for rank in wanting if not reach[PROCESS][rank, row]}
        assert len(far) <= 1 or len(others) <= 1


@pytest.mark.parametrize("readers", [1, 12])
@given(size=st.integers(4, 23), each=st.integers(1, 3), data=st.data())
@settings(max_examples=20)
def test_along_the_rows_of_many_hosts_everything_arrives_once_and_no_hosts_wait_for_each_other(
    readers, size, each, data
):
    hosts, rows = [rank // each for rank in range(size * each)], 12
    wants = np.array([[data.draw(st.booleans())] * rows for _ in hosts])
    reach = {kind: np.zeros((len(hosts), rows), bool) for kind in KINDS}
    reach[SLOW][data.draw(st.permutations(range(len(hosts))))[:readers]] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_plan, "DIRECT", 2)
        every, grid = plans(hosts, np.full(rows, 10), wants, reach), HostGrid(hosts)
    there = arrivals(every)
    for rank, plan in enumerate(every):
        assert all(there[rank].get(row, 0) == 1 for row in range(rows) if wants[rank, row])
        mine = hosts[rank]
        for source, got in plan.receives.items():
            for to, sent in plan.sends.items():
                if np.isin(got, sent).any() and hosts[to] != mine:  # it is forwarded to another host
                    assert grid.row(hosts[source]) != grid.row(mine) == grid.row(hosts[to])
                    assert hosts[source] != mine
    assert sum(len(plan.reads) for plan in every) == rows * bool(wants.any())


def test_ten_thousand_ranks_have_few_connections():
    hosts = [rank // 8 for rank in range(10_000)]
    every = np.array([[0, 500]])
    offers = [RankRows(every, (NO_ROWS, NO_ROWS, every, NO_ROWS))] * len(hosts)
    for me in (0, 5000, 9999):
        plan = plan_exchange(offers, hosts, np.full(500, 10), me)
        assert len({*plan.sends, *plan.receives}) < 200


def test_who_reads_sends_to_its_row_and_to_one_host_of_each_other_row():
    hosts, every = list(range(100)), np.array([[0, 100]])
    offers = [RankRows(every, (NO_ROWS, NO_ROWS, every, NO_ROWS))] * len(hosts)
    found = [plan_exchange(offers, hosts, np.full(100, 10), me) for me in hosts]
    assert sum(len(plan.reads) for plan in found) == 100
    assert max(len(plan.sends) for plan in found) <= 9 + 9


def test_who_gets_a_chunk_from_its_host_does_not_read_it_for_others(monkeypatch):
    monkeypatch.setattr(exchange_plan, "FEW_HOSTS", 1)
    hosts, yes = [0, 1, 2, 2], np.array([True])
    wants = np.array([yes, yes, yes, ~yes])
    reach = {kind: np.zeros((4, 1), bool) for kind in KINDS}
    reach[HOST][3] = reach[SLOW][2] = True
    every = plans(hosts, np.array([10]), wants, reach)
    assert [there.get(0, 0) for there in arrivals(every)] == [1, 1, 1, 1]


def test_many_ranks_read_each_chunk_of_the_site_once():
    size, rows = 160, 300
    hosts = [rank // 8 for rank in range(size)]
    assert len(set(hosts)) > FEW_HOSTS
    everyone = np.array([[0, rows]])
    offers = [RankRows(everyone, (NO_ROWS, NO_ROWS, everyone, NO_ROWS))] * size
    every = [plan_exchange(offers, hosts, np.full(rows, 1 << 20), me) for me in range(size)]
    assert sorted(row for plan in every for row in plan.reads.tolist()) == list(range(rows))
    for plan in every:
        there = [*plan.reads.tolist(), *(row for got in plan.receives.values() for row in got.tolist())]
        assert sorted(there) == list(range(rows))


@given(worlds())
def test_what_only_one_rank_wants_is_planned_the_same_without_its_short_cut(world):
    found = plans(*world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_plan, "_only_reader", lambda _offers, rows: np.full(rows, exchange_plan.NOBODY, "i4"))
        right = plans(*world)
    for one, other in zip(found, right, strict=True):
        assert one.reads.tolist() == other.reads.tolist()
        for name in ("sends", "receives", "lacking"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert {r: rows.tolist() for r, rows in mine.items()} == {r: rows.tolist() for r, rows in theirs.items()}


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), max_size=5))
def test_how_many_sets_have_a_row(sets):
    found = sets_with([runs_in(np.array(bits)) for bits in sets], 7)
    assert found.tolist() == [sum(bits[row] for bits in sets) for row in range(7)]


@given(worlds())
def test_what_a_rank_has_in_its_own_memory_never_leaves_it_for_itself(world):
    _, _, wants, reach = world
    for rank, plan in enumerate(plans(*world)):
        for rows in plan.receives.values():
            assert not (wants[rank] & reach[PROCESS][rank])[rows].any()


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=400),
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from([HOST, SITE, SLOW]),
)
def test_replicas_read_about_as_many_bytes_each(lengths, ranks, hosts, kind):
    nbytes = np.array(lengths)
    size = ranks * hosts
    host = [r // ranks for r in range(size)]
    all_ = np.ones((size, len(nbytes)), bool)
    reach = {k: all_ & (k == kind) for k in KINDS}
    every = plans(host, nbytes, all_, reach)
    loads = np.array([int(nbytes[plan.reads].sum()) for plan in every])
    total = int(nbytes.sum()) * (1 if kind == SLOW else hosts)
    assert loads.sum() == total
    assert loads.max() - total / size <= nbytes.max()


def test_a_chunk_crosses_to_each_other_host_once():
    hosts, rows = [0, 0, 1, 1, 2, 2], 30
    everything = np.ones((6, rows), bool)
    reach = {kind: np.zeros((6, rows), bool) for kind in KINDS}
    reach[HOST][0] = reach[HOST][1] = True
    every = plans(hosts, np.full(rows, 10), everything, reach)
    across = [
        row for s, plan in enumerate(every) for to, got in plan.sends.items() if hosts[s] != hosts[to] for row in got
    ]
    assert len(across) == 2 * rows
    assert [len(plan.reads) for plan in every] == [15, 15, 0, 0, 0, 0]
    # Both ranks of the other hosts take their share of what comes from outside.
    assert [sorted(len(rows) for rows in plan.receives.values()) for plan in every[2:]] == [[15, 15]] * 4


def test_a_replaced_host_reads_what_it_lacks_from_the_site_and_others_read_at_home():
    hosts, rows = [0, 0, 1, 1], 8
    wants = np.ones((4, rows), bool)
    reach = {kind: np.zeros((4, rows), bool) for kind in KINDS}
    reach[HOST][:2] = True
    reach[SITE][:] = True
    every = plans(hosts, np.full(rows, 10), wants, reach)
    assert sum(len(plan.reads) for plan in every[2:]) == rows
    assert not any(hosts[s] != hosts[to] for s, plan in enumerate(every) for to in plan.sends)


@pytest.mark.parametrize(
    ("traits", "ranks", "kind"),
    [
        (Traits(True, "site", "a"), 1, SITE),
        (Traits(True, "site", "a", bandwidth=200 << 20), 2, SLOW),
        (Traits(True, "site", "a", bandwidth=200 << 20), 8, SITE),
        (Traits(True, "site", "a", bandwidth=2 * LINK), 1, SITE),
        (Traits(True, "host", "a", bandwidth=1), 1, HOST),
        (Traits(False, "process", "a"), 4, PROCESS),
    ],
)
def test_the_network_is_preferred_to_a_tier_that_is_slower(traits, ranks, kind):
    assert reach_kind(traits, ranks) == kind


@pytest.mark.parametrize("case", ["replicas", "shards"])
def test_a_million_chunks(case):
    rows, size = 1_000_000, 16
    everyone = np.array([[0, rows]])
    part = rows // size
    wants = [everyone if case == "replicas" else np.array([[r * part, (r + 1) * part]]) for r in range(size)]
    offers = [RankRows(w, (NO_ROWS, NO_ROWS, everyone, NO_ROWS)) for w in wants]
    plan = plan_exchange(offers, [r // 8 for r in range(size)], np.full(rows, 1 << 20), 3)
    assert len(plan.reads) == (rows // 8 if case == "replicas" else part)
    assert sum(len(got) for got in plan.receives.values()) == (rows - rows // 8 if case == "replicas" else 0)


@given(st.lists(st.booleans(), max_size=60))
def test_row_sets_survive_their_bytes(bits):
    mask = np.array(bits, bool)
    runs = runs_in(mask)
    again = decode_runs(encode_runs(runs), len(mask))
    assert again.tolist() == runs.tolist()
    assert (sets_with([again], len(mask)) > 0).tolist() == bits


@given(st.binary(max_size=40) | st.lists(st.integers(0, 2**32 - 1), max_size=6), st.integers(0, 50))
def test_row_sets_of_strangers_are_refused_or_are_such(data, rows):
    import zlib

    said = data if isinstance(data, bytes) else zlib.compress(np.array(data, "<u4").tobytes())
    try:
        runs = decode_runs(said, rows)
    except FormatError:
        return
    assert runs_in(sets_with([runs], rows) > 0).tolist() == runs.tolist()
