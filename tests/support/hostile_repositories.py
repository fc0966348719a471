"""Repositories whose metadata a forger has changed: with checksums made right again, so that parsers get past them.

`forge` changes one object of a tier: a record (numbers and texts of its tables, or a leaf as a whole with shards and
chunks that fit it), the bytes of a value, a footer, an index, a tag, a lease, the marker, or it adds objects under odd
names. `look` then calls everything that reads, and holds each answer against a small reader of its own.
"""

from __future__ import annotations

import datetime
import errno
import faulthandler
import json
import logging
import math
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from support.checkpointer_worlds import opened, policy, scratch, tier

import tierstate as ts
from tierstate.engine.packs.pack import MAGIC, PackWriter
from tierstate.engine.store import index
from tierstate.files.export import export
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError, StateMismatch, TierstateError, Unsafe
from tierstate.manifest.format import table as col
from tierstate.manifest.format.layout import RAW, ChunkPlace, Layout
from tierstate.manifest.format.leaf import CONTAINERS, STRIDES, TIED, Leaf, Spec
from tierstate.manifest.format.record import Record, decode_sections, encode_sections
from tierstate.manifest.format.version import ShardRow, Version
from tierstate.manifest.history import log
from tierstate.manifest.history.log import Log
from tierstate.providers.values.values import ValueProvider

RUN = "run"
STEPS = (1, 2, 3)
CHUNK = 4096

NUMBERS = (
    0,
    1,
    2,
    3,
    15,
    16,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**53,
    2**56,
    2**62,
    2**63 - 1,
    2**64 - 1,
)
KINDS = ("tensor", "array", "value", "object", "tied", "storage", "cast", "quantized", *CONTAINERS, "made-up", "")
DTYPES = (
    "float32", "bfloat16", "complex64", "uint8", "bool", "float8_e4m3fn", "<f8", "<M8[ns]", "|V8", "|O", "<U9", "x",
)  # fmt: skip
SHAPES = ((), (0,), (1,), (2, 3), (2**20,), (2**31, 2), (2**40,), (2**55,), (2**62, 2**62), (1,) * 70, (0, 2**62))
TEXTS = ("", ".", "\0", "\ud800", "x" * 3000, "os:system", "builtins:eval", "torch.nn:Linear", '["a"]', '["storage"]')


def junk(dice: random.Random) -> Any:
    """A JSON value that nobody expects where it is."""
    numbers = [*NUMBERS, *(-n for n in NUMBERS), 10**400, 1.5, math.inf, -math.inf, math.nan]
    plain: list[Any] = [*TEXTS, None, True, [], {}, [[]], {"": 0}, [1, 2], ["a"], {"method": 5}, {"tuple": []}]
    return dice.choice(numbers) if dice.random() < 0.6 else dice.choice(plain)


