"""Forged repositories: whatever a record, footer, index, tag, lease or marker says, an answer is right or an error.

In a process with bounded memory and time, that may open no pickle and no file outside of the tier.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import hostile_repositories as hostile
from support.checkpointer_worlds import scratch

import tierstate as ts
from tierstate.engine.store import index
from tierstate.manifest.boxes import Box
from tierstate.manifest.format.layout import RAW, ChunkPlace, Layout
from tierstate.manifest.format.leaf import STRIDES, Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import ShardRow, Version

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def repository() -> Iterator[hostile.Repository]:
    with scratch() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "READ_WITHOUT_INDEX", 0)
        patch.setattr(hostile.log, "clock_seq", lambda: 0)
        yield hostile.build(place)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.binary(max_size=60))
def test_a_forgery_ends_in_what_it_says_or_in_an_error(repository: hostile.Repository, data: bytes) -> None:
    with scratch() as place:
        hostile.tried(repository, place, hostile.Dice(data))


def many(seed: str, count: int, seconds: float) -> str:
    """Forgeries in a process of their own; what it says."""
    command = [sys.executable, "-m", "support.hostile_repositories", seed, str(count), str(seconds)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout


@pytest.mark.slow
def test_forgeries_in_bounded_memory() -> None:
    found = many("few", 25, 600)
    assert "versions: load: fine" in found
    assert "versions: load: FormatError" in found
    assert "older: Damaged" not in found


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(4), ids="seed{}".format)
def test_thousands_of_forgeries(seed: int) -> None:
    print(many(f"many-{seed}", 1_000_000, 900))


# What a record may say of a leaf that no value can be

ABSURD: dict[str, Spec] = {
    "more than any memory": Spec("tensor", "float32", 4, (1 << 36,)),
    "an array of that": Spec("array", "<f8", 8, (1 << 36,)),
    "a value of that": Spec("value", "uint8", 1, (1 << 38,)),
    "axes": Spec("tensor", "float32", 4, (1,) * 200),
    "strides": Spec("tensor", "float32", 4, (2, 2), {STRIDES: [1 << 55, 1]}),
    "negative strides": Spec("tensor", "float32", 4, (2, 2), {STRIDES: [-1, 1]}),
    "dtype": Spec("tensor", "complex1024", 4, (1,)),
    "date": Spec("array", "<M8[99999999999999999999s]", 8, (1,)),
    "fields": Spec("array", "|V8", 8, (1,), {"fields": [["a", "O"]]}),
    "kind": Spec("nothing known", "uint8", 1, (1,)),
    "tied to nothing": Spec("tied", "float32", 4, (1,), {"to": '["nowhere"]'}),
    "tied beyond": Spec("tied", "float32", 4, (1 << 40,), {"to": '["same"]', "offset": 1 << 60, "strides": [1]}),
    "namedtuple": Spec("namedtuple", attrs={"type": 5}),
    "names of it": Spec("namedtuple", attrs={"type": "x", "fields": ["class"]}),
}


def add_leaf(folder: Path, spec: Spec) -> None:
    """Forge the newest record: one more leaf, whose chunks are said to be those of the version, again and again."""
    newest = max((folder / "disk/versions/run").iterdir())
    record = Record.decode(memoryview(newest.read_bytes()))
    version = record.version
    shards = zip(version.shard_leaf.tolist(), version.shard_rank.tolist(), version.boxes, strict=True)
    rows = [ShardRow(*row) for row in shards]
    if spec.has_bytes:
        rows.append(ShardRow(len(version.leaves), 0, Box.whole(spec.shape)))
    chunk = 1 << 30 if spec.nbytes > 1 << 30 else hostile.CHUNK
    sizes = [math.prod(row.box.shape) * [*version.leaves, Leaf((), spec)][row.leaf].spec.itemsize for row in rows]
    count = sum(-(-n // chunk) for n in sizes)
    digests = np.resize(version.digests, (count, 2))
    made = Version.build(replace(version.head, chunk=chunk), [*version.leaves, Leaf(("extra",), spec)], rows, digests)
    # Of the packs nothing has to be there: what is said of the leaf is looked at before anything is read.
    pack = "packs/run/000000000003-0-0-abc"
    places = [ChunkPlace(pack, 0, int(n), RAW) for n in made.chunk_nbytes.tolist()]
    layout = Layout.build(places, {pack: max([1, *made.chunk_nbytes.tolist()])})
    newest.chmod(0o644)
    newest.write_bytes(Record(made, layout, record.commit).encode())


@pytest.mark.parametrize("what", ABSURD)
def test_no_leaf_keeps_a_restore_from_the_version_before(
    repository: hostile.Repository, place: Path, what: str
) -> None:
    folder = place / "copy"
    shutil.copytree(repository.folder, folder)
    add_leaf(folder, ABSURD[what])
    with ts.Checkpointer(hostile.spec(folder), hostile.RUN) as ckpt:
        with pytest.raises((ts.FormatError, ts.OutOfMemory), match="extra"):
            ckpt.load(allow_lossy=True)
        state = ckpt.load(on_damage="older", allow_lossy=True)
        assert ckpt.restored is not None
        assert ckpt.restored.step == hostile.STEPS[-2]
        assert torch.equal(state["model"]["w"], repository.older["model"]["w"])
