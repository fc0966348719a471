"""Checks a live tier: opens it, tests the promises of the tier contract, and measures latency and throughput.

Throughput is measured with durable writes, for about a second per direction. All objects are under a scratch prefix,
and are deleted afterwards.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

from tierstate.manifest.chunk import Buffer, as_buffer, spans, to_bytes
from tierstate.manifest.errors import AccessDenied, PolicyError, TierError, TierFull, TierstateError, TierUnavailable
from tierstate.manifest.format.marker import MARKER_KEY, MAX_MARKER_BYTES, TierMarker
from tierstate.manifest.history.log import list_runs
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.memory.pages import map_pages
from tierstate.tiers.object.tier import REQUEST_DEADLINE
from tierstate.tiers.places import check_places
from tierstate.tiers.policy.policy import Policy, TierPolicy
from tierstate.tiers.registry import open_tier
from tierstate.tiers.secrets import scrub, secrets_of
from tierstate.tiers.testing import PROMISES
from tierstate.tiers.units import parse_seconds
from tierstate.tiers.wrappers.limit import Limited

FIRST, MOST = 4 << 20, 256 << 20
"""Bytes of the first object that is written, and of the largest one."""


ENOUGH = 1.0
"""Seconds that a write must take to count as a measurement; after a shorter one a larger object is written."""


SLAB = 16 << 20


FIRST_ANSWER = 15.0
"""Seconds to wait for the first answer of an object store. Somebody waits for the check, while a save has the tier's
deadline to outlast an outage; a store that answers does so in far less, after name look-up, TLS and credentials."""


SMALL = 4096


OnStep = Callable[[str], None]
"""Called with the name of each step."""


THROUGHPUT_CHECK = "moves long objects"
"""Name of the promise that is reported as broken if the measurement of throughput fails."""


NOT_TRIED = (TierFull, AccessDenied, TierUnavailable)
"""Errors after which a promise counts as not tested, rather than broken; its message begins with the error's name."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """The throughput of a tier with the largest object.

    Attributes:
        nbytes: its length.
        write: bytes per second until its writer was closed.
        read: bytes per second of reading it, with the number of parallel requests that the tier's traits give.
    """

    nbytes: int
    write: float
    read: float


@dataclass(frozen=True, slots=True)
class Latency:
    """The median latency of a few calls, in seconds.

    Attributes:
        put: writing an object of 4 KiB.
        list: listing a few keys.
    """

    put: float
    list: float


def measure_latency(tier: Tier, prefix: str) -> Latency:
    """Put a few small objects and list them."""
    data = _random(SMALL)
    puts = [_seconds(partial(tier.put, f"{prefix}/small-{n}", data)) for n in range(5)]
    lists = [_seconds(lambda: list(tier.list(f"{prefix}/small-"))) for _ in range(3)]
    return Latency(median(puts), median(lists))


def measure_throughput(tier: Tier, prefix: str, most: int = MOST) -> Throughput:
    """Write larger and larger objects, until one takes `ENOUGH` seconds or has ``most`` bytes, and read it back.

    Args:
        most: bytes of the largest object.
    """
    slab = _random(min(SLAB, most))
    nbytes = min(FIRST, most)
    while True:
        key = f"{prefix}/speed-{nbytes}"
        seconds = _seconds(partial(_write, tier, key, nbytes, slab))
        if seconds >= ENOUGH or nbytes >= most:
            return Throughput(nbytes, nbytes / seconds, nbytes / _seconds(partial(_read, tier, key, nbytes)))
        tier.delete(key)
        nbytes = min(most, int(nbytes * min(8.0, max(2.0, ENOUGH / seconds))))


def _write(tier: Tier, key: str, nbytes: int, slab: Buffer) -> None:
    with tier.writer(key, nbytes) as writer:
        for _, length in spans(nbytes, slab.numel()):
            # The slab is never changed, so that it may be leased many times at once, like the slabs of a save.
            writer.append(slab[:length], _nothing)


def _read(tier: Tier, key: str, nbytes: int) -> None:
    traits = tier.traits
    part = min(traits.part_size, SLAB)
    memory = map_pages(min(nbytes, part * min(traits.parallelism, 8)))
    for start, length in spans(nbytes, memory.numel()):
        tier.read(key, [Range(start + at, memory[at : at + n]) for at, n in spans(length, part)])


def _nothing() -> None:
    pass


def _random(nbytes: int) -> Buffer:
    return map_pages(nbytes).random_(0, 256)


def _seconds(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    # A clock may not tick between two very short calls.
    return max(time.monotonic() - start, 1e-9)


def look_at_tiers(policy: Policy) -> tuple[str, dict[str, tuple[str, ...]]]:
    """Why the tiers of a policy cannot be used together, or an empty text; and what is known of each without using it.

    Reads and writes no object. A tier that cannot be opened here, such as one whose package is missing, is left out.
    """
    notes = {}
    with ExitStack() as closing:
        opened = []
        for spec in policy.tiers:
            with suppress(Exception):  # whatever a plug-in raises: the live check says why
                opened.append(open_tier(spec.name, spec.type, spec.options))
                closing.callback(opened[-1].close)
                notes[spec.name] = tuple(scrub(note, secrets_of(spec.options)) for note in opened[-1].traits.notes)
        try:
            check_places(opened)
        except PolicyError as error:
            return str(error), notes
    return "", notes


@dataclass
class TierFinding:
    """The result of the check of one tier.

    Attributes:
        name, type: as in the policy.
        reached: whether the tier could be opened, and one object put, listed, read and deleted.
        traits: the tier's traits, read after it was used.
        kept, broken: promises of the contract that held, and those that did not, with the reason.
        put_seconds, list_seconds: of putting a small object, and of listing a few.
        write, read: bytes per second of one large object, including durability; None if it could not be measured.
        moved: bytes of that object.
        room: free bytes in the tier; None if not known.
        occupied: whether it has versions already.
        marker: the id in its marker; empty if it has none, or that cannot be read here, as where it is encrypted.
        limits: limits of the policy for it: ``bandwidth``, ``operations``, ``retries``.
        error: why the check failed or did not finish.
        hung: whether the check did not finish in the time limit.
        problems: what must be repaired, and how.
        notes: other facts worth knowing.
    """

    name: str
    type: str
    reached: bool = False
    traits: dict[str, Any] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    put_seconds: float | None = None
    list_seconds: float | None = None
    write: float | None = None
    read: float | None = None
    moved: int = 0
    room: int | None = None
    occupied: bool = False
    marker: str = ""
    limits: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    hung: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the tier can be relied upon."""
        return not (self.error or self.broken or self.problems)


