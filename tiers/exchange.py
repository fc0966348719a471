"""The exchange: which rank reads which chunk of a version that all restore, and to whom it passes it on. Pure.

Each rank says which rows it wants and which it reaches; all then draw the same plan. Rows that the same ranks want and
the same ranks reach are a *class*, and what is decided is decided by class: thousands of ranks that want the same, or
each something else, are few of them. Within a class the rows are cut into as many pieces as there are readers, so that
all read about as many bytes.

* What a rank has in a tier of its own process it reads itself.
* What ranks of a host want is read once there, by one of them: from a tier of the host, from another rank's memory, or
  from a tier of the site. The reader passes it to the others.
* Where the site's tier is slower than the network (`is_slow`), and where only ranks of other hosts have it, it is read
  once in the whole team; the reader passes it to one rank of each host, which passes it on there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tierstate.manifest.columns import Array

from .offers import HOST, PROCESS, SITE, SLOW, WANTED, Offer, RowClass, classes


@dataclass(frozen=True, eq=False)
class Exchange:
    """What one rank does.

    Attributes:
        reads: rows that it reads, rising.
        sends: by rank, the rows that it passes on to it: those that it reads, and those that it gets to pass on.
        receives: by rank, the rows that it gets from it.
        lacking: by rank, rows that it wants and nobody reaches; of all ranks.
    """

    reads: Array
    sends: Mapping[int, Array]
    receives: Mapping[int, Array]
    lacking: Mapping[int, Array]


class _Group(NamedTuple):
    """Rows that are read once, the ranks that may do it, and by host the ranks that want them."""

    rows: Array
    readers: list[int]
    served: dict[int, list[int]]


def draw_up(offers: Sequence[Offer], hosts: Sequence[int], nbytes: Array, me: int, *, apart: bool = False) -> Exchange:
    """The plan of one rank; those of all ranks fit together, as each is drawn from the same offers.

    Args:
        offers: of each rank.
        hosts: the number of each rank's host.
        nbytes: ``(rows,)``: the length of each chunk.
        me: the rank whose plan it is.
        apart: each rank reads itself what it reaches itself, as is done after passing on has failed.
    """
    lacking: dict[int, list[Array]] = defaultdict(list)
    groups: list[_Group] = []
    for one in classes(offers):
        groups += _groups(one, hosts, lacking, apart)
    # Who has no choice goes first, so that the others fill up what is left.
    groups.sort(key=lambda group: (len(group.readers), group.rows[0]))
    load = [0] * len(offers)
    edges = _Edges(me, hosts)
    for group in _concerning(hosts[me], groups, hosts):
        for reader, rows in _cut(group, nbytes, load):
            edges.add(group, reader, rows)
    sends, receives = edges.both
    return Exchange(_joined(edges.reads), _by_rank(sends), _by_rank(receives), _by_rank(lacking))


def _by_rank(parts: Mapping[int, Sequence[Array]]) -> dict[int, Array]:
    return {rank: _joined(parts[rank]) for rank in sorted(parts)}


def _joined(parts: Sequence[Array]) -> Array:
    """Rows that were found bit by bit, rising."""
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate([np.zeros(0, "i8"), *parts]))


def _groups(one: RowClass, hosts: Sequence[int], lacking: dict[int, list[Array]], apart: bool) -> list[_Group]:
    """Who may read a class, and for whom."""
    kinds = range(WANTED) if apart else (PROCESS,)
    alone = [rank for rank in one.wanting if any(rank in one.reach[kind] for kind in kinds)]
    shared: list[_Group] = []
    left: dict[int, list[int]] = {}
    for host, ranks in _by_host(sorted(set(one.wanting) - set(alone)), hosts).items():
        readers = _near(one, host, ranks, hosts)
        if readers:
            shared.append(_Group(one.rows, readers, {host: ranks}))
        else:
            left[host] = ranks
    if left and not shared and (readers := _far(one)):
        shared.append(_Group(one.rows, readers, {}))
    for at, (host, ranks) in enumerate(left.items()):
        if shared:  # those who read it do so for these too, in turns
            shared[at % len(shared)].served[host] = ranks
        else:
            for rank in ranks:
                lacking[rank].append(one.rows)
    return [_Group(one.rows, [rank], {}) for rank in alone] + shared


def _by_host(ranks: Sequence[int], hosts: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        found[hosts[rank]].append(rank)
    return found


def _near(one: RowClass, host: int, ranks: list[int], hosts: Sequence[int]) -> list[int]:
    """Who of a host may read a class for it: of those that want it, if one of them can."""
    for kind in (HOST, PROCESS, SITE):
        readers = [rank for rank in ranks if rank in one.reach[kind]]
        readers = readers or [rank for rank in sorted(one.reach[kind]) if hosts[rank] == host]
        if readers:
            return readers
    return []


def _far(one: RowClass) -> list[int]:
    """Who of all may read a class for all."""
    for kind in (PROCESS, HOST, SLOW, SITE):
        readers = [rank for rank in one.wanting if rank in one.reach[kind]] or sorted(one.reach[kind])
        if readers:
            return readers
    return []


def _concerning(host: int, groups: Sequence[_Group], hosts: Sequence[int]) -> Iterator[_Group]:
    """Groups that decide what ranks of this host do: not those of other hosts that have to do with themselves alone."""
    homes = [{hosts[rank] for rank in group.readers} for group in groups]
    wide = [len(home) > 1 or not home.issuperset(group.served) for home, group in zip(homes, groups, strict=True)]
    near = {host}.union(*(home for home, far in zip(homes, wide, strict=True) if far))
    return (group for group, home in zip(groups, homes, strict=True) if home & near)


def _cut(group: _Group, nbytes: Array, load: list[int]) -> Iterator[tuple[int, Array]]:
    """Readers, and the rows of each: runs of about as many bytes as bring all to one load, or near it."""
    readers = sorted(group.readers, key=lambda rank: (load[rank], rank))
    ends = np.cumsum(nbytes[group.rows].astype("i8"))
    have = np.array([load[rank] for rank in readers])
    # The level up to which so many bytes fill the readers, as water would.
    levels = (np.cumsum(have) + int(ends[-1])) / np.arange(1, len(have) + 1)
    level = levels[max(0, int(np.searchsorted(have - levels, 0)) - 1)]
    middles = ends - nbytes[group.rows] / 2
    stops = np.searchsorted(middles, np.cumsum(np.maximum(0, level - have))[:-1], side="right").tolist()
    for rank, start, stop in zip(readers, [0, *stops], [*stops, len(ends)], strict=True):
        if start < stop:
            load[rank] += int(ends[stop - 1]) - (int(ends[start - 1]) if start else 0)
            yield rank, group.rows[start:stop]


class _Edges:
    """What goes from rank to rank, as far as one rank has to do with it."""

    def __init__(self, me: int, hosts: Sequence[int]) -> None:
        self._me, self._hosts = me, hosts
        self.reads: list[Array] = []
        self.both: tuple[dict[int, list[Array]], dict[int, list[Array]]] = defaultdict(list), defaultdict(list)
        """What is sent, by receiver; what is received, by sender."""

    def add(self, group: _Group, reader: int, rows: Array) -> None:
        """Add rows of a group and who reads them."""
        if reader == self._me:
            self.reads.append(rows)
        mine = self._hosts[self._me]
        for host, ranks in group.served.items():
            # Of what goes on elsewhere, only what touches this host matters.
            if reader == self._me or host == mine:
                self._serve(reader, host, ranks, rows, len(group.readers))

    def _serve(self, reader: int, host: int, ranks: Sequence[int], rows: Array, readers: int) -> None:
        if host == self._hosts[reader]:
            self._fan_out(reader, ranks, rows)
            return
        # Through one rank of the other host, and another one for each reader; where readers are few, through all.
        at = reader % len(ranks)
        relays = ranks if readers < len(ranks) else [ranks[at]]
        for i, relay in enumerate(relays):
            part = rows[i :: len(relays)]
            self._edge(reader, relay, part)
            self._fan_out(relay, ranks, part)

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
