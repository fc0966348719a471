"""A process in which a signal handler saves, waits, restores or closes while the main thread does one of these.

``python -m support.reentry OUTER INNER LEAVES FOLDER STEP ...``: for each step, in a run of its own, the handler runs
before the STEP-th traced line of OUTER (thousandths of all lines), where the interpreter may handle a signal.
``LEAVES`` is ``leaves`` if it lets its error out. Prints what came of the handler's call. A hang ends the process.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import tierstate as ts

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
"""Seconds for one run."""


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100_000,), value), "x": torch.full((10,), value)}


def handled_at(step: int, outer: Callable[[], object], handler: Callable[[], None]) -> int:
    """Run ``outer``, with the handler before its step-th line in this package or in `threading`. Returns the lines."""
    seen, done = 0, False

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal seen, done
        ours = "tierstate" in frame.f_code.co_filename or frame.f_code.co_filename == threading.__file__
        if not ours or done:
            return None
        seen += event in ("line", "call")
        if seen == step:
            done = True
            sys.settrace(None)
            handler()
        return trace

    sys.settrace(trace)
    try:
        outer()
    except ts.Reentered:
        pass  # the handler's, let out
    finally:
        sys.settrace(None)
    return seen


def once(outer: str, inner: str, leaves: bool, place: Path, step: int) -> tuple[int, str]:
    """Lines of the outer call, and what came of the inner one."""
    spec, outcome = ts.Policy.parse(TEXT.format(place=place)), "never"
    ckpt = ts.Checkpointer(spec, "run")
    ckpt.save(state(1), step=1).wait()
    pending = ckpt.save(state(2), step=2)
    calls: dict[str, Callable[[int], object]] = {
        "save": lambda number: ckpt.save(state(number), step=number),
        "wait": lambda _number: pending.wait(),
        "restore": lambda _number: ckpt.restore(into=state(0)),
        "close": lambda _number: ckpt.close(),
    }

    def handler() -> None:
        nonlocal outcome
        try:
            calls[inner](4)
            outcome = "done"
        except ts.TierstateError as error:
            outcome = type(error).__name__
            if leaves and isinstance(error, ts.Reentered):
                raise

    def run() -> None:
        try:
            calls[outer](3)
        except ts.TierstateError as error:
            if isinstance(error, ts.Reentered) or inner != "close":
                raise  # after a close in the middle, the outer call may fail

    faulthandler.dump_traceback_later(LIMIT, exit=True)
    lines = handled_at(step, run, handler)
    ckpt.close()
    with ts.Checkpointer(spec, "run") as other:
        found = other.load()
        assert other.restored is not None
        assert torch.equal(found["w"], torch.full((100_000,), float(other.restored.step)))
        assert torch.equal(found["x"], torch.full((10,), float(other.restored.step)))
        assert other.verify(deep=True).ok
    faulthandler.cancel_dump_traceback_later()
    return lines, outcome


def main(outer: str, inner: str, leaves: str, folder: str, *steps: str) -> None:
    lines, _ = once(outer, inner, False, Path(folder) / "whole", 0)
    for step in steps:
        at = 1 + int(step) * (lines - 1) // 1000
        print(once(outer, inner, leaves == "leaves", Path(folder) / step, at)[1], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
