"""What `doctor` reports: the state of each version over all tiers, and the repairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version

Kind = Literal["rebuild", "mend", "clean", "copy", "tag"]


State = Literal["whole", "part", "damaged", "lost", "unknown"]


@dataclass(frozen=True)
class Repair:
    """One repair, in one tier.

    Attributes:
        kind: ``rebuild``: a lost or damaged record is made again; ``mend``: damaged or missing chunks are written
            again, under a new record; ``clean``: damaged records beside a sound one are deleted; ``copy``: a version
            that is due in the tier is copied there; ``tag``: a tag is written again.
        tier: the tier that gets it; empty for tags, which all persistent tiers get.
        seq, step: the version; 0 and None for tags.
        what: the damage.
        chunks, nbytes: how many chunks are written, and their raw bytes.
        sources: the tiers from which these chunks come.
        done: whether it was carried out.
        error: why it failed.
    """

    kind: Kind
    tier: str
    seq: int
    step: int | None
    what: str
    chunks: int = 0
    nbytes: int = 0
    sources: tuple[str, ...] = ()
    done: bool = False
    error: str = ""


@dataclass(frozen=True)
class VersionHealth:
    """One version over all tiers, as it was found.

    Attributes:
        seq, step, id: of the version; None and empty if nothing says what it consisted of.
        state: ``whole``: it can be restored, and every copy is whole; ``damaged``: some copy is not, and all of it can
            be repaired; ``part``: what should be there is whole, and retention, or the rules, have left out the rest;
            ``lost``: a part of it is nowhere; ``unknown``: what is missing may be in a tier that cannot be asked.
        tiers: by tier, the state of its copy: ``whole``, ``part``, ``damaged``, ``record damaged``, ``record lost``.
        restorable: whether a restore gets it as it is now.
        leaves: how many leaves have a chunk that is nowhere.
        lost: names of the first of them.
        left_out: how many leaves no tier should have any more, or never got.
        why: why it is lost or unknown.
    """

    seq: int
    step: int | None
    id: str
    state: State
    tiers: Mapping[str, str] = field(default_factory=dict)
    restorable: bool = False
    leaves: int = 0
    lost: tuple[str, ...] = ()
    left_out: int = 0
    why: str = ""


@dataclass
class DoctorReport:
    """What a doctor found, and did or would do.

    Attributes:
        applied: whether the repairs were carried out.
        versions: newest first; the state is the one before any repair.
        repairs: in the order in which they are to be carried out.
        unreachable: tiers that could not be read, or not everywhere, and why.
        notes: other damage, with what can be done about it.
        unknown: numbers of which packs are there, and no record, and not enough to rebuild one: dropped, or lost as a
            whole.
    """

    applied: bool = False
    versions: list[VersionHealth] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, or all that was wrong has been repaired."""
        lost = any(version.state in ("lost", "unknown") for version in self.versions)
        return not (lost or self.unreachable or self.notes) and all(repair.done for repair in self.repairs)


class RepairStep(NamedTuple):
    """A repair, and what is needed to carry it out."""

    repair: Repair
    version: Version | None = None
    rows: tuple[int, ...] = ()
    base: Record | None = None
    replaced: tuple[int, ...] = ()
