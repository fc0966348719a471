"""Summaries: what listing and retention need of records, without their tables, and many of them as one object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import columns as col
from .digest import checksum
from .errors import FormatError
from .head import MAX_SEQ, refuse_unknown
from .layout import is_pack
from .leaf import lossy_methods
from .record import Record, frame, unframe

WHAT = "index"
MAX_INDEX = 64 << 20
"""Bytes of an index that are read back."""

MAX_MORE = 16 << 10
"""Bytes of one version's metadata and the like; a version with more is in no index, and read from its record."""

MAX_PACKS = 1 << 16
"""Packs of one version that is in an index."""

_GENERATION = 999_999
_SECTION = "index"
_MORE = (("parent", str), ("commit", str), ("metadata", dict))


class Summary(NamedTuple):
    """One record without its tables.

    Attributes:
        seq, generation: its place in the log.
        step, time: the version's own.
        id: the version's name, the same in every tier.
        nbytes: raw bytes of the state.
        stored: bytes that its chunks take in this tier, shared ones included.
        whole: whether this tier has all of its chunks.
        leaves: how many it has.
        paths: a checksum of their paths: versions of the same paths go to the same tiers.
        packs: keys of the packs in which its chunks lie here.
        more: fields of JSON types: ``parent``, ``commit`` (its id), ``metadata``, perhaps ``lossy``, and those of
            later programs.
    """

    seq: int
    generation: int
    step: int
    time: float
    id: str
    nbytes: int
    stored: int
    whole: bool
    leaves: int
    paths: str
    packs: tuple[str, ...]
    more: Mapping[str, Any]

    @classmethod
    def of(cls, record: Record, generation: int = 0) -> Summary:
        """What a record says."""
        version, layout, head = record.version, record.layout, record.version.head
        return cls(
            head.seq,
            generation,
            head.step,
            head.time,
            version.id,
            version.nbytes,
            layout.stored_nbytes,
            bool(layout.present.all()),
            len(version.leaves),
            checksum("\n".join(version.leaf_index).encode()).hex(),
            layout.objects,
            {"parent": head.parent, "commit": record.commit["id"], "metadata": dict(head.metadata)}
            | ({"lossy": list(lossy)} if (lossy := lossy_methods(version.leaves)) else {}),
        )

    @property
    def parent(self) -> str:
        """Id of the version before it, or empty."""
        return str(self.more["parent"])

    @property
    def commit(self) -> str:
        """Id of the commit that made the record."""
        return str(self.more["commit"])

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the user gave at the save."""
        found: Mapping[str, Any] = self.more["metadata"]
        return found

    @property
    def lossy(self) -> tuple[str, ...]:
        """Methods by which leaves were saved with fewer bits."""
        found = self.more.get("lossy")
        return tuple(map(str, found)) if isinstance(found, list) else ()


def encode(run: str, summaries: Iterable[Summary]) -> bytes:
    """An index of a run, as long as one may be: where it would be longer the oldest versions are left out."""
    pairs = [(s, json.dumps(dict(s.more), sort_keys=True, separators=(",", ":"))) for s in summaries]
    rows = sorted(((s, more) for s, more in pairs if len(more) <= MAX_MORE and len(s.packs) <= MAX_PACKS), key=_place)
    while len(data := frame({_SECTION: _table(run, rows)})) > MAX_INDEX:
        rows = rows[len(rows) // 2 + 1 :]
    return data


def _place(pair: tuple[Summary, str]) -> tuple[int, int]:
    return pair[0].seq, pair[0].generation


def _table(run: str, pairs: Sequence[tuple[Summary, str]]) -> bytes:
    rows, more = [summary for summary, _ in pairs], [text for _, text in pairs]
    keys: dict[str, int] = {}
    packs = [keys.setdefault(key, len(keys)) for s in rows for key in s.packs]
    return col.encode(
        {"run": run, "requires": []},
        {
            "seq": np.array([s.seq for s in rows], "<u8"),
            "generation": np.array([s.generation for s in rows], "<u4"),
            "step": np.array([s.step for s in rows], "<i8"),
            "time": np.array([s.time for s in rows], "<f8").view("<u8"),
            "id": _digests([s.id for s in rows]),
            "nbytes": np.array([s.nbytes for s in rows], "<u8"),
            "stored": np.array([s.stored for s in rows], "<u8"),
            "whole": np.array([s.whole for s in rows], "<u1"),
            "leaves": np.array([s.leaves for s in rows], "<u8"),
            "paths": _digests([s.paths for s in rows]),
            **col.pool(list(keys), "pack.key"),
            "pack.end": np.cumsum([len(s.packs) for s in rows], dtype="<u8"),
            "pack.row": np.array(packs, "<u4"),
            "more": np.frombuffer(f"[{','.join(more)}]".encode(), "<u1"),
        },
    )


def _digests(names: Sequence[str]) -> col.Array:
    return np.frombuffer(bytes.fromhex("".join(names)), "<u1")


def decode(data: memoryview, run: str) -> list[Summary]:
    """The summaries of an index.

    Raises:
        FormatError: the bytes are no index, one of another run, or one that does not fit together.
    """
    section = unframe(data).get(_SECTION)
    if section is None:
        raise FormatError(f"no {WHAT}: it has no such section")
    head, columns = col.decode(section, WHAT)
    refuse_unknown(head, WHAT)
    if col.field(head, "run", str, WHAT) != run:
        raise FormatError(f"{WHAT} is of run {head['run'][:100]!r}")
    seq = col.column(columns, "seq", "<u8", WHAT)
    count = len(seq)
    numbers = {
        name: col.column(columns, name, kind, WHAT, count)
        for name, kind in (
            ("generation", "<u4"), ("step", "<i8"), ("time", "<u8"), ("nbytes", "<u8"), ("stored", "<u8"),
            ("whole", "<u1"), ("leaves", "<u8"),
        )
    }  # fmt: skip
    time = numbers["time"].view("<f8")
    _check(seq, numbers["generation"], time)
    more = _more(col.column(columns, "more", "<u1", WHAT).tobytes(), count)
    step, nbytes, stored, leaves = (numbers[name].tolist() for name in ("step", "nbytes", "stored", "leaves"))
    rows = zip(
        seq.tolist(),
        numbers["generation"].tolist(),
        step,
        time.tolist(),
        _names(columns, "id", count),
        nbytes,
        stored,
        numbers["whole"].astype(bool).tolist(),
        leaves,
        _names(columns, "paths", count),
        _packs(columns, count),
        more,
        strict=True,
    )
    return [Summary(*row) for row in rows]


def _check(seq: col.Array, generation: col.Array, time: col.Array) -> None:
    if not len(seq):
        return
    if int(seq.max()) > MAX_SEQ or int(generation.max()) > _GENERATION:
        raise FormatError(f"{WHAT} has a number that no record has")
    if not bool(np.all((time >= 0) & (time <= 2**53))):  # also where it is NaN
        raise FormatError(f"{WHAT} has a time that no version has")
    if len(np.unique(np.stack([seq, generation.astype("<u8")], 1), axis=0)) != len(seq):
        raise FormatError(f"{WHAT} has two entries of one record")


def _names(columns: col.Columns, name: str, count: int) -> list[str]:
    text = col.column(columns, name, "<u1", WHAT, 16 * count).tobytes().hex()
    return [text[at : at + 32] for at in range(0, 32 * count, 32)]


def _packs(columns: col.Columns, count: int) -> list[tuple[str, ...]]:
    keys = col.texts(columns, "pack.key", WHAT)
    if wrong := next((key for key in keys if not is_pack(key)), None):
        raise FormatError(f"{WHAT} names {wrong[:80]!r}, which is no pack")
    ends = col.ends_of(col.column(columns, "pack.end", "<u8", WHAT, count), WHAT)
    rows = col.column(columns, "pack.row", "<u4", WHAT, int(ends[-1]) if count else 0)
    if len(rows) and int(rows.max()) >= len(keys):
        raise FormatError(f"{WHAT}: a version names a pack that is not listed")
    named, starts = [keys[row] for row in rows.tolist()], col.starts_of(ends).tolist()
    return [tuple(named[a:b]) for a, b in zip(starts, ends.tolist(), strict=True)]


def _more(text: bytes, count: int) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{WHAT}: {text[:60]!r} is not JSON") from error
    if not isinstance(found, list) or len(found) != count:
        raise FormatError(f"{WHAT}: {text[:60]!r} is no list of {count} objects")
    for one in found:
        if not isinstance(one, dict) or any(not isinstance(one.get(name), kind) for name, kind in _MORE):
            raise FormatError(f"{WHAT}: {str(one)[:60]!r} says too little of a version")
    return found
