"""The head of a version: what it says of itself beside its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import columns as col
from .chunk import CHUNK_GRAIN, MAX_CHUNK_SIZE
from .digest import ALGORITHMS
from .errors import FormatError

FEATURES: frozenset[str] = frozenset()
"""Names of features this program can read; a table that requires another is refused by name."""

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "run": str, "seq": int, "step": int, "time": (int, float), "parent": str,
    "chunk": int, "digest": str, "world": int, "metadata": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Head:
    """What a version says of itself beside its tables.

    Attributes:
        run, seq: the line it belongs to and its place there.
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
        if not 0 < found.chunk <= MAX_CHUNK_SIZE or found.chunk % CHUNK_GRAIN:
            raise FormatError(f"{what} has chunks of {found.chunk} bytes; right is a multiple of 16, at most 1 GiB")
        if found.digest not in ALGORITHMS:
            raise FormatError(f"{what} uses digest {found.digest!r:.40}; known are {', '.join(ALGORITHMS)}")
        return found


def refuse_unknown(head: Mapping[str, Any], what: str) -> None:
    """Raises FormatError if a table requires a feature that this program does not know."""
    unknown = set(map(str, col.field(head, "requires", list, what))) - FEATURES
    if unknown:
        names = ", ".join(sorted(unknown))
        raise FormatError(f"{what} requires {names}, which this program does not know: use a newer one")