def change_json(value: Any, dice: random.Random) -> Any:
    """The value with one thing in it changed, at any depth."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(list(value))
        left = {k: v for k, v in value.items() if k != key}
        how = dice.random()
        if how < 0.1:
            return left
        return {**left, key if how < 0.9 else dice.choice(TEXTS): change_json(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.9:
        at = dice.randrange(len(value))
        extra = dice.choice([[], [], [value[at]]])
        return [*value[:at], change_json(value[at], dice), *extra, *value[at + 1 :]]
    if isinstance(value, int) and dice.random() < 0.3:
        return value + dice.choice([-1, 1])
    return junk(dice)


def change_column(column: Any, dice: random.Random) -> Any:
    """A column with a number of it changed, or a row more or less."""
    found = column.copy()
    how = dice.random()
    if how < 0.1 or not len(found):
        return np.append(found, found[-1:] if len(found) else [0]).astype(column.dtype)
    if how < 0.2:
        return found[:-1]
    number = dice.choice([dice.choice(NUMBERS), int(found[dice.randrange(len(found))]), int(found[0]) + 1])
    bits = 8 * found.dtype.itemsize
    at = dice.randrange(len(found))
    found.view(f"u{found.dtype.itemsize}")[at] = number % (1 << bits)
    return found


def change_texts(columns: dict[str, Any], name: str, dice: random.Random) -> dict[str, Any]:
    """A column of JSON texts (paths, attributes) with one text changed."""
    texts = col.column_texts(columns, name, "texts")
    if not texts:
        return columns
    at = dice.randrange(len(texts))
    with suppress(ValueError):
        texts[at] = json.dumps(change_json(json.loads(texts[at] or "{}"), dice))
    if dice.random() < 0.1:
        texts[at] = dice.choice(["[" * 4000, "{", "[]", texts[0], "9" * 5000, '{"a":1e999}'])
    return {**columns, **col.text_columns(texts, name)}


def change_table(data: bytes, dice: random.Random) -> bytes:
    """A table with one thing in it changed: the head, a column, or a text."""
    head, columns = col.decode_table(memoryview(data), "a table")
    how = dice.random()
    texts = [name.removesuffix(".text") for name in columns if name.endswith(".text")]
    if how < 0.35:
        head = change_json(head, dice)
    elif how < 0.65 and texts:
        columns = change_texts(columns, dice.choice(texts), dice)
    else:
        name = dice.choice(list(columns))
        columns = {**columns, name: change_column(columns[name], dice)}
    return col.encode_table(head if isinstance(head, dict) else {}, columns)


def change_leaf(leaf: Leaf, dice: random.Random) -> Leaf:
    """A leaf that is another one now, of numbers that may fit each other."""
    spec, what = leaf.spec, dice.choice(["kind", "dtype", "itemsize", "shape", "attrs", "attrs", "strides", "path"])
    if what == "path":
        key: Any = dice.choice([0, 1, 7, "a", "", "x.y", True, 2**70, (1, ("a",)), b"x", None, 0.5, math.nan])
        return Leaf((*leaf.path[: dice.randrange(len(leaf.path) + 1)], *dice.choice([(), (key,), (key,) * 70])), spec)
    if what == "attrs":
        attrs = change_json(dict(spec.attrs) or {"requires_grad": True}, dice)
        return leaf._replace(spec=replace(spec, attrs=attrs if isinstance(attrs, dict) else {}))
    if what == "strides":
        strides = [dice.choice([0, 1, 5, 2**20, 2**40, 2**55, 2**56, 2**63, -1]) for _ in spec.shape]
        return leaf._replace(spec=replace(spec, attrs={**spec.attrs, STRIDES: strides, "offset": dice.choice(NUMBERS)}))
    value = {"kind": KINDS, "dtype": DTYPES, "itemsize": (0, 1, 2, 3, 4, 8, 16, 0xFFFF), "shape": SHAPES}[what]
    return leaf._replace(spec=replace(spec, **{what: dice.choice(value)}))


def rebuilt(record: Record, dice: random.Random) -> bytes:
    """A record of which one leaf, or two, are others now, with shards and chunks of the lengths that these say.

    Chunks are those of the old version, under their own digests, again and again; beyond a thousand of them the record
    has so long chunks that these are enough, and what no pack can hold is absent.
    """
    leaves = list(record.version.leaves)
    for _ in range(dice.choice([1, 1, 2])):
        at = dice.randrange(len(leaves))
        leaves[at] = change_leaf(leaves[at], dice)
    head = record.version.head
    rows = [ShardRow(i, 0, Box.whole(leaf.spec.shape)) for i, leaf in enumerate(leaves) if leaf.spec.has_bytes]
    sizes = [math.prod(leaf.spec.shape) * leaf.spec.itemsize for leaf in leaves if leaf.spec.has_bytes]
    chunk = head.chunk
    while sum(-(-n // chunk) for n in sizes) > 1000 and chunk < 1 << 30:
        chunk *= 4
    count = sum(-(-n // chunk) for n in sizes)
    if count > 5000:
        raise FormatError("more chunks than a record of a test can list")
    old = record.version.digests
    digests = np.array([old[i % len(old)] for i in range(count)], "<u8").reshape(-1, 2)
    version = Version.build(replace(head, chunk=chunk), leaves, rows, digests)
    return Record(version, _layout(record, version, dice), record.commit).encode()


def _layout(record: Record, version: Version, dice: random.Random) -> Layout:
    """Places for the chunks of a version that is made up: those of the old one, of a length that passes the checks."""
    old, sizes = record.layout, record.layout.pack_sizes
    longer = dice.random() < 0.5  # packs that are said to be longer than they are
    places: list[ChunkPlace | None] = []
    for row, nbytes in enumerate(version.chunk_nbytes.tolist()):
        place = old.place(row % len(record.version.digests))
        if place is not None and place.codec == RAW:
            fits = nbytes == place.stored or longer
            place = ChunkPlace(place.object, 0 if nbytes != place.stored else place.offset, nbytes, RAW)
            if fits and place.offset + nbytes > sizes[place.object]:
                sizes[place.object] = place.offset + nbytes
            if not fits:
                place = None
        places.append(place)
    return Layout.build(places, {key: sizes[key] for key in _named(places)})


def _named(places: list[ChunkPlace | None]) -> set[str]:
    """The packs in which chunks are, or bases of chunks."""
    there = [place for place in places if place is not None]
    return {place.object for place in there} | {place.base.object for place in there if place.base is not None}


def revalued(folder: Path, record: Record, dice: random.Random) -> bytes:
    """A record of which a plain value has other bytes, which are in a pack, under their own digest."""
    version = record.version
    values = [i for i, leaf in enumerate(version.leaves) if leaf.spec.kind == ValueProvider.kind]
    leaf = dice.choice(values)
    shard = int(np.flatnonzero(version.shard_leaf == leaf)[0])
    row = int(version.chunk_end[shard]) - 1
    where = opened(spec(folder), "disk")
    place = record.layout.place(row)
    assert place is not None
    data = bytearray(to_bytes(where.get(place.object))[place.offset : place.offset + place.stored])
    for _ in range(dice.choice([1, 1, 2, 3])):
        at = dice.randrange(1, len(data)) if len(data) > 1 else 0
        data[at] = dice.choice([dice.randrange(256), *b"NTFifcsbyrltIJSZdoCuanDVzPe\x80\xff\x7f"])
    digest = checksum(bytes(data))
    pack = PackWriter(where, RUN, version.head.seq, label="forged")
    fresh = pack.add(as_buffer(bytes(data)), digest, len(data), RAW)
    sizes = pack.close()
    digests = version.digests.copy()
    digests[row] = np.frombuffer(digest, "<u8")
    again = version.again(version.head, digests)
    places = [record.layout.place(i) if i != row else fresh for i in range(len(digests))]
    known = record.layout.pack_sizes | sizes
    where.close()
    return Record(again, Layout.build(places, {key: known[key] for key in _named(places)}), record.commit).encode()


def change_record(folder: Path, path: Path, dice: random.Random) -> bytes:
    """A record that says something else."""
    data = path.read_bytes()
    how = dice.random()
    if how < 0.4:
        return rebuilt(Record.decode(memoryview(data)), dice)
    if how < 0.55:
        return revalued(folder, Record.decode(memoryview(data)), dice)
    sections = {name: bytes(section) for name, section in decode_sections(memoryview(data)).items()}
    name = dice.choice(["version", "version", "layout", "layout", "commit"])
    if name == "commit":
        sections[name] = json.dumps(change_json(json.loads(sections[name]), dice)).encode()
    else:
        sections[name] = change_table(sections[name], dice)
    return encode_sections(sections)


def change_pack(data: bytes, dice: random.Random) -> bytes:
    """A pack with another footer."""
    length = int.from_bytes(data[-28:-24], "little")
    table = change_table(data[-28 - length : -28], dice)
    return data[: -28 - length] + table + len(table).to_bytes(4, "little") + checksum(table) + MAGIC


def change_index(data: bytes, dice: random.Random) -> bytes:
    """An index that says something else."""
    sections = {name: bytes(section) for name, section in decode_sections(memoryview(data)).items()}
    return encode_sections({name: change_table(section, dice) for name, section in sections.items()})


def change_object(data: bytes, dice: random.Random) -> bytes:
    """A tag, lease or marker that says something else, with its own checksum."""
    if dice.random() < 0.1:
        return dice.choice([b"", b"\xff\xfe{}", b"[" * 4000, b'{"seq":1e999}', b"9" * 5000, b"null", b"\xef\xbb\xbf{}"])
    found = change_json(json.loads(data or b"{}"), dice)
    if isinstance(found, dict) and "sum" in found:
        rest = {key: value for key, value in found.items() if key != "sum"}
        found = {**rest, "sum": checksum(json.dumps(rest, sort_keys=True).encode()).hex()}
    return json.dumps(found, sort_keys=True).encode()


ODD_NAMES = (
    b"versions/run/\xff\xfe", b"versions/run/000000000009", b"versions/run/000000000003.5", b"tags/run/\xff@1",
    b"packs/run/\xc3\x28", b"leases/run/x\ny", b"versions/\xff/000000000001", b"index/run/\xff",
    b"versions/run/999999999999", b"tags/run/best@99999999999999999", b"leases/run/000000000003-read-\x1b[2J",
)  # fmt: skip


def forge(folder: Path, dice: random.Random) -> str:
    """Change one object of the tier; its kind."""
    kind = dice.choice([*["versions"] * 6, "packs", "packs", "index", "tags", "leases", "tier.json", "names"])
    if kind == "names":
        odd = Path(os.fsdecode(bytes(folder) + b"/disk/" + dice.choice(ODD_NAMES)))
        odd.parent.mkdir(parents=True, exist_ok=True)
        odd.write_bytes(dice.choice([b"", b"x", bytes(100)]))
        return kind
    at = folder / "disk" / kind
    paths = sorted(p for p in at.rglob("*") if p.is_file()) if at.is_dir() else [at]
    path = paths[-1] if kind == "versions" else dice.choice(paths)
    changes: Mapping[str, Callable[[bytes], bytes]] = {
        "versions": lambda _data: change_record(folder, path, dice),
        "packs": lambda data: change_pack(data, dice),
        "index": lambda data: change_index(data, dice),
    }
    before = path.read_bytes()
    after = before
    for _ in range(50):
        with suppress(FormatError, StateMismatch, TypeError, ValueError, OverflowError, UnicodeError):
            # What cannot even be written down is tried again with other numbers.
            after = changes.get(kind, lambda data: change_object(data, dice))(before)
        if after != before:
            break
    path.chmod(0o644)
    path.write_bytes(after)
    if kind == "packs" and dice.random() < 0.5:  # and the records are lost, so that all is read from the packs
        shutil.rmtree(folder / "disk" / "versions" / RUN)
    return kind


class Named(NamedTuple):
    """A namedtuple that the state has."""

    weight: torch.Tensor
    name: str


def state_of(step: int) -> dict[str, Any]:
    """A state with a leaf of each kind."""
    generator = torch.Generator().manual_seed(step // 2)
    base = torch.randn(60, generator=generator)
    return {
        "step": step,
        "model": OrderedDict(w=torch.randn(40, 30, generator=generator), b=torch.randn(7).bfloat16()),
        "tied": [base, base[10:20], base.view(6, 10).t()],
        "same": base,
        "list": [1, 2.5, "text", None, (1, (2, b"x"))],
        "named": Named(torch.ones(3), "n"),
        "when": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
        "zone": datetime.timezone(datetime.timedelta(hours=2)),
        "path": Path("/nowhere"),
        "array": np.arange(24.0).reshape(2, 3, 4),
        "fields": np.zeros(3, [("a", "<i4"), ("b", "<f8", (2,))]),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "many": {"range": range(5), "dtype": torch.float16, "size": torch.Size([1, 2]), "set": {1, 2, 3}},
        "exp_avg": torch.randn(50, generator=generator),
    }


def spec(folder: Path, **keys: Any) -> ts.Policy:
    """The policy of the repository."""
    disk = {**tier("nvme", folder), "path": str(folder / "disk"), "codec": "delta", **keys}
    return policy({"disk": disk}, rules=[{"match": "exp_avg", "lossy": "bf16"}])


@dataclass(frozen=True)
class Repository:
    """Three versions in one tier, and what their chunks are.

    Attributes:
        folder: where it is; copied before it is changed.
        older: the state of the version before the newest.
    """

    folder: Path
    older: dict[str, Any]


def build(folder: Path) -> Repository:
    """Save the versions, with a tag, a fork's pin, a lease that a dead process left, and an index."""
    with ts.Checkpointer(spec(folder), RUN) as ckpt:
        for step in STEPS:
            ckpt.save(state_of(step), step, {"loss": step, "note": "n"}).wait()
        ckpt.tag("best", 2)
        ckpt.fork("other", 1)
        older = ckpt.load(step=STEPS[-2], allow_lossy=True)
    where = opened(spec(folder), "disk")
    where.put(f"leases/{RUN}/000000000003-read-abc", as_buffer(b'{"host": "h", "pid": 5, "boot": "b", "record": "r"}'))
    summaries = index.Summaries(where, RUN)
    summaries.look()
    summaries.write()
    where.close()
    return Repository(folder, older)


