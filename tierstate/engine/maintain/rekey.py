"""Replaces the keys of encrypted tiers by hand, without writing their packs again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstate.manifest.errors import NotFound
from tierstate.tiers.policy.policy import Policy, open_policy_tier
from tierstate.tiers.wrappers.encrypt import encryption_of


@dataclass(frozen=True)
class RekeyResult:
    """A tier whose key was replaced.

    Attributes:
        tier: the tier's name.
        key: the id of the key that it has now.
        data_keys: how many data keys are wrapped with it.
    """

    tier: str
    key: str
    data_keys: int


def rekey_tiers(policy: Policy, names: Sequence[str] = ()) -> list[RekeyResult]:
    """Wrap the data keys of encrypted tiers with the first key that the policy lists for each.

    Args:
        names: the tiers; none: all that are encrypted.

    Raises:
        NotFound: the policy has no such tier, or it is not encrypted.
        Unauthentic: no key of the policy is the tier's key now.
        TierError: a tier could not be read or written.
    """
    chosen = [policy.tier(name) for name in names] or [spec for spec in policy.tiers if spec.encrypt]
    if not chosen:
        raise NotFound("no tier of this policy is encrypted")
    found = []
    for spec in chosen:
        tier = open_policy_tier(spec)
        try:
            encryption = encryption_of(tier)
            if encryption is None:
                raise NotFound(f"{spec.name}: is not encrypted, by this policy", tier=spec.name)
            ring = encryption.replace_key()
            found.append(RekeyResult(spec.name, encryption.key_id, len(ring.keys)))
        finally:
            tier.close()
    return found
