"""Coverage-guided fuzzing of everything that reads bytes from a tier, or another program's file: `make fuzz`.

    python tests/fuzz/parsers.py [-max_total_time=SECONDS] [CORPUS ...]

Whatever the bytes, a parser gives a value or a `TierstateError`, within five seconds and two gigabytes; anything else
ends the run with the input that did it. The first byte chooses the parser; the rest is a table or a section without
its checksum, since nothing is learned about what lies behind a checksum that is wrong. (libFuzzer by way of Atheris.)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import pickle
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tierstate"]):
    from tierstate.engine.codecs.codecs import CODECS, compress, decompress
    from tierstate.engine.packs.pack import PackWriter, read_footer
    from tierstate.engine.repair.rebuild import rebuild
    from tierstate.engine.store.run_in_tier import TierRun as Shelf
    from tierstate.files.readers.dcp import open_dcp
    from tierstate.files.readers.safetensors import open_safetensors
    from tierstate.manifest.boxes import Box
    from tierstate.manifest.errors import TierstateError
    from tierstate.manifest.format import table as col
    from tierstate.manifest.format.layout import ChunkPlace as Place
    from tierstate.manifest.format.layout import Layout
    from tierstate.manifest.format.leaf import Leaf, Spec
    from tierstate.manifest.format.leaf_path import decode_path
    from tierstate.manifest.format.record import Record, Summary
    from tierstate.manifest.format.record import decode_index as decode
    from tierstate.manifest.format.record import decode_sections as unframe
    from tierstate.manifest.format.record import encode_index as encode
    from tierstate.manifest.format.record import encode_sections as frame
    from tierstate.manifest.format.version import Head, ShardRow, Version
    from tierstate.manifest.history.leases import Leases
    from tierstate.manifest.history.log import Log
    from tierstate.manifest.history.tags import TagReader, read_tag
    from tierstate.manifest.sharded.ownership import Ownership as Sharing
    from tierstate.manifest.sharded.ownership import SaveCandidates as Table
    from tierstate.manifest.sharded.ownership import assign_owners as share_out
    from tierstate.manifest.sharded.part import PartReader, encode_part
    from tierstate.providers.tree.unflatten import plan_restore
    from tierstate.providers.values.values import ValueProvider
    from tierstate.tiers.memory.host import Memory
    from tierstate.tiers.policy.policy import Policy

import numpy as np
import torch
from torch.distributed import checkpoint as dcp

from tierstate.engine.packs.pack import MAGIC
from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.format.layout import DeltaBase
from tierstate.manifest.history.leases import this_process

LIMITS = ("-timeout=5", "-rss_limit_mb=2048", "-max_len=65536")


def version() -> Version:
    """A version with a leaf of each kind."""
    specs = {
        ("a",): Spec("tensor", "float32", 4, (4, 5), {"parameter": True}),
        ("b", 0): Spec("value", shape=(7,)),
        ("c",): Spec("tied", "float32", 4, (4, 5), {"to": '["a"]'}),
        ("d", "x.y"): Spec("array", "<f8", 8, (3,)),
        ("e",): Spec("quantized", shape=(24,), attrs={"of": "float32", "shape": [4, 5], "lossy": {"method": "int8"}}),
    }
    holders = {(): Spec("dict"), ("b",): Spec("list"), ("d",): Spec("odict")}
    leaves = [
        Leaf(path, spec) for path, spec in sorted({**holders, **specs}.items(), key=lambda item: [*map(str, item[0])])
    ]
    shards = [ShardRow(i, 0, Box.whole(leaf.spec.shape)) for i, leaf in enumerate(leaves) if leaf.spec.has_bytes]
    chunks = sum(-(-s.box.volume * leaves[s.leaf].spec.itemsize // 16) for s in shards)
    head = Head("run", 3, 100, 1.5, chunk=16, metadata={"loss": 1.5})
    return Version.build(head, leaves, shards, np.arange(2 * chunks, dtype="u8"))


VERSION = version()
PACK = "packs/run/000000000003-0-0-abc"
LAYOUT = Layout.build(
    [Place(PACK, 16 * i, int(n), "raw") for i, n in enumerate(VERSION.chunk_nbytes.tolist())], {PACK: 4096}
)
BASE = DeltaBase(PACK, 0, 4, "blosc", bytes(16), 3, 500)
BASED = Layout.build(
    [
        Place(PACK, 16 * i, int(n), "delta", BASE) if i % 2 else Place(PACK, 16 * i, int(n), "raw")
        for i, n in enumerate(VERSION.chunk_nbytes.tolist())
    ],
    {PACK: 4096},
)
POLICY = Policy.parse("{version: 1, tiers: {memory: {type: memory}, disk: {type: nvme, path: /nowhere}}}")


def split(*, full: bool = False) -> tuple[bytes, bytes]:
    """A pack before its footer, and the footer without what frames it; a full one has deltas and a version's copy."""
    tier = Memory()
    packs = PackWriter(tier, "run", 3)
    packs.add(as_buffer(bytearray(48)), bytes(16), 48, "raw")
    for digest, nbytes in zip(VERSION.digests, VERSION.chunk_nbytes.tolist(), strict=True) if full else ():
        packs.add(as_buffer(bytearray(nbytes)), digest.tobytes(), nbytes, "raw")
    if full:
        packs.add(as_buffer(bytearray(8)), bytes(15) + b"d", 48, "delta", base=DeltaBase(PACK, 0, 48, "raw", bytes(16)))
    packs.close(VERSION.data if full else b"")
    (key,) = tier.list("packs/")
    data = to_bytes(tier.get(key))
    length = int.from_bytes(data[-28:-24], "little")
    return data[: -28 - length], data[-28 - length : -28]


