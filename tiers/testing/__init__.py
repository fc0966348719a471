"""The contract of a tier as a test suite, for everybody who writes a backend.

A test of ten lines is enough; it needs pytest and hypothesis (``pip install pytest hypothesis``)::

    from tierstate.tiers.testing import TierContract

    class TestMyTier(TierContract):
        def make(self, tmp_path):
            return MyTier(place=tmp_path)

        def reopen(self, tier):  # optional: another handle on the same place
            return MyTier(place=tier.place)

One of its tests is `TierMachine`, a stateful test: it compares any history of calls with a dict. It needs hypothesis
only::

    TierMachine.check(lambda: MyTier(path=folder), lambda tier: MyTier(path=tier.path))

`PROMISES` is the same list for use without pytest: ``(name, check)``, where ``check(tier, prefix)`` tests one promise
with objects under the key ``prefix``, deletes them, and raises `PromiseBroken` if the tier does not keep the promise.

For tests of code that uses tiers: `Faulty` injects faults into chosen calls, `Interleaved` interleaves several actors
on one place in a determined order, and `Recording` gives every state in which a crash can leave its tiers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .crashes import Crash, Operation, Recorded, Recording
from .faulty import Fault, Faulty
from .interleaved import ActorResults, Interleaved, Turns
from .promises import PROMISES, Check, Lease, PromiseBroken, random_bytes

if TYPE_CHECKING:
    from .contract import TierContract
    from .machine import TierMachine, machine_of

__all__ = [
    "PROMISES",
    "ActorResults",
    "Check",
    "Crash",
    "Fault",
    "Faulty",
    "Interleaved",
    "Lease",
    "Operation",
    "PromiseBroken",
    "Recorded",
    "Recording",
    "TierContract",
    "TierMachine",
    "Turns",
    "machine_of",
    "random_bytes",
]


def __getattr__(name: str) -> Any:
    # Only these need pytest and hypothesis; a check of a live tier works without those packages.
    if name == "TierContract":
        from .contract import TierContract

        return TierContract
    if name in ("TierMachine", "machine_of"):
        from . import machine

        return getattr(machine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
