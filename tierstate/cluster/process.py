"""Checks live tiers in a child process with a timeout, so that a call that hangs does not block the command."""

from __future__ import annotations

import json
import logging
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

from tierstate.tiers.interpreter import same_modules, same_python
from tierstate.tiers.policy.policy import Policy, TierPolicy

from .check import OnStep, TierFinding, check_tier

START = 120.0
"""Seconds until the first message of the process; before it only imports modules and reads the policy."""


PARTING = 5.0
"""Seconds to wait for the end of a process that has finished or was killed."""


_CODE = "from tierstate.cluster.process import answer; answer()"


def check_tiers(policy: Policy, limit: float, told: OnStep = lambda _doing: None) -> list[TierFinding]:
    """Check the tiers of a policy one after another, in its order, in a child process.

    Args:
        limit: seconds for each tier; the check of a slower tier is given up, and its objects may be left behind.
        told: called with the name of each step.
    """
    findings: list[TierFinding] = []
    while left := policy.tiers[len(findings) :]:
        # A new process for the remaining tiers, if one tier has crashed or blocked the last process.
        with closing(_Process(policy, left)) as process:
            for spec in left:
                findings.append(process.look(spec, limit, told))
                if process.over:
                    break
    return findings


class _Process:
    """A child process that checks tiers in their order.

    Attributes:
        over: whether it has ended, or was given up.
    """

    def __init__(self, policy: Policy, tiers: Sequence[TierPolicy]) -> None:
        command = same_python("-c", _CODE, *(spec.name for spec in tiers))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=same_modules()
        )
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self.over = False
        threading.Thread(target=self._talk, args=(policy.dump(secrets=True),), daemon=True).start()

    def _talk(self, text: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process.stdin as to:
            to.write(text)
        with self._process.stdout as answers:
            for line in answers:
                self._lines.put(line)
        self._lines.put(None)

    def look(self, spec: TierPolicy, limit: float, told: OnStep) -> TierFinding:
        """The finding about the next tier, or a finding with the reason why there is none."""
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
                return TierFinding(**word["found"])
            if at == "start":
                deadline = time.monotonic() + limit
            at = str(word["doing"])
            told(f"{spec.name}: {at}")

    def _nothing(self, spec: TierPolicy, why: str, *, hung: bool = False) -> TierFinding:
        self.over = True
        return TierFinding(
            spec.name, spec.type, error=f"{spec.name}: {why}; what it wrote may be left behind", hung=hung
        )

    def _kill(self) -> None:
        self._process.kill()
        try:
            self._process.wait(PARTING)
        except subprocess.TimeoutExpired:
            # It blocks inside the kernel (uninterruptible), and ends after that. We do not wait for it any longer.
            self._process.returncode = -signal.SIGKILL

    def close(self) -> None:
        """Wait for the process to end, and kill it after `PARTING` seconds."""
        try:
            self._process.wait(PARTING)
        except subprocess.TimeoutExpired:
            self._kill()


def answer() -> None:
    """The main function of the child process: reads a policy, checks the named tiers, and prints a line of JSON for
    each step and each finding."""
    with os.fdopen(os.dup(1), "w") as answers:
        # Anything that a tier's code prints goes to stderr, since stdout is for the answers.
        os.dup2(2, 1)

        def say(**word: object) -> None:
            print(json.dumps(word, default=str), file=answers, flush=True)

        # What a tier logs about its failures is in the finding, and the parent tells that, perhaps as JSON.
        logging.getLogger("tierstate").addHandler(logging.NullHandler())
        policy = Policy.parse(sys.stdin.read())
        try:
            for name in sys.argv[1:]:
                say(found=asdict(check_tier(policy.tier(name), lambda what: say(doing=what))))
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            # The parent process has ended: the remaining output is discarded.
            nobody = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nobody, answers.fileno())
            sys.exit(1)
