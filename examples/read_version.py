"""A reader of versions that knows nothing of tierstate: NumPy, and docs/reference/format.md.

python read_version.py FOLDER RUN        # the folder of an nvme, lustre or file:// tier

It reads tensors and arrays that are stored raw, and verifies digests where the package xxhash is there. It refuses
compressed chunks, and layouts that require deltas.
"""

import json
import sys
from pathlib import Path

import numpy as np


def sections(record: bytes) -> dict[str, bytes]:
    """The sections of a record, by name."""
    assert record[:12] == b"\x89TSR\r\n\x1a\n" + bytes([1, 0, 0, 0]), "not a record of format 1"
    entries = np.frombuffer(record, "S16, <u8, <u8, V16", int.from_bytes(record[12:16], "little"), 24)
    return {name.decode(): record[start : start + length] for name, start, length, _ in entries.tolist()}


def table(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """The head of a table, and its columns."""
    at = 4 + int.from_bytes(data[:4], "little")
    head, columns = json.loads(data[4:at]), {}
    assert not head["requires"], f"this reader knows nothing of {head['requires']}"
    for name, dtype, count in head["columns"]:
        at += -at % 64
        columns[name] = np.frombuffer(data, dtype, count, at)
        at += columns[name].nbytes
    return head, columns


def texts(columns: dict[str, np.ndarray], name: str) -> list[str]:
    """The strings of a pool."""
    ends = columns[f"{name}.end"].tolist()
    data = columns[f"{name}.text"].tobytes()
    return [data[start:end].decode() for start, end in zip([0, *ends[:-1]], ends, strict=bool(ends))]


def read(folder: Path, run: str) -> dict[str, np.ndarray]:
    """The newest version's tensors and arrays: encoded path to its elements, those NumPy has no type for as bytes."""
    found = sections(max((folder / "versions" / run).glob("[0-9]" * 12)).read_bytes())
    head, version = table(found["version"])
    about, layout = table(found["layout"])
    keys, shapes = texts(layout, "object.key"), np.split(version["leaf.shape"], np.cumsum(version["leaf.ndim"]))
    shards, ends = version["shard.leaf"].tolist(), version["shard.chunk"].tolist()
    paths, arrays = texts(version, "leaf.path"), {}
    for leaf, first, end in zip(shards, [0, *ends[:-1]], ends, strict=bool(ends)):
        kind = head["kinds"][version["leaf.kind"][leaf]]
        dtype, size = head["dtypes"][version["leaf.dtype"][leaf]], int(version["leaf.itemsize"][leaf])
        if kind in ("tensor", "array"):
            raw = b"".join(chunk(folder, head, version, about, layout, keys, row) for row in range(first, end))
            known = dtype if kind == "array" or hasattr(np, dtype) else f"V{size}"
            arrays[paths[leaf]] = np.frombuffer(raw, known).reshape(shapes[leaf])
    return arrays


def chunk(folder, head, version, about, layout, keys, row) -> bytes:
    """One chunk's bytes, verified if that can be."""
    assert layout["row.object"][row] != 0xFFFFFFFF, "this tier does not have the leaf"
    assert about["codecs"][layout["row.codec"][row]] == "raw", "this reader has no codecs"
    with open(folder / keys[layout["row.object"][row]], "rb") as pack:
        pack.seek(int(layout["row.offset"][row]))
        raw = pack.read(int(layout["row.stored"][row]))
    if head["digest"] == "xxh3-128" and "xxhash" in sys.modules:
        digest = version["chunk.digest"][2 * row : 2 * row + 2].tobytes()
        assert sys.modules["xxhash"].xxh3_128_digest(raw) == digest, f"chunk {row} is damaged"
    return raw


if __name__ == "__main__":
    try:
        import xxhash  # noqa: F401
    except ImportError:
        print("without xxhash nothing is verified", file=sys.stderr)
    for name, array in read(Path(sys.argv[1]), sys.argv[2]).items():
        print(name, array.dtype, array.shape)
