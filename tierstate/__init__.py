"""tierstate: training state on every tier of a cluster, without stopping the training."""

import logging

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
from tierstate.manifest.printable import PrintableRecords
from tierstate.providers.base import Provider
from tierstate.providers.registry import register_provider
from tierstate.providers.sharded.shards import Shard
from tierstate.providers.tree.lossy_rules import Lossy
from tierstate.providers.values.stateful import PerRank, Rng
from tierstate.tiers.base import Tier
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.registry import register_tier

from .checkpointer import Checkpointer, Save

__version__ = "0.1.0"

# Every module logs by this one.
logging.getLogger("tierstate").addFilter(PrintableRecords())

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "CaptureError",
    "Checkpointer",
    "CommitUnknown",
    "Damaged",
    "FormatError",
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
]
