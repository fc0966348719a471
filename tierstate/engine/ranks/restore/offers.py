"""What each rank wants of a version and can read of it (*reaches*), as a message to all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.manifest.format import table as col

from .exchange_plan import WANTED, RankRows, decode_runs, encode_runs

WHAT = "what another rank wants"
"""Names the offer of another rank in error messages."""


def encode_offer(address: str, sets: Mapping[str, Array]) -> bytes:
    """What one rank wants and reaches, by name as runs, with the address of its listening socket; as bytes."""
    columns = {name: encode_runs(runs) for name, runs in sets.items()}
    return col.encode_table({"address": address}, {name: np.frombuffer(d, "<u1") for name, d in columns.items()})


class SaidOffers(NamedTuple):
    """What all ranks want and reach; each a list by rank.

    Attributes:
        offers: the rows that they still want now, and what they reach.
        later: the same for all that they want in all.
        addresses: of their listening sockets.
        away: the rows in tiers that they could not ask.
        elsewhere: the leaves that their states do not have.
    """

    offers: list[RankRows]
    later: list[RankRows]
    addresses: list[str]
    away: list[Array]
    elsewhere: list[Array]


def decode_offers(answers: Sequence[bytes], rows: int, leaves: int) -> SaidOffers:
    """The offers that `encode_offer` has encoded.

    Args:
        rows, leaves: how many chunks and leaves the version has.

    Raises:
        FormatError: one of them is no offer.
    """
    found, known = SaidOffers([], [], [], [], []), dict[tuple[bytes, int], Array]()

    def runs(columns: col.Columns, name: str, count: int) -> Array:
        data = _column(columns, name)
        if (data, count) not in known:  # many ranks say the same
            known[data, count] = decode_runs(data, count)
        return known[data, count]

    for said in answers:
        head, columns = col.decode_table(memoryview(said), WHAT)
        sets = [runs(columns, f"rows.{i}", rows) for i in range(WANTED + 1)]
        reach = (sets[0], sets[1], sets[2], sets[3])
        found.offers.append(RankRows(sets[WANTED], reach))
        found.later.append(RankRows(runs(columns, "rows.all", rows), reach))
        found.addresses.append(col.json_field(head, "address", str, WHAT))
        found.away.append(runs(columns, "rows.away", rows))
        found.elsewhere.append(runs(columns, "elsewhere", leaves))
    return found


def _column(columns: col.Columns, name: str) -> bytes:
    return col.column(columns, name, "<u1", WHAT).tobytes()
