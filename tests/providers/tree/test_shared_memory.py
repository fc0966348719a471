"""Shards that share memory: restored as they were saved, or an error says why this is not possible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tierstate as ts
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import StateMismatch
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.unflatten import plan_restore


@given(st.integers(0, 5), st.integers(0, 8), st.booleans(), st.booleans())
@settings(deadline=None)
def test_rows_of_one_memory_are_right_or_refused(first: int, second: int, alike: bool, plain: bool) -> None:
    memory = torch.arange(40.0).reshape(10, 4)
    saved = {
        "a": memory[first : first + 5].clone(),
        "b": (memory if alike else -memory - 1)[second : second + 2].clone(),
    }
    leaves = flatten(saved).leaves
    here = torch.zeros(10, 4)
    a, b = here[first : first + 5], here[second : second + 2]
    target = plan_restore(
        leaves, into={"a": ts.Shard(a, (0, 0), (5, 4)), "b": b if plain else ts.Shard(b, (0, 0), (2, 4))}
    )
    for index, provider in target.wanted.items():
        provider.load(0, as_buffer(saved[str(leaves[index].path[0])].numpy().tobytes()))
    if alike or second >= first + 5 or second + 2 <= first:
        target.finish()
        assert torch.equal(a, saved["a"])
        assert torch.equal(b, saved["b"])
    else:
        with pytest.raises(StateMismatch, match="shares memory with another leaf here"):
            target.finish()
