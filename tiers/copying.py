"""Copying: a version brought to a tier that does not have it, by itself and not by the cascade."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import NotFound
from tierstate.manifest.log import RACES
from tierstate.manifest.record import Record

from .arena import Arena, Slab
from .catalog import Entry
from .fetch import Fetch, Sink
from .formatted import publication_of, whole
from .leasing import Moved, building_on
from .policy import Policy
from .route import Route
from .routes import Routes
from .shelf import Shelf


class _Told(Fetch):
    """Reads, and tells how much."""

    progress: Callable[[int], None]

    def run(self, rows: Sequence[int], sink: Sink) -> None:
        def told(row: int, raw: Buffer, slab: Slab | None) -> None:
            sink(row, raw, slab)
            self.progress(raw.numel())

        super().run(rows, told)


def copy_version(
    entry: Entry,
    shelf: Shelf,
    policy: Policy,
    arena: Arena,
    progress: Callable[[int], None] = lambda _nbytes: None,
) -> Record:
    """Publish a version in a tier, from those that have it: which leaves, and how encoded, as the policy says.

    Args:
        shelf: the run in the tier that gets it. One of its own, where a saver may be using the tier too.
        progress: called with the raw bytes read since the last call.

    Raises:
        NotFound: no rule sends a leaf there.
        AlreadyExists: it has come there meanwhile, or another version of that number has.
        Damaged: a chunk is whole in none of the tiers that have the version.
    """
    version = entry.version
    route = Routes(policy).of(version.leaves)[shelf.name]
    if not route.leaves.any():
        raise NotFound(f"no rule of the policy sends a leaf of step {version.head.step} to {shelf.name}")
    with _based(shelf):
        return _publish(entry, shelf, route, arena, progress)


@contextmanager
def _based(shelf: Shelf) -> Iterator[None]:
    with ExitStack() as held:
        for left in reversed(range(RACES)):
            try:
                held.enter_context(building_on(shelf))
                break
            except Moved:
                shelf.look_again()
                if not left:
                    raise
        yield


def _publish(entry: Entry, shelf: Shelf, route: Route, arena: Arena, progress: Callable[[int], None]) -> Record:
    version, stages = entry.version, partial(whole, entry.version)
    publication = publication_of(shelf, version.head, version.leaves, version.chunk_leaf, route, stages)
    fetch = _Told(version, entry.holdings, arena)
    fetch.progress = progress
    try:
        publication.copy(version, fetch)
        return publication.commit(version)
    except BaseException as error:
        publication.abort(error)
        raise
