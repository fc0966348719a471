"""Coverage-guided fuzzing of everything that reads bytes from a tier: `make fuzz`.

    python tests/fuzz/parsers.py [-max_total_time=SECONDS] [CORPUS ...]

Whatever the bytes, a parser gives a value or a `TierstateError`, within five seconds and two gigabytes; anything else
ends the run with the input that did it. The first byte chooses the parser; the rest is a table or a section without
its checksum, since nothing is learned about what lies behind a checksum that is wrong. (libFuzzer by way of Atheris.)
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tierstate"]):
    from tierstate.manifest.box import Box
    from tierstate.manifest.errors import TierstateError
    from tierstate.manifest.head import Head
    from tierstate.manifest.layout import Layout, Place
    from tierstate.manifest.leaf import Leaf, Spec, decode_path
    from tierstate.manifest.record import Record, frame, unframe
    from tierstate.manifest.version import ShardRow, Version
    from tierstate.providers.target import plan_restore
    from tierstate.providers.values import ValueProvider
    from tierstate.tiers.memory import Memory
    from tierstate.tiers.packs import PackWriter, read_footer
    from tierstate.tiers.policy import Policy

import numpy as np

from tierstate.manifest.chunk import as_buffer, to_bytes

LIMITS = ("-timeout=5", "-rss_limit_mb=2048", "-max_len=65536")


def version() -> Version:
    """A version with a leaf of each kind."""
    specs = {
        ("a",): Spec("tensor", "float32", 4, (4, 5), {"parameter": True}),
        ("b", 0): Spec("value", shape=(7,)),
        ("c",): Spec("tied", attrs={"to": '["a"]'}),
        ("d", "x.y"): Spec("array", "<f8", 8, (3,)),
        ("e",): Spec("quantized", shape=(24,), attrs={"of": "float32", "shape": [4, 5], "lossy": {"method": "int8"}}),
    }
    holders = {(): Spec("dict"), ("b",): Spec("list"), ("d",): Spec("odict")}
    leaves = [Leaf(path, spec) for path, spec in sorted({**holders, **specs}.items(), key=lambda item: str(item[0]))]
    shards = [ShardRow(i, 0, Box.whole(leaf.spec.shape)) for i, leaf in enumerate(leaves) if leaf.spec.has_bytes]
    chunks = sum(-(-s.box.volume * leaves[s.leaf].spec.itemsize // 16) for s in shards)
    head = Head("run", 3, 100, 1.5, chunk=16, metadata={"loss": 1.5})
    return Version.build(head, leaves, shards, np.arange(2 * chunks, dtype="u8"))


VERSION = version()
PACK = "packs/run/000000000003-0-0-abc"
LAYOUT = Layout.build(
    [Place(PACK, 16 * i, int(n), "raw") for i, n in enumerate(VERSION.chunk_nbytes.tolist())], {PACK: 4096}
)


def footer() -> bytes:
    """A pack's footer, without what frames it."""
    tier = Memory()
    packs = PackWriter(tier, "run", 3)
    packs.add(as_buffer(bytes(48)), bytes(16), 48, "raw")
    packs.close()
    (key,) = tier.list("packs/")
    data = to_bytes(tier.get(key))
    length = int.from_bytes(data[-28:-24], "little")
    return data[-28 - length : -28]


def read_version(data: bytes) -> None:
    """A version, and all that a restore asks of its leaves."""
    found = Version.decode(memoryview(data))
    assert found.nbytes == int(found.chunk_nbytes.sum())
    plan_restore(found.leaves)


def read_layout(data: bytes) -> None:
    """A layout of a version that is known."""
    layout = Layout.decode(memoryview(data), VERSION)
    for row in range(len(VERSION.digests)):
        place = layout.place(row)
        assert place is None or place.offset + place.stored <= layout.size_of(place.object)


def read_record(data: bytes) -> None:
    """A record, as it lies in a tier."""
    Record.decode(memoryview(data))


def read_sections(data: bytes) -> None:
    """A record around sections of which the last is any."""
    Record.decode(memoryview(frame({"version": VERSION.data, "layout": LAYOUT.encode(), "commit": data})))


def read_pack(data: bytes) -> None:
    """A footer with a checksum that is right."""
    from tierstate.manifest.digest import checksum
    from tierstate.tiers.packs import MAGIC

    tier = Memory()
    tier.put(PACK, as_buffer(bytearray(bytes(64) + data + len(data).to_bytes(4, "little") + checksum(data) + MAGIC)))
    for row in read_footer(tier, PACK):
        assert row.place.offset + row.place.stored <= tier.size(PACK)


def read_value(data: bytes) -> None:
    """A plain value's bytes."""
    provider = ValueProvider.fresh(Spec("value", shape=(len(data),)))
    provider.load(0, as_buffer(bytearray(data)))
    provider.done()


def read_path(data: bytes) -> None:
    """A leaf's path."""
    decode_path(data.decode("utf-8", "replace"))


def read_policy(data: bytes) -> None:
    """A policy file."""
    Policy.parse(data.decode("utf-8", "replace"))


PARSERS: Sequence[Callable[[bytes], None]] = (
    read_version, read_layout, read_record, read_sections, read_pack, read_value, read_path, read_policy,
)  # fmt: skip

SEEDS: dict[Callable[[bytes], None], list[bytes]] = {
    read_version: [VERSION.data],
    read_layout: [LAYOUT.encode()],
    read_record: [Record(VERSION, LAYOUT, {"id": "x"}).encode()],
    read_sections: [bytes(unframe(memoryview(Record(VERSION, LAYOUT, {"id": "x"}).encode()))["commit"])],
    read_pack: [footer()],
    read_value: [to_bytes(ValueProvider(v).data) for v in (1, 2.5, "text", [1, (2, {"k": None})], b"b", 1 << 90)],
    read_path: [b'["a",0,{"float":"0x1.8p+1"},{"tuple":[1,{"bytes":"00ff"}]}]'],
    read_policy: [Path(__file__).parents[2].joinpath("examples/policy.yaml").read_bytes()],
}


def one(data: bytes) -> None:
    """One input."""
    if data:
        with contextlib.suppress(TierstateError):
            PARSERS[data[0] % len(PARSERS)](data[1:])


def main() -> None:
    """Fuzz, from seeds that are sound and whatever corpus is named."""
    with tempfile.TemporaryDirectory() as seeds:
        for number, parser in enumerate(PARSERS):
            for i, seed in enumerate(SEEDS[parser]):
                Path(seeds, f"{parser.__name__}-{i}").write_bytes(bytes([number]) + seed)
        atheris.Setup([*sys.argv, *LIMITS, seeds], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
