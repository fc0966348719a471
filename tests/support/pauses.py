"""Random pauses of every thread, to find tests that pass only by how threads happen to be scheduled.

What a busy machine does once in a thousand runs then happens in one of ten: a thread stops between any two functions,
while the others go on. Each test has another rate; one that fails is repeated with the rate that its report says. What
is found are races, and limits of time that are too short. Processes that tests start have no pauses.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Generator
from types import FrameType
from typing import Any

import pytest

VARIABLE = "TIERSTATE_TEST_PAUSES"
"""Of the environment: the tests of this run have pauses."""


RATE = "TIERSTATE_TEST_PAUSES_RATE"
"""Of the environment: how many pauses there are for each call or return of a function, in place of a random number."""


LONGEST = (0.002, 0.01, 0.04)
"""Seconds of the longest pause, of which each test takes one."""


BUDGET = 2.0
"""Seconds of pauses in one test, after which it goes on without."""


class Pauses:
    """A plugin of pytest: see the module."""

    def __init__(self) -> None:
        self._dice = random.Random()  # not the generator of the process: tests set its seed
        self._rate = self._longest = self._left = 0.0
        self._sleep = time.sleep  # tests replace it

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        rate = os.environ.get(RATE)
        self._rate = 10 ** self._dice.uniform(-4.5, -2) if rate is None else float(rate)
        self._longest, self._left = self._dice.choice(LONGEST), BUDGET
        item.add_report_section("call", "pauses", f"{RATE}={self._rate:.2g}, the longest {self._longest} s")
        threading.setprofile(self._maybe)
        sys.setprofile(self._maybe)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _maybe(self, _frame: FrameType, _event: str, _arg: object) -> None:
        if self._dice.random() < self._rate and self._left > 0:
            seconds = self._dice.random() * self._longest
            self._left -= seconds
            self._sleep(seconds)