BODY, FOOTER = split(full=True)


def pack(footer: bytes) -> bytearray:
    """A pack that ends with a footer, whose checksum is right."""
    return bytearray(BODY + footer + len(footer).to_bytes(4, "little") + checksum(footer) + MAGIC)


def read_version(data: bytes) -> None:
    """A version, and all that a restore asks of its leaves."""
    found = Version.decode(memoryview(data))
    assert found.nbytes == int(found.chunk_nbytes.sum())
    plan_restore(found.leaves, allow_lossy=True)


def read_layout(data: bytes) -> None:
    """A layout of a version that is known."""
    layout = Layout.decode(memoryview(data), VERSION)
    for row in range(len(VERSION.digests)):
        place = layout.place(row)
        assert place is None or place.offset + place.stored <= layout.size_of(place.object)
        base = layout.base(row)
        assert base is None or base.offset + base.stored <= layout.size_of(base.object)


def read_record(data: bytes) -> None:
    """A record, as it lies in a tier."""
    Record.decode(memoryview(data))


def read_sections(data: bytes) -> None:
    """A record around sections of which the last is any."""
    Record.decode(memoryview(frame({"version": VERSION.data, "layout": LAYOUT.encode(), "commit": data})))


def read_part(data: bytes) -> None:
    """A rank's part around a table that is any."""
    PartReader().decode(frame({**PART, "part": data}))


def read_piece(data: bytes) -> None:
    """A rank's part of which the leaves are any, all in one piece."""
    piece = zlib.compress(data)
    head, columns = col.decode(memoryview(PART["part"]), "part")
    table = col.encode(head, {**columns, "piece.end": np.array([len(piece)], "<u8")})
    PartReader().decode(frame({**PART, "part": table, "pieces": piece}))


def read_sharing(data: bytes) -> None:
    """What ranks tell each other before they save."""
    for what in (Table, Sharing):
        with contextlib.suppress(TierstateError):
            what.decode(data)


