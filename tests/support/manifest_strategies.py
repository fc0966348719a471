"""Hypothesis strategies for tests of manifests: paths, states cut into shards, versions, layouts, records."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tierstate.manifest.boxes import Box
from tierstate.manifest.format import table as col
from tierstate.manifest.format.layout import ChunkPlace, DeltaBase, Layout
from tierstate.manifest.format.leaf import CONTAINERS, STORAGE, TIED, Leaf, Spec
from tierstate.manifest.format.leaf_path import encode_path
from tierstate.manifest.format.record import Record, decode_sections
from tierstate.manifest.format.version import MAX_SEQ, Head, ShardRow, Version

any_text = st.text(st.characters(), max_size=8)
"""Any code points, lone surrogates too."""

tricky_text = st.text("01.'\"b()[], -\\naT\u202e\x9b", max_size=4) | st.sampled_from(
    [
        "True",
        "False",
        "None",
        "nan",
        "inf",
        "(nan)",
        "1.5",
        "(1.5)",
        "(1, 2)",
        "b''",
        "**",
        "",
        "\ud800\udc00",
        "\U00010000",
    ]
)
_scalars = st.one_of(
    any_text,
    tricky_text,
    st.integers(-2, 2),
    st.integers(),
    st.booleans(),
    st.floats(),
    st.none(),
    st.binary(max_size=4),
)
keys = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
paths = st.lists(keys, max_size=4).map(tuple)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(st.text(max_size=6), json_values, max_size=3)
run_names = st.from_regex(r"[a-z0-9][a-z0-9._\-]{0,8}", fullmatch=True)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def strict(key: Any) -> Any:
    """A key with its types and bits, so that True, 1 and 1.0 differ, and a NaN is equal to itself only."""
    if isinstance(key, tuple):
        return ("tuple", tuple(map(strict, key)))
    return (type(key).__name__, struct.pack("<d", key) if isinstance(key, float) else key)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], most: int = 4) -> list[Box]:
    """Boxes that tile an array of this shape, in no order."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, most)) if shape else 0):
        i, axis = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        if boxes[i].shape[axis] > 1:
            boxes += split(boxes.pop(i), axis, draw(st.integers(1, 4)))
    return draw(st.permutations(boxes))


def split(box: Box, axis: int, at: int) -> list[Box]:
    """A box cut in two along an axis, at most ``at`` behind its start."""
    n = min(at, box.shape[axis] - 1)
    low = tuple(n if d == axis else s for d, s in enumerate(box.shape))
    high = tuple(s - n if d == axis else s for d, s in enumerate(box.shape))
    return [Box(box.offset, low), Box(tuple(o + n * (d == axis) for d, o in enumerate(box.offset)), high)]


