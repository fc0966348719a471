"""Writing: the order in which an object comes to be, the same in every tier of ours."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import TierError

from .base import ObjectWriter, Release, Tier


class StepWriter(ObjectWriter):
    """A writer that is open, then closed or given up, and never publishes a part of an object.

    A failure at any step gives the object up: a caller that goes on regardless gets the same failure at ``close``.
    The steps of one writer exclude each other, so that an abort from another thread waits for the append under way.

    Args:
        place: tier and key, for messages.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._open = True
        self._failure: BaseException | None = None
        self._step = threading.RLock()

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        kept = False
        try:
            with self._step:
                if not self._open:
                    raise ValueError(f"{self._place}: nothing can be added: the writer is closed or was given up")
                with self._giving_up():
                    kept = self._add(buffer, release)
        finally:
            # Outside the lock: what a caller does on release is not ours to hold up.
            if release is not None and not kept:
                release()

    def close(self) -> None:
        with self._step:
            if isinstance(self._failure, Exception):
                raise self._failure
            if self._failure is not None:
                raise TierError(f"{self._place}: was given up when it was interrupted") from self._failure
            if self._open:
                with self._giving_up():
                    self._publish()
                self._open = False

    def abort(self) -> None:
        with self._step:
            if self._open:
                self._open = False
                self._discard()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._open, self._failure = False, error
            self._discard()
            raise

    @abstractmethod
    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        """Take the bytes; whether the lease is kept, to be released by whoever frees the object."""

    @abstractmethod
    def _publish(self) -> None:
        """Make the object visible, whole. On an error nothing is visible; `_discard` follows."""

    @abstractmethod
    def _discard(self) -> None:
        """Leave nothing behind, and release the leases that were kept. Called once at most."""


class Gather(StepWriter):
    """The writer of a tier that has none of its own: gathers copies, and puts them in one piece."""

    def __init__(self, tier: Tier, key: str) -> None:
        super().__init__(f"{tier.name}: {key}")
        self._tier, self._key = tier, key
        self._pieces: list[Buffer] = []

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        self._pieces.append(buffer.clone())
        return False

    def _publish(self) -> None:
        self._tier.put(self._key, torch.cat([empty_buffer(0), *self._pieces]))
        self._pieces = []

    def _discard(self) -> None:
        self._pieces = []
