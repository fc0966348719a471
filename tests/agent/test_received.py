"""The agent's side of a save: how long slabs stay that a trainer may need again, should it lose its agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.agent.received import MEMORY, IncomingSave

ORDER = (MEMORY, "peer", "nvme", "lustre", "object")
PERSISTENT = {"nvme", "lustre", "object"}


def incoming(*tiers: str) -> IncomingSave:
    save_state = SimpleNamespace(tiers=dict.fromkeys((MEMORY, *tiers)))
    return IncomingSave(cast(Any, save_state), cast(Any, None), [], ORDER, idle=True)


@given(st.permutations(ORDER), st.sets(st.sampled_from(ORDER[1:]), min_size=1), st.sets(st.sampled_from(ORDER)))
def test_slabs_stay_for_tiers_to_which_nothing_else_can_be_copied(
    told: list[str], tiers: set[str], failing: set[str]
) -> None:
    """A version is copied from a persistent tier to slower ones. What is copied to a tier beside a save comes, too."""
    save = incoming(*[name for name in ORDER if name in tiers])
    there, open_ = set[str](), set(tiers)
    for name in told:
        open_.discard(name)
        there |= {name} & (PERSISTENT - failing)
        sources = [ORDER.index(one) for one in there]
        needed = not sources or any(ORDER.index(one) < min(sources) for one in open_)
        assert save.told(name, lasting=name in there) != needed


@pytest.mark.parametrize("first", [True, False])
def test_a_slower_tier_that_has_it_first_is_no_source_for_a_faster_one(first: bool) -> None:
    save = incoming("peer", "lustre")
    assert save.told("peer", lasting=False) is False
    assert save.told("lustre", lasting=True) is True
    save = incoming("peer", "lustre")
    assert save.told("lustre", lasting=first) is False
    assert save.told("peer", lasting=False) is first
