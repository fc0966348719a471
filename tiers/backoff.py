"""Exponential back-off with jitter: how long to wait before something that failed is tried again.

One rule for all that is retried: calls of a tier (`tierstate.tiers.wrappers.retry`), requests to S3
(`tierstate.tiers.object.s3.retry`), and a tier to which a save could not be written
(`tierstate.engine.publish.backlog.RetryTimer`). The bound of the pause doubles from failure to failure; a random share
of it is waited, so that many ranks that failed together do not come back together (M. Brooker, "Exponential backoff and
jitter", AWS Architecture Blog, 2015).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that grow with the number of failures.

    Attributes:
        first: seconds that the first pause may last.
        longest: seconds that any pause may last.
        fixed: share of the bound that is always waited; the rest is drawn at random. 0 is full jitter.
    """

    first: float
    longest: float
    fixed: float = 0.0

    def bound(self, failures: int) -> float:
        """Seconds that the pause after so many failures (1 and more) may last."""
        return min(self.longest, self.first * 2.0 ** min(failures - 1, 30))

    def pause(self, failures: int, draw: Callable[[], float] = random.random) -> float:
        """Seconds to wait after so many failures (1 and more).

        Args:
            draw: returns a random number from 0 to 1.
        """
        return self.bound(failures) * (self.fixed + (1.0 - self.fixed) * draw())
