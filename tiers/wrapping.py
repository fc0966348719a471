"""Tiers around tiers: what a wrapper does not change passes through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import TierError

from .base import Meeting, ObjectWriter, Range, Release, Tier, Traits


class Wrapping(Tier):
    """Another tier, call by call. Subclasses change some calls; wrappers may be stacked.

    The name is the inner tier's, so that all messages have the same one. What a class of tiers offers beside the
    contract is found on its wrapper too, unchanged.

    Args:
        inner: the tier inside. It belongs to the wrapper, which closes it.
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        """The inner tier's name."""
        return self.inner.name

    @name.setter
    def name(self, name: str) -> None:
        self.inner.name = name

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def meet(self, team: Meeting) -> None:
        self.inner.meet(team)

    def put(self, key: str, data: Buffer) -> None:
        self.inner.put(key, data)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self.inner.read(key, ranges)

    def list(self, prefix: str) -> Iterator[str]:
        return self.inner.list(prefix)

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def discard(self, keys: Iterable[str]) -> None:
        self.inner.discard(keys)

    def age(self, key: str) -> float | None:
        return self.inner.age(key)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        return self.inner.writer(key, size_hint)

    def firm(self, key: str) -> bool:
        return self.inner.firm(key)

    def room(self) -> int | None:
        return self.inner.room()

    def close(self) -> None:
        self.inner.close()

    if not TYPE_CHECKING:  # which would otherwise believe that a wrapper has every attribute

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name == "inner":
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
            return getattr(self.inner, name)


class WrappingWriter(ObjectWriter):
    """Another writer, call by call.

    Args:
        inner: the writer inside.
    """

    def __init__(self, inner: ObjectWriter) -> None:
        self.inner = inner
        self._failure: BaseException | None = None

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        self.inner.append(buffer, release)

    def close(self) -> None:
        self.check()
        self.inner.close()

    def abort(self) -> None:
        self.inner.abort()

    def give_up(self, error: BaseException) -> None:
        """Abort the object after an error of the wrapper's own, which `check` raises again."""
        self._failure = error
        self.inner.abort()

    def check(self) -> None:
        """Nothing, unless the object was given up: then why."""
        if isinstance(self._failure, Exception):
            raise self._failure
        if self._failure is not None:
            raise TierError("the object was given up when its writer was interrupted") from self._failure


def layers(tier: Tier) -> Iterator[Tier]:
    """A tier, then the tier inside it, and so on to the one that keeps the bytes."""
    yield tier
    while isinstance(tier, Wrapping):
        tier = tier.inner
        yield tier
