"""The core property: any state comes back bit for bit, through any chunks, in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.equality import difference
from support.state_strategies import scrambled, states
from support.transfer import restore, stream, transfer

from tierstate.manifest.chunk import to_bytes
from tierstate.providers.tree.flatten import flatten

SIZES = st.integers(1, 8).map(lambda n: 16 * n)


@given(states(), SIZES, st.integers(1, 70), st.integers(0, 99))
@settings(deadline=None)
def test_a_fresh_load_is_the_state(state: Any, size: int, piece: int, seed: int) -> None:
    leaves, data = transfer(flatten(state), size)
    assert difference(state, restore(leaves, data, piece=piece, seed=seed)) == ""


@given(states(), SIZES, st.integers(1, 70), st.integers(0, 99))
@settings(deadline=None)
def test_a_load_in_place_is_the_state(state: Any, size: int, piece: int, seed: int) -> None:
    leaves, data = transfer(flatten(state), size)
    given_state = scrambled(state)
    out = restore(leaves, data, piece=piece, seed=seed, into=given_state)
    assert difference(state, out) == ""
    if isinstance(state, (dict, list)) and type(out) is type(given_state) and leaves[0].spec.kind != "value":
        assert out is given_state


@given(states())
@settings(deadline=None, max_examples=100)
def test_equal_states_have_equal_leaves_and_bytes(state: Any) -> None:
    (leaves, data), (others, more) = transfer(flatten(state), 16), transfer(flatten(state), 4096)
    assert data == more
    assert [(leaf.name, leaf.spec) for leaf in leaves] == [(leaf.name, leaf.spec) for leaf in others]


@given(states())
@settings(deadline=None, max_examples=100)
def test_memory_holds_the_bytes_that_chunks_give(state: Any) -> None:
    for node in flatten(state).nodes:
        memory = node.provider.memory() if node.provider is not None else None
        if memory is not None:
            assert to_bytes(memory) == stream(node.provider)


@given(states(), st.booleans())
@settings(deadline=None)
def test_bytes_put_into_memory_are_loaded(state: Any, in_place: bool) -> None:
    leaves, data = transfer(flatten(state))
    into = {"into": scrambled(state)} if in_place else {}
    assert difference(state, restore(leaves, data, by_memory=True, **into)) == ""
