"""Opening: a tier as its policy has it, with the wrappers that the policy asks for."""

from __future__ import annotations

from .base import Tier
from .limited import Limited
from .measured import Measured
from .policy import TierPolicy
from .registry import open_tier
from .retried import Retried


def opened(spec: TierPolicy, arena: object | None = None) -> Tier:
    """The tier, measured, and limited and retried as the policy says.

    From the inside out: what is measured is the tier itself, without the time that calls wait for their turn; what is
    tried again takes its turn again.

    Args:
        spec: what the policy says about it.
        arena: the engine's arena, for a class whose constructor has a parameter of that name.

    Raises: as `tierstate.tiers.registry.open_tier`.
    """
    tier: Tier = Measured(open_tier(spec.name, spec.type, spec.options, arena))
    if spec.bandwidth or spec.operations:
        tier = Limited(tier, bandwidth=spec.bandwidth, operations=spec.operations)
    return Retried(tier, spec.retries) if spec.retries else tier
