"""`tierstate.testing.resumes_exactly` passes a loop that resumes exactly, and names what others forget."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import resumed_training
from support.forked import command, script

from tierstate.testing import LOG, NotExact, record, resumes_exactly

LOOP = f"{resumed_training.__file__}:main"


def check(mistake: str = "", **how: Any) -> Any:
    """Of processes that need not import torch each; the first test and the one of ranks start them as users do."""
    train = [*command(resumed_training.__file__), "{folder}"]
    return resumes_exactly(**{"train": train, "kill_at": [6], "env": {resumed_training.MISTAKE: mistake}, **how})


@pytest.mark.slow
def test_a_loop_that_is_right(tmp_path: Path) -> None:
    found = check(train=LOOP, kill_at=[6], folder=tmp_path / "runs")
    assert found.resumed_at == (6,)
    assert found.steps == 7 + 6
    assert (tmp_path / "runs" / "killed" / "log-2.0").exists()


@pytest.mark.slow
def test_a_loop_that_is_killed_twice(tmp_path: Path) -> None:
    found = check(kill_at=[3, 8], folder=tmp_path / "runs")
    assert found.resumed_at == (4, 8)
    assert found.steps == 4 + 5 + 4
    assert (tmp_path / "runs" / "killed" / "log-3.0").exists()


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
def test_each_rank_goes_on_exactly() -> None:
    found = check(train=[*TORCHRUN, *script(resumed_training.__file__), "{folder}"], kill_at=[6])
    assert found.resumed_at == (6,)
    assert found.steps >= 2 * 6 + 7 + 6, "those of both ranks; the one that was not killed may come a step less far"


@pytest.mark.soak
def test_a_rank_that_does_not_is_named() -> None:
    with pytest.raises(NotExact, match=r"after the kill at step 6 rank [01] the loss of step"):
        check("rng", train=[*TORCHRUN, *script(resumed_training.__file__), "{folder}"], kill_at=[6])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("rng", ["generators.torch", "put ts.Rng() into the state"]),
        ("loader", ["loader.epoch: 0, uninterrupted 1", "at point 0 of step 6"]),
        ("plain loader", ["generators.torch", "iterate over ts.Loader(loader)"]),
        ("scheduler", ["scheduler.last_epoch: 0, uninterrupted 6", "at point 0 of step 6"]),
        ("optimizer", ["optimizer.state.0.exp_avg: not in the resumed run"]),
    ],
)
def test_what_is_not_saved_is_named(mistake: str, said: list[str]) -> None:
    with pytest.raises(NotExact, match="after the kill at step 6 the loss of step ") as caught:
        check(mistake)
    for text in said:
        assert text in str(caught.value)
    first = str(caught.value).partition("what differs first")[2]
    if mistake in ("loader", "scheduler"):
        assert {line.strip().split(".")[0] for line in first.splitlines()[1:]} == {mistake}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "how", "error", "said"),
    [
        ("unseeded", {}, NotExact, "before any kill .* two fresh runs of the loop differ already"),
        ("short", {}, ValueError, "ended at step 4, before it was to be killed at step 6"),
        ("crash", {"kill_at": [4]}, RuntimeError, "the planted crash"),
        ("", {"kill_at": [0]}, ValueError, "began again at step 0: nothing was durable"),
    ],
)
def test_what_cannot_be_compared_is_told(mistake: str, how: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"(?s){said}"):
        check(mistake, **how)


@pytest.mark.slow
def test_a_process_that_does_not_end_is_killed() -> None:
    with pytest.raises(TimeoutError, match=r"not at its end after 0\.2 s"):
        check(train=[sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)
    with pytest.raises(ValueError, match="recorded no loss"):
        check(train=[sys.executable, "-c", "print(1)"])


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"kill_at": []}, {"kill_at": [4, 2]}, {"train": "main"}, {"train": lambda _f: None}])
def test_wrong_arguments_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"right are|cannot be called by"):
        check(**wrong)


def test_record_writes_nothing_without_a_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(LOG, raising=False)
    record(0, loss=object())
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    record(0, loss=torch.ones(()), odd=object())
    (line,) = (tmp_path / "log.0").read_text().splitlines()
    assert '"loss": ["' in line
    assert "generators.torch" in line
