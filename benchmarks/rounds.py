"""Rounds: all competitors take turns, each measurement in a child process, on a folder that is always removed."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.child import Task, run
from benchmarks.competitor import Competitor
from benchmarks.field import Missing, find
from benchmarks.results import Results

HOUSE = Path(__file__).resolve().parents[1]
PATIENCE = 600
"""Seconds that one measurement may take."""
TRAINING = [("lazy", 5), ("lazy", 1), ("eager", 5), ("torch", 5), ("dcp-async", 5), ("safetensors", 5)]
"""Who saves during a training, and each how many steps."""
TRAINED = 512 << 20
"""Bytes of the state that is trained."""
EXTRAS = {"waiting", "memcpy-1", "as-safetensors", "as-hdf5"}
"""Who saves only the smallest state: variations that say little more about a bigger one."""
UNCHANGED = ("eager", "torch")
"""Who saves a state that has not changed."""
IMPORTS = ("torch", "safetensors.torch", "torch.distributed.checkpoint", "torchsnapshot", "tierstate")


_SERVER = multiprocessing.get_context("forkserver")
# An optimizer imports torch._dynamo when it is first used, which takes longer than many a measurement.
_SERVER.set_forkserver_preload(["torch", "torch._dynamo"])


class Failed(Exception):
    """A measurement did not come to its end."""


class Rounds:
    """Measures, and keeps what was found.

    Args:
        results: where samples go.
        field: who takes part, by name.
        root: a folder of the disk that is measured.
        rounds: how often measurements are repeated, where nothing else is said.
        device: where the states are.
    """

    def __init__(
        self, results: Results, field: dict[str, type[Competitor]], root: Path, rounds: int, device: str
    ) -> None:
        self._device = device
        self._results, self._field, self._root, self._rounds = results, field, root, rounds

    def saves(self, nbytes: int, rounds: int, restores: bool, extras: bool) -> None:
        """Saves, and if asked cold restores and fresh loads of what was saved."""
        for number, name in self._turns([n for n in self._field if extras or n not in EXTRAS], rounds):
            with _folder(self._root) as root:
                base = {"peer": name, "root": str(root), "nbytes": nbytes}
                saved = self._one("save", base, nbytes, number)
                if saved is None or not restores:
                    continue
                base["expected"] = saved["expected"]
                competitor = self._field[name]
                for way in competitor.ways:
                    self._one("restore", base | {"way": way}, nbytes, number)
                if competitor.loads:
                    self._one("load", base | {"way": competitor.loads}, nbytes, number)

    def unchanged(self, nbytes: int) -> None:
        """Saves of a state that stays as it is."""
        for number, name in self._turns([n for n in UNCHANGED if n in self._field], self._rounds):
            with _folder(self._root) as root:
                self._one("unchanged", {"peer": name, "root": str(root), "nbytes": nbytes}, nbytes, number)

    def training(self) -> None:
        """Trainings with and without saves. The turns are taken inside each, since machines drift."""
        for name, every in TRAINING:
            if name in self._field:
                with _folder(self._root) as root:
                    task = {"peer": name, "root": str(root), "nbytes": TRAINED, "every": every, "blocks": self._rounds}
                    self._one("training", task, TRAINED, 0)

    def imports(self) -> None:
        """Whole processes that only import something, less those that import nothing."""
        wanted = [m for m in IMPORTS if m.partition(".")[0] in ("torch", "tierstate", *self._field)]
        for number in range(self._rounds):
            empty = _seconds_of("pass")
            for module in wanted:
                sample = {"phase": "import", "peer": module, "round": number}
                self._results.samples.append(sample | {"seconds": _seconds_of(f"import {module}") - empty})
        for module in wanted:
            found = [s["seconds"] for s in self._results.pick("import", peer=module)]
            say(f"import {module}: {statistics.median(found):.2f} s")

    def _turns(self, names: list[str], rounds: int) -> Iterator[tuple[int, str]]:
        """Every round begins with another one."""
        for number in range(rounds):
            start = number * 3 % len(names) if names else 0
            for name in names[start:] + names[:start]:
                yield number, name

    def _one(self, job: str, task: dict[str, Any], size: int, number: int) -> dict[str, Any] | None:
        what = " ".join(filter(None, (job, task["peer"], task.get("way", "").replace("`", ""))))
        try:
            found = _in_child(Task(job, device=self._device, **task))
        except Failed as error:
            self._results.failures.append(f"{what}: {error}")
            say(f"FAILED: {what}: {error}")
            return None
        kept = {k: task[k] for k in ("peer", "way", "every") if k in task}
        self._results.samples.append({"phase": job, "size": size, "round": number, **kept, **found})
        say(f"{size / 2**30:.2f} GiB, round {number + 1}: {what}: {_brief(found)}")
        return found


def _brief(found: dict[str, Any]) -> str:
    last = found["saves"][-1] if "saves" in found else found
    numbers = {k: last[k] for k in ("blocked", "captured", "durable", "seconds", "cpu") if last.get(k) is not None}
    if "quiet" in found:
        numbers = {k: statistics.mean(found[k]) for k in ("quiet", "saving", "blocked", "drained")}
    return ", ".join(f"{k} {v:.3f}" for k, v in numbers.items())


def say(text: str) -> None:
    """Tell whoever waits."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """For argparse: a list of these names, with commas between them; others are refused."""

    def parse(text: str) -> list[str]:
        if wrong := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(wrong))}: not one of {', '.join(known)}")
        return text.split(",")

    return parse


def takers(names: list[str], results: Results) -> dict[str, type[Competitor]]:
    """Who takes part. Who cannot is named."""
    field = {}
    for name in names:
        try:
            field[name] = find(name)
        except Missing as error:
            say(f"LEFT OUT: {error}")
            results.left_out.append(str(error))
        else:
            results.versions[name] = field[name].version()
    return field


@contextmanager
def _folder(root: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.sync()  # so that nothing of it is left to do beside the next one


def _in_child(task: Task) -> dict[str, Any]:
    """What a child found. It is forked from a server that has imported torch and has done nothing else.

    Raises:
        Failed: it ended badly, or not at all.
    """
    answer = Path(task.root).parent / "answer.json"
    answer.unlink(missing_ok=True)
    child = _SERVER.Process(target=run, args=(task, answer))
    child.start()
    try:
        child.join(PATIENCE)
        late = child.is_alive()
    finally:
        child.kill()
        child.join()
    found: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
    if late or child.exitcode != 0:
        why = f"not done after {PATIENCE} s" if late else f"exit status {child.exitcode}"
        raise Failed(f"{why}: {found.get('error', 'it said nothing')}")
    return found


def _seconds_of(code: str) -> float:
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HOUSE)
    return time.monotonic() - start
