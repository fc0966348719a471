"""Markers of tiers by hand: create them ahead of training (init), or use one tier in place of another (adopt)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tierstate.engine.store.identity import UNKNOWN, TierIdentity, check_key, newest_records, read_marker
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import NotFound, TierError
from tierstate.manifest.format.marker import MARKER_KEY, TierMarker, named_tiers
from tierstate.tiers.places import check_places
from tierstate.tiers.policy.policy import Policy, open_policy_tier


@dataclass(frozen=True)
class MarkerResult:
    """A tier and its marker.

    Attributes:
        tier: the tier's name.
        id: its id.
        created: whether it got this id now.
        replaces: ids of tiers that it is used in place of.
    """

    tier: str
    id: str
    created: bool
    replaces: tuple[str, ...] = ()


def init_tiers(policy: Policy, names: Sequence[str] = ()) -> list[MarkerResult]:
    """Create the markers of tiers that have none. Run once, it lets a policy say ``initialized: true``.

    Args:
        names: the tiers; none: all that survive the host.

    Raises:
        NotFound: the policy has no such tier, or it does not survive the host.
        WrongTier: records of another tier name a tier that is not there; it may not be mounted.
        PolicyError: two tiers lie in one place.
        TierError: a tier could not be read or written.
    """
    with _opened(policy) as identities:
        chosen = [_named(identities, name) for name in names] or identities
        for one in identities:
            for record in newest_records(one.tier):
                one.learn(record)
        found = []
        for one in chosen:
            created = one.marker is None
            one.ensure()
            assert one.marker is not None
            found.append(MarkerResult(one.name, one.marker.id, created, one.marker.replaces))
    return found


def adopt_tier(policy: Policy, name: str) -> MarkerResult:
    """Use what lies in a tier's place from now on, in place of every tier of that name that records know.

    The tier keeps its id, unless another tier of the policy has the same one, or records know it as another one: then
    it is a copy, or was mounted in the place of this one, and gets a new id.
    No version is changed. Interrupted, it may leave no marker; then it is run again.

    Raises:
        NotFound: the policy has no such tier, or it does not survive the host.
        PolicyError: two tiers lie in one place.
        Unauthentic: the tier's marker needs another key than those of the policy.
        TierError: a tier could not be read, or this one not written.
    """
    with _opened(policy) as identities:
        one = _named(identities, name)
        records = (record for each in identities for record in newest_records(each.tier))
        said = {(tier, t.id) for record in records for tier, t in named_tiers(record.commit).items()}
        known = {id for tier, id in said if tier == name}
        # Ids of other tiers of this policy, also of one that is away: it stays expected in its own place.
        others = {id for tier, id in said if tier in {other.name for other in identities}} - known
        taken = others | {other.marker.id for other in identities if other is not one and other.marker is not None}
        before = one.marker if one.marker is not None and one.marker is not UNKNOWN else TierMarker()
        made = TierMarker(tier=name) if before.id in taken else before
        replaces = {*before.replaces, *known} - taken - {made.id}
        new = TierMarker(made.id, name, made.time, tuple(sorted(replaces)))
        check_key(one.tier)
        one.tier.delete(MARKER_KEY)
        one.tier.put(MARKER_KEY, as_buffer(new.encode()))
        if read_marker(one.tier) != new:
            raise TierError(f"{name}: {MARKER_KEY} is not what was just written", tier=name)
        created = one.marker is None or one.marker.id != new.id
    return MarkerResult(name, new.id, created, new.replaces)


@contextmanager
def _opened(policy: Policy) -> Iterator[list[TierIdentity]]:
    """The tiers of a policy that survive the host, with their markers."""
    tiers = [open_policy_tier(spec) for spec in policy.tiers if spec.persistent]
    try:
        check_places(tiers)
        identities = [TierIdentity(tier, lambda: None) for tier in tiers if tier.traits.persistent]
        for one in identities:
            one.beside = identities
            one.look()
        yield identities
    finally:
        for tier in tiers:
            tier.close()


def _named(identities: Sequence[TierIdentity], name: str) -> TierIdentity:
    for one in identities:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in identities)
    raise NotFound(f"{name!r} is no tier of this policy that survives the host; those are {known}")
