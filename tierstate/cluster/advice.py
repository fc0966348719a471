"""Advice for a cluster's admin: which problems of the live tiers to fix, and how. Pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierstate.manifest.errors import TierFull
from tierstate.tiers.memory.limits import REMEDY, MemoryLimits
from tierstate.tiers.policy.policy import Policy, TierPolicy
from tierstate.tiers.units import rough_size

from .check import NOT_TRIED, THROUGHPUT_CHECK, TierFinding

MUCH_FASTER = 3.0
"""How many times faster than the tier above it a tier must be before this is reported; less may be chance."""


_LOST = "what is saved here may not come back: do not use this tier, and ask who made its type or store"


_CACHED = "turn caches between here and the store off, or ask who made the tier's type"


REMEDIES: Mapping[str, str] = {
    "absent until closed": "a save that is killed would leave half an object for a whole one: do not use this tier",
    "create only": "a second writer would replace saves: one process at a time may write here, under a run of its own",
    "one winner of a race": "let one process at a time write a run here, or upgrade the store; see traits",
    "lists are whole and in order": _CACHED,
    "deletes": "allow deleting (a bucket's policy, object lock, the folder's mode), or keep: {all: true}",
    "leases are released once": "saves would wait for memory forever: this is a fault of the tier's type",
    "keys that are none are refused": "a key could lead out of the tier: this is a fault of the tier's type",
    "traits are sane": "the engine would rely on what is not so: this is a fault of the tier's type",
    THROUGHPUT_CHECK: "see what it says; look first at the capacity, a quota, and the largest size of an object",
}
"""Broken promise -> consequence and remedy; a promise that is not listed here concerns the stored bytes themselves."""


def advise(policy: Policy, findings: Sequence[TierFinding], state: int | None = None) -> None:
    """Fill in the problems of each tier with their remedies, and notes.

    Args:
        state: bytes of the state that will be saved, to check whether `keep` fits; None if not known.
    """
    for spec, finding in zip(policy.tiers, findings, strict=True):
        finding.problems = _problems(policy, spec, finding, state)
        finding.notes = _notes(spec, finding, state)
    _compare_markers(findings)
    _note_one_domain(findings)
    _note_order(findings)


def advise_arena(size: int, limits: MemoryLimits, devices: bool) -> list[str]:
    """What stands in the way of an arena of this size on this machine, with the remedy.

    Args:
        size: bytes of the arena, of each process.
        devices: whether the machine has CUDA devices, for which the arena is pinned.
    """
    short = []
    if devices and limits.memlock is not None and limits.memlock < size:
        short.append(f"the limit of locked memory (RLIMIT_MEMLOCK) is {rough_size(limits.memlock)}")
    if limits.container is not None and limits.container < size:
        short.append(f"the memory limit of the container (cgroup) is {rough_size(limits.container)}")
    if not short:
        return []
    return [f"arena: size is {rough_size(size)}, but {' and '.join(short)}: {REMEDY}"]


def advise_agent(mode: str, huge_pages: bool) -> list[str]:
    """What makes an agent's slabs slow on this machine, with the remedy.

    Args:
        mode: the policy's ``agent: mode``.
        huge_pages: whether the system gives huge pages to shared memory.
    """
    if mode == "off" or huge_pages:
        return []
    return [
        "agent: slabs lie in shared memory, to which this system gives no huge pages, so that direct I/O is slower; "
        "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    ]


def _problems(policy: Policy, spec: TierPolicy, found: TierFinding, state: int | None) -> list[str]:
    problems = [f"{name}: {_remedy(name, what)}" for name, what in found.broken.items()]
    if found.hung:
        problems.append("look whether its servers answer; if it is merely slow, give more time by --limit")
    if policy.durable == spec.name and found.traits.get("persistent") is False:
        problems.append("`durable` names it, but what it keeps does not survive the host: name another tier")
    if not found.occupied and (short := _shortage(spec, found, state)):
        problems.append(f"{short}: keep fewer versions, or make room")
    return problems


def _remedy(name: str, what: str) -> str:
    if what.startswith(f"{TierFull.__name__}: "):
        return "it could not be tried for want of room: make some, or give the tier more"
    untried = what.startswith(tuple(f"{kind.__name__}: " for kind in NOT_TRIED))
    return REMEDIES.get(name, "it could not be tried: see what it says" if untried else _LOST)


def _shortage(spec: TierPolicy, found: TierFinding, state: int | None) -> str:
    """The problem that `keep` needs more space than is free; empty if it fits, or if this is not known."""
    need = bytes_to_keep(spec, state) if state else None
    if need is None or found.room is None or need <= found.room:
        return ""
    return f"keep: needs about {rough_size(need)}, there is room for {rough_size(found.room)}"


def _notes(spec: TierPolicy, found: TierFinding, state: int | None) -> list[str]:
    traits = found.traits
    notes = list(traits.get("notes", ()))
    if traits.get("conditional_create") is False and "one winner of a race" not in found.broken:
        notes.append("several racing writers of one key may succeed: let one process at a time write a run here")
    if found.limits:
        notes.append("limits: " + ", ".join(f"{name} {_limit(name, said)}" for name, said in found.limits.items()))
    if spec.bandwidth and found.write and found.write < 0.8 * spec.bandwidth:
        notes.append("the limit of its bandwidth is above what was reached, and changes nothing")
    if found.occupied and (short := _shortage(spec, found, state)):
        notes.append(f"{short} beside the versions that are there already, of which those of this run count")
    if state and (spec.keep.all or spec.keep.every):
        notes.append("keep: grows with every version that it keeps for good")
    return notes


def _limit(name: str, said: float) -> str:
    return f"{rough_size(said)}/s" if name == "bandwidth" else f"{said:g}/s" if name == "operations" else f"{said:g}"


def describe_finding(found: TierFinding, day: str) -> list[str]:
    """What was measured of a tier, and what is to be done about it, in sentences for the comments of a policy.

    Args:
        day: the date of the measurement.
    """
    said = []
    if found.put_seconds is not None:
        said.append(f"{1000 * found.put_seconds:.2g} ms to put 4 KiB")
    # A tier in memory only takes a lease: its rate says nothing.
    if found.write is not None and found.read is not None and found.traits.get("persistent"):
        said.append(f"writes {rough_size(found.write)}/s, reads {rough_size(found.read)}/s")
        said.append(f"with an object of {rough_size(found.moved)}")
    figures = [f"Measured on {day}: {', '.join(said)}."] if said else []
    troubles = filter(None, [found.error, *(f"{name}: {what}" for name, what in found.broken.items())])
    to_do = [f"TO DO: {what}." for what in found.problems]
    notes = [f"{_capital(note)}." for note in found.notes]
    return [*figures, *(f"FOUND on {day}: {what}." for what in troubles), *to_do, *notes]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def bytes_to_keep(spec: TierPolicy, state: int) -> int | None:
    """Bytes of all versions that `keep` keeps and of the one being written, if no chunk is reused; None if the number
    of versions is not known."""
    keep = spec.keep
    if keep.all or keep.every or keep.within:
        return None
    count = (keep.last or 1) + (keep.best.count if keep.best else 0)
    # A tier that is not persistent drops its oldest version before the next one is written, but never its last one.
    return state * (count + 1 if spec.persistent else max(2, count))


def _compare_markers(findings: Sequence[TierFinding]) -> None:
    """Two tiers with one marker refuse every save: they are one place by two names, or one is a copy of the other."""
    first: dict[str, str] = {}
    for found in findings:
        if found.marker and (other := first.setdefault(found.marker, found.name)) != found.name:
            found.problems.append(
                f"has the marker of {other}: they lie in one place, or one is a copy of the other; give each a place "
                "of its own, or run `tierstate adopt` for the copy"
            )


def _note_one_domain(findings: Sequence[TierFinding]) -> None:
    lasting = [found for found in findings if found.traits.get("persistent")]
    if all(found.reached for found in findings) and len({found.traits["failure_domain"] for found in lasting}) == 1:
        lasting[-1].notes.append("no tier is in another failure domain: if this one is lost, all that was saved is")


def _note_order(findings: Sequence[TierFinding]) -> None:
    """Note tiers that were measured much faster than a tier above them; a policy should list the fastest first."""
    lasting = [found for found in findings if found.traits.get("persistent") and found.write]
    for i, fast in enumerate(lasting):
        for slow in lasting[:i]:
            if "bandwidth" not in slow.limits and (fast.write or 0) > MUCH_FASTER * (slow.write or 0):
                fast.notes.append(f"is much faster than {slow.name}, which stands above it: put the fastest first")
