"""The exchange plan of a restore by many ranks: which rank reads which chunk, and to which ranks it sends it.

Pure functions, used by `restore` beside this module. A *row* is the number of a chunk in the version. Each rank
gathers to all ranks which rows it wants and which it can read (*reaches*); then all compute the same plan. Rows that
the same ranks want and the same ranks reach form a *class*, and the plan is made by class. There are few classes, even
if thousands of ranks want the same rows or each wants others. Within a class the rows are divided among the readers, so
that all readers read about the same number of bytes.

* A chunk in a tier of a rank's own process: the rank reads it itself.
* A chunk that several ranks of a host want: one rank reads it once for the host, from a tier of the host, from its own
  memory, or from a tier of the site, and sends it to the other ranks.
* A chunk in a tier of the site that is slower than the network (`is_slow_tier`), one that more than `FEW_HOSTS` want,
  or one that only ranks of other hosts can read: one rank reads it once for the whole team and sends it to one rank of
  each host, which forwards it there. Where these are more than `DIRECT` hosts, it goes along the rows of a grid of all
  hosts (`HostGrid`), so that a rank has connections to a few dozen others and not to thousands.

Sets of rows are sent as runs (first row, row after the last), which takes few bytes.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tierstate.manifest.arrays import Array, expand_runs
from tierstate.manifest.errors import FormatError
from tierstate.tiers.base import Traits

NO_ROWS: Array = np.zeros((0, 2), "i8")
"""No rows, as runs."""


PROCESS, HOST, SITE, SLOW = range(4)
"""The kind of tier in which a rank reaches a row: of its process, of its host, of the site, of the site but slow."""


WANTED = 4
"""The kind of the rows that a rank wants; the number of kinds of tiers."""


LINK = 1e9
"""Bytes per second that a host is assumed to receive through the network: about a link of 10 Gbit/s."""


FEW_HOSTS = 8
"""Hosts that may each read the same chunk from a tier of the site, at most. What they read adds up there, where it does
not in the network: each link carries the chunk once."""


DIRECT = 16
"""Hosts to which a reader sends a chunk itself, at most."""


class HostGrid:
    """All hosts in rows, about as many rows as hosts in each. A reader sends to the hosts of its own row, and to one
    host of each other row, which forwards to its row.

    Chunks that are forwarded to other hosts come from other rows and go along the own one, so no two hosts ever wait
    for each other. (As in broadcasts over the dimensions of a mesh.)

    Args:
        hosts: by rank, the number of its host.
    """

    def __init__(self, hosts: Sequence[int]) -> None:
        self._hosts = hosts
        every = sorted(set(hosts))
        self._width = math.isqrt(max(0, len(every) - 1)) + 1
        self._place = {host: at for at, host in enumerate(every)}
        self.used = len(every) > DIRECT + 1

    def row(self, host: int) -> int:
        """The row of a host."""
        return self._place[host] // self._width

    def rows(self, hosts: Iterable[int]) -> dict[int, list[int]]:
        """These hosts by row."""
        found: dict[int, list[int]] = defaultdict(list)
        for host in hosts:
            found[self.row(host)].append(host)
        return found

    def head(self, row: Sequence[int], reader: int) -> int:
        """Which of some hosts of a row gets the chunks of a reader in another row."""
        return row[self._place[self._hosts[reader]] % self._width % len(row)]

    def steps(self, source: int, me: int) -> int:
        """Over how many ranks chunks may come that one rank gets from another."""
        if len(self._place) == 1:
            return 1
        mine, its = self._hosts[me], self._hosts[source]
        forwarded = self.used and self.row(mine) == self.row(its)
        return 1 + forwarded + (mine == its)


def runs_in(mask: Array) -> Array:
    """The runs of true values in a ``(rows,)`` array of bool.

    Returns:
        ``(runs, 2)`` of int64: the first row of each run and the row after its last; rising, with a gap after each.
    """
    edges = np.flatnonzero(np.diff(mask.astype("i1"), prepend=0, append=0))
    return edges.astype("i8").reshape(-1, 2)


def sets_with(sets: Sequence[Array], rows: Array | int) -> Array:
    """``(rows,)``: in how many of these sets of runs each row is. Takes no more than there are rows and runs."""
    change = np.zeros(int(rows) + 1, "i4")
    for runs in sets:
        change[runs[:, 0]] += 1
        change[runs[:, 1]] -= 1
    return np.cumsum(change[:-1], dtype="i4")


def encode_runs(runs: Array) -> bytes:
    """Runs as compressed bytes, for `decode_runs`."""
    return zlib.compress(np.diff(runs.reshape(-1), prepend=0).astype("<u4").tobytes(), 1)


def decode_runs(data: bytes, rows: int) -> Array:
    """Runs from the bytes that another rank sent.

    Args:
        rows: number of rows of the version.

    Raises:
        FormatError: the bytes are not runs of that many rows.
    """
    most = 4 * (rows + 2)
    reader = zlib.decompressobj()
    try:
        raw = reader.decompress(data, most + 1)
    except zlib.error as error:
        raise FormatError(f"rows of another rank cannot be read: {error}") from error
    if len(raw) > most or len(raw) % 8 or not reader.eof:
        raise FormatError(f"rows of another rank are {len(raw)} bytes, which are no runs of {rows} rows")
    steps = np.frombuffer(raw, "<u4").astype("i8")
    ends = np.cumsum(steps)
    if len(steps) and (not steps[1:].all() or int(ends[-1]) > rows):
        raise FormatError(f"rows of another rank are no rising runs of {rows} rows")
    return ends.reshape(-1, 2)


def is_slow_tier(traits: Traits, ranks: int) -> bool:
    """Whether sending chunks from host to host is cheaper than reading them from this tier on each host.

    If each of H hosts reads all, it takes ``nbytes / (ranks * bandwidth)`` seconds. If the team reads once, it takes
    1/H of that, and then each host receives ``nbytes`` through its link. A tier of unknown bandwidth is not slow.

    Args:
        traits: of the tier.
        ranks: number of ranks of a host that read from it.
    """
    return traits.shared == "site" and traits.bandwidth is not None and traits.bandwidth * ranks < LINK


def reach_kind(traits: Traits, ranks: int) -> int:
    """The kind (`PROCESS`, `HOST`, `SITE`, `SLOW`) of a tier from which ``ranks`` ranks of a host read."""
    if traits.shared == "site":
        return SLOW if is_slow_tier(traits, ranks) else SITE
    return HOST if traits.shared == "host" else PROCESS


class RankRows(NamedTuple):
    """Which rows of a version one rank wants and reaches, as runs.

    Attributes:
        wants: the rows that it wants.
        reach: by `PROCESS`, `HOST`, `SITE`, `SLOW`, the rows that it can read from tiers of that kind. A row may be in
            several.
    """

    wants: Array = NO_ROWS
    reach: tuple[Array, Array, Array, Array] = (NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS)


class RowClass(NamedTuple):
    """Rows, the ranks that want them, and by kind of tier the ranks that reach them."""

    rows: Array
    wanting: list[int]
    reach: tuple[frozenset[int], ...]


def row_classes(offers: Sequence[RankRows]) -> Iterator[RowClass]:
    """The classes: rows grouped by the ranks that want and reach them. Rows that no rank wants are left out."""
    kinds, ranks, runs = _sets(offers)
    of = np.repeat(np.arange(len(runs)), [len(r) for r in runs])
    bounds = np.concatenate([NO_ROWS, *runs])
    # Each set has a pseudo-random number, and a row's key is the sum of the numbers of its sets: rows of equal keys are
    # in the same sets. The key changes only where a run starts or ends.
    points, at = np.unique(bounds, return_inverse=True)
    key, marks = np.zeros(len(points), "u8"), _scatter(of)
    np.add.at(key, at.reshape(bounds.shape)[:, 0], marks)
    np.subtract.at(key, at.reshape(bounds.shape)[:, 1], marks)
    _, first, inverse = np.unique(np.cumsum(key, dtype="u8")[:-1], return_index=True, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(inverse, minlength=len(first)))[:-1])
    first = points[first]
    for number, members in enumerate(_members(first, of, bounds)):
        wanting = sorted(r for s in members if kinds[s] == WANTED for r in ranks[s])
        if wanting:
            reach = tuple(_union([ranks[s] for s in members if kinds[s] == kind]) for kind in range(WANTED))
            yield RowClass(_spread(points[parts[number]], points[parts[number] + 1]), wanting, reach)


def _spread(starts: Array, stops: Array) -> Array:
    """The rows of some runs."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    found: Array = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return found


