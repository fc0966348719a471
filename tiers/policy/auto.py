"""A policy made of what is known of a machine: YAML text with a comment for each choice, for `Policy.auto` and
``tierstate policy init``.

Pure functions of `MachineFacts`: the same facts make the same text. What was measured is only told in comments, so that
a policy does not depend on what else the machine did meanwhile.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import yaml

from tierstate.manifest.errors import PolicyError
from tierstate.manifest.printable import escape_controls
from tierstate.tiers.memory.limits import MemoryLimits
from tierstate.tiers.units import format_size, rough_size

from .machine import AWS_ENDPOINTS, CREDENTIAL_SOURCES, FolderFacts, MachineFacts, Medium, PlaceFacts

ARENA_SHARE = 16
"""The arena takes at most this part (one in so many) of the memory of a process."""


HOST_SHARE = 8
"""The same of the tier in host memory."""


MOST_ARENA = 8 << 30


LEAST_HOST = 512 << 20
"""A smaller tier in host memory holds no version that is worth it."""


UNKNOWN_MEMORY = 4 << 30
"""Memory that is assumed where the system does not say."""


_LONGEST_CHUNK = 16 << 20


_CHUNKS_PER_ARENA = 8


_COLUMNS = 110


_PLAIN = re.compile(r"[A-Za-z/$][\w./${}@%+=,~-]*(?::[\w./${}@%+=,~-]+)*", re.ASCII)
"""Text that YAML reads as it stands, between mappings and lists that are not written in braces."""


_ORDER: Mapping[Medium, int] = {
    "ssd": 0,
    "block device": 1,
    "container": 2,
    "disk": 3,
    "network disk": 4,
    "disk image": 4,
    "shared": 5,
    "unknown": 5,
}
"""Media of folders, fastest first."""


_STORE = 6
"""The place of object stores in that order."""


_WHAT: Mapping[Medium, str] = {
    "ssd": "a drive of this machine without turning platters",
    "disk": "a disk of this machine with turning platters",
    "block device": "a file system of this machine; which kind of drive it lies on is not known",
    "network disk": "a block device that lies on other machines",
    "disk image": "a disk image, which is a file somewhere else",
    "container": "the layer of a container",
    "shared": "a file system that other hosts see too",
    "unknown": "a file system of a kind that is not known here, so it is used like one that other hosts see too",
}


@dataclass(frozen=True, slots=True)
class _Key:
    """A line of a policy, and the comment above it.

    Attributes:
        text: the key with its value; nothing for a comment alone.
        why: the comment's paragraphs.
    """

    text: str
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _TierPlan:
    """A persistent tier before its text is written.

    Attributes:
        name: of the tier.
        place: where its bytes are.
        lost: what takes its bytes away, in a few words; empty if only the loss of the place does.
    """

    name: str
    place: PlaceFacts
    lost: str


def choose_places(facts: MachineFacts) -> MachineFacts:
    """The same facts, with the best scratch folder of the machine as the place if the user gave none.

    Raises:
        PolicyError: there is none, or a place cannot keep a state; the message says what to give.
    """
    if not facts.places:
        if not facts.scratch:
            raise PolicyError(_nothing_found(facts))
        facts = replace(facts, places=(PlaceFacts(folder=facts.scratch[0]),))
    for place in facts.places:
        if place.folder is not None and place.folder.medium == "memory":
            where = place.url or place.folder.written
            raise PolicyError(
                f"{where} is on {place.folder.kind}, which is memory: what is there does not survive the host. Give a "
                "folder on a disk or the URL of a store; memory is used anyway, by a tier of its own"
            )
    return facts


def policy_text(
    facts: MachineFacts, heading: Sequence[str] = (), remarks: Mapping[str, Sequence[str]] | None = None
) -> str:
    """The YAML text of a policy for the places in the facts, with a comment for each choice.

    Args:
        facts: as of `choose_places`.
        heading: paragraphs for the comment at the top.
        remarks: for each tier, by its name, paragraphs about what was measured of it.
    """
    remarks, plans = remarks or {}, _plans(facts)
    top = [
        _Key("version: 1", (*heading, *_found(facts))),
        *_arena(facts),
        *_durable(plans),
        _Key("tiers:", ("Fastest first: a save enters at the first tiers and is copied from there to the others.",)),
    ]
    tiers = [_host_tier(facts)] if _host_size(facts) else []
    tiers += [_tier(plan, plans, facts) for plan in plans]
    parts = ["\n".join(_lines([key], "")) for key in top]
    for n, (name, why, keys) in enumerate(tiers):
        whole = (*why, *remarks.get(name, ()))
        part = "\n".join([*_lines([_Key(f"{_scalar(name)}:", whole)], "  "), *_lines(keys, "    ")])
        parts[-1:] = [parts[-1], part] if n else [f"{parts[-1]}\n{part}"]
    return "\n\n".join(parts) + "\n"


def policy_warnings(facts: MachineFacts) -> list[str]:
    """What a user should know before a state is entrusted to the policy of these facts, a sentence each."""
    plans = _plans(facts)
    said = [
        f"{plan.name}: nothing can be written to {_where(plan.place)} now: {plan.place.folder.refused}"
        for plan in plans
        if plan.place.folder is not None and plan.place.folder.refused
    ]
    if all(plan.lost for plan in plans):
        said.append(
            f"every place of this policy goes {plans[0].lost}: give one more that stays, as in 's3://bucket/ckpt' or a "
            "folder on a shared file system"
        )
    return said


# Memory


def _memory(facts: MachineFacts) -> int:
    """Bytes of memory for one process."""
    known = [size for size in (facts.limits.container, facts.limits.total) if size]
    return min(known, default=UNKNOWN_MEMORY) // max(1, facts.processes)


def _power_of_two_below(size: int) -> int:
    # Round numbers are easier to change; and nodes whose memory differs by a little get the same policy.
    return 1 << (size.bit_length() - 1) if size > 0 else 0


def _arena_size(facts: MachineFacts) -> int:
    # Below this there is no room for two chunks of a page each.
    return max(32 << 10, min(MOST_ARENA, _power_of_two_below(_memory(facts) // ARENA_SHARE)))


def _host_size(facts: MachineFacts) -> int:
    """Bytes of the tier in host memory; 0 for no such tier."""
    size = _power_of_two_below(_memory(facts) // HOST_SHARE)
    return size if size >= LEAST_HOST else 0


def _arena(facts: MachineFacts) -> list[_Key]:
    size = _arena_size(facts)
    chunk = min(_LONGEST_CHUNK, size // _CHUNKS_PER_ARENA)
    lines = []
    if chunk < _LONGEST_CHUNK:
        lines.append(
            _Key(f"chunk: {format_size(chunk)}", ("Shorter than the default of 16 MiB, for the small arena.",))
        )
    why = [
        "Memory through which saves pass, of each process: at most a sixteenth of what there is for one. A save waits "
        "while it is full; with more of it, training goes on earlier."
    ]
    locked = facts.limits.memlock
    if facts.devices and locked is not None and locked < size:
        why.append(
            f"The limit of locked memory (ulimit -l) is {rough_size(locked)}: this memory may not be pinned, and "
            "copies from the GPU are slower then. Raise the limit, or write a smaller size."
        )
    return [*lines, _Key(f"arena: {{size: {format_size(size)}}}", tuple(why))]


# Tiers


def _plans(facts: MachineFacts) -> list[_TierPlan]:
    """The persistent tiers, fastest first; places of one speed in the order in which they were given."""
    plans: list[_TierPlan] = []
    for place in sorted(facts.places, key=_speed):
        name, taken = _name(place), {"host", *(plan.name for plan in plans)}
        number = next(n for n in range(1, len(facts.places) + 3) if _numbered(name, n) not in taken)
        plans.append(_TierPlan(_numbered(name, number), place, _loss(place.folder)))
    return plans


def _speed(place: PlaceFacts) -> int:
    return _ORDER[place.folder.medium] if place.folder is not None else _STORE


def _name(place: PlaceFacts) -> str:
    if place.url:
        name = place.protocol
    else:
        folder = place.folder
        assert folder is not None
        names = {"ssd": "nvme", "block device": "disk", "disk": "disk", "container": "container"}
        shared = folder.kind.removeprefix("fuse.") if folder.medium == "shared" else "shared"
        names |= {"network disk": "netdisk", "disk image": "image"}
        name = names.get(folder.medium, shared)
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:50] or "place"


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _loss(folder: FolderFacts | None) -> str:
    if folder is None:
        return ""
    if folder.job:
        return "when the job ends"
    if folder.temporary:
        return "when the machine starts again, as many systems empty /tmp then"
    return "with its container" if folder.medium == "container" else ""


def _lasting(plans: Sequence[_TierPlan]) -> _TierPlan:
    """The tier for ``durable``: the fastest whose bytes do not go by themselves, or else the fastest."""
    return next((plan for plan in plans if not plan.lost), plans[0])


def _durable(plans: Sequence[_TierPlan]) -> list[_Key]:
    """`durable`, where the first persistent tier is not the right one."""
    lasting, first = _lasting(plans), plans[0]
    if lasting is first:
        return []
    why = f"What save.wait() waits for. {_capital(first.name)} is faster, but what is there goes {first.lost}."
    return [_Key(f"durable: {_scalar(lasting.name)}", (why,))]


_Tier: TypeAlias = tuple[str, tuple[str, ...], list[_Key]]
"""Name, comment and keys."""


def _host_tier(facts: MachineFacts) -> _Tier:
    size = _host_size(facts)
    return (
        "host",
        ("Memory of the process, lost with it. Has the newest version, to undo a bad step without reading a disk.",),
        [
            _Key("type: host"),
            _Key(
                f"capacity: {format_size(size)}",
                ("At most an eighth of the memory of a process. A version that is larger is not kept here.",),
            ),
            _Key("keep: {last: 1}"),
        ],
    )


def _tier(plan: _TierPlan, plans: Sequence[_TierPlan], facts: MachineFacts) -> _Tier:
    keys = _store(plan.place, facts) if plan.place.url else _folder(plan.place.folder)
    return plan.name, tuple(_description(plan)), [*keys, *_cadence(plan, plans)]


def _description(plan: _TierPlan) -> Iterator[str]:
    folder = plan.place.folder
    if folder is None:
        yield "An object store: survives this machine."
        return
    kind = f" ({folder.kind}{f', {folder.model}' if folder.model else ''})" if folder.kind else ""
    room = ""
    if folder.size is not None and folder.free is not None:
        room = f", {rough_size(folder.free)} free of {rough_size(folder.size)}"
    yield _capital(f"{_WHAT[folder.medium]}{kind}{room}.")
    if plan.lost:
        name = f" ({folder.job} names the folder that the scheduler made for it)" if folder.job else ""
        yield f"WARNING: what is here goes {plan.lost}{name}."
    elif folder.medium in ("ssd", "disk", "block device"):
        yield "Survives a crash of the job or of this machine; lost with the machine."
    if folder.medium == "unknown":
        yield "If it is a disk of this machine, write 'type: nvme' instead."
    if folder.refused:
        yield f"WARNING: nothing can be written there now: {folder.refused}."


def _folder(folder: FolderFacts | None) -> list[_Key]:
    assert folder is not None
    path = _Key(f"path: {_scalar(folder.written)}")
    if folder.medium not in ("shared", "unknown"):
        return [_Key("type: nvme"), path]
    why = ["Also for shared file systems that are not Lustre: calls to a server that hangs are given up."]
    if folder.kind.startswith("lustre"):
        why = [
            "Files are striped as the site has it. Where a rank writes files of more than 512 MiB, 'stripe_count: 8' "
            "may be faster."
        ]
    return [_Key("type: lustre", tuple(why)), path]


def _store(place: PlaceFacts, facts: MachineFacts) -> list[_Key]:
    lines = [_Key("type: object"), _Key(f"url: {_scalar(place.url)}")]
    if place.protocol in ("s3", "s3a"):
        lines += _s3_options(facts)
    lines.append(
        _Key(
            "codec: auto",
            ("Chunks are compressed, without loss, where that is faster than to send them as they are.",),
        )
    )
    return lines


def _s3_options(facts: MachineFacts) -> list[_Key]:
    if facts.endpoint:
        why = f"AWS's own tools do not look at {facts.endpoint}, which has the address of the store."
        return [_Key(f'options: {{endpoint_url: "${{{facts.endpoint}}}"}}', (why, _credentials(facts)))]
    address = next((name for name in AWS_ENDPOINTS if name in facts.aws), "")
    where = 'For another store than AWS: options: {endpoint_url: "https://..."}'
    if address:
        where = f"The address of the store is in {address}."
    return [_Key("", (where, _credentials(facts)))]


def _credentials(facts: MachineFacts) -> str:
    found = [name for name in facts.aws if name in CREDENTIAL_SOURCES]
    found += ["files in ~/.aws"] if facts.aws_files else []
    if not found:
        return (
            "No credentials were found in variables or in ~/.aws: they come from the machine's role, or the training "
            "needs AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    return f"Credentials do not belong here. They were found in {', '.join(found)}: the training needs that, too."


def _cadence(plan: _TierPlan, plans: Sequence[_TierPlan]) -> list[_Key]:
    """`every`, `on_lag` and `keep`. The tier that save.wait() waits for takes every save: else waiting would fail."""
    tags = "A version with a tag stays until that is deleted."
    lasting = _lasting(plans)
    if plan is lasting:
        why = "Every save goes here. The newest three stay, as one of them may turn out to be bad."
        return [_Key("keep: {last: 3}", (f"{why} {tags}",))]
    if plans.index(plan) < plans.index(lasting):
        return [_Key("keep: {last: 2}", ("Every save goes here, for quick restarts.",))]
    speed = _speed(plan.place)
    every = "30min" if speed == _STORE else "15min" if speed == _ORDER["shared"] else "5min"
    why = "More often would load it more. If all tiers above are lost, so is the work since the last save here."
    lines = [_Key(f"every: {every}", (why,))]
    if speed >= _ORDER["shared"]:
        lines.append(_Key("on_lag: skip", ("When it is slow, only the newest of the waiting versions is copied.",)))
    return [*lines, _Key("keep: {last: 5}", (tags,))]


# What was found


def _found(facts: MachineFacts) -> Iterator[str]:
    yield "What was found on this machine:"
    yield f"- memory: {_told_memory(facts.limits)}; {_count(facts.processes, 'process', 'es')} ({facts.processes_from})"
    if facts.devices:
        yield f"- {_count(facts.devices, 'CUDA device')}"
    if facts.scheduler:
        yield f"- a job of {facts.scheduler}"
    for folder in facts.scratch:
        yield f"- a folder for scratch data: {folder.written} ({_told_folder(folder)})"
    for path, why in facts.rejected:
        yield f"- not used: {path}: {why}"
    for point, kind in facts.shared:
        yield f"- a shared file system: {point} ({kind}); a folder there can be a place too"
    if facts.aws:
        yield f"- variables for S3: {', '.join(facts.aws)}"


def _told_memory(limits: MemoryLimits) -> str:
    total = "not known" if not limits.total else rough_size(limits.total)
    return (
        total if limits.container is None else f"{total}, of which the container may use {rough_size(limits.container)}"
    )


def _told_folder(folder: FolderFacts) -> str:
    size = [] if folder.size is None else [rough_size(folder.size)]
    return ", ".join(filter(None, [folder.kind, folder.medium, folder.model, *size]))


def _where(place: PlaceFacts) -> str:
    return place.url or (place.folder.written if place.folder is not None else "")


def _nothing_found(facts: MachineFacts) -> str:
    seen = [f"{path} will not do ({why})" for path, why in facts.rejected]
    seen += [f"{point} is shared ({kind}): a folder there will do" for point, kind in facts.shared]
    found = f" Found: {'; '.join(seen)}." if seen else ""
    return (
        "no disk for scratch data was found on this machine; say where to save: a folder on a disk, as in "
        f"'/data/ckpt', or a URL, as in 's3://bucket/ckpt', or several of them.{found}"
    )


def _count(number: int, one: str, more: str = "s") -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}{more}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# Text


def _scalar(text: str) -> str:
    """A text as a value in YAML."""
    if _PLAIN.fullmatch(text) and yaml.safe_load(text) == text:  # which true, null and many more are not
        return text
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=1 << 20).strip()


def _lines(keys: Sequence[_Key], margin: str) -> Iterator[str]:
    """Lines of YAML: each key below its comment."""
    for key in keys:
        yield from _comment(key.why, margin)
        if key.text:
            yield margin + key.text


def _comment(paragraphs: Sequence[str], margin: str) -> Iterator[str]:
    for paragraph in paragraphs:
        # Names of folders and drives may have any character: none may end the comment.
        text = escape_controls(paragraph)
        hanging = "  " if text.startswith("- ") else ""
        lines = textwrap.wrap(text, _COLUMNS - len(margin), subsequent_indent=hanging, break_long_words=False)
        yield from (f"{margin}# {line}".rstrip() for line in lines or [""])
