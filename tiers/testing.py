"""The contract of a tier as a test suite, for everybody who writes one.

Ten lines are enough; they need pytest and hypothesis (``pip install pytest hypothesis``)::

    from tierstate.tiers.testing import TierContract

    class TestMyTier(TierContract):
        def make(self, tmp_path):
            return MyTier(path=tmp_path)

        def reopen(self, tier):  # optional: another handle on the same place
            return MyTier(path=tier.path)

One of its tests is `TierMachine`: any history of a tier, beside a dict. By itself it needs hypothesis alone::

    TierMachine.check(lambda: MyTier(path=folder), lambda tier: MyTier(path=tier.path))

`PROMISES` is the same list for use without pytest: ``(name, check)``, where ``check(tier, prefix)`` tries one promise
with objects under the key ``prefix``, removes them, and raises `PromiseBroken` where the promise does not hold.
`Faulty` wraps a tier and lets chosen calls go wrong, `Interleaved` lets several actors take turns on one place, and
`Recording` makes tiers whose every operation is recorded, and gives every state that a crash can leave of them; for
tests of what uses tiers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .evidence import Check, Lease, PromiseBroken, random_bytes
from .faulty import Fault, Faulty
from .interleaving import Interleaved, Said, Turns
from .promises import PROMISES
from .recorded import Crash, Operation, Recorded, Recording

if TYPE_CHECKING:
    from .contract import TierContract
    from .machine import TierMachine, machine_of

__all__ = [
    "PROMISES",
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
    "Said",
    "TierContract",
    "TierMachine",
    "Turns",
    "machine_of",
    "random_bytes",
]


def __getattr__(name: str) -> Any:
    # Only these need pytest and hypothesis, which who merely checks a live tier need not have.
    if name == "TierContract":
        from .contract import TierContract

        return TierContract
    if name in ("TierMachine", "machine_of"):
        from . import machine

        return getattr(machine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