def _sets(offers: Sequence[RankRows]) -> tuple[list[int], list[frozenset[int]], list[Array]]:
    """The distinct sets of rows: their kinds, their ranks, and their runs. Ranks with equal sets share one."""
    found: dict[tuple[int, bytes], tuple[set[int], Array]] = {}
    for rank, (wants, reach) in enumerate(offers):
        for kind, runs in enumerate((*reach, wants)):
            if len(runs):
                found.setdefault((kind, runs.tobytes()), (set(), runs))[0].add(rank)
    kinds = [kind for kind, _ in found]
    return kinds, [frozenset(ranks) for ranks, _ in found.values()], [runs for _, runs in found.values()]


def _scatter(numbers: Array) -> Array:
    """Well-mixed 64-bit numbers, the same everywhere (Steele, Lea and Flood's SplitMix64)."""
    z = (numbers.astype("u8") + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = z ^ (z >> np.uint64(31))
    return mixed


def _members(first: Array, of: Array, bounds: Array) -> Iterator[list[int]]:
    """For each class, given its first row, the sets that contain it."""
    order = np.argsort(first)
    low, high = (np.searchsorted(first[order], bounds[:, i]) for i in (0, 1))
    counts = high - low
    starts = np.repeat(low - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) if len(counts) else counts
    classes = order[starts + np.arange(len(starts))]
    sets = np.repeat(of, counts)
    by_class = np.lexsort((sets, classes))
    ends = np.cumsum(np.bincount(classes, minlength=len(first)))
    return (part.tolist() for part in np.split(sets[by_class], ends[:-1]))


def _union(sets: Sequence[frozenset[int]]) -> frozenset[int]:
    return sets[0] if len(sets) == 1 else frozenset().union(*sets)


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """What one rank reads, sends and receives.

    Attributes:
        reads: rows that this rank reads from tiers, rising.
        sends: by receiving rank, the rows that this rank sends to it: rows that it reads and rows that it forwards.
        receives: by sending rank, the rows that this rank gets from it.
        lacking: by rank, of all ranks, the rows that it wants and no rank reaches.
    """

    reads: Array
    sends: Mapping[int, Array]
    receives: Mapping[int, Array]
    lacking: Mapping[int, Array]


class _Group(NamedTuple):
    """Rows that are read once, the ranks that may read them, and by host the ranks that want them."""

    rows: Array
    readers: list[int]
    served: dict[int, list[int]]


def plan_exchange(
    offers: Sequence[RankRows], hosts: Sequence[int], nbytes: Array, me: int, *, apart: bool = False
) -> ExchangePlan:
    """The exchange plan of one rank. The plans of all ranks fit together, since all are computed from the same offers.

    Args:
        offers: by rank, what it wants and reaches.
        hosts: by rank, the number of its host.
        nbytes: ``(rows,)``: the length of each chunk.
        me: the rank whose plan is returned.
        apart: each rank reads all that it reaches itself; used after an exchange has failed.
    """
    lacking: dict[int, list[Array]] = defaultdict(list)
    groups: list[_Group] = []
    only = np.full(len(nbytes), NOBODY, "i4") if apart else _only_reader(offers, len(nbytes))
    taken = np.flatnonzero(only != NOBODY)
    load = np.bincount(only[taken], nbytes[taken], len(offers)).astype("i8").tolist()
    edges = _Edges(me, hosts, HostGrid(hosts))
    edges.reads.append(np.flatnonzero(only == me))
    for one in row_classes(_wanted_otherwise(offers, only)):
        groups += _groups(one, hosts, lacking, apart)
    # Groups with few possible readers first, so that the later ones even out the load.
    groups.sort(key=lambda group: (len(group.readers), group.rows[0]))
    for group in _concerning(hosts[me], groups, hosts):
        for reader, rows in _cut(group, nbytes, load):
            edges.add(group, reader, rows)
    sends, receives = edges.both
    return ExchangePlan(_joined(edges.reads), _by_rank(sends), _by_rank(receives), _by_rank(lacking))


NOBODY = -1
"""No rank, as the only one that wants a row and reads it itself."""


def _only_reader(offers: Sequence[RankRows], rows: int) -> Array:
    """``(rows,)``: the rank that reads a row for itself alone, since no other wants it; or `NOBODY`.

    Where each rank wants its own, as under the same parallelism, these are all rows, of which ten thousand ranks may
    have tens of millions. So they are found without sorting, and without a class for each rank.
    """
    wanting = sets_with([offer.wants for offer in offers], rows)
    # Where one rank wants a row, the sum of the numbers of all that want it is that rank's.
    number = np.zeros(rows + 1, "i8")
    for rank, offer in enumerate(offers):
        number[offer.wants[:, 0]] += rank
        number[offer.wants[:, 1]] -= rank
    wanter = np.where(wanting == 1, np.cumsum(number[:-1]), NOBODY)
    kinds, ranks, runs = _sets([RankRows(NO_ROWS, offer.reach) for offer in offers])
    near = sets_with([one for kind, one in zip(kinds, runs, strict=True) if kind in (PROCESS, HOST)], rows) > 0
    found = np.zeros(rows, bool)
    for kind, holders, one in zip(kinds, ranks, runs, strict=True):
        if kind != SLOW:
            reached = _spread(one[:, 0], one[:, 1])
            reaches = np.zeros(len(offers) + 1, bool)  # the last one is for `NOBODY`
            reaches[list(holders)] = True
            # From the site only where no rank has it nearer: that might be one of the same host.
            found[reached] |= reaches[wanter[reached]] & ~(near[reached] & (kind == SITE))
    return np.where(found, wanter, NOBODY)


def _wanted_otherwise(offers: Sequence[RankRows], reader: Array) -> Sequence[RankRows]:
    """The offers, without the rows that a rank reads for itself alone."""
    taken = runs_in(reader != NOBODY)
    if not len(taken):
        return offers
    return [offer._replace(wants=_without(offer.wants, taken)) for offer in offers]


def _without(runs: Array, holes: Array) -> Array:
    """Some runs without the rows of others."""
    first, last = np.searchsorted(holes[:, 1], runs[:, 0], "right"), np.searchsorted(holes[:, 0], runs[:, 1])
    count = np.maximum(last - first, 0)
    inside = holes[expand_runs(first, count)]
    low, high = np.repeat(runs[:, 0], count), np.repeat(runs[:, 1], count)
    starts = np.sort(np.concatenate([runs[:, 0], np.minimum(inside[:, 1], high)]))
    stops = np.sort(np.concatenate([np.maximum(inside[:, 0], low), runs[:, 1]]))
    return np.stack([starts, stops], 1)[starts < stops]


def _by_rank(parts: Mapping[int, Sequence[Array]]) -> dict[int, Array]:
    return {rank: _joined(parts[rank]) for rank in sorted(parts)}


def _joined(parts: Sequence[Array]) -> Array:
    """The union of some arrays of rows, rising."""
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate([np.zeros(0, "i8"), *parts]))


