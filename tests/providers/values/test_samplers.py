"""Loaders of torchdata before their first iteration: asking for their state draws nothing, and setting it sets all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.transfer import restore, transfer
from torch.utils.data import RandomSampler, SequentialSampler

from tierstate.manifest.errors import StateMismatch
from tierstate.providers.tree.flatten import flatten


class Numbers:
    """A dataset with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 9

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class LikeTorchdata:
    """What ``StatefulDataLoader`` does: asked for its state before its first iteration, it makes an iterator, which
    draws; one that is restored goes on where it was."""

    def __init__(self, seed: int, *, shuffle: bool = True) -> None:
        self.dataset = Numbers()
        generator = torch.Generator().manual_seed(seed)
        # Of torchdata: in the order of the generator that a sampler of its own has.
        self.sampler = RandomSampler(self.dataset, generator=generator) if shuffle else SequentialSampler(self.dataset)
        self._iterator: list[int] | None = None
        self.next_iter_state: dict[str, Any] | None = None

    def _begin(self) -> None:
        torch.rand(())
        self._iterator = (self.next_iter_state or {}).get("left") or list(self.sampler)
        self.next_iter_state = None

    def __iter__(self) -> Iterator[int]:
        self._begin()
        assert self._iterator is not None
        while self._iterator:
            yield self._iterator.pop(0)

    def state_dict(self) -> dict[str, Any]:
        if self._iterator is None:
            self._begin()
        assert self._iterator is not None
        return {"left": list(self._iterator)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iterator = None
        if state:
            self.next_iter_state = state


def drawn(loader: LikeTorchdata) -> list[float]:
    return [torch.rand(()).item(), *loader, torch.rand(()).item()]


def test_a_save_before_the_first_iteration_draws_nothing() -> None:
    torch.manual_seed(3)
    truth = drawn(LikeTorchdata(1))
    torch.manual_seed(3)
    loader = LikeTorchdata(1)
    transfer(flatten({"loader": loader}))
    assert drawn(loader) == truth


@pytest.mark.parametrize("used", ["new", "begun", "restored"])
def test_a_restore_of_it_begins_where_the_saved_one_would_have(used: str) -> None:
    loader = LikeTorchdata(1)
    loader.dataset.at = 5
    leaves, data = transfer(flatten({"loader": loader}))
    again = LikeTorchdata(2)
    if used != "new":
        next(iter(again))
    if used == "restored":
        again.load_state_dict(again.state_dict())
    restore(leaves, data, into={"loader": again})
    assert again.dataset.at == 5
    assert list(again) == list(loader)


def test_one_that_is_restored_and_not_begun_is_saved_as_it_was_restored() -> None:
    loader = LikeTorchdata(1)
    next(iter(loader))
    again = LikeTorchdata(2)
    for one in (loader, again):
        leaves, data = transfer(flatten({"loader": one}))
        restore(leaves, data, into={"loader": again})
    assert list(again) == loader._iterator


def test_other_samplers_are_refused() -> None:
    leaves, data = transfer(flatten({"loader": LikeTorchdata(1)}))
    with pytest.raises(
        StateMismatch, match="was saved with other samplers: they had generator, those here have nothing"
    ):
        restore(leaves, data, into={"loader": LikeTorchdata(1, shuffle=False)})