def as_read(folder: Path) -> tuple[Mapping[tuple[Any, ...], tuple[Spec, bytes]], Record] | None:
    """What the newest record says, by a reader that knows no more than tables and raw chunks: path -> spec and bytes.

    Leaves that it cannot read so simply (compressed ones, tied ones, those in several shards) are left out.
    """
    where = opened(spec(folder), "disk")
    try:
        records = Log(where, RUN)
        record = records.read(max(records.seqs()))
        found = {}
        version, start = record.version, 0
        for shard, end in enumerate(version.chunk_end.tolist()):
            leaf = version.leaves[int(version.shard_leaf[shard])]
            rows, start = range(start, end), end
            parts = [_raw(where, record, row) for row in rows]
            if version.boxes[shard] == Box.whole(leaf.spec.shape) and None not in parts:
                found[leaf.path] = leaf.spec, b"".join(part for part in parts if part is not None)
        return found, record
    except (TierstateError, ValueError, MemoryError):
        return None
    finally:
        where.close()


def _raw(where: Any, record: Record, row: int) -> bytes | None:
    """A chunk that is stored raw, and is what its digest says."""
    place = record.layout.place(row)
    if place is None or place.codec != RAW or place.stored > 1 << 20:
        return None
    data = to_bytes(where.get(place.object))[place.offset : place.offset + place.stored]
    return data if checksum(data) == record.version.digests[row].tobytes() else None