@st.composite
def heads(draw: st.DrawFn) -> Head:
    """Heads of small chunks."""
    return Head(
        run=draw(run_names),
        seq=draw(st.integers(0, MAX_SEQ)),
        step=draw(st.integers(-(2**63), 2**63 - 1)),
        time=draw(st.floats(0, 2**53) | st.integers(0, 2**53)),
        parent=draw(st.text("0123456789abcdef", max_size=32)),
        chunk=draw(st.sampled_from([16, 32, 48, 1 << 30])),
        digest=draw(st.sampled_from(["xxh3-128", "blake3"])),
        world=draw(st.integers(1, 2**32)),
        metadata=draw(json_objects),
    )


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Specs of values, containers, tied and storage leaves."""
    kind = draw(st.sampled_from(["tensor", "value", "numpy", STORAGE, TIED, *sorted(CONTAINERS)]))
    itemsize = draw(st.sampled_from([0, 1, 2, 8, 65535]))
    return Spec(kind, draw(st.sampled_from(["uint8", "bfloat16", "µ"])), itemsize, draw(shapes), draw(json_objects))


@st.composite
def leaf_lists(draw: st.DrawFn, most: int = 5) -> list[Leaf]:
    """Leaves of different paths."""
    found = draw(st.lists(paths, max_size=most, unique_by=encode_path))
    return [Leaf(path, draw(specs())) for path in found]


def random_digests(count: int, seed: int) -> np.ndarray:
    """``(count, 2)`` of uint64; seeds below 4 give few different ones."""
    high = 2 if seed < 4 else 2**64 - 1
    return np.random.default_rng(seed).integers(0, high, (count, 2), "u8", endpoint=True)


def chunk_count(leaf: Leaf, box: Box, chunk: int) -> int:
    """Chunks of a shard."""
    return -(-math.prod(box.shape) * leaf.spec.itemsize // chunk)


@st.composite
def versions(draw: st.DrawFn) -> Version:
    """Versions of any kind; not all of them whole."""
    head, leaves = draw(heads()), draw(leaf_lists())
    rows = [
        ShardRow(i, draw(st.integers(0, 2**32 - 1)), box)
        for i, leaf in enumerate(leaves)
        if leaf.spec.has_bytes
        for box in draw(cuts(leaf.spec.shape))
    ]
    count = sum(chunk_count(leaves[r.leaf], r.box, head.chunk) for r in rows)
    return Version.build(head, leaves, rows, random_digests(count, draw(st.integers(0, 2**20))))


@st.composite
def layouts(draw: st.DrawFn, version: Version) -> Layout:
    """Layouts of a version, with absent chunks, shared packs, several codecs and bases."""
    places = [draw(st.none() | stored_chunks(nbytes)) for nbytes in version.chunk_nbytes.tolist()]
    return Layout.build(places, sizes_of([p for p in places if p], draw(st.integers(0, 100))))


@st.composite
def stored_chunks(draw: st.DrawFn, nbytes: int, codecs: tuple[str, ...] = ("raw", "fast", "delta")) -> ChunkPlace:
    """Places of a chunk of so many bytes."""
    codec, name = draw(st.sampled_from(codecs)), f"packs/run/{draw(st.integers(0, 2))}-0-0-x"
    stored = nbytes if codec == "raw" else draw(st.integers(0, 2**32 - 1))
    return ChunkPlace(
        name, draw(st.integers(0, 2**40)), stored, codec, draw(bases(nbytes)) if codec == "delta" else None
    )


@st.composite
def bases(draw: st.DrawFn, nbytes: int) -> DeltaBase:
    """Bases of a delta of so many bytes."""
    place = draw(stored_chunks(nbytes, ("raw", "fast")))
    digest = draw(st.binary(min_size=16, max_size=16))
    return DeltaBase(*place[:4], digest, draw(st.integers(0, 2**16 - 1)), draw(st.integers(0, 2**64 - 1)))


def sizes_of(places: Sequence[ChunkPlace], least: int = 0) -> dict[str, int]:
    """Lengths of packs in which these chunks and their bases have room."""
    found: dict[str, int] = {}
    for part in [*places, *(p.base for p in places if p.base)]:
        found[part.object] = max(found.get(part.object, least), part.offset + part.stored)
    return found


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Whole records."""
    version = draw(versions())
    return Record(version, draw(layouts(version)), draw(json_objects) | {"id": draw(st.text(max_size=8))})


HEAD = Head("run", 3, 100, 1.5, chunk=16)
LEAF = Leaf(("a",), Spec("tensor", shape=(40,)))
PACK = "packs/run/0-0-0-x"


def small_version(head: Head = HEAD) -> Version:
    """A version of one leaf in three chunks of 16, 16 and 8 bytes."""
    return Version.build(head, [LEAF], [ShardRow(0, 0, Box.whole((40,)))], np.arange(6, dtype="u8"))


def place(offset: int = 0, stored: int = 16, codec: str = "raw", key: str = PACK) -> ChunkPlace:
    """Where a chunk of the small version might lie."""
    return ChunkPlace(key, offset, stored, codec)


def small_record() -> Record:
    """The small version, raw in one pack."""
    layout = Layout.build([place(), place(16), place(32, 8)], {PACK: 40})
    return Record(small_version(), layout, {"id": "x"})


def sections_of(record: Record) -> dict[str, bytes]:
    """A record's sections, to be changed and framed again."""
    return {name: bytes(data) for name, data in decode_sections(memoryview(record.encode())).items()}


class Table:
    """A table's parts, each of which may be changed."""

    def __init__(self, data: bytes) -> None:
        self.head, columns = col.decode_table(memoryview(data), "table")
        self.columns = {name: column.copy() for name, column in columns.items()}
        self.listed = [[name, c.dtype.str.replace("|", "<"), len(c)] for name, c in columns.items()]

    def encode(self) -> bytes:
        """The bytes, whatever the parts say."""
        text = json.dumps({**self.head, "columns": self.listed}).encode()
        data = len(text).to_bytes(4, "little") + text
        for column in self.columns.values():
            data += bytes(-len(data) % col.COLUMN_ALIGNMENT) + column.tobytes()
        return data
