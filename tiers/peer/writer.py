"""The writer of an object in peer memory: kept on this host, sent to partners, made visible on all hosts or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.errors import AlreadyExists, TierError, TierstateError
from tierstate.tiers.base import AtomicWriter, Release

from .client import PeerHosts, RemoteStaging
from .local import LocalWriter

SENT = 1 << 20
"""Bytes of a piece that is sent at once: few enough to stay in the processor's cache for MAC and copy."""


class PublishStep(NamedTuple):
    """One step of making an object visible: the host's place in the order, and how to do and undo it on that host."""

    order: int
    commit: Callable[[], None]
    undo: Callable[[], None]


class PeerWriter(AtomicWriter):
    """Copies appended bytes into this host's memory at once; `close` sends the object to the partners.

    Args:
        name: the tier's name.
        key: the object's key.
        local: the writer of the object in this host's memory.
        peers: the other hosts.
        pace: called with a number of bytes before they are sent; waits until the rate limit allows them.
        piece: bytes that are sent at once, at most.
    """

    def __init__(
        self, name: str, key: str, local: LocalWriter, peers: PeerHosts, pace: Callable[[int], None], piece: int = SENT
    ) -> None:
        super().__init__(f"{name}: {key}")
        self._name, self._key, self._local, self._peers = name, key, local, peers
        self._pace, self._piece = pace, min(piece, SENT)

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        self._local.append(view(buffer))
        return False

    def _publish(self) -> None:
        nbytes = self._local.length
        staged: list[RemoteStaging] = []
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

    def _send(self, staged: Sequence[RemoteStaging], nbytes: int) -> None:
        if not staged:
            return
        with self._local.seen() as written:
            for start in range(0, nbytes, self._piece):
                with written[start : min(start + self._piece, nbytes)] as piece:
                    for one in staged:
                        self._pace(len(piece))
                        one.send(piece)

    def _show(self, staged: Sequence[RemoteStaging]) -> None:
        """Make the object visible on one host after the other; if one fails, undo it on those before.

        All writers take the hosts in the same order. So if two writers race for a name and have a host in common, one
        of them succeeds on all of its hosts.
        """
        steps = [PublishStep(self._peers.order(one.far), one.commit, one.undo) for one in staged]
        steps.append(PublishStep(self._peers.order(None), self._local.close, self._local.undo))
        done: list[PublishStep] = []
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


def _undo(step: PublishStep, error: BaseException) -> None:
    try:
        step.undo()
    except (TierstateError, TierError) as second:
        error.add_note(f"and a copy may be left that could not be removed: {second}")
