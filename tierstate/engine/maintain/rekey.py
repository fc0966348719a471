"""Replaces the keys of sealed and encrypted tiers by hand, without writing their packs again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from tierstate.engine.store.run_in_tier import TierRun
from tierstate.engine.versions.tags import Tags
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import AlreadyExists, NotFound, TierstateError
from tierstate.manifest.format.marker import MARKER_KEY
from tierstate.manifest.history.removals import removal_key, removal_marks
from tierstate.tiers.base import Tier, layer_of
from tierstate.tiers.concurrency import results_ahead
from tierstate.tiers.policy.policy import Policy, open_policy_tier
from tierstate.tiers.wrappers.encrypt import Encrypted
from tierstate.tiers.wrappers.seal import Sealed

WITH_RUNS = ("versions/", "tags/", "removed/")
"""Prefixes of the objects that are sealed and stay: the name of their run comes next. Leases, indexes and events are
left alone: they go by themselves, and where they cannot be read nothing is lost."""


@dataclass
class RekeyResult:
    """A tier whose key was replaced.

    Attributes:
        tier: the tier's name.
        key: the id of the key that it has now.
        data_keys: how many data keys are wrapped with it; 0 for a sealed tier.
        sealed: how many objects were sealed with it now; 0 for an encrypted tier.
        left: why others could not be sealed with it.
    """

    tier: str
    key: str
    data_keys: int = 0
    sealed: int = 0
    left: list[str] = field(default_factory=list)


def rekey_tiers(policy: Policy, names: Sequence[str] = ()) -> list[RekeyResult]:
    """Wrap the data keys of encrypted tiers with the first key that the policy lists for each, and seal what lies in
    sealed tiers with the first key of ``seal``. Nobody may save to those meanwhile; interrupted, it is run again.

    Args:
        names: the tiers; none: all that are sealed or encrypted.

    Raises:
        NotFound: the policy has no such tier, or it is neither sealed nor encrypted.
        WrongTier: another tier lies in the place of a sealed one.
        Unauthentic: no key of the policy is the tier's key now.
        TierError: a tier could not be read or written.
    """
    chosen = [policy.tier(name).name for name in names]
    with ExitStack() as stack:
        tiers = []
        for spec in policy.tiers:
            if spec.persistent and (spec.seal or not chosen or spec.name in chosen):  # tags are written to all of them
                tiers.append(open_policy_tier(spec))
                stack.callback(tiers[-1].close)
        here = [tier for tier in tiers if not chosen or tier.name in chosen]
        found = {tier.name: one for tier in here if (one := _rekeyed(tier)) is not None}
        if plain := [name for name in chosen if name not in found]:
            raise NotFound(f"{plain[0]}: is neither sealed nor encrypted, by this policy", tier=plain[0])
        if not found:
            raise NotFound("no tier of this policy is sealed or encrypted")
        _Resealing(tiers, found).run()
    return list(found.values())


def _rekeyed(tier: Tier) -> RekeyResult | None:
    """Replaces the key of a tier that is encrypted; None for a tier that is neither that nor sealed."""
    if (encryption := layer_of(tier, Encrypted)) is not None:
        ring = encryption.replace_key()
        return RekeyResult(tier.name, encryption.key_id, len(ring.keys))
    seals = layer_of(tier, Sealed)
    return None if seals is None else RekeyResult(tier.name, seals.key_id)


class _Resealing:
    """Seals what stays in sealed tiers with the key that the policy lists first.

    What can be read with another key of the policy is written again: records as new generations, tags under new
    numbers, so that at each moment one of them is there.

    Args:
        tiers: all that survive the host.
        found: by tier; of these, what is sealed is sealed again.
    """

    def __init__(self, tiers: Sequence[Tier], found: Mapping[str, RekeyResult]) -> None:
        self._tiers, self._found = tiers, found
        self._seals = {tier.name: seals for tier in tiers if (seals := layer_of(tier, Sealed)) and tier.name in found}

    def run(self) -> None:
        """Seal the objects of all runs, and then the markers: until those have the new seal, nothing is saved with the
        new key alone."""
        runs = {name: _runs(seals) for name, seals in self._seals.items()}
        for run in sorted(set[str]().union(*runs.values())):
            tier_runs = [TierRun(tier, run) for tier in self._tiers]
            for tier_run in tier_runs:
                if (seals := self._seals.get(tier_run.name)) is not None:
                    tier_run.identity.ensure(create=False)
                    self._records(tier_run, seals)
                    self._removals(run, seals)
            written, failed = Tags(tier_runs).renew(self._is_stale)
            for name in self._seals:
                self._found[name].sealed += written
                self._found[name].left += failed
        for name, seals in self._seals.items():
            with self._told(seals):
                if seals.is_stale(MARKER_KEY):
                    _put_again(seals, MARKER_KEY, seals.get(MARKER_KEY))
                    self._found[name].sealed += 1
            if runs[name] and not any(seals.list(MARKER_KEY)):  # it was interrupted here, perhaps
                self._found[name].left.append(f"{name}: {MARKER_KEY} is missing; `tierstate adopt` writes it")

    def _records(self, tier_run: TierRun, seals: Sealed) -> None:
        every = list(tier_run.log.generations().items())
        stale = results_ahead(lambda one: any(seals.is_stale(tier_run.log.key(one[0], g)) for g in one[1]), every)
        for (seq, generations), needed in zip(every, stale, strict=True):
            with self._told(seals):
                if needed:
                    tier_run.replace(tier_run.log.read(seq), generations)
                    self._found[seals.name].sealed += 1

    def _removals(self, run: str, seals: Sealed) -> None:
        for key, seq in list(removal_marks(seals, run)):
            with self._told(seals):
                if seals.is_stale(key):
                    mark, spare = seals.get(key), removal_key(run, seq, "")
                    made = _put(seals, spare, mark)  # so that the version has a mark at each moment
                    _put_again(seals, key, mark)
                    if made:
                        seals.delete(spare)
                    self._found[seals.name].sealed += 1

    def _is_stale(self, tier: Tier, key: str) -> bool:
        return tier.name in self._seals and self._seals[tier.name].is_stale(key)

    @contextmanager
    def _told(self, seals: Sealed) -> Iterator[None]:
        """What fails in the block is noted."""
        try:
            yield
        except NotFound:
            pass  # deleted meanwhile
        except TierstateError as error:
            self._found[seals.name].left.append(str(error))


def _put(seals: Sealed, key: str, data: Buffer) -> bool:
    """Write an object; False if it is there already."""
    try:
        seals.put(key, data)
    except AlreadyExists:
        return False
    return True


def _put_again(seals: Sealed, key: str, data: Buffer) -> None:
    seals.delete(key)
    _put(seals, key, data)  # if it is there, the answer to the first try was lost


def _runs(seals: Sealed) -> set[str]:
    """The runs that have sealed objects that stay."""
    keys = (key.split("/") for prefix in WITH_RUNS for key in seals.list(prefix))
    return {parts[1] for parts in keys if len(parts) == 3}
