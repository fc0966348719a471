"""The writer of peer memory: into this host's, then on to the partners, then visible in all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import AlreadyExists, TierError, TierstateError

from .base import Release
from .peer_client import Staging
from .peer_memory import KeptWriter
from .peer_peers import Peers
from .writing import StepWriter

SENT = 1 << 20
"""Bytes that are sent at once: so much is still in the processor's cache on both sides when it is summed and copied."""


class Step(NamedTuple):
    """One host at which an object becomes visible, and how that is taken back."""

    order: int
    commit: Callable[[], None]
    undo: Callable[[], None]


class PeerWriter(StepWriter):
    """Copies what is appended into this host's memory at once; `close` brings it to the partners.

    Args:
        name: the tier's.
        key: the object's.
        local: the object in this host's memory.
        peers: the other hosts.
        pace: called before so many bytes are sent; waits until they may be.
        piece: bytes that are sent at once.
    """

    def __init__(
        self, name: str, key: str, local: KeptWriter, peers: Peers, pace: Callable[[int], None], piece: int = SENT
    ) -> None:
        super().__init__(f"{name}: {key}")
        self._name, self._key, self._local, self._peers = name, key, local, peers
        self._pace, self._piece = pace, min(piece, SENT)

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        self._local.append(buffer)
        return False

    def _publish(self) -> None:
        nbytes = self._local.settle()
        staged: list[Staging] = []
        try:
            if self._peers.taken_elsewhere(self._key):
                raise AlreadyExists(
                    f"{self._place}: another host has an object of that name, nothing was changed",
                    tier=self._name,
                    key=self._key,
                )
            staged.extend(far.stage(self._key, nbytes) for far in self._peers.partners)
            self._send(staged, nbytes)
            self._show(staged)
        finally:
            for one in staged:
                one.close()

    def _send(self, staged: Sequence[Staging], nbytes: int) -> None:
        if not staged:
            return
        with self._local.seen() as written:
            for start in range(0, nbytes, self._piece):
                with written[start : min(start + self._piece, nbytes)] as piece:
                    for one in staged:
                        self._pace(len(piece))
                        one.send(piece)

    def _show(self, staged: Sequence[Staging]) -> None:
        """Make the object visible, host by host, or nowhere.

        All writers go from host to host in the same order, so that of two which race for a name, and have a host in
        common, one gets all of its hosts.
        """
        steps = [Step(self._peers.order(one.far), one.commit, one.undo) for one in staged]
        steps.append(Step(self._peers.order(None), self._local.close, self._local.undo))
        done: list[Step] = []
        for step in sorted(steps):
            try:
                step.commit()
            except BaseException as error:
                for before in reversed(done):
                    _undo(before, error)
                raise
            done.append(step)

    def _discard(self) -> None:
        self._local.abort()


def _undo(step: Step, error: BaseException) -> None:
    try:
        step.undo()
    except (TierstateError, TierError) as second:
        error.add_note(f"and a copy may be left that could not be removed: {second}")
