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
from tierstate.manifest.format.leaf_path import Path, encode_path
from tierstate.manifest.format.version import check_features

ONE_OWNER = frozenset({"tensor", "array", "storage", "cast", "quantized"})
"""Kinds of leaves that one owner saves for all ranks. Replicated leaves of other kinds are saved by every rank, and
their digests are compared in the merge."""


WHAT = "sharing"


class SaveCandidates:
    """The shards that a rank holds and could save, of those that one owner saves (`ONE_OWNER`).

    Args:
        paths: the leaf's path of each row, encoded or not; one row per box, so a path may occur several times.
        boxes: the box of each row.
        nbytes: ``(rows,)``: bytes of each row.

    Attributes:
        keys: ``(rows, 2)`` of uint64: the digest of path and box.
    """

    def __init__(self, paths: Sequence[Path | str], boxes: Sequence[Box], nbytes: Array) -> None:
        if not len(paths) == len(boxes) == len(nbytes):
            raise ValueError(f"{len(paths)} paths, {len(boxes)} boxes and {len(nbytes)} numbers")
        self.keys = np.frombuffer(b"".join(map(_key, paths, boxes)), "<u8").reshape(-1, 2)
        self.nbytes = np.asarray(nbytes, "<i8")

    @property
    def digest(self) -> bytes:
        """A digest of the rows; ranks with equal tables have equal digests."""
        return checksum(self.keys.tobytes() + self.nbytes.astype("<i8").tobytes())

    def encode(self) -> bytes:
        """The rows as bytes."""
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
        found.nbytes = nbytes
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
        owners: for each table the owner of each row.
    """

    tables: Mapping[int, bytes]
    owners: Mapping[bytes, Array]

    def owners_of(self, rank: int, table: SaveCandidates) -> Array:
        """``(rows,)``: the owner of each row of a rank's table.

        Raises:
            StateMismatch: the table differs from the one that the rank sent.
        """
        if self.tables.get(rank) != table.digest:
            raise StateMismatch(f"what rank {rank} holds is not what was shared out among the ranks")
        return self.owners[table.digest]

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
    names, ranks = [table.digest for table in tables], dict[bytes, list[int]]()
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    # Equal tables once: mostly a few ranks hold the same, and there may be ten thousand.
    distinct = [tables[holders[0]] for holders in ranks.values()]
    counts = [len(t.keys) for t in distinct]
    keys = np.concatenate([np.zeros((0, 2), "<u8"), *(t.keys for t in distinct)])
    nbytes = np.concatenate([np.zeros(0, "<i8"), *(t.nbytes for t in distinct)])
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    fresh = np.ones(len(order), bool)
    fresh[1:] = np.any(keys[order][1:] != keys[order][:-1], axis=1)
    starts = np.flatnonzero(fresh)
    most = np.maximum.reduceat(nbytes[order], starts) if len(starts) else nbytes
    table = np.repeat(np.arange(len(distinct)), counts)[order]
    owners = np.zeros(len(order), "<u4")
    owners[order] = np.repeat(
        _OwnerChoice(table, starts, most, list(ranks.values())).owners(), np.diff(np.append(starts, len(order)))
    )
    cut = np.split(owners, np.cumsum(counts)[:-1]) if counts else []
    return Ownership(dict(enumerate(names)), dict(zip(ranks, cut, strict=True)))


class _OwnerChoice:
    """Chooses an owner for each box.

    Args:
        table: the tables in which each box is, concatenated.
        starts: ``(boxes,)``: index of each box's first table.
        nbytes: ``(boxes,)``: bytes of each box.
        ranks: for each table the ranks that have it, rising.
    """

    def __init__(self, table: Array, starts: Array, nbytes: Array, ranks: Sequence[Sequence[int]]) -> None:
        self._tables, self._starts, self._nbytes, self._ranks = table, starts, nbytes, ranks
        self._counts = np.diff(np.append(starts, len(table)))
        self._table = table[starts]
        self._holders = np.array([len(held) for held in ranks], "i8")
        self._found = np.array([held[0] for held in ranks], "i8")[self._table]
        self._alone = (self._counts == 1) & (self._holders[self._table] == 1)
        # float64: exact up to 2**53 bytes per rank
        self._load = np.bincount(self._found[self._alone], nbytes[self._alone], sum(map(len, ranks)))

    def owners(self) -> Array:
        """``(boxes,)``: the owner of each box."""
        shared = np.flatnonzero(~self._alone)
        shared = shared[np.argsort(-self._nbytes[shared], kind="stable")]
        first = 0
        for place in [*np.flatnonzero(self._counts[shared] > 1).tolist(), len(shared)]:
            self._of_one_table(shared[first:place])
            if place < len(shared):
                self._of_several(int(shared[place]))
            first = place + 1
        return self._found

    def _of_several(self, box: int) -> None:
        """Choose the owner of a box that is in several tables."""
        start = self._starts[box]
        there = self._tables[start : start + self._counts[box]].tolist()
        holders = np.sort(np.concatenate([np.array(self._ranks[table], "i8") for table in there]))
        self._give(np.array([box]), holders[None])

    def _of_one_table(self, boxes: Array) -> None:
        """Choose the owners of boxes, each of which is in one table: no other table's boxes count for that, so all
        tables get an owner for their next box at once."""
        holders = self._holders[self._table[boxes]]
        for count in np.unique(holders).tolist():
            mine = boxes[holders == count]
            tables, number = np.unique(self._table[mine], return_inverse=True)
            members = np.array([self._ranks[table] for table in tables.tolist()], "i8")
            by_table = np.argsort(number, kind="stable")
            turn = np.zeros(len(mine), "i8")
            each = np.bincount(number)
            turn[by_table] = np.arange(len(mine)) - np.repeat(starts_of(np.cumsum(each)), each)
            for now in np.split(np.argsort(turn, kind="stable"), np.cumsum(np.bincount(turn))[:-1]):
                self._give(mine[now], members[number[now]])

    def _give(self, boxes: Array, holders: Array) -> None:
        """Give each box to the first of those ``(boxes, ranks)`` with the fewest bytes so far; no rank holds two
        of these boxes."""
        best = holders[np.arange(len(boxes)), np.argmin(self._load[holders], axis=1)]
        self._load[best] += self._nbytes[boxes]
        self._found[boxes] = best