def at_path(state: Any, path: tuple[Any, ...]) -> Any:
    """The value under a path."""
    for key in path:
        state = getattr(state, key) if hasattr(state, "_fields") else state[key]
    return state


def check_values(state: Any, said: Mapping[tuple[Any, ...], tuple[Spec, bytes]]) -> None:
    """Fails unless every tensor and array of a loaded state is what the record says: shape, dtype and bytes."""
    for path, (leaf, data) in said.items():
        if leaf.kind not in ("tensor", "array") or leaf.kind == TIED:
            continue
        value = at_path(state, path)
        if isinstance(value, torch.Tensor):
            value = value.detach()
            assert (str(value.dtype), tuple(value.shape)) == (f"torch.{leaf.dtype}", leaf.shape), path
            if value.numel():
                flat = value.contiguous().flatten()
                assert flat.view(torch.uint8).numpy().tobytes() == data, path
        else:
            assert (value.dtype.str, value.shape) == (leaf.dtype, leaf.shape), path
            assert value.tobytes() == data, path


def look(repository: Repository, folder: Path, kind: str, said: list[str]) -> None:
    """Call what reads. Every answer is right, or an error of ours; ``said`` gets how each ended."""
    known = as_read(folder)
    for name, call in calls(repository, folder, kind, known):
        try:
            call()
        except TierstateError as error:
            said.append(f"{name}: {type(error).__name__}")
        except BaseException as error:
            error.add_note(f"in {name}, of {kind}")
            raise
        else:
            said.append(f"{name}: fine")


