"""tierstate: training state on every tier of a cluster, without stopping the training.

The public names are loaded when they are first used (PEP 562): the server process of peer memory is a module of this
package and must stay small, without torch, which nearly all of them need.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tierstate.manifest.printable import PrintableRecords, contain_handlers

if TYPE_CHECKING:
    from tierstate.engine.events import Event
    from tierstate.engine.info import Stats, TierStats, VersionInfo
    from tierstate.manifest.errors import (
        AccessDenied,
        AlreadyExists,
        CaptureError,
        CommitUnknown,
        Damaged,
        FormatError,
        NewestUnreadable,
        NotFound,
        OutOfMemory,
        PolicyError,
        RankFailed,
        Reentered,
        StateAlarm,
        StateMismatch,
        TierError,
        TierFull,
        TierstateError,
        TierUnavailable,
        Unauthentic,
        Unreadable,
        Unsafe,
        WrongTier,
    )
    from tierstate.providers.base import Provider
    from tierstate.providers.registry import register_provider
    from tierstate.providers.sharded.shards import Shard
    from tierstate.providers.tree.lossy_rules import Lossy
    from tierstate.providers.tree.rename import unwrapped
    from tierstate.providers.values.loader import Loader
    from tierstate.providers.values.stateful import PerRank, Rng
    from tierstate.tiers.base import Tier
    from tierstate.tiers.policy.policy import Policy
    from tierstate.tiers.registry import register_tier

    from .checkpointer import Checkpointer, Save

__version__ = "0.1.0"

# Every module logs by this one.
logging.getLogger("tierstate").addFilter(PrintableRecords())
contain_handlers(logging.getLogger("tierstate"))

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "CaptureError",
    "Checkpointer",
    "CommitUnknown",
    "Damaged",
    "Event",
    "FormatError",
    "Loader",
    "Lossy",
    "NewestUnreadable",
    "NotFound",
    "OutOfMemory",
    "PerRank",
    "Policy",
    "PolicyError",
    "Provider",
    "RankFailed",
    "Reentered",
    "Rng",
    "Save",
    "Shard",
    "StateAlarm",
    "StateMismatch",
    "Stats",
    "Tier",
    "TierError",
    "TierFull",
    "TierStats",
    "TierUnavailable",
    "TierstateError",
    "Unauthentic",
    "Unreadable",
    "Unsafe",
    "VersionInfo",
    "WrongTier",
    "register_provider",
    "register_tier",
    "unwrapped",
]


_MODULES = {
    "tierstate.checkpointer": ("Checkpointer", "Save"),
    "tierstate.engine.events": ("Event",),
    "tierstate.engine.info": ("Stats", "TierStats", "VersionInfo"),
    "tierstate.providers.base": ("Provider",),
    "tierstate.providers.registry": ("register_provider",),
    "tierstate.providers.sharded.shards": ("Shard",),
    "tierstate.providers.tree.lossy_rules": ("Lossy",),
    "tierstate.providers.tree.rename": ("unwrapped",),
    "tierstate.providers.values.loader": ("Loader",),
    "tierstate.providers.values.stateful": ("PerRank", "Rng"),
    "tierstate.tiers.base": ("Tier",),
    "tierstate.tiers.policy.policy": ("Policy",),
    "tierstate.tiers.registry": ("register_tier",),
}
"""By module, the public names that it defines; all others are errors."""


_MODULE_OF = dict.fromkeys(__all__, "tierstate.manifest.errors")
_MODULE_OF |= {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        found = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return found
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
