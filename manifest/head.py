"""The head of a version: what it says of itself beside its tables."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import columns as col
from .chunk import CHUNK_GRAIN, MAX_CHUNK_SIZE
from .digest import ALGORITHMS
from .errors import FormatError

MAX_SEQ = 10**12 - 1
"""Largest sequence number: what fits the twelve digits of a record's key."""

FEATURES: frozenset[str] = frozenset({"delta"})
"""Names of features this program can read; a table that requires another is refused by name."""

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "run": str, "seq": int, "step": int, "time": (int, float), "parent": str,
    "chunk": int, "digest": str, "world": int, "metadata": dict,
}  # fmt: skip
_RANGES = (("seq", 0, MAX_SEQ), ("step", -(2**63), 2**63 - 1), ("time", 0, 2**53), ("world", 1, 2**32))


@dataclass(frozen=True)
class Head:
    """What a version says of itself beside its tables.

    Attributes:
        run, seq: the line it belongs to and its place there, from 0 to MAX_SEQ.
        step: the training step, as the user counts.
        time: seconds since 1970 when it was saved.
        parent: id of the version before it in the line, or empty.
        chunk: chunk length in bytes.
        digest: name of the digest algorithm.
        world: number of ranks that took part.
        metadata: the user's own JSON values.
    """

    run: str
    seq: int
    step: int
    time: float
    parent: str = ""
    chunk: int = 16 << 20
    digest: str = "xxh3-128"
    world: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """The head as JSON types."""
        return {name: getattr(self, name) for name in _FIELDS} | {"metadata": dict(self.metadata)}

    @classmethod
    def decode(cls, head: Mapping[str, Any], what: str = "version") -> Head:
        """A head from JSON types.

        Raises:
            FormatError: a field is absent, of another type or out of its range.
        """
        found = cls(**{name: col.field(head, name, kind, what) for name, kind in _FIELDS.items()})
        found.check(what)
        return found

    def check(self, what: str = "version") -> None:
        """Raises FormatError if a number is out of its range or the digest is not known."""
        if not 0 < self.chunk <= MAX_CHUNK_SIZE or self.chunk % CHUNK_GRAIN:
            raise FormatError(f"{what} has chunks of {self.chunk} bytes; right is a multiple of 16, at most 1 GiB")
        if self.digest not in ALGORITHMS:
            raise FormatError(f"{what} uses digest {self.digest!r:.40}; known are {', '.join(ALGORITHMS)}")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:  # also where it is NaN
                raise FormatError(f"{what} has {name} {reprlib.repr(value)}; right is a number from {low} to {high}")


def refuse_unknown(head: Mapping[str, Any], what: str) -> None:
    """Raises FormatError if a table requires a feature that this program does not know."""
    unknown = set(col.names(head, "requires", what)) - FEATURES
    if unknown:
        names = ", ".join(sorted(unknown))
        raise FormatError(f"{what} requires {names}, which this program does not know: use a newer one")
