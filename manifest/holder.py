"""Holders: processes, as others can tell whether they still live."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

_PROC = "/proc"


def this_process() -> dict[str, Any]:
    """What tells this process from every other one, also from a later one of the same number."""
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "pids": _numbering(),
        "pid": os.getpid(),
        "start": _start(os.getpid()),
        "time": time.time(),
    }


def is_dead(holder: Mapping[str, Any]) -> bool:
    """Whether a process is known to have ended: one of this host since it was started, whose number we would see.

    False where nobody here can tell.
    """
    pid, boot, numbering = holder.get("pid"), _boot(), _numbering()
    if not (boot and numbering) or (holder.get("boot"), holder.get("pids")) != (boot, numbering):
        return False
    if not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's
    start = _start(pid)
    return start is not None and start != holder.get("start")


@cache
def _boot() -> str:
    """What names this host since it was started; empty where there is no such thing."""
    return _line(f"{_PROC}/sys/kernel/random/boot_id")


def _numbering() -> str:
    """The namespace of process numbers: containers of one host may each have their own."""
    with suppress(OSError):
        return os.readlink(f"{_PROC}/self/ns/pid")
    return ""


def _start(pid: int) -> str | None:
    """When a process began, in ticks since the host did; empty for one that has ended; None where it is not told."""
    # The name before it, in brackets, may hold anything.
    fields = _line(f"{_PROC}/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20 or not re.fullmatch(r"[0-9]+", fields[19]):
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _line(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.readline().strip()
    return ""
