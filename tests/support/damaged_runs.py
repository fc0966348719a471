"""Runs with deltas, forks, tags and several tiers, whose objects are damaged at random; and what can still be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, opened, policy, tensors

import tierstate as ts
from tierstate.engine.packs.keys import has_footer
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.format.layout import ChunkPlace
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.log import Log

TIERS = ("one", "two", "three")

State = dict[str, torch.Tensor]


class Shape(NamedTuple):
    """What is saved: for each tier codec, format and `every`; and how the state changes from save to save.

    Attributes:
        keep: `keep: last` of the first tier; 0 for all versions.
        parted: whether one leaf goes to the first tier only, and another to the last.
    """

    tiers: tuple[tuple[str, str, int], ...]
    changes: tuple[int, ...]
    fork: bool
    keep: int = 0
    parted: bool = False


class Blow(NamedTuple):
    """One damage: to which object (of a tier, below a prefix, by number), of what kind, where (0 to 1)."""

    tier: int
    prefix: str
    number: int
    kind: str
    at: float


shapes = st.builds(
    Shape,
    st.lists(
        st.tuples(
            st.sampled_from(["raw", "fast", "delta"]),
            st.sampled_from(["native", "native", "safetensors", "hdf5"]),
            st.sampled_from([1, 1, 2]),
        ).map(lambda t: t if t[1] == "native" else ("raw", *t[1:])),
        min_size=1,
        max_size=3,
    ).map(tuple),
    st.lists(st.integers(1, 15), min_size=1, max_size=4).map(tuple),
    st.booleans(),
    st.sampled_from([0, 0, 1, 2]),
    st.booleans(),
)


def _as_one(shape: Shape) -> Shape:
    """Where leaves go to different tiers, all tiers get and keep all versions: each has all of its leaves."""
    return shape._replace(keep=0, tiers=tuple((*t[:2], 1) for t in shape.tiers)) if shape.parted else shape


whole_shapes = shapes.map(_as_one)


blows = st.lists(
    st.builds(
        Blow,
        st.integers(0, 2),
        st.sampled_from(["versions", "packs", "packs", "tags"]),
        st.integers(0, 9),
        st.sampled_from(["flip", "flip", "delete", "truncate", "wipe"]),
        st.floats(0, 1, exclude_max=True),
    ),
    min_size=1,
    max_size=8,
)


def spec_of(shape: Shape, place: Path) -> ts.Policy:
    """The policy of a shape, over folders."""
    keys = [{"codec": codec, "format": fmt, "every": every} for codec, fmt, every in shape.tiers]
    keys[0]["every"] = 1  # every save goes somewhere
    keys[0] |= {"keep": {"last": shape.keep}} if shape.keep else {}
    folders = [{"type": "nvme", "path": str(place / name)} for name in TIERS]
    last = TIERS[len(keys) - 1]
    rules = [{"match": "b", "tiers": ["one"]}, {"match": "c", "tiers": [last]}] if shape.parted else []
    return policy({name: {**f, **k} for name, f, k in zip(TIERS, folders, keys, strict=False)}, rules=rules)


@dataclass
class World:
    """A run and perhaps a fork of it, and what was saved, by run and version id."""

    place: Path
    spec: ts.Policy
    truth: dict[tuple[str, str], State] = field(default_factory=dict)
    before: dict[str, bytes] = field(default_factory=dict)

    def runs(self) -> list[str]:
        """The names of the runs."""
        return sorted({run for run, _ in self.truth})

    def files(self) -> dict[str, bytes]:
        """All objects of all tiers, by path."""
        found = (p for p in self.place.rglob("*") if p.is_file())
        return {str(p.relative_to(self.place)): p.read_bytes() for p in sorted(found)}

    def restorable(self, run: str, id: str) -> bool:
        """Whether a version is restored, bit for bit; what is not what was saved fails the test."""
        try:
            with ts.Checkpointer(self.spec, run) as ckpt:
                found = ckpt.load(version=id)
        except TierstateError:
            return False
        assert alike(found, self.truth[run, id])
        return True


def make_world(shape: Shape, place: Path) -> World:
    """Save versions in which some leaves change, and fork the run."""
    world, state = World(place, spec_of(shape, place)), tensors(9000, 20_000, 4000, 100)
    with ts.Checkpointer(world.spec, "run") as ckpt:
        _save(world, ckpt, state, shape.changes, 0)
        ckpt.tag("best")
        if shape.fork:
            ckpt.fork("other")
    if shape.fork:
        with ts.Checkpointer(world.spec, "other") as ckpt:
            (first,) = ckpt.versions()
            world.truth["other", first.id] = {name: t.clone() for name, t in state.items()}
            _save(world, ckpt, state, shape.changes[:1], 10)
    world.before = world.files()
    return world


def _save(world: World, ckpt: ts.Checkpointer, state: State, changes: Sequence[int], first: int) -> None:
    for step, change in enumerate(changes, first):
        for number, tensor in enumerate(state.values()):
            if change >> number & 1:
                tensor[:: 7 if step % 2 else 1] += 0.5
        save = ckpt.save(state, step=step)
        for name in save.tiers:
            save.wait(name)
        world.truth[ckpt.run, ckpt.versions()[-1].id] = {name: t.clone() for name, t in state.items()}


def damage(world: World, blow: Blow) -> None:
    """Strike one object; nothing if the tier has none of the kind."""
    names = sorted(p.name for p in world.place.iterdir() if p.is_dir())
    folder = world.place / names[blow.tier % len(names)] / blow.prefix
    found = sorted(p for p in folder.rglob("*") if p.is_file()) if folder.exists() else []
    if not found:
        return
    path = found[blow.number % len(found)]
    data = bytearray(path.read_bytes())
    at = int(blow.at * len(data))
    if blow.kind == "delete":
        path.unlink()
    elif blow.kind == "wipe":
        for each in found:
            each.unlink()
    elif data:
        if blow.kind == "flip":
            data[at] ^= 1 << (at % 8)
        path.chmod(0o644)
        path.write_bytes(data if blow.kind == "flip" else data[:at])


class _Spot(NamedTuple):
    tier: str
    place: ChunkPlace


class Oracle:
    """What is still there of each version, from what lay in the tiers before the damage: made before, asked after.

    A chunk survives where its bytes, and those of a base of its delta, are the same as before. It can be found if the
    record that names the place is the same as before, or the pack's end (its footer), or for other files all of it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._spots: dict[bytes, set[_Spot]] = {}
        self._named: dict[_Spot, set[str]] = {}
        self._records: dict[tuple[str, str], list[tuple[str, Record]]] = {}
        for tier in world.spec.tiers:
            where = opened(world.spec, tier.name)
            for run in world.runs():
                log = Log(where, run)
                for seq in log.seqs():
                    self._learn(tier.name, f"{tier.name}/{log.key(seq)}", log.read(seq))
            where.close()

    def _learn(self, tier: str, path: str, record: Record) -> None:
        version = record.version
        self._records.setdefault((version.head.run, version.id), []).append((path, record))
        for row in range(len(version.digests)):
            place = record.layout.place(row)
            if place is not None:
                self._note(tier, path, version.digests[row].tobytes(), place)
                if place.base is not None:
                    self._note(tier, path, place.base.digest, ChunkPlace(*place.base[:4]))

    def _note(self, tier: str, path: str, digest: bytes, place: ChunkPlace) -> None:
        spot = _Spot(tier, place._replace(base=place.base and place.base._replace(uses=1, spent=0)))
        self._spots.setdefault(digest, set()).add(spot)
        self._named.setdefault(spot, set()).add(path)

    def can_be_had(self, now: Mapping[str, bytes], run: str, id: str) -> bool:
        """Whether all chunks of a version survive and can be found, and what it consisted of."""
        records = self._records.get((run, id), [])
        if not any(now.get(path) == self._world.before[path] for path, _ in records):
            return False  # or retention has dropped it
        return all(self._survives(now, digest.tobytes()) for digest in records[0][1].version.digests)

    def _survives(self, now: Mapping[str, bytes], digest: bytes) -> bool:
        for spot in self._spots.get(digest, ()):
            base = spot.place.base
            found = self._is_same(now, spot) and self._can_be_found(now, spot)
            if found and (base is None or self._survives(now, base.digest)):
                return True
        return False

    def _is_same(self, now: Mapping[str, bytes], spot: _Spot) -> bool:
        key, at, end = f"{spot.tier}/{spot.place.object}", spot.place.offset, spot.place.offset + spot.place.stored
        return now.get(key, b"")[at:end] == self._world.before[key][at:end]

    def _can_be_found(self, now: Mapping[str, bytes], spot: _Spot) -> bool:
        if any(now.get(path) == self._world.before[path] for path in self._named[spot]):
            return True
        key = f"{spot.tier}/{spot.place.object}"
        before, after = self._world.before[key], now.get(key, b"")
        if not has_footer(spot.place.object):
            return before == after
        footer = int.from_bytes(before[-28:-24], "little") + 28
        return len(before) == len(after) and before[-footer:] == after[-footer:]
