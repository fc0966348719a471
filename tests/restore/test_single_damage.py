"""Thousands of random single damages to repositories of every pack format, with codecs, deltas and a fork.

Each is found, or mended from the other tier, or hits bytes that no version uses; and nothing wrong ever comes back.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import opened, policy, scratch, tensors, tier
from support.damage import FOLDER, objects, used_ranges

import tierstate as ts
from tierstate.engine.store import index
from tierstate.manifest.format.marker import MARKER_KEY

pytestmark = pytest.mark.slow

State = dict[str, Any]

TIERS = ("nvme", "file")
KINDS: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "native": ({"codec": "small"}, {}),
    "delta": ({"codec": "delta"}, {"codec": "fast"}),
    "safetensors": ({"format": "safetensors"}, {"codec": "delta"}),
    "hdf5": ({"format": "hdf5"}, {"format": "safetensors"}),
}
"""The keys of both tiers: every format and every codec, those that compress and the one that does not."""

STEPS = {"run": range(4), "fork": (2, 10)}
"""Versions of each run; the first one of the fork is a version of the run, whose packs it shares."""

TAG = "best"
HOW = ("flip", "overwrite", "zeros", "truncate", "grow", "delete", "swap")
SMALL = ("versions", "tags", "leases", "index", MARKER_KEY)
"""Records, and what is beside them: half of all damages hit one of these, however few they are, the others a pack."""


@dataclass(frozen=True)
class Repository:
    """Versions of two runs in two tiers, and what they were.

    Attributes:
        truth: what was saved, by run and step.
        used: by tier and run, what of each pack is a version's, or what a version's delta is made against.
    """

    kind: str
    place: Path
    truth: Mapping[tuple[str, int], State]
    used: Mapping[tuple[str, str], Mapping[str, Collection[tuple[int, int]]]]

    def copy(self, place: Path) -> None:
        for folder in FOLDER.values():
            shutil.rmtree(place / folder, ignore_errors=True)
            shutil.copytree(self.place / folder, place / folder)

    def hits(self, name: str, key: str, before: bytes, after: bytes | None) -> set[str]:
        """The runs of which a damage to one object hits something: a record, or bytes that a version uses."""
        folder, *rest = key.split("/")
        if folder == "versions":
            return {rest[0]}
        if folder == "leases":
            return {"fork"} if after is None else set()  # a pin's key is all that counts
        if folder != "packs":
            return set()  # no version needs them
        found = set()
        for one in STEPS:
            ranges = self.used[name, one].get(key)
            if ranges is not None and (
                after is None or len(after) != len(before) or any(before[a:b] != after[a:b] for a, b in ranges)
            ):
                found.add(one)
        return found


@cache
def hierarchy(kind: str, place: Path, only: str = "") -> ts.Policy:
    """A policy of both tiers, or of one."""
    keys = dict(zip(TIERS, KINDS[kind], strict=True))
    return policy({name: tier(name, place, **keys[name]) for name in TIERS if only in ("", name)})


def new_state() -> State:
    state: State = dict(tensors(8200, 300, 5000, 40))
    # What can be compressed, what no file of another kind can express, and what is no tensor.
    return {**state, "half": torch.randn(3000).bfloat16(), "z": torch.zeros(40) + 0j, "step": 0, "word": ""}


def change(state: State, step: int) -> None:
    """All of one leaf, and a little of another."""
    state["abcd"[step % 4]] += 1.0
    state["half"][step] = -1.0
    state["z"][step] = 1j
    state.update(step=step, word="x" * (step % 3))


def copied(state: State) -> State:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def same(one: State, other: State) -> bool:
    """Whether two of these states are the same bit for bit."""
    return list(one) == list(other) and all(_exact(one[name]) == _exact(other[name]) for name in one)


def _exact(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.view(torch.uint8).numpy().tobytes()
    return type(value), value


def saved(kind: str, place: Path) -> Repository:
    """A repository: a run, a fork of it with saves of its own, a tag, and indexes."""
    state, truth = new_state(), {}
    spec = hierarchy(kind, place)
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in STEPS["run"]:
            change(state, step)
            ckpt.save(state, step=step, metadata={"loss": step}).wait("file")
            truth["run", step] = copied(state)
        ckpt.fork("fork", 2)
        ckpt.tag(TAG, 1)
    with ts.Checkpointer(spec, "fork") as ckpt:
        state = ckpt.load()
        truth["fork", 2] = truth["run", 2]
        for step in STEPS["fork"][1:]:
            change(state, step)
            ckpt.save(state, step=step).wait("file")
            truth["fork", step] = copied(state)
    for name in TIERS:
        handle = opened(spec, name)
        for run in STEPS:
            summaries = index.Summaries(handle, run)
            summaries.look()
            summaries.write()
    used = {(name, run): used_ranges(spec, name, run) for name in TIERS for run in STEPS}
    return Repository(kind, place, truth, used)


@pytest.fixture(scope="module")
def repositories() -> Iterator[Mapping[str, Repository]]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(index, "READ_WITHOUT_INDEX", 0)  # a few records are enough to look for an index
        yield {kind: saved(kind, stack.enter_context(scratch())) for kind in KINDS}


def hit(path: Path, others: list[Path], dice: random.Random) -> bytes | None:
    """Damage one object at one place, or put another one in its stead, in half of all cases one with the same number.

    Returns:
        What it is now; None where it is no more.
    """
    how, before = dice.choice(HOW), path.read_bytes()
    data, at = bytearray(before), dice.randrange(len(before))
    if how == "delete":
        path.unlink()
        return None
    if how == "flip":
        data[at] ^= 1 << dice.randrange(8)
    elif how == "overwrite":
        data[at : at + 16] = dice.randbytes(min(16, len(data) - at))
    elif how == "zeros":
        at -= at % 512
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    elif how == "truncate":
        del data[at:]
    elif how == "grow":
        data += dice.randbytes(dice.randrange(1, 40))
    else:
        alike = [other for other in others if other.name.split("-")[0] == path.name.split("-")[0]]
        data = bytearray(dice.choice(dice.choice([others, alike or others])).read_bytes())
    path.write_bytes(data)
    return bytes(data)


def tried(repositories: Mapping[str, Repository], place: Path, dice: random.Random) -> str:
    """One damage to a copy, in ``place``, of one of the repositories: how it ended."""
    repository = repositories[dice.choice(list(repositories))]
    name = dice.choice(TIERS)
    repository.copy(place)
    folder = dice.choice([*SMALL, *["packs"] * len(SMALL)])
    before: bytes = b""
    after: bytes | None = b""
    while after == before:  # nothing was changed: once more
        path = dice.choice(objects(place, name, folder) or [place / FOLDER[name] / folder])
        before = path.read_bytes()
        after = hit(path, objects(place, dice.choice(TIERS) if folder != MARKER_KEY else name, "."), dice)
    key = path.relative_to(place / FOLDER[name]).as_posix()
    hits = repository.hits(name, key, before, after)
    ended = (alone if dice.random() < 0.5 else together)(repository, place, name, key, hits, dice)
    return f"{repository.kind}, {folder}: {ended}"


def restored(repository: Repository, ckpt: ts.Checkpointer) -> set[int]:
    """The steps that come back as they were; all others are refused with an error of ours."""
    found = set()
    for step in STEPS[ckpt.run]:
        try:
            assert same(ckpt.load(step=step), repository.truth[ckpt.run, step])
            found.add(step)
        except ts.TierstateError:
            continue
    return found


def looked_at(hits: set[str], dice: random.Random) -> list[str]:
    """The runs that are hit, and sometimes the other ones too; at least one."""
    return [run for run in STEPS if run in hits or dice.random() < 0.5] or [dice.choice(list(STEPS))]


def alone(repository: Repository, place: Path, name: str, key: str, hits: set[str], dice: random.Random) -> str:
    """With the damaged tier alone every version is as it was, or refused; a look finds what is wrong, and no more."""
    spec = hierarchy(repository.kind, place, name)
    sound: dict[str, set[int]] = {}
    for run in looked_at(hits, dice):
        with ts.Checkpointer(spec, run) as ckpt:
            sound[run] = restored(repository, ckpt)
            there = {info.step for info in ckpt.versions() if info.step is not None}
            report = ckpt.verify(data=True)
            if key.startswith(f"tags/{run}/"):
                assert not report.ok or (place / FOLDER[name] / key).exists() is tagged(ckpt)
            else:
                assert (not report.ok or there != set(STEPS[run])) == (run in hits), report
            assert run in hits or sound[run] == set(STEPS[run])
    if dice.random() < 0.3:
        goes_on(repository, spec, dice.choice(list(sound)), sound)
    return "found" if hits else "no version uses it"


def tagged(ckpt: ts.Checkpointer) -> bool:
    """Whether the tag is there, and is of the right version."""
    found = ckpt.tags().get(TAG)
    assert found is None or found.step == 1
    return found is not None


def goes_on(repository: Repository, spec: ts.Policy, run: str, sound: Mapping[str, set[int]]) -> None:
    """Saves and prunes go on beside the damage that was found: none builds on it, and nothing sound is taken."""
    state = copied(repository.truth["run", 3])
    change(state, 20)
    with ts.Checkpointer(spec, run) as ckpt:
        ckpt.verify(data=True)
        ckpt.save(state, step=20).wait()
        ckpt.prune(grace=0)
    for one in sound:
        with ts.Checkpointer(spec, one) as ckpt:
            assert one != run or same(ckpt.load(), state)
            assert restored(repository, ckpt) >= sound[one]


def together(repository: Repository, place: Path, name: str, key: str, hits: set[str], dice: random.Random) -> str:
    """With both tiers every version is as it was; what was read damaged is mended, and what was not read is found."""
    spec = hierarchy(repository.kind, place)
    runs = looked_at(hits, dice)
    for _ in range(1 + (dice.random() < 0.2)):
        for run in runs:
            with ts.Checkpointer(spec, run) as ckpt:
                assert restored(repository, ckpt) == set(STEPS[run])
                report = ckpt.verify(data=True)
                if name != TIERS[0] and not key.startswith("tags/"):
                    everywhere = all(info.tiers == TIERS for info in ckpt.versions())
                    assert (not report.ok or not everywhere) == (run in hits), report
                assert not report.lost
                assert not any(p.leaf for p in report.problems if p.tier == TIERS[0])
    read = key.startswith(("packs/", "versions/"))
    return "no version uses it" if not hits else "mended" if name == TIERS[0] and read else "found"


def many(repositories: Mapping[str, Repository], count: int, seed: int) -> Counter[str]:
    """So many damages; each has dice of its own, so that one that fails can be tried alone."""
    found, wrong = Counter[str](), list[Exception]()
    with scratch() as place:
        for i in range(count):
            try:
                found[tried(repositories, place, random.Random(f"{seed}-{i}"))] += 1
            except Exception as error:
                print(f"{seed}-{i}: {error}", flush=True)
                error.add_note(f"with random.Random('{seed}-{i}')")
                wrong.append(error)
    if wrong:
        raise ExceptionGroup(f"{len(wrong)} of {count} damages", wrong)
    return found


def test_single_damages(repositories: Mapping[str, Repository]) -> None:
    found = many(repositories, 40, seed=100)
    ends = Counter[str]()
    for said, count in found.items():
        ends[said.rpartition(": ")[2]] += count
    assert min(ends[end] for end in ("found", "mended", "no version uses it")) > 3, found


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10), ids="seed{}".format)
def test_a_thousand_single_damages(repositories: Mapping[str, Repository], seed: int) -> None:
    found = many(repositories, 1000, seed)
    print(dict(sorted(found.items())))
    assert found.total() == 1000
