"""Per-rank values: each rank saves its own and takes its own, whatever the others have."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.equality import same
from support.transfer import transfer

import tierstate as ts
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.format.leaf import Leaf
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.flatten_cache import FlattenCache
from tierstate.providers.tree.unflatten import NEW, plan_restore


def saved(*states: Any) -> tuple[list[Leaf], dict[int, bytes]]:
    """A version of what several ranks gave, as it is put together: by path, in order of first appearance."""
    leaves: list[Leaf] = []
    data: dict[int, bytes] = {}
    for rank, state in enumerate(states):
        own, bytes_of = transfer(flatten(state, rank=rank))
        for i, leaf in enumerate(own):
            if leaf not in leaves:
                leaves.append(leaf)
                if i in bytes_of:
                    data[len(leaves) - 1] = bytes_of[i]
    return leaves, data


def restore(leaves: list[Leaf], data: dict[int, bytes], into: Any = NEW, rank: int = 0, **options: Any) -> Any:
    target = plan_restore(leaves, into=into, rank=rank, **options)
    for index, provider in target.ahead:
        provider.load(0, as_buffer(data[index]))
    target.settle()
    for index, provider in target.wanted.items():
        provider.load(0, as_buffer(data[index]))
    return target.finish()


def state_of(rank: int) -> dict[str, Any]:
    values = {"position": 100 + rank, "mask": torch.full((rank + 1,), float(rank)), "rng": random.Random(rank)}
    return {"w": torch.ones(2), "own": ts.PerRank(values)}


def test_all_ranks_entries_lie_under_one_path() -> None:
    leaves, data = saved(state_of(0), state_of(1))
    names = [leaf.name for leaf in leaves]
    assert "own.0.position" in names
    assert "own.1.position" in names
    loaded = restore(leaves, data)
    assert list(loaded["own"]) == [0, 1]
    assert [loaded["own"][rank]["position"] for rank in (0, 1)] == [100, 101]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_takes_its_own_in_place(rank: int) -> None:
    leaves, data = saved(*map(state_of, range(3)))
    right, state = state_of(rank), state_of(rank)
    own, mask = state["own"], state["own"].value["mask"].zero_()
    own.value["position"] = 0
    own.value["rng"].random()
    restored = restore(leaves, data, state, rank)
    assert restored is state
    assert restored["own"] is own
    assert own.value["mask"] is mask
    assert own.value["position"] == 100 + rank
    assert same(mask, right["own"].value["mask"])
    assert own.value["rng"].random() == right["own"].value["rng"].random()


@pytest.mark.parametrize("value", [7, "text", None, (1, torch.ones(2)), [1, 2], torch.arange(3)])
def test_a_value_of_any_kind_is_put_into_the_wrapper(value: Any) -> None:
    leaves, data = saved(ts.PerRank(value))
    given_one = ts.PerRank(torch.zeros(3, dtype=torch.int64) if isinstance(value, torch.Tensor) else value)
    assert restore(leaves, data, given_one) is given_one
    assert same(given_one.value, value)


def test_a_rank_without_an_entry_is_told_so_with_the_remedy() -> None:
    leaves, data = saved(state_of(0))
    with pytest.raises(StateMismatch, match=r'own: the version has no entry of rank 5;.*missing="keep"'):
        restore(leaves, data, state_of(5), rank=5)
    state = state_of(5)
    state["w"].zero_()
    assert restore(leaves, data, state, rank=5, only=["w"])["w"].tolist() == [1.0, 1.0]  # it was not asked for


def test_a_rank_without_an_entry_keeps_what_it_has_where_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    leaves, data = saved(state_of(0))
    state = state_of(5)
    state["own"].missing = "keep"
    state["w"].zero_()
    with caplog.at_level(logging.WARNING, "tierstate"):
        restored = restore(leaves, data, state, rank=5)
    assert "own: the version has no entry of rank 5; its value is kept" in caplog.text
    assert restored["own"].value["position"] == 105
    assert restored["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("missing", ["keep", "error"])
def test_a_version_that_knows_nothing_of_it_has_no_entry_either(missing: Any) -> None:
    leaves, data = saved({"w": torch.ones(2)})
    state = {"w": torch.zeros(2), "own": ts.PerRank(3, missing)}
    if missing == "keep":
        assert restore(leaves, data, state)["own"].value == 3
    else:
        with pytest.raises(StateMismatch, match="own: the version has no entry of rank 0"):
            restore(leaves, data, state)


def test_what_was_no_per_rank_value_is_another_kind() -> None:
    leaves, data = saved({"own": torch.ones(2)})
    with pytest.raises(StateMismatch, match="own: is dict here, tensor in the version"):
        restore(leaves, data, {"own": ts.PerRank(torch.ones(2))})


def test_entries_of_others_are_not_asked_for_and_not_listed() -> None:
    leaves, _ = saved(*map(state_of, range(4)))
    target = plan_restore(leaves, into=state_of(1), rank=1, elsewhere=True)
    assert target.elsewhere == ()
    assert all(leaves[i].path[:2] in (("w",), ("own", 1)) for i in target.wanted)


class Loader:
    """A thing that gives per-rank values as a part of its state."""

    def __init__(self, at: int) -> None:
        self.at = ts.PerRank(at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


def test_a_thing_gets_the_wrapper_back_that_it_gave() -> None:
    leaves, data = saved({"loader": Loader(5)}, {"loader": Loader(6)})
    loader = Loader(0)
    restore(leaves, data, {"loader": loader}, rank=1)
    assert isinstance(loader.at, ts.PerRank)
    assert loader.at.value == 6
    assert loader.epoch == 3


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 9))
def test_a_state_with_one_is_known_again(order: list[int], rank: int) -> None:
    recall = FlattenCache(rank=rank)
    kept = torch.arange(4)
    for which in order:
        own = [ts.PerRank({"a": kept, "b": 1}), ts.PerRank({"a": kept, "b": 2}), ts.PerRank(4), {rank: 4}][which]
        leaves, data = transfer(recall.flatten({"own": own}))
        anew, again = transfer(flatten({"own": own}, rank=rank))
        assert (leaves, data) == (anew, again)


def test_a_word_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="missing='never': right are 'error' and 'keep'"):
        ts.PerRank(1, "never")  # type: ignore[arg-type]