def _groups(one: RowClass, hosts: Sequence[int], lacking: dict[int, list[Array]], apart: bool) -> list[_Group]:
    """The groups of a class: who may read it, and for whom. Adds what no rank can read to ``lacking``."""
    kinds = range(WANTED) if apart else (PROCESS,)
    alone = [rank for rank in one.wanting if any(rank in one.reach[kind] for kind in kinds)]
    shared: list[_Group] = []
    left: dict[int, list[int]] = {}
    wanting = _by_host(sorted(set(one.wanting) - set(alone)), hosts)
    near = (HOST, PROCESS) if len(wanting) > FEW_HOSTS else (HOST, PROCESS, SITE)
    for host, ranks in wanting.items():
        readers = _near(one, host, ranks, hosts, near)
        if readers:
            shared.append(_Group(one.rows, readers, {host: ranks}))
        else:
            left[host] = ranks
    serving = shared  # the groups that read it serve the other hosts, too, in turns
    served = {rank for group in shared for ranks in group.served.values() for rank in ranks}
    if len(left) > FEW_HOSTS * len(shared) and (readers := _far(one, hosts, len(left), served)):
        serving = [_Group(one.rows, readers, {})]
        shared = shared + serving
    for at, (host, ranks) in enumerate(left.items()):
        if serving:
            serving[at % len(serving)].served[host] = ranks
        else:
            for rank in ranks:
                lacking[rank].append(one.rows)
    return [_Group(one.rows, [rank], {}) for rank in alone] + shared


