"""A container that another thread changes while the state is flattened is taken as it was before, or as it is after.

What the other thread does is done at a step of the interpreter that hypothesis chooses.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.equality import difference
from support.transfer import restore, transfer

from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.flatten_cache import FlattenCache
from tierstate.providers.values.metadata import json_metadata

Change = Callable[[Any], Any]


def rotate(items: Any) -> None:
    items.append(items.pop(0))


def rename(items: Any) -> None:
    key = next(iter(items))
    items[f"{key}'"] = items.pop(key)


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(i)) for i in range(count)]


CASES: dict[str, tuple[Callable[[], Any], Change]] = {
    "a history of losses": (lambda: [0.5, 0.25, 0.125], lambda items: items.append(7.0)),
    "a list that is cleared": (lambda: [0.5, "x", (1, 2)], list.clear),
    "ints of which one becomes a float": (lambda: [1] * 9, lambda items: items.__setitem__(8, 2.5)),
    "a list of tensors": (lambda: tensors(4), rotate),
    "a list of tensors that grows": (lambda: tensors(4), lambda items: items.append(1)),
    "a dict of tensors": (lambda: dict(zip("abcd", tensors(4), strict=True)), rename),
    "an OrderedDict of tensors": (lambda: OrderedDict(zip("abcd", tensors(4), strict=True)), rename),
    "a dict that shrinks": (lambda: {"a": 1, "b": [2], "c": 3}, lambda items: items.pop("a")),
    "a dict as one value": (lambda: {frozenset({1}): 2, frozenset({2}): 4}, lambda items: items.popitem()),
    "a Counter": (lambda: Counter("abca"), lambda items: items.update("def")),
    "a set": (lambda: {1, 2, 3}, lambda items: items.add(9)),
    "a deque": (lambda: deque(tensors(4)), deque.rotate),
    "a deque of values": (lambda: deque([1.5, 2.5, 3.5]), deque.popleft),
    "bytes": (lambda: bytearray(b"abc"), lambda items: items.extend(b"def")),
}


def with_change(call: Callable[[Any], Any], state: Any, at: int, change: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call, with a change at a step of the interpreter; and the number of steps."""
    steps = 0

    def step(*_event: Any) -> None:
        nonlocal steps
        if steps == at:
            sys.setprofile(None)
            change()
            sys.setprofile(step)
        steps += 1

    sys.setprofile(step)
    try:
        found = call(state)
    finally:
        sys.setprofile(None)
    return found, steps


@pytest.mark.parametrize("name", CASES)
@given(first=st.booleans(), at=st.floats(0, 1))
@settings(deadline=None, max_examples=60)
def test_it_is_taken_as_it_was_at_one_moment(name: str, first: bool, at: float) -> None:
    make, change = CASES[name]
    state, calls = {"x": make(), "y": torch.ones(1)}, [flatten, flatten]
    if not first:
        calls = [FlattenCache().flatten, FlattenCache().flatten]
        for call in calls:
            call(state)
    _, steps = with_change(calls[0], state, -1, lambda: None)
    before = copy.deepcopy(state)
    tree, _ = with_change(calls[1], state, int(at * steps), lambda: change(state["x"]))
    found = restore(*transfer(tree))
    assert "" in (difference(found, before), difference(found, state))


@pytest.mark.parametrize("make", [list, deque, lambda items: dict(enumerate(items))])
@given(at=st.floats(0, 1))
@settings(deadline=None, max_examples=30)
def test_so_are_metadata(make: Any, at: float) -> None:
    metadata = {"losses": make([0.5, 0.25])}
    _, steps = with_change(json_metadata, metadata, -1, lambda: None)
    before = json_metadata(metadata)
    changed = metadata["losses"].pop if make is list else metadata["losses"].clear
    found, _ = with_change(json_metadata, metadata, int(at * steps), changed)
    assert found in (before, json_metadata(metadata))