def read_pack(data: bytes) -> None:
    """A footer with a checksum that is right."""
    tier = Memory()
    tier.put(PACK, as_buffer(pack(data)))
    for row in read_footer(tier, PACK):
        assert row.place.offset + row.place.stored <= tier.size(PACK)


def read_packs(data: bytes) -> None:
    """Records that are made again of what a pack says; what is made can be read."""
    tier = Memory()
    tier.name = "memory"
    tier.put(PACK, as_buffer(pack(data)))
    rebuild([Shelf(tier, "run")], "memory", POLICY, partial=True)
    log = Log(tier, "run")
    for seq in log.seqs():
        log.read(seq)


def read_index(data: bytes) -> None:
    """The table of an index."""
    for summary in decode(memoryview(frame({"index": data})), "run"):
        assert (type(summary.parent), type(summary.commit), len(summary.id)) == (str, str, 32)
        assert all(method.isascii() or method for method in summary.lossy)
        assert json.dumps(summary.more)


def read_name(data: bytes) -> None:
    """A tag."""
    tier = Memory()
    tier.put("tags/run/best@000001", as_buffer(bytearray(data)))
    for call in (lambda: read_tag(tier, "run", "best", 1), lambda: TagReader(tier, "run").by_version()):
        with contextlib.suppress(TierstateError):
            call()


def read_lease(data: bytes) -> None:
    """A lease: it stands, or its process is dead; there is no third."""
    tier = Memory()
    tier.put("leases/run/000000000003-read-abc", as_buffer(bytearray(data)))
    held = Leases(tier, "run").look(lambda _key: None)
    assert len(held.live) + len(held.gone) == 1
    assert all(len(lease.reason) < 300 for lease in held.live)


def read_compressed(data: bytes) -> None:
    """A compressed chunk that says the right lengths, just before memory that may not be read."""
    nbytes = int.from_bytes(data[:3], "little") % (1 << 20)
    stored = bytearray(data[3:])
    stored[4:8], stored[12:16] = nbytes.to_bytes(4, "little"), len(stored).to_bytes(4, "little")
    raw = decompress("blosc", guarded(bytes(stored[: len(data) - 3])), nbytes)
    assert len(raw) == nbytes


def read_safetensors(data: bytes) -> None:
    """The header of a safetensors file."""
    length = len(data).to_bytes(8, "little")
    read_file("some.safetensors", length + data + bytes(256))


def read_safetensors_index(data: bytes) -> None:
    """An index of safetensors files."""
    Path(FOLDER, "one.safetensors").write_bytes(SAFETENSORS)
    read_file("some.safetensors.index.json", data)


def read_file(name: str, data: bytes) -> None:
    """A file of another program's."""
    path = Path(FOLDER, name)
    path.write_bytes(data)
    with open_safetensors(path, lambda _nbytes: None) as found:
        assert found.step is None or found.step >= 0


def read_dcp(data: bytes) -> None:
    """The metadata of a folder of torch's."""
    Path(FOLDER, "dcp", ".metadata").write_bytes(data)
    with open_dcp(Path(FOLDER, "dcp"), lambda _nbytes: None):
        pass


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


def guarded(data: bytes) -> torch.Tensor:
    """Bytes behind which the process may not read."""
    end = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
    start = end - len(data)
    memory = mmap.mmap(-1, end + mmap.PAGESIZE)
    memory[start:end] = data
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + end), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return torch.frombuffer(memory, dtype=torch.uint8)[start:end]


def saved_by_torch() -> bytes:
    """Metadata of a folder that torch wrote; its data stay in the folder."""
    state = {"a": torch.arange(12.0).reshape(3, 4), "b": {"c": 5, "d": [torch.ones(2, dtype=torch.int64), "x"]}}
    dcp.save(state, checkpoint_id=Path(FOLDER, "dcp"), no_dist=True)
    return Path(FOLDER, "dcp", ".metadata").read_bytes()


