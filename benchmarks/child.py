"""One measurement in a process of its own, so that memory, CPU seconds and caches of allocators do not mix."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.competitor import Competitor
from benchmarks.field import find
from benchmarks.files import census, make_cold, sync_tree
from benchmarks.gauge import Gauge, Peak
from benchmarks.state import State, fingerprint, tensors
from benchmarks.training import train

SAVES = 2
"""Saves of one process: the first also warms up, the second is what counts."""


@dataclass(frozen=True)
class Task:
    """What to measure.

    Attributes:
        job: a key of `JOBS`.
        peer: a competitor's name.
        root: the folder of its saves.
        nbytes: of the state.
        way: of restoring.
        expected: fingerprint of what was saved; empty where nothing is scattered.
        every: a save each so many steps.
        blocks: pairs of blocks of steps, without and with saves.
        device: where the state's tensors are.
    """

    job: str
    peer: str
    root: str
    nbytes: int
    way: str = ""
    expected: str = ""
    every: int = 0
    blocks: int = 0
    device: str = "cpu"


def run(task: Task, answer: Path) -> None:
    """Measure, and write what was found as JSON, or under ``error`` what went wrong."""
    try:
        found = measure(task)
    except BaseException:
        answer.write_text(json.dumps({"error": traceback.format_exc()}))
        raise
    answer.write_text(json.dumps(found))


def measure(task: Task) -> dict[str, Any]:
    """What a task asks for."""
    competitor = find(task.peer)(Path(task.root))
    try:
        return JOBS[task.job](task, competitor)
    finally:
        competitor.close()


def save(task: Task, competitor: Competitor) -> dict[str, Any]:
    """Save a changing state again and again."""
    state = State(task.nbytes, filled=competitor.scattered, device=task.device)
    peak = Peak()
    competitor.open(state)
    found = []
    for number in range(SAVES):
        if competitor.scattered:
            state.change()
        found.append(one_save(competitor, state, number))
    expected = fingerprint(state.tensors()) if competitor.scattered and competitor.keeps else ""
    return {
        "nbytes": state.nbytes,
        "tensors": len(state.tensors()),
        "saves": found,
        "memory": peak.extra(),
        "expected": expected,
    }


def unchanged(task: Task, competitor: Competitor) -> dict[str, Any]:
    """Save a state that stays as it is, twice."""
    state = State(task.nbytes, device=task.device)
    competitor.open(state)
    found = [one_save(competitor, state, number) for number in range(SAVES)]
    return {"nbytes": state.nbytes, "saves": found}


def one_save(competitor: Competitor, state: State, number: int) -> dict[str, Any]:
    """Seconds from the call until it returned, until all was captured, and until all was durable."""
    os.sync()  # what is left to write from before is none of this save's business
    files, nbytes = census(competitor.root)
    with Gauge() as gauge:
        pending = competitor.save(state, number)
        blocked = gauge.elapsed()
        pending.captured()
        captured = gauge.elapsed()
        pending.durable()
        if competitor.keeps:
            sync_tree(competitor.root)
    more_files, more_bytes = census(competitor.root)
    own = pending.seconds
    return {
        "blocked": own or blocked,
        "captured": own or captured,
        "durable": (own or gauge.seconds) if competitor.keeps else None,
        "cpu": gauge.cpu,
        "written": gauge.written,
        "files": more_files - files,
        "bytes": more_bytes - nbytes,
    }


def restore(task: Task, competitor: Competitor) -> dict[str, Any]:
    """Fill a state of other values from cold files, and compare it with what was saved."""
    rehearse(task, lambda other, tiny: other.restore(tiny, 0, task.way))
    state = State(task.nbytes, seed=1, filled=competitor.scattered, device=task.device)
    return _cold(task, competitor, lambda: competitor.restore(state, SAVES - 1, task.way), state.tensors)


def load(task: Task, competitor: Competitor) -> dict[str, Any]:
    """Load a fresh state from cold files, and compare it with what was saved."""
    rehearse(task, lambda other, _: other.load(0))
    found: list[Any] = []
    fresh = _cold(task, competitor, lambda: found.append(competitor.load(SAVES - 1)), lambda: list(tensors(found[0])))
    return fresh | {"memory": fresh["memory"] - sum(t.nbytes for t in tensors(found[0]))}


def rehearse(task: Task, work: Callable[[Competitor, State], Any]) -> None:
    """Do the same with a tiny state, so that nothing is first imported while the seconds are counted."""
    with TemporaryDirectory(dir=Path(task.root).parent) as folder:
        other, tiny = find(task.peer)(Path(folder)), State(1, device=task.device)
        other.open(tiny)
        other.save(tiny, 0).durable()
        other.close()
        work(other, tiny)


def _cold(task: Task, competitor: Competitor, work: Callable[[], Any], filled: Callable[[], Any]) -> dict[str, Any]:
    cold = make_cold(competitor.root)
    peak = Peak()
    with Gauge() as gauge:
        own = work()
    found = {"seconds": own or gauge.seconds, "cpu": gauge.cpu, "read": gauge.read, "memory": peak.extra()}
    if task.expected and fingerprint(filled()) != task.expected:
        raise ValueError(f"{competitor.title} gave back other bytes than were saved")
    return found | {"cold": cold}


def training(task: Task, competitor: Competitor) -> dict[str, Any]:
    """Train with and without saves."""
    return asdict(train(competitor, State(task.nbytes, device=task.device), task.every, task.blocks))


JOBS: dict[str, Callable[[Task, Competitor], dict[str, Any]]] = {
    "save": save,
    "restore": restore,
    "load": load,
    "unchanged": unchanged,
    "training": training,
}