def check_tier(spec: TierPolicy, told: OnStep = lambda _doing: None) -> TierFinding:
    """Open a tier, test its promises under a scratch prefix, measure it, and delete what was written.

    Promises are tested on the tier itself, without the wrappers for the policy's limits and retries, which would hide
    its behaviour. Throughput is measured with these wrappers.
    """
    return _scrubbed(_look(spec, told), secrets_of(spec.options))


def _look(spec: TierPolicy, told: OnStep) -> TierFinding:
    finding = TierFinding(spec.name, spec.type)
    finding.limits = {name: found for name in ("bandwidth", "operations", "retries") if (found := getattr(spec, name))}
    told("open")
    try:
        tier = open_tier(spec.name, spec.type, spec.options)
    except Exception as error:
        finding.error = _said(error)
        return finding
    prefix = f"scratch/{uuid.uuid4().hex[:12]}"
    told("reach")
    if spec.type == "object" and (why := _no_answer(spec, prefix)):
        finding.error, finding.traits = why, asdict(tier.traits)
        tier.close()
        return finding
    try:
        _reach(tier, prefix)
        finding.reached = True
        _try_promises(tier, prefix, finding, told)
        told("measure")
        _measure(tier, spec, prefix, finding)
    except Exception as error:
        finding.error = _said(error)
    finally:
        with suppress(BrokenPipeError):  # the parent process may have ended: the objects are deleted anyway
            told("clear")
        _clear(tier, prefix, finding)
        _close(tier, finding)
    return finding


