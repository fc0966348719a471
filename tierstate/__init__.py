"""tierstate: training state on every tier of a cluster, without stopping the training."""

from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    CaptureError,
    CommitUnknown,
    Damaged,
    FormatError,
    NotFound,
    PolicyError,
    RankFailed,
    StateMismatch,
    TierError,
    TierFull,
    TierstateError,
    TierUnavailable,
    Unsafe,
)
from tierstate.providers.base import Provider
from tierstate.providers.per_rank import PerRank
from tierstate.providers.reducing import Lossy
from tierstate.providers.registry import register_provider
from tierstate.providers.rng import Rng
from tierstate.providers.shards import Shard
from tierstate.tiers.base import Tier
from tierstate.tiers.policy import Policy
from tierstate.tiers.registry import register_tier

from .checkpointer import Checkpointer
from .info import Stats, TierStats, VersionInfo
from .save import Save

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "CaptureError",
    "Checkpointer",
    "CommitUnknown",
    "Damaged",
    "FormatError",
    "Lossy",
    "NotFound",
    "PerRank",
    "Policy",
    "PolicyError",
    "Provider",
    "RankFailed",
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
    "Unsafe",
    "VersionInfo",
    "register_provider",
    "register_tier",
]
