"""What a caller asks of a Checkpointer is checked before anything is looked up: a slip is an error, never a guess."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alone

import tierstate as ts


@pytest.fixture
def saved(place: Any) -> Any:
    with ts.Checkpointer(alone("nvme", place), "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"m": step, "w": torch.full((4,), float(step))}, step=step).wait("only")
        yield ckpt


CALLS: dict[str, Callable[..., Any]] = {
    "load": lambda ckpt, **asked: ckpt.load(**asked),
    "restore": lambda ckpt, **asked: ckpt.restore(into={"m": 0, "w": torch.zeros(4)}, **asked),
    "info": lambda ckpt, **asked: ckpt.info(**asked),
    "leaves": lambda ckpt, **asked: ckpt.leaves(**asked),
    "tag": lambda ckpt, **asked: ckpt.tag("best", **asked),
    "fork": lambda ckpt, **asked: ckpt.fork("other", **asked),
    "copy": lambda ckpt, **asked: ckpt.copy(to="only", **asked),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_step_and_an_id_are_not_given_together(saved: Any, call: str) -> None:
    newest = saved.info().id
    with pytest.raises(ValueError, match=r"step 1 and version .* are two ways to name a version; give one of them"):
        CALLS[call](saved, step=1, version=newest)
    assert saved.tags() == {}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("step", [True, "1", 1.0, float("nan"), [1]], ids=repr)
def test_a_step_is_an_int(saved: Any, call: str, step: Any) -> None:
    with pytest.raises(ValueError, match="a step is an int, 0 or more"):
        CALLS[call](saved, step=step)


@pytest.mark.parametrize("step", [np.int64(2), torch.tensor(2)], ids=repr)
def test_any_integer_names_a_step(saved: Any, step: Any) -> None:
    assert saved.load(step=step)["m"] == 2


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=14), st.integers(0, 14), st.booleans())
def test_any_version_of_any_history_is_found_whatever_an_index_has(
    place: Any, steps: list[int], indexed: int, older: bool
) -> None:
    """Steps come again after a resume from an older one; the newest version of a step is meant."""
    newest: dict[int, int] = {}
    policy = alone("nvme", place / uuid.uuid4().hex)
    with ts.Checkpointer(policy, "run") as ckpt:
        for number, step in enumerate(steps):
            ckpt.save({"m": number}, step=step).wait("only")
            newest[step] = number
            if number == indexed:
                ckpt._tier_runs[0].summaries.look()
                ckpt._tier_runs[0].summaries.write()
        ids = {version.seq: version.id for version in ckpt.versions()}
    with ts.Checkpointer(policy, "run") as ckpt:
        for step in range(10):
            if step in newest:
                assert ckpt.load(step=step, on_damage="older" if older else "raise")["m"] == newest[step]
            else:
                with pytest.raises(ts.NotFound):
                    ckpt.load(step=step)
        for number, seq in enumerate(sorted(ids)):
            assert ckpt.load(version=ids[seq])["m"] == number


def test_an_old_version_is_found_by_the_index(place: Any) -> None:
    policy = alone("nvme", place)
    with ts.Checkpointer(policy, "run") as ckpt:
        for step in range(40):
            ckpt.save({"m": step}, step=step).wait("only")
        ckpt._tier_runs[0].summaries.look()
        ckpt._tier_runs[0].summaries.write()
    with ts.Checkpointer(policy, "run") as ckpt:
        assert ckpt.load(step=0)["m"] == 0
        assert ckpt.stats().tiers["only"].operations["read"].calls < 12
        with pytest.raises(ts.NotFound, match="no version with step 77"):
            ckpt.load(step=77)
        assert ckpt.stats().tiers["only"].operations["read"].calls < 24


@pytest.mark.parametrize("call", CALLS)
def test_an_id_is_text(saved: Any, call: str) -> None:
    with pytest.raises(TypeError, match="version 5: an id is text"):
        CALLS[call](saved, version=5)


@pytest.mark.parametrize("said", ["rise", "Raise", "", None, False], ids=repr)
def test_what_to_do_on_damage_is_one_of_two_words(saved: Any, said: Any) -> None:
    """Any other word was taken for ``older``: a damaged version was passed over without having been asked for."""
    for call in (CALLS["load"], CALLS["restore"], lambda ckpt, **asked: ckpt.resume({"m": 0}, **asked)):
        with pytest.raises(ValueError, match="what to do about damage is 'raise' or 'older', not"):
            call(saved, on_damage=said)


@pytest.mark.parametrize("only", ["m", "model.**"])
def test_globs_are_a_list(saved: Any, only: Any) -> None:
    calls = [CALLS["load"], CALLS["restore"], lambda ckpt, **asked: ckpt.diff(1, 2, **asked)]
    calls += [lambda ckpt, **asked: ckpt.statistics(**asked), lambda ckpt, **asked: ckpt.history(**asked)]
    for call in calls:
        with pytest.raises(TypeError, match="is one glob where a list of them is right"):
            call(saved, only=only)


@pytest.mark.parametrize("only", [[5], [("m",)], [["m"]], [None]], ids=repr)
def test_a_glob_is_text(saved: Any, only: Any) -> None:
    with pytest.raises(TypeError, match=r"is no pattern of leaf paths; write text, as in 'model\.\*\*'"):
        saved.load(only=only)


def test_globs_may_come_one_by_one(saved: Any) -> None:
    """An iterator can be read once, and the globs are asked for each leaf."""
    into = {"m": 0, "w": torch.zeros(4)}
    saved.restore(into=into, only=iter(["m", "w"]), step=2)
    assert into["m"] == 2
    assert into["w"].tolist() == [2.0] * 4
    assert saved.load(only=iter(["w"]), step=1).keys() == {"w"}
    assert [leaf.path for leaf in saved.diff(1, 2, only=iter(["w"]))] == [("w",)]


class Odd:
    """What only a pickle can save."""


def test_one_glob_of_pickles_is_not_taken_for_its_letters(place: Any) -> None:
    """The letters of ``model.**`` are globs too: ``*`` allows pickles under every single key, ``.`` for the state."""
    with pytest.raises(TypeError, match=r"'model\.\*\*' is one glob where a list of them is right"):
        ts.Checkpointer(alone("nvme", place), "run", allow_pickle="model.**")
    with ts.Checkpointer(alone("nvme", place), "run", allow_pickle=iter(["model.**"])) as ckpt:
        ckpt.save({"model": {"sampler": Odd()}}, step=1).wait("only")
        with pytest.raises(ts.CaptureError, match="has no provider"):
            ckpt.save({"x": Odd()}, step=2)