def compressed() -> list[bytes]:
    """Compressed chunks, with what `read_compressed` takes before them."""
    found = []
    for codec in CODECS[1:3]:
        for itemsize, count in ((1, 300), (2, 5000), (4, 20_000)):
            raw = np.repeat(np.arange(count, dtype=f"u{itemsize}"), 3)
            data = to_bytes(compress(codec, as_buffer(raw.tobytes()), itemsize)[1])
            found.append(len(raw.tobytes()).to_bytes(3, "little") + data)
    return found


_PLACE = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
FOLDER = _PLACE.name
HEADER = b'{"__metadata__":{"step":"3"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(24)
INDEX = b'{"metadata":{"total_size":24},"weight_map":{"a":"one.safetensors"}}'
SUMMARY = Summary.of(Record(VERSION, BASED, {"id": "x"}))
PART = {n: bytes(d) for n, d in unframe(memoryview(encode_part(Record(VERSION, BASED, {"id": "x"})))).items()}
HELD = Table([("a",), ("b", 0)], [Box((0,), (4,)), Box((), ())], np.array([16, 4]))

PARSERS: Sequence[Callable[[bytes], None]] = (
    read_version, read_layout, read_record, read_sections, read_pack, read_value, read_path, read_policy,
    read_packs, read_index, read_name, read_lease, read_compressed, read_safetensors, read_safetensors_index, read_dcp,
    read_part, read_piece, read_sharing,
)  # fmt: skip

SEEDS: dict[Callable[[bytes], None], list[bytes]] = {
    read_version: [VERSION.data],
    read_layout: [LAYOUT.encode(), BASED.encode()],
    read_record: [Record(VERSION, LAYOUT, {"id": "x"}).encode()],
    read_sections: [bytes(unframe(memoryview(Record(VERSION, LAYOUT, {"id": "x"}).encode()))["commit"])],
    read_pack: [FOOTER, split()[1]],
    read_value: [to_bytes(ValueProvider(v).data) for v in (1, 2.5, "text", [1, (2, {"k": None})], b"b", 1 << 90)],
    read_path: [b'["a",0,{"float":"0x1.8p+1"},{"tuple":[1,{"bytes":"00ff"}]}]'],
    read_policy: [Path(__file__).parents[2].joinpath("examples/policy.yaml").read_bytes()],
    read_packs: [FOOTER, split()[1]],
    read_index: [bytes(unframe(memoryview(encode("run", [SUMMARY, SUMMARY._replace(seq=4)])))["index"])],
    read_name: [b'{"seq": 3, "id": "00"}', b'{"seq": null}'],
    read_lease: [json.dumps({**this_process(), "record": "x"}).encode()],
    read_compressed: compressed(),
    read_safetensors: [HEADER],
    read_safetensors_index: [INDEX],
    read_dcp: [saved_by_torch(), pickle.dumps({"a": 1})],
    read_part: [PART["part"]],
    read_piece: [col.encode(*VERSION.catalog.tables)],
    read_sharing: [HELD.encode(), share_out([HELD, HELD]).encode()],
}


def one(data: bytes) -> None:
    """One input. Files that are named and not there are the file system's own errors, too little memory is Python's."""
    if data:
        with contextlib.suppress(TierstateError, OSError, MemoryError):
            PARSERS[data[0] % len(PARSERS)](data[1:])


def main() -> None:
    """Fuzz, from seeds that are sound and whatever corpus is named."""
    with tempfile.TemporaryDirectory() as seeds:
        for number, parser in enumerate(PARSERS):
            for i, seed in enumerate(SEEDS[parser]):
                Path(seeds, f"{parser.__name__}-{i}").write_bytes(bytes([number]) + seed)
        if child := os.fork():  # libFuzzer ends its process without clearing up
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            _PLACE.cleanup()
        else:
            atheris.Setup([*sys.argv, *LIMITS, seeds], one)
            atheris.Fuzz()
    sys.exit(status)


if __name__ == "__main__":
    main()
