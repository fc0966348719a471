"""A small race: whether a store really creates an object only once."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tierstate.manifest.errors import TierError

ROUNDS, RACERS = 4, 8

Create = Callable[[str], None]
"""Creates an object of the given name under the condition that there is none."""


def one_winner(create: Create, delete: Callable[[str], None]) -> bool:
    """Whether every round of several creates at once had one winner.

    A store that ignores the condition lets everybody win; one that checks it and then writes lets some. True proves
    nothing about a race to come: it says that none of these was lost.

    Raises:
        TierError: nobody won, for another reason than that the name was taken.
    """
    with ThreadPoolExecutor(RACERS) as pool:
        for _ in range(ROUNDS):
            name = f".probe-{uuid.uuid4().hex}"
            start = threading.Barrier(RACERS)
            outcomes = list(pool.map(lambda _, name=name, start=start: _try(create, name, start), range(RACERS)))
            winners = outcomes.count(None)
            if not winners:
                raise next(error for error in outcomes if error is not None)
            delete(name)
            if winners > 1:
                return False
    return True


def _try(create: Create, name: str, start: threading.Barrier) -> TierError | None:
    start.wait()
    try:
        create(name)
    except TierError as error:
        return error
    return None
