"""How much verify, doctor and prune will do, and how far they are."""

from __future__ import annotations

import errno
import io
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tierstate as ts
from tierstate.engine.progress import Pace, byte_progress, drain_progress, status_line
from tierstate.engine.repair.check_chunks import Depth
from tierstate.engine.repair.verify import bytes_to_examine, bytes_to_verify
from tierstate.tiers.policy.policy import Policy

SOME = settings(max_examples=10)


STATES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4)
"""Seeds of the two tensors of each save, so that some are as in the save before."""


LENGTH = 200_000
"""Elements of each tensor, of 8 bytes."""


def returning(states: list[tuple[int, int]]) -> int:
    """Bytes of content that was in an earlier version, and not in the one before."""
    seen, before, found = set[int](), set[int](), 0
    for now in map(set, states):
        found += len((now & seen) - before) * LENGTH * 8
        seen, before = seen | now, now
    return found


def saved(root: Path, states: list[tuple[int, int]], codec: str) -> ts.Checkpointer:
    tiers = {name: {"type": "nvme", "path": str(root / name)} for name in ("near", "far")}
    policy = {"rules": [{"match": "**", "codec": codec}], "chunk": "64KiB", "tiers": tiers}
    ckpt = ts.Checkpointer(Policy.parse(json.dumps(policy)), run="run")
    for step, seeds in enumerate(states, 1):
        values = [torch.arange(LENGTH) // 7 + 1_000_000 * seed for seed in seeds]
        ckpt.save({"a": values[0], "b": values[1]}, step=step)
    ckpt.close()
    return ts.Checkpointer(Policy.parse(json.dumps(policy)), run="run")


@pytest.mark.slow
@SOME
@given(STATES, st.sampled_from(["raw", "fast"]), st.booleans())
@example([(0, 0), (1, 1), (0, 0)], "fast", True)
def test_it_is_known_about_how_much_is_verified(states: list[tuple[int, int]], codec: str, deep: bool) -> None:
    with tempfile.TemporaryDirectory() as root, saved(Path(root), states, codec) as ckpt:
        told: list[int] = []
        expected = bytes_to_verify(ckpt._tier_runs, Depth.of(data=True, deep=deep))
        ckpt.verify(data=not deep, deep=deep, progress=told.append)
        assert sum(told) * 0.75 <= expected <= (sum(told) + returning(states) * deep) * 1.25


@pytest.mark.slow
@SOME
@given(STATES, st.sampled_from(["raw", "fast"]))
def test_it_is_known_about_how_much_a_doctor_reads(states: list[tuple[int, int]], codec: str) -> None:
    with tempfile.TemporaryDirectory() as root, saved(Path(root), states, codec) as ckpt:
        told: list[int] = []
        expected = bytes_to_examine(ckpt._tier_runs)
        ckpt.doctor(progress=told.append)
        assert sum(told) <= expected
        assert expected == pytest.approx(sum(told), rel=0.25)


def test_a_prune_says_how_far_it_is(tmp_path: Path) -> None:
    told: list[str] = []
    kept = {"type": "nvme", "path": str(tmp_path / "near"), "keep": {"last": 3}}
    everything = {"tiers": {"near": {**kept, "keep": {"all": True}}}}
    with ts.Checkpointer(Policy.parse(json.dumps(everything)), run="run") as ckpt:
        for step in range(1, 6):
            # Version 3 still needs the frozen part of the first pack. What the newest one needs would not be moved.
            frozen, moving = torch.ones(1 << 20) if step < 4 else torch.zeros(1), torch.rand(4 << 20)
            ckpt.save({"frozen": frozen, "moving": moving}, step=step)
    with ts.Checkpointer(Policy.parse(json.dumps({"tiers": {"near": kept}})), run="run") as ckpt:
        ckpt.prune(grace=0, progress=told.append)
        assert ckpt.verify(data=True).ok
    assert any("near: dropping 2 versions: " in text and " of 3 objects" in text for text in told), told
    # A fast disk moves more than a GiB a second.
    assert any(re.search(r"near: repacking: 4 MiB of 4 MiB, [0-9.]+ [KMG]iB/s", text) for text in told), told


def test_the_pace_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [100.0], list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pace = Pace("copying", told.append, 8 << 30)
    for _ in range(4):
        now[0] += 1
        pace(1 << 30)
        pace(0)  # at once again, so that nothing is told
    assert told[-1] == "copying: 4 GiB of 8 GiB, 1 GiB/s, 4 s left"
    assert len(told) == 4
    Pace("deleting", told.append, 0, "objects")(0)
    assert told[-1] == "deleting: 0 objects of 0 objects, 0 objects/s"


class Log:
    """What many programs put in the place of standard error: it has no `isatty`."""

    def write(self, text: str) -> int:
        return len(text)


class LostTerminal(io.StringIO):
    """A terminal whose window has been closed."""

    def isatty(self) -> bool:
        return True

    def write(self, _text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def flush(self) -> None:
        self.write("")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, Log(), closed(), LostTerminal()])
def test_close_finishes_saves_whatever_standard_error_is(
    stream: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("TERM", "xterm")
        patched.setattr("tierstate.engine.progress.BAR_DELAY", 0.0)
        ckpt = ts.Checkpointer(ts.Policy.default(tmp_path), run="run")
        save = ckpt.save({"w": torch.rand(1 << 20)}, step=1)
        patched.setattr(sys, "stderr", stream)
        ckpt.close()
    assert save.done()


def test_a_terminal_that_goes_away_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("tierstate.engine.progress.BAR_DELAY", 0.0)
    monkeypatch.setattr(sys, "stderr", LostTerminal())
    with drain_progress() as left:
        assert left is not None
        left({"nvme": 5})
        left({"nvme": 0})
    with status_line() as told:
        told("nvme: deletes")
    with byte_progress("reading", total=lambda: 5) as read:
        read(5)
