"""The base class of wrapper tiers: every call is forwarded to the tier inside; subclasses change some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import TierError
from tierstate.tiers.base import ObjectWriter, Place, Range, RankGroup, Release, Tier, Traits


class Wrapping(Tier):
    """A tier that forwards every call to another one. Subclasses change some calls; wrappers may be stacked.

    The name is the inner tier's, so that all messages show the same one. Attributes of the inner tier that are not
    part of the `Tier` interface are available on the wrapper too.

    Args:
        inner: the tier inside; the wrapper owns and closes it.
    """

    inner: Tier

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

    @property
    def trouble(self) -> str:
        return self.inner.trouble

    def meet(self, team: RankGroup) -> None:
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

    def place(self) -> Place | None:
        return self.inner.place()

    def close(self) -> None:
        self.inner.close()

    if not TYPE_CHECKING:  # which would otherwise believe that a wrapper has every attribute

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name == "inner":
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
            return getattr(self.inner, name)


class WrappingWriter(ObjectWriter):
    """A writer that forwards every call to another one.

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
        """Abort the object after an error of the wrapper itself, which `check` raises again."""
        self._failure = error
        self.inner.abort()

    def check(self) -> None:
        """Raise the error for which the object was aborted, if it was."""
        if isinstance(self._failure, Exception):
            raise self._failure
        if self._failure is not None:
            raise TierError("the object was given up when its writer was interrupted") from self._failure
