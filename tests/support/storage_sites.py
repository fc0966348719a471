"""Storage of tiers that outlives the processes using it: each can be unavailable, lose everything, or be damaged."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from support.checkpointer_worlds import tier
from support.tier_claims import Look

import tierstate as ts
from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.tiers.base import Tier, Traits
from tierstate.tiers.registry import open_tier
from tierstate.tiers.testing import Fault, Faulty
from tierstate.tiers.testing.faulty import FaultyCall


class Power:
    """What a process lives from: once it is gone, nothing that it asks of a tier takes effect.

    Attributes:
        left: operations until it is gone; None: it stays.
    """

    def __init__(self) -> None:
        self.left: int | None = None
        self._lock = threading.Lock()

    def spend(self) -> None:
        """One operation.

        Raises:
            TierUnavailable: the power is gone.
        """
        with self._lock:
            if self.left is None:
                return
            if self.left <= 0:
                raise ts.TierUnavailable("this process is dead")
            self.left -= 1


class Site:
    """The place of one tier.

    Args:
        kind: as in `worlds.KINDS`, of those that leave something behind, and ``bucket``.
        folder: where files may lie.
        keys: more of the tier's, which are the place's and not a policy's.

    Attributes:
        away: nobody gets an answer.
        hits: every object that was damaged or lost here, as it was before.
        power: of the process that opens the tier next.
    """

    def __init__(self, kind: str, folder: Path, **keys: Any) -> None:
        self.kind, self.folder = kind, folder
        self.key = uuid.uuid4().hex
        self._keys = tier(kind, folder, **keys)
        self.raw = self.opened()
        self.away = False
        self.hits: dict[str, Buffer] = {}
        self.power = Power()

    def opened(self) -> Tier:
        """A handle of its own."""
        keys = dict(self._keys)
        return open_tier("raw", keys.pop("type"), keys)

    def keys(self, **more: Any) -> dict[str, Any]:
        """The tier's keys in a policy."""
        return {"type": "site", "key": self.key, **more}

    def objects(self, prefix: str = "") -> list[str]:
        """Keys of what lies here."""
        return list(self.raw.list(prefix))

    def look(self) -> Look:
        """What lies here now, and what of it is as it was."""
        return Look(self.raw, self.hits)

    def lose(self, *, folders: bool) -> None:
        """Everything is gone."""
        for key in self.objects():
            self._hit(key)
            self.raw.delete(key)
        if folders:
            shutil.rmtree(self.folder / ("object" if self.kind == "file" else self.kind), ignore_errors=True)

    def damage(self, key: str, how: str, where: float, other: str) -> None:
        """Damage one object; ``where`` is a share of its length, ``other`` what it is swapped with."""
        data = self._hit(key)
        at = min(int(where * data.numel()), max(0, data.numel() - 1))
        if how == "swap":
            twin = self._hit(other)
            self._set(other, data)
            self._set(key, twin)
        elif how == "delete":
            self.raw.delete(key)
        else:
            self._set(key, flipped(data, at) if how == "flip" else data[:at])

    def _hit(self, key: str) -> Buffer:
        data = self.raw.get(key)
        if key.startswith("versions/"):
            self.hits[key] = empty_buffer(0)  # records are read or not; their numbers may be used again
        else:
            self.hits.setdefault(key, data)
        return data

    def _set(self, key: str, data: Buffer) -> None:
        self.raw.delete(key)
        self.raw.put(key, data)


def flipped(data: Buffer, at: int) -> Buffer:
    """The same bytes but for one bit."""
    data = data.clone()
    if data.numel():
        data[at] ^= 0x10
    return data


class AtSite(Faulty):
    """A tier type for policies, ``site``: a process's own handle on a `Site`."""

    SITES: ClassVar[dict[str, Site]] = {}

    def __init__(self, *, key: str) -> None:
        self._site = self.SITES[key]
        self._power = self._site.power
        super().__init__(self._site.opened())

    @property
    def traits(self) -> Traits:
        """Those of the tier inside, said to be persistent, as its site is."""
        return replace(self.inner.traits, persistent=True)

    def begin(self, operation: FaultyCall) -> Fault | None:
        self._power.spend()
        if self._site.away:
            raise ts.TierUnavailable(f"{self.name} is away", tier=self.name)
        return super().begin(operation)


@contextmanager
def sites(kinds: list[str], folder: Path, **keys: Mapping[str, Any]) -> Iterator[dict[str, Site]]:
    """A site of each kind, by its name, some with more keys; known to policies as long as the block lasts."""
    with known({kind: Site(kind, folder, **keys.get(kind, {})) for kind in kinds}) as made:
        yield made


@contextmanager
def known(made: dict[str, Site]) -> Iterator[dict[str, Site]]:
    """These sites, known to policies as long as the block lasts."""
    ts.register_tier("site", AtSite)
    AtSite.SITES.update({site.key: site for site in made.values()})
    try:
        yield made
    finally:
        for site in made.values():
            site.lose(folders=False)
            site.raw.close()
            del AtSite.SITES[site.key]


def tried(call: Callable[[], Any]) -> tuple[Any, ts.TierstateError | None]:
    """What a call gives, or its typed error. Any other error is raised."""
    try:
        return call(), None
    except ts.TierstateError as error:
        return None, error
