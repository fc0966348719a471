"""Live tiers, looked at by a process of its own: a call that never returns, even one that cannot be killed, holds up
nobody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from queue import Empty, SimpleQueue

from tierstate.tiers.policy import Policy, TierPolicy

from .live import Finding, Told, look_at

START = 120.0
"""Seconds for the process to say a first word; all it does before is to import and to read the policy."""

PARTING = 5.0
"""Seconds in which a process that has done its work, or was killed, should be gone."""

_COMMAND = (sys.executable, "-P", "-c", "from tierstate.apart import answer; answer()")


def look_at_all(policy: Policy, limit: float, told: Told = lambda _doing: None) -> list[Finding]:
    """What is found of each tier of a policy, in its order, one after the other.

    Args:
        limit: seconds for each tier; one that takes longer is given up, and what it wrote may be left behind.
        told: called with what is being done.
    """
    findings: list[Finding] = []
    while left := policy.tiers[len(findings) :]:
        # Once, and again for those that are left where one has taken the process with it.
        with closing(_Process(policy, left)) as process:
            for spec in left:
                findings.append(process.look(spec, limit, told))
                if process.over:
                    break
    return findings


class _Process:
    """Looks at tiers in their order.

    Attributes:
        over: whether it has ended, or was given up.
    """

    def __init__(self, policy: Policy, tiers: Sequence[TierPolicy]) -> None:
        command = [*_COMMAND, *(spec.name for spec in tiers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self.over = False
        threading.Thread(target=self._talk, args=(policy.dump(),), daemon=True).start()

    def _talk(self, text: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process.stdin as to:
            to.write(text)
        with self._process.stdout as answers:
            for line in answers:
                self._lines.put(line)
        self._lines.put(None)

    def look(self, spec: TierPolicy, limit: float, told: Told) -> Finding:
        """What it finds of the next tier, or why it found nothing."""
        at, deadline = "start", time.monotonic() + START
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                self._kill()
                return self._nothing(spec, f"did not come to an end within {limit:g} s, at '{at}'", hung=True)
            if line is None:
                return self._nothing(spec, f"took the process with it that looked at it, at '{at}'")
            word = json.loads(line)
            if "found" in word:
                return Finding(**word["found"])
            if at == "start":
                deadline = time.monotonic() + limit
            at = str(word["doing"])
            told(f"{spec.name}: {at}")

    def _nothing(self, spec: TierPolicy, why: str, *, hung: bool = False) -> Finding:
        self.over = True
        return Finding(spec.name, spec.type, error=f"{spec.name}: {why}; what it wrote may be left behind", hung=hung)

    def _kill(self) -> None:
        self._process.kill()
        try:
            self._process.wait(PARTING)
        except subprocess.TimeoutExpired:
            # It hangs in the kernel, and ends when that lets go. Nobody waits for it any more.
            self._process.returncode = -signal.SIGKILL

    def close(self) -> None:
        """Let it end, or end it."""
        try:
            self._process.wait(PARTING)
        except subprocess.TimeoutExpired:
            self._kill()


def answer() -> None:
    """What the process does: reads a policy, looks at the tiers that are named, and says a line of JSON for each step
    and for each finding."""
    with os.fdopen(os.dup(1), "w") as answers:
        # What a tier prints is no answer.
        os.dup2(2, 1)

        def say(**word: object) -> None:
            print(json.dumps(word, default=str), file=answers, flush=True)

        policy = Policy.parse(sys.stdin.read())
        try:
            for name in sys.argv[1:]:
                say(found=asdict(look_at(policy.tier(name), lambda what: say(doing=what))))
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            # Whoever asked is gone: what is left to be said is said to nobody.
            nobody = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nobody, answers.fileno())
            sys.exit(1)