def calls(repository: Repository, folder: Path, kind: str, known: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    with ts.Checkpointer(spec(folder), RUN) as ckpt:
        yield "versions", ckpt.versions
        yield "tags", ckpt.tags
        yield "info", ckpt.info
        yield "leaves", ckpt.leaves
        yield "located", ckpt.located
        yield "diff", lambda: ckpt.diff(1, 3)
        yield "diff values", lambda: ckpt.diff(2, 3, values=True)
        yield "load", lambda: _load(ckpt, known)
        yield "older", lambda: _older(ckpt, repository, kind, known)
        yield "restore", lambda: ckpt.restore(state_of(9), allow_lossy=True)
        yield "older into", lambda: ckpt.restore(state_of(9), on_damage="older", allow_lossy=True)
        yield "by tag", lambda: ckpt.load(tag="best", allow_lossy=True)
        yield "export", lambda: _export(ckpt, "x.safetensors")
        yield "export hdf5", lambda: _export(ckpt, "x.h5")
        yield "verify", lambda: ckpt.verify(deep=True)
        yield "verify data", lambda: ckpt.verify(data=True)
        yield "prune", lambda: ckpt.prune(dry_run=True)
        yield "doctor", ckpt.doctor
        yield "rebuild", lambda: ckpt.rebuild("disk", partial=True, dry_run=True)
        yield "doctor applies", lambda: ckpt.doctor(apply=True)
        yield "load after that", lambda: ckpt.load(on_damage="older", allow_lossy=True)


def _load(ckpt: ts.Checkpointer, known: Any) -> None:
    state = ckpt.load(allow_lossy=True)
    if known is not None and ckpt.restored is not None and ckpt.restored.id == known[1].version.id:
        check_values(state, known[0])


def _older(ckpt: ts.Checkpointer, repository: Repository, kind: str, known: Any) -> None:
    """A record that is forged ends in what it says, in the version before it, or in a question to the caller."""
    try:
        state = ckpt.load(on_damage="older", allow_lossy=True)
    except (Unsafe, StateMismatch):
        return  # a pickle, or a class that is not known here: a version that needs a permission
    except TierstateError as error:
        if kind == "versions":
            raise AssertionError(f"the version before is whole, and was not taken: {error!r}") from error
        raise
    assert ckpt.restored is not None
    if known is not None and ckpt.restored.id == known[1].version.id:
        check_values(state, known[0])
    elif kind == "versions":
        assert ckpt.restored.step == STEPS[-2]
        assert torch.equal(state["model"]["w"], repository.older["model"]["w"])


def _export(ckpt: ts.Checkpointer, name: str) -> None:
    with tempfile.TemporaryDirectory(dir=Path(ckpt.policy.tiers[0].options["path"]).parent) as to:
        try:
            export(ckpt, Path(to, name), skip_values=True)
        except OSError as error:
            if error.errno != errno.ENOSPC:  # room is reserved in the user's own file system, before anything is read
                raise


def tried(repository: Repository, place: Path, dice: random.Random) -> tuple[str, list[str]]:
    """One forgery in a copy of a repository: its kind, and how each call ended."""
    folder, said = place / "copy", list[str]()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(repository.folder, folder)
    kind = forge(folder, dice)
    with watched(folder):
        look(repository, folder, kind, said)
    return kind, said


class Dice(random.Random):
    """Dice that fall as given bytes say, and show zeros after the last: so a fuzzer decides what is changed."""

    def __new__(cls, data: bytes) -> Dice:
        return super().__new__(cls)

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def getrandbits(self, k: int, /) -> int:
        """So many bits of the next bytes."""
        count = -(-k // 8)
        part = self._data[self._at : self._at + count]
        self._at += count
        return int.from_bytes(part.ljust(count, b"\0"), "little") >> (8 * count - k)

    def random(self) -> float:
        """The next two bytes as a number from 0 to 1."""
        return self.getrandbits(16) / (1 << 16)


_WATCHED: list[Path] = []
_READ_ANYWHERE = tuple(
    {sys.prefix, sys.base_prefix, str(Path(ts.__file__).parents[1]), "/proc", "/sys", "/dev", "/etc", "/usr"}
)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _WATCHED:
        return
    if event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "ctypes.dlopen"):
        raise AssertionError(f"{event} of {args!r:.200}")
    if event == "open" and isinstance(args[0], str | bytes) and os.path.isabs(os.fsdecode(args[0])):
        path, writes = os.fsdecode(args[0]), bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        inside = os.path.realpath(path).startswith(str(_WATCHED[0]))
        if not inside and (writes or not path.startswith(_READ_ANYWHERE)):
            raise AssertionError(f"{path} was opened, outside of the tier")


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Fails where a pickle names a class, a program is started, or a file is opened outside of a folder (by Python)."""
    _WATCHED.append(folder.resolve())
    try:
        yield
    finally:
        _WATCHED.clear()


def watch() -> None:
    """Begin to listen to what Python reports; this cannot be ended again."""
    sys.addaudithook(_audit)
    logging.getLogger("tierstate").setLevel(logging.CRITICAL)
    index.READ_WITHOUT_INDEX = 0  # a few records are enough to look for an index
    log.clock_seq = lambda: 0


MEMORY = 3 << 30
"""Bytes of address space that a process gets beside what it has once all is imported."""

PATIENCE = 60.0


def limit() -> None:
    """From now on this process gets no more than `MEMORY`."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(seed: str, count: int, seconds: float = math.inf) -> Counter[str]:
    """So many forgeries, each with dice of its own, or as many as there is time for; how their calls ended.

    Raises:
        ExceptionGroup: the calls that ended otherwise, with the dice that show it again.
    """
    watch()
    ends, wrong, began = Counter[str](), list[Exception](), time.monotonic()
    with scratch() as place:
        (place / "repository").mkdir()
        repository = build(place / "repository")
        limit()
        for i in range(count):
            if time.monotonic() - began > seconds:
                break
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            try:
                kind, said = tried(repository, place, random.Random(f"{seed}-{i}"))
                ends.update([kind, *(f"{kind}: {one}" for one in said)])
            except Exception as error:
                error.add_note(f"with random.Random('{seed}-{i}')")
                wrong.append(error)
        faulthandler.cancel_dump_traceback_later()
    if wrong:
        raise ExceptionGroup(f"{len(wrong)} of {i + 1} forgeries", wrong)
    return ends


if __name__ == "__main__":
    for end, times in sorted(main(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:])).items()):
        print(times, end)
