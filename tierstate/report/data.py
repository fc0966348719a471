"""What a report says, as plain values: the same numbers for the page, its charts, its tables and ``--json``.

All series of a run lie on one axis: groups of consecutive versions, `POINTS` at most. A number that is not known is
None. Times are seconds since 1970, durations seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

POINTS = 250
"""Groups of versions on the axis of a run, at most; more than a screen can show apart."""


NEWEST = 100
"""Rows of tables that list single versions or events, at most: the newest ones."""


STATES = (
    "not sent",
    "dropped",
    "left out",
    "whole",
    "in part",
    "owed",
    "failed",
    "unreadable",
)
"""How a version may stand in a tier; of a group of versions the last of these counts that one of them has."""


Series: TypeAlias = Sequence[float | None]
"""A number for each group of the axis."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The groups of versions that all series of a run share.

    Attributes:
        size: versions in a group (fewer in the last one).
        first, last: steps of the first and the last version of each group.
        time: when the last version of each group was saved.
    """

    size: int
    first: Sequence[int]
    last: Sequence[int]
    time: Sequence[float]


@dataclass(frozen=True, slots=True)
class Durations:
    """How long something took: mean and longest of each group, and of all."""

    mean: Series
    longest: Series
    count: int
    total: float
    mean_of_all: float | None
    longest_of_all: float | None


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier of a run.

    Attributes:
        visible: whether another process sees what is in it; not so for the memory of a process.
        states: for each of `STATES` how many versions of each group stand so.
        versions: how many it has now.
        newest: step of the newest one.
        behind, behind_seconds: how far that is behind the newest save, in steps and in time.
        arrival: from the save of a version until it was in this tier.
        exposure: what would have been lost at the worst moment of each group if only this tier had been left: the age
            of its newest version (RPO).
        raw, written: of each group, bytes of the states that arrived (of what of them rules send to this tier), and
            bytes written for them. None if no event says so.
        stored: of each group, bytes that the chunks of the versions that are there take, shared ones included.
        raw_total, written_total: sums of ``raw`` and ``written``.
        by_codecs, by_reuse, by_both: what of the difference came from codecs, from chunks that were there already
            (deduplication), and from both where a version is gone, so that they cannot be told apart.
        counts: events by kind.
        trouble: what hangs in it now.
    """

    name: str
    type: str
    persistent: bool
    visible: bool
    states: Sequence[Sequence[int]]
    versions: int
    partial: int
    owed: int
    owed_bytes: int
    unreadable: int
    newest: int | None
    newest_time: float | None
    behind: int | None
    behind_seconds: float | None
    arrival: Durations
    exposure: Series
    exposure_worst: float | None
    raw: Series
    written: Series
    stored: Series
    raw_total: int
    written_total: int
    by_codecs: int
    by_reuse: int
    by_both: int
    counts: dict[str, int]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """How many versions are kept for a reason."""

    reason: str
    versions: int


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version that retention keeps in a tier, and why."""

    step: int
    seq: int
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True)
class TierRetention:
    """What retention would do in a tier now.

    Attributes:
        keep: what the policy says.
        reasons: the most frequent first.
        drop: how many versions it would drop.
        newest: the newest versions that it keeps.
        problem: why it is not known.
    """

    tier: str
    keep: str
    kept: int
    drop: int
    reasons: Sequence[ReasonCount]
    newest: Sequence[KeptVersion]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Happening:
    """An event that somebody may want to know about."""

    time: float
    kind: str
    tier: str
    step: int | None
    seq: int | None
    rank: int | None
    reason: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class RankReport:
    """For how long the training of one rank has waited; the rank is None for a process alone."""

    rank: int | None
    saves: int
    blocked: float
    blocked_longest: float
    waits: int
    waited: float


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One of the newest versions."""

    seq: int
    step: int
    id: str
    time: float
    nbytes: int
    tiers: Sequence[str]
    owed: Sequence[str]
    tags: Sequence[str]
    metadata: str
    unreadable: Sequence[str]


@dataclass(frozen=True, slots=True)
class PolicyLine:
    """A line of the policy, and what it did in this run."""

    number: int
    text: str
    did: str


@dataclass(frozen=True, slots=True)
class LayerMap:
    """A map of layers by versions; each of the four has a row for each layer, and in it a number for each step.

    Attributes:
        layers: names; a layer is all leaves below a path that ends with a number.
        steps: of the versions that were looked at.
        norms: the norm of all values of the layer.
        nonfinite: how many of its values are NaN or infinite.
        changed: the share of its bytes whose chunks are others than in the version before that was looked at.
        drift: by which part of itself its norm differs from that of the version before that was looked at.
        left_off: layers that are not shown, as there are too many.
    """

    layers: Sequence[str] = ()
    steps: Sequence[int] = ()
    norms: Sequence[Sequence[float | None]] = ()
    nonfinite: Sequence[Sequence[int | None]] = ()
    changed: Sequence[Sequence[float | None]] = ()
    drift: Sequence[Sequence[float | None]] = ()
    left_off: int = 0


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run.

    Attributes:
        versions: how many are in any tier now.
        known: how many are known, also from events of versions that are gone.
        events: how many are logged; with none, times and written bytes are not known.
        nbytes: of the newest version's state.
        failures: versions that have failed in a tier.
        durable: the tier that `Save.wait` waits for.
        happenings: the newest events that somebody may want to know about; ``happened`` counts all of them.
    """

    run: str
    durable: str
    versions: int
    known: int
    events: int
    saves: int
    skipped: int
    restores: int
    failures: int
    newest: int | None
    newest_time: float | None
    oldest_time: float | None
    nbytes: int | None
    axis: Axis
    blocked: Durations
    captured: Durations
    waited: float
    tiers: Sequence[TierReport]
    retention: Sequence[TierRetention]
    happened: int
    happenings: Sequence[Happening]
    ranks: Sequence[RankReport]
    layers: LayerMap
    policy: Sequence[PolicyLine]
    newest_versions: Sequence[VersionRow]
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReportData:
    """Several runs beside each other.

    Attributes:
        made: when.
        program: version of this package.
        states: `STATES`, which the numbers of ``TierReport.states`` follow.
    """

    made: float
    program: str
    runs: Sequence[RunReport]
    points: int = POINTS
    states: Sequence[str] = field(default=STATES)

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)