def _said(error: Exception) -> str:
    """What a tier has raised. A plug-in may raise anything, of which the message alone may say little."""
    return str(error) if isinstance(error, (TierstateError, OSError)) else f"{type(error).__name__}: {error}"


def _no_answer(spec: TierPolicy, prefix: str) -> str:
    """Why an object store does not answer a first request soon; empty if it does, be it with a refusal."""
    given = parse_seconds(spec.options.get("deadline", REQUEST_DEADLINE))
    soon = min(given, FIRST_ANSWER)
    try:
        with closing(open_tier(spec.name, spec.type, {**spec.options, "deadline": soon})) as tier:
            list(tier.list(prefix))
    except TierUnavailable as error:
        return f"{error}" + (f" (this check waits {soon:g} s at most, saves {given:g} s)" if soon < given else "")
    except TierError:
        return ""  # what comes next says so too
    return ""


def _scrubbed(finding: TierFinding, secrets: frozenset[str]) -> TierFinding:
    """The finding without secrets: what a plug-in says in its errors and traits may have some."""
    return TierFinding(**{name: _scrub(value, secrets) for name, value in vars(finding).items()})


def _scrub(value: Any, secrets: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {key: _scrub(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scrub(item, secrets) for item in value]
    return scrub(value, secrets) if isinstance(value, str) else value


def _reach(tier: Tier, prefix: str) -> None:
    """Write, list, read and delete one object, so that a general failure is reported once, not for every promise."""
    key = f"{prefix}/first"
    tier.put(key, as_buffer(b"tierstate"))
    list(tier.list(prefix))
    tier.get(key)
    tier.delete(key)


def _try_promises(tier: Tier, prefix: str, finding: TierFinding, told: OnStep) -> None:
    for number, (name, check) in enumerate(PROMISES):
        told(name)
        try:
            check(tier, f"{prefix}/{number}")
        except Exception as error:
            # A plug-in tier may raise anything; the error is the finding.
            plain = isinstance(error, (AssertionError, TierError)) and not isinstance(error, NOT_TRIED)
            kind = "" if plain else f"{type(error).__name__}: "
            finding.broken[name] = kind + (str(error) or "nothing said")
        else:
            finding.kept.append(name)


def _measure(tier: Tier, spec: TierPolicy, prefix: str, finding: TierFinding) -> None:
    finding.room = tier.room()
    finding.occupied, finding.marker = bool(list_runs(tier)), _marker(tier)
    paced = Limited(tier, bandwidth=spec.bandwidth, operations=spec.operations)
    try:
        calls = measure_latency(paced, f"{prefix}/trial")
        finding.put_seconds, finding.list_seconds = calls.put, calls.list
        # At most a quarter of the free bytes: other jobs may be writing too.
        moved = measure_throughput(
            paced, f"{prefix}/trial", MOST if finding.room is None else min(MOST, finding.room // 4)
        )
    except Exception as error:
        finding.broken[THROUGHPUT_CHECK] = str(error) or type(error).__name__
        return
    finding.write, finding.read, finding.moved = moved.write, moved.read, moved.nbytes


def _marker(tier: Tier) -> str:
    with suppress(TierstateError):
        return TierMarker.decode(to_bytes(tier.get_within(MARKER_KEY, MAX_MARKER_BYTES, "a marker")), MARKER_KEY).id
    return ""


def _clear(tier: Tier, prefix: str, finding: TierFinding) -> None:
    try:
        for key in list(tier.list(prefix)):
            tier.delete(key)
    except Exception as error:
        finding.error = finding.error or f"scratch objects under {prefix} could not be removed: {_said(error)}"


def _close(tier: Tier, finding: TierFinding) -> None:
    try:
        finding.traits = asdict(tier.traits)
        tier.close()
    except Exception as error:
        finding.error = finding.error or _said(error)
