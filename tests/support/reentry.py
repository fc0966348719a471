"""A process in which a signal handler uses a Checkpointer, or raises, at any moment of a call of the main thread.

``python -m support.reentry HOW,... FOLDER SHARE SEED OUTER ...``: for each call OUTER, and each HOW at a share of all
its moments (1: at all of them), in a run of its own. HOW is ``calls`` (the handler makes all calls, and catches their
errors), ``leaves`` (it saves, and lets the error out), ``raises`` (as Ctrl-C does) or ``preempts`` (SIGTERM comes, and
the Checkpointer handles it). Prints one line for each moment: what came of the handler. Afterwards the Checkpointer and
a later one must work. A hang ends the process.
"""

from __future__ import annotations

import faulthandler
import gc
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import tierstate as ts

from .interruptions import Interruption, Moment, described, moments
from .outcomes import until

TEXT = """
version: 1
chunk: 64KiB
arena: {{size: 256KiB}}
tiers:
  host: {{type: host, capacity: 16MiB}}
  nvme: {{type: nvme, path: "{place}/nvme"}}
  file: {{type: object, url: "file://{place}/object"}}
"""

LIMIT = 60
"""Seconds for one moment."""


class Interrupt(BaseException):
    """What the handler raises, as `KeyboardInterrupt`."""


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100_000,), value), "x": torch.full((10,), value)}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tierstate")]


def whole(found: Mapping[str, torch.Tensor]) -> bool:
    """Whether all of a state is of one save."""
    return bool((found["w"] == found["x"][0]).all() and (found["x"] == found["x"][0]).all())


class Job:
    """A Checkpointer with one save behind it and one under way; with none of its own, before its first save."""

    def __init__(self, place: Path, outer: str, *, preempted: bool = False) -> None:
        self._policy, self._signals = ts.Policy.parse(TEXT.format(place=place)), 0
        signal.signal(signal.SIGTERM, self._count)
        self.ckpt = ckpt = ts.Checkpointer(self._policy, "run", preemption=preempted)
        ckpt.save(state(1), step=1).wait()
        self._pending = ckpt.save(state(2), step=2)
        if outer == "first save":
            ckpt.close()
            self.ckpt = ckpt = ts.Checkpointer(self._policy, "run", preemption=preempted)
        self.into = state(0)
        self.calls: dict[str, Callable[[], object]] = {
            "save": lambda: ckpt.save(state(3), step=3),
            "first save": lambda: ckpt.save(state(3), step=3),
            "wait": lambda: self._pending.wait(),
            "restore": lambda: ckpt.restore(into=self.into),
            "load": ckpt.load,
            "resume": lambda: ckpt.resume(into=self.into),
            "versions": ckpt.versions,
            "verify": lambda: ckpt.verify(deep=True),
            "prune": lambda: ckpt.prune(grace=0),
            "tag": lambda: ckpt.tag("best", 1),
            "stats": ckpt.stats,
            "close": ckpt.close,
        }

    def _count(self, _number: int, _frame: object) -> None:
        self._signals += 1

    def preempt(self) -> str:
        """A signal comes that the Checkpointer handles."""
        signal.raise_signal(signal.SIGTERM)
        return "signalled"

    def was_preempted(self) -> None:
        """The Checkpointer has seen the signal, and called the handler that was there before, once."""
        assert self.ckpt.preempted or self.ckpt._preemption.over  # type: ignore[union-attr]
        self.ckpt.close()
        assert until(lambda: self._signals)
        assert self._signals == 1
        assert signal.getsignal(signal.SIGTERM) == self._count

    def handle(self, first: int) -> str:
        """Make all calls, from the ``first`` on. Returns what came of them."""
        names = [*self.calls]
        outcomes = []
        for name in names[first:] + names[:first]:
            try:
                self.calls[name]()
                outcomes.append(f"{name}=done")
            except ts.TierstateError as error:
                outcomes.append(f"{name}={type(error).__name__}")
        return " ".join(outcomes)

    def goes_on(self) -> None:
        """Everything works after an interrupt, or says that it does not."""
        for _ in range(2):
            try:
                self.ckpt.save(state(5), step=5).wait()
                break
            except ts.TierstateError:
                pass  # the error of the save that was interrupted, or it is closed
        for name in ("versions", "tag", "restore", "prune", "stats"):
            try:
                self.calls[name]()
            except ts.TierstateError:
                assert self.ckpt._closed, f"{name} fails after an interrupt"

    def ends(self) -> None:
        """It closes, nothing is left of it, and what was saved is whole."""
        self.ckpt.close()
        assert gc.isenabled()
        # After an interrupted close, threads without work end by themselves, some seconds later.
        assert until(lambda: not threads()), threads()
        with ts.Checkpointer(self._policy, "run") as other:
            for version in other.versions():
                found = other.load(version=version.id)
                assert whole(found)
                assert found["x"][0] == version.step
            assert other.verify(deep=True).ok


def once(outer: str, how: str, place: Path, at: Moment, number: int) -> str:
    """What came of the handler at one moment of the outer call."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    job, outcome = Job(place, outer, preempted=how == "preempts"), "never"

    def handler() -> None:
        nonlocal outcome
        if how == "raises":
            outcome = how
            raise Interrupt
        if how == "leaves":
            outcome = "save=Reentered"
            job.ckpt.save(state(4), step=4)
            outcome = "save=done"
        elif how == "preempts":
            outcome = job.preempt()
        else:
            outcome = job.handle(number % len(job.calls))

    left: list[str] = []
    # Python itself takes no error from the end of a generator that is dropped.
    sys.unraisablehook = lambda error: left.append(repr(error.exc_value))
    try:
        Interruption(handler, at).run(job.calls[outer])
    except (Interrupt, ts.TierstateError) as error:
        left.append(repr(error))  # without its traceback, which keeps what it passed through
    sys.unraisablehook = sys.__unraisablehook__
    failed = how in ("raises", "leaves") and outcome in ("raises", "save=Reentered")
    assert bool(left) == failed or job.ckpt._closed, (left, outcome)
    assert whole(job.into) or how != "calls"
    job.goes_on()
    if outcome == "signalled":
        job.was_preempted()
    job.ends()
    faulthandler.cancel_dump_traceback_later()
    shutil.rmtree(place)
    return outcome


def all_moments(outer: str, place: Path) -> list[Moment]:
    """The moments of three calls: which they are depends on other threads, too."""
    found: dict[Moment, None] = {}
    for number in range(3):
        job = Job(place / str(number), outer)
        found |= dict.fromkeys(moments(job.calls[outer]))
        job.ends()
    shutil.rmtree(place)
    return [*found]


def main(hows: str, folder: str, share: str, seed: str, *outers: str) -> None:
    for outer in outers:
        place = Path(folder) / outer
        found = all_moments(outer, place)
        for how in hows.split(","):
            dice = random.Random(f"{outer} {how} {seed}")
            chosen = found if share == "1" else dice.sample(found, max(1, round(len(found) * float(share))))
            for number, moment in enumerate(chosen):
                print(f"{how} {outer} at {number}/{len(chosen)} {described(moment)}:", end=" ", flush=True)
                print(once(outer, how, place, moment, number), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
