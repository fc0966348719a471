"""Ownership: which rank saves a shard that several ranks hold, so that each box has one owner and bytes are balanced.

Used when replicated state (data parallel, tensor parallel) is saved: every rank sends its `SaveCandidates`, one rank
assigns an owner to each box (`assign_owners`), and each rank reads from `Ownership` which of its shards it saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tierstate.manifest.arrays import Array, check_rising, starts_of
from tierstate.manifest.boxes import Box
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError, StateMismatch
from tierstate.manifest.format import table as col
from tierstate.manifest.format.leaf import Path, encode_path
from tierstate.manifest.format.version import check_features

ONE_OWNER = frozenset({"tensor", "array", "storage", "cast", "quantized"})
"""Kinds of leaves that one owner saves for all ranks. Replicated leaves of other kinds are saved by every rank, and
their digests are compared in the merge."""


WHAT = "sharing"


class SaveCandidates:
    """The shards that a rank holds and could save.

    Args:
        paths: the leaf's path of each row, encoded or not; one row per box, so a path may occur several times.
        boxes: the box of each row.
        nbytes: ``(rows,)``: bytes of each row.
        single: ``(rows,)`` of bool: whether one owner saves it; otherwise every rank that holds it does.

    Attributes:
        keys: ``(rows, 2)`` of uint64: the digest of path and box, of the single rows only.
        nbytes: ``(rows,)``, of the single rows only.
        single: as given; in a decoded table all rows are single.
    """

    def __init__(self, paths: Sequence[Path | str], boxes: Sequence[Box], nbytes: Array, single: Array) -> None:
        self.single = np.asarray(single, bool)
        if not len(paths) == len(boxes) == len(nbytes) == len(self.single):
            raise ValueError(f"{len(paths)} paths, {len(boxes)} boxes, {len(nbytes)} and {len(self.single)} numbers")
        rows = zip(paths, boxes, self.single.tolist(), strict=True)
        names = [_key(path, box) for path, box, single in rows if single]
        self.keys = np.frombuffer(b"".join(names), "<u8").reshape(-1, 2)
        self.nbytes = np.asarray(nbytes, "<i8")[self.single]

    @property
    def digest(self) -> bytes:
        """A digest of the rows; ranks with equal tables have equal digests."""
        return checksum(self.keys.tobytes() + self.nbytes.astype("<i8").tobytes())

    def encode(self) -> bytes:
        """The single rows as bytes; the other rows need no owner."""
        return col.encode_table({"requires": []}, {"key": self.keys.reshape(-1), "nbytes": self.nbytes})

    @classmethod
    def decode(cls, data: bytes | memoryview) -> SaveCandidates:
        """A table from its bytes.

        Raises:
            FormatError: the bytes are none.
        """
        head, columns = col.decode_table(memoryview(data), WHAT)
        check_features(head, WHAT)
        nbytes = col.column(columns, "nbytes", "<i8", WHAT)
        found = cls.__new__(cls)
        found.keys = col.column(columns, "key", "<u8", WHAT, 2 * len(nbytes)).reshape(-1, 2)
        found.nbytes, found.single = nbytes, np.ones(len(nbytes), bool)
        if len(nbytes) and int(nbytes.min()) < 0:
            raise FormatError(f"{WHAT}: a box has fewer than no bytes")
        return found


def _key(path: Path | str, box: Box) -> bytes:
    text = path if isinstance(path, str) else encode_path(path)
    return checksum(text.encode() + np.array([*box.offset, *box.shape], "<i8").tobytes())


@dataclass(frozen=True, eq=False)
class Ownership:
    """Which rank saves which shard.

    Attributes:
        tables: the digest of each rank's table; only of the ranks that this object is for.
        owners: for each table the owner of each single row.
    """

    tables: Mapping[int, bytes]
    owners: Mapping[bytes, Array]

    def saved_by(self, rank: int, table: SaveCandidates) -> Array:
        """``(rows,)`` of bool: which rows of its table this rank saves.

        Raises:
            StateMismatch: the table differs from the one that the rank sent.
        """
        if self.tables.get(rank) != table.digest:
            raise StateMismatch(f"what rank {rank} holds is not what was shared out among the ranks")
        found = ~table.single
        found[table.single] = self.owners[table.digest] == rank
        return found

    def of(self, ranks: Sequence[int]) -> Ownership:
        """The ownership for these ranks only."""
        tables = {rank: self.tables[rank] for rank in ranks}
        return Ownership(tables, {name: self.owners[name] for name in dict.fromkeys(tables.values())})

    def encode(self) -> bytes:
        """The ownership as bytes."""
        number = {name: i for i, name in enumerate(self.owners)}
        owners = [np.zeros(0, "<u4"), *self.owners.values()]
        return col.encode_table(
            {"requires": []},
            {
                "rank": np.array(list(self.tables), "<u4"),
                "rank.table": np.array([number[name] for name in self.tables.values()], "<u4"),
                "table.digest": np.frombuffer(b"".join(self.owners), "<u8"),
                "table.end": np.cumsum([len(o) for o in owners[1:]], dtype="<u8"),
                "owner": np.concatenate(owners).astype("<u4"),
            },
        )

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Ownership:
        """An ownership from its bytes.

        Raises:
            FormatError: the bytes are none.
        """
        head, columns = col.decode_table(memoryview(data), WHAT)
        check_features(head, WHAT)
        ends = check_rising(col.column(columns, "table.end", "<u8", WHAT), WHAT)
        owner = col.column(columns, "owner", "<u4", WHAT, int(ends[-1]) if len(ends) else 0)
        digests = col.column(columns, "table.digest", "<u8", WHAT, 2 * len(ends)).tobytes()
        names = [digests[16 * i : 16 * i + 16] for i in range(len(ends))]
        ranks = col.column(columns, "rank", "<u4", WHAT)
        tables = col.column(columns, "rank.table", "<u4", WHAT, len(ranks))
        if len(tables) and int(tables.max()) >= len(names):
            raise FormatError(f"{WHAT}: a rank has a table that is not listed")
        starts = starts_of(ends).tolist()
        cut = [owner[a:b] for a, b in zip(starts, ends.tolist(), strict=True)]
        found = {rank: names[table] for rank, table in zip(ranks.tolist(), tables.tolist(), strict=True)}
        return cls(found, dict(zip(names, cut, strict=True)))


def assign_owners(tables: Sequence[SaveCandidates]) -> Ownership:
    """An owner for each box of each path, among the ranks that hold it; ``tables[r]`` is rank r's.

    Greedy: the largest box first, each to the holder with the fewest bytes so far; boxes with only one holder are
    counted before. The order of the rows in a table does not matter.
    """
    counts = [len(t.keys) for t in tables]
    keys = np.concatenate([np.zeros((0, 2), "<u8"), *(t.keys for t in tables)])
    nbytes = np.concatenate([np.zeros(0, "<i8"), *(t.nbytes for t in tables)])
    rank = np.repeat(np.arange(len(tables)), counts)
    order = np.lexsort((rank, keys[:, 1], keys[:, 0]))
    fresh = np.ones(len(order), bool)
    fresh[1:] = np.any(keys[order][1:] != keys[order][:-1], axis=1)
    starts = np.flatnonzero(fresh)
    owner = _owners(
        rank[order], starts, np.maximum.reduceat(nbytes[order], starts) if len(starts) else nbytes, len(tables)
    )
    owners = np.zeros(len(order), "<u4")
    owners[order] = np.repeat(owner, np.diff(np.append(starts, len(order))))
    names = [t.digest for t in tables]
    cut = np.split(owners, np.cumsum(counts)[:-1]) if counts else []
    return Ownership(dict(enumerate(names)), dict(zip(names, cut, strict=True)))


def _owners(holder: Array, starts: Array, nbytes: Array, ranks: int) -> Array:
    """``(boxes,)``: an owner for each box.

    Args:
        holder: the ranks that hold each box, concatenated.
        starts: ``(boxes,)``: index of each box's first holder.
        nbytes: ``(boxes,)``: bytes of each box.
        ranks: number of ranks.
    """
    counts = np.diff(np.append(starts, len(holder)))
    found = holder[starts]
    alone = counts == 1
    load = np.bincount(found[alone], nbytes[alone], ranks)  # float64: exact up to 2**53 bytes per rank
    shared = np.flatnonzero(~alone)
    for box in shared[np.argsort(-nbytes[shared], kind="stable")].tolist():
        holders = holder[starts[box] : starts[box] + counts[box]]
        best = holders[int(np.argmin(load[holders]))]
        load[best] += nbytes[box]
        found[box] = best
    return found