def _by_host(ranks: Sequence[int], hosts: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        found[hosts[rank]].append(rank)
    return found


def _near(one: RowClass, host: int, ranks: list[int], hosts: Sequence[int], kinds: Sequence[int]) -> list[int]:
    """The ranks of a host that may read a class for it from such tiers: ranks that want it, if one of them can read
    it."""
    for kind in kinds:
        readers = [rank for rank in ranks if rank in one.reach[kind]]
        readers = readers or [rank for rank in sorted(one.reach[kind]) if hosts[rank] == host]
        if readers:
            return readers
    return []


def _far(one: RowClass, hosts: Sequence[int], left: int, served: Set[int]) -> list[int]:
    """The ranks of the whole team that may read a class for so many hosts.

    Args:
        served: ranks that get it from one of their host. Where there are some, these others read it from the site. In
            general few ranks that have it in a tier of their own do not serve many hosts if it can be read from there.
    """
    found: list[int] = []
    for kind in (SLOW, SITE) if served else (PROCESS, HOST, SLOW, SITE):
        there = one.reach[kind] - served
        readers = [rank for rank in one.wanting if rank in there] or sorted(there)
        if readers and (kind in (SLOW, SITE) or len({hosts[r] for r in readers}) * FEW_HOSTS >= left):
            return readers
        found = found or readers
    return found


def _concerning(host: int, groups: Sequence[_Group], hosts: Sequence[int]) -> Iterator[_Group]:
    """The groups that affect ranks of this host; without the groups of other hosts that serve only themselves."""
    homes = [{hosts[rank] for rank in group.readers} for group in groups]
    wide = [len(home) > 1 or not home.issuperset(group.served) for home, group in zip(homes, groups, strict=True)]
    near = {host}.union(*(home for home, far in zip(homes, wide, strict=True) if far))
    return (group for group, home in zip(groups, homes, strict=True) if home & near)


def _cut(group: _Group, nbytes: Array, load: list[int]) -> Iterator[tuple[int, Array]]:
    """Divide the rows of a group among its readers, so that the loads (bytes to read) become about equal."""
    readers = sorted(group.readers, key=lambda rank: (load[rank], rank))
    ends = np.cumsum(nbytes[group.rows].astype("i8"))
    have = np.array([load[rank] for rank in readers])
    # The load that all readers reach if the bytes go to the least loaded readers first ("water filling").
    levels = (np.cumsum(have) + int(ends[-1])) / np.arange(1, len(have) + 1)
    level = levels[max(0, int(np.searchsorted(have - levels, 0)) - 1)]
    middles = ends - nbytes[group.rows] / 2
    stops = np.searchsorted(middles, np.cumsum(np.maximum(0, level - have))[:-1], side="right").tolist()
    for rank, start, stop in zip(readers, [0, *stops], [*stops, len(ends)], strict=True):
        if start < stop:
            load[rank] += int(ends[stop - 1]) - (int(ends[start - 1]) if start else 0)
            yield rank, group.rows[start:stop]


class _Edges:
    """Collects the transfers between ranks that one rank takes part in."""

    def __init__(self, me: int, hosts: Sequence[int], grid: HostGrid) -> None:
        self._me, self._hosts, self._grid = me, hosts, grid
        self._rows: dict[int, dict[int, list[int]]] = {}
        self.reads: list[Array] = []
        self.both: tuple[dict[int, list[Array]], dict[int, list[Array]]] = defaultdict(list), defaultdict(list)
        """Rows to send, by receiver; rows to receive, by sender."""

    def add(self, group: _Group, reader: int, rows: Array) -> None:
        """Add rows of a group and the rank that reads them."""
        if reader == self._me:
            self.reads.append(rows)
        mine = self._hosts[self._me]
        if self._grid.used and len(group.served) > DIRECT:
            self._along_rows(group, reader, rows)
            return
        for host in group.served if reader == self._me else [mine] if mine in group.served else []:
            # Transfers between other hosts do not concern this rank.
            self._serve(group, reader, host, reader, rows)

    def _along_rows(self, group: _Group, reader: int, rows: Array) -> None:
        """Add the transfers of the grid that this rank takes part in."""
        grid, mine = self._grid, self._hosts[self._me]
        if id(group) not in self._rows:
            self._rows[id(group)] = grid.rows(group.served)
        by_row = self._rows[id(group)]
        home, own = grid.row(self._hosts[reader]), grid.row(mine)
        for number in by_row if reader == self._me else [own] if own in by_row else []:
            row = by_row[number]
            if number == home:
                for host in row if reader == self._me else [mine] if mine in row else []:
                    self._serve(group, reader, host, reader, rows)
                continue
            head = grid.head(row, reader)
            for relay, part in self._serve(group, reader, head, reader, rows):
                for host in row if relay == self._me else [mine] if mine in row else []:
                    if host != head:
                        self._serve(group, reader, host, relay, part)

    def _serve(self, group: _Group, reader: int, host: int, source: int, rows: Array) -> list[tuple[int, Array]]:
        """Add the transfers of rows of a reader from a source to the ranks of a host.

        Returns:
            The ranks of that host that get rows from the source, and which.
        """
        ranks = group.served[host]
        if host == self._hosts[source]:
            self._fan_out(source, ranks, rows)
            return []
        # Through one relay rank of the other host, another one for each reader; if readers are few, through all ranks.
        relays = ranks if len(group.readers) < len(ranks) else [ranks[reader % len(ranks)]]
        parts = [(relay, rows[i :: len(relays)]) for i, relay in enumerate(relays)]
        for relay, part in parts:
            self._edge(source, relay, part)
            self._fan_out(relay, ranks, part)
        return parts

    def _fan_out(self, source: int, ranks: Sequence[int], rows: Array) -> None:
        for rank in ranks if source == self._me else [self._me] if self._me in ranks else []:
            if rank != source:
                self._edge(source, rank, rows)

    def _edge(self, source: int, to: int, rows: Array) -> None:
        if not len(rows):
            return
        if source == self._me:
            self.both[0][to].append(rows)
        elif to == self._me:
            self.both[1][source].append(rows)
