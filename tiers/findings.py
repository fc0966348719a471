"""Findings: how deep a verification looks, and what it found."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Depth:
    """How deep a verification looks.

    Attributes:
        data: every chunk is read, decoded and compared with its digest.
        sample: the share of each tier's bytes of which that is done instead, chosen at random; 0 for none.
        seed: what the choice comes from.
        deep: also footers, containers, and each leaf by its provider.
        mend: what is damaged in one tier and whole in another is written again.
    """

    data: bool = False
    sample: float = 0.0
    seed: int = 0
    deep: bool = False
    mend: bool = False

    @classmethod
    def of(
        cls,
        *,
        deep: bool = False,
        data: bool = False,
        sample: float = 0.0,
        seed: int | None = None,
        mend: bool = False,
    ) -> Depth:
        """The depth that was asked for. ``deep``, and ``mend`` without a sample, read all data.

        Raises:
            ValueError: the sample is no share, or all data is to be read anyway.
        """
        if not 0 <= sample <= 1:
            raise ValueError(f"sample={sample!r}: a share is between 0 and 1, or between 0% and 100%")
        if sample and (deep or data):
            raise ValueError("either a sample of the data is read or all of it; leave out one of them")
        if seed is not None and seed < 0:
            raise ValueError(f"seed={seed}: right is a number from 0 on")
        whole = data or deep or (mend and not sample)
        return cls(whole, sample, secrets.randbits(32) if seed is None else seed, deep, mend)

    @property
    def reads(self) -> bool:
        """Whether any chunk is read."""
        return self.data or self.sample > 0


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it should be.

    Attributes:
        tier: where; empty where it is about the version itself.
        seq: the version's number.
        step: its step; None where the record itself cannot be read.
        leaf: the leaf, or empty where it is about a whole record or pack.
        what: what was found; the first such thing, where several chunks of a leaf are damaged.
        chunks: how many chunks of the leaf are.
        whole: whether all of them are whole in another tier; None where that was not looked for.
        mended: whether all of them were written again.
    """

    tier: str
    seq: int
    step: int | None
    leaf: str
    what: str
    chunks: int = 0
    whole: bool | None = None
    mended: bool = False


@dataclass(frozen=True, slots=True)
class Unrestorable:
    """A version that cannot be restored as a whole from the tiers that answered.

    Attributes:
        seq, step: which; the step is None where no record of it can be read.
        leaves: how many of its leaves have a part that is whole nowhere.
        first: the first of them.
        thinned: what retention has dropped of it on purpose, in words; empty where all of it was kept.
    """

    seq: int
    step: int | None
    leaves: int = 0
    first: str = ""
    thinned: str = ""


@dataclass
class Report:
    """What a verification looked at, and what it found.

    Attributes:
        versions: records read, one per version and tier.
        chunks, nbytes: chunks read and their raw bytes; none unless data was asked for.
        problems: what is not as it should be, also what was mended.
        unreachable: tiers that could not be asked.
        lost: versions that cannot be restored as a whole.
        mended: by tier, chunks that were written again.
        read, held: by tier, raw bytes read, and of all chunks there; where data was asked for.
        sample, seed: what share of the bytes was to be read, and what the choice came from.
        unopened: leaves that a deep look left unopened, since to load them would run code.
    """

    versions: int = 0
    chunks: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    lost: list[Unrestorable] = field(default_factory=list)
    mended: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    sample: float = 0.0
    seed: int = 0
    unopened: int = 0

    @property
    def ok(self) -> bool:
        """Whether every tier answered, and nothing is wrong that was not mended."""
        return not self.unreachable and all(problem.mended for problem in self.problems)
