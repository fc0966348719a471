"""Deterministic interleaving: several actors on one place, of which one at a time may do its next operation.

Races between processes are rare and hard to repeat. Here each actor is a thread with its own handle on the place, an
`Interleaved` tier, which waits before each operation for its actor's turn. The next actor is chosen only when every
actor waits or has ended. So a list of numbers determines one history of the place, and hypothesis can search for a list
that breaks a promise, and shorten it::

    from tierstate.tiers.testing import Interleaved, Turns

    @given(stretches=st.lists(st.integers(0, 9)))
    def test_two_writers_of_one_key(stretches):
        place, turns = MyPlace(), Turns(stretches)
        one, two = (Interleaved(MyTier(place), turns, name) for name in ("one", "two"))
        results = turns.run({"one": lambda: one.put("a", ONE), "two": lambda: two.put("a", TWO)})
        assert [type(error) for error in results.errors.values()] == [AlreadyExists]

An actor may be a whole `Checkpointer`: its own threads then share the actor's turns, in no determined order.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tierstate.manifest.chunk import Buffer
from tierstate.tiers.base import ObjectWriter, Range, Release, Tier
from tierstate.tiers.wrappers.base import Wrapping, WrappingWriter

STUCK_AFTER = 60.0
"""Seconds without any operation after which `Turns.run` raises an error that says who waits for what."""


@dataclass
class ActorResults:
    """By actor's name, what its function returned, or what it raised."""

    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)


class Turns:
    """The schedule: which actor may go on, and for how many operations.

    Args:
        stretches: how many operations the first actor does, then the next one, and so on, round and round; actors that
            have ended are skipped. After the last number each actor runs to its end, one after the other. So an empty
            list interleaves nothing, and a short list little.
    """

    def __init__(self, stretches: Iterable[int]) -> None:
        self._stretches = iter(stretches)
        self._changed = threading.Condition()
        self._running: list[str] = []
        self._waiting: Counter[str] = Counter()
        self._turn = ""
        self._left: int | None = None
        self._busy = False
        self._stuck: AssertionError | None = None
        self.history: list[tuple[str, str]] = []
        """Every operation so far: the actor and the operation."""

    def run(self, actors: Mapping[str, Callable[[], Any]]) -> ActorResults:
        """Run each function in a thread of its own, and wait until all have ended.

        Raises:
            AssertionError: no actor can go on.
        """
        results = ActorResults()
        self._running = list(actors)
        self._next(self._running[-1])
        threads = [threading.Thread(target=self._act, args=(name, act, results)) for name, act in actors.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._stuck is not None:
            raise self._stuck
        return results

    def _act(self, name: str, act: Callable[[], Any], results: ActorResults) -> None:
        try:
            results.results[name] = act()
        except BaseException as error:
            results.errors[name] = error
        finally:
            with self._changed:
                after = self._running[(self._running.index(name) + 1) % len(self._running)]
                self._running.remove(name)
                if self._turn == name:
                    self._turn, self._left = after, next(self._stretches, None)
                self._changed.notify_all()

    def _next(self, name: str) -> None:
        """Give the turn to the actor after ``name``."""
        self._turn = self._running[(self._running.index(name) + 1) % len(self._running)]
        self._left = next(self._stretches, None)

    @contextmanager
    def turn(self, actor: str, operation: str) -> Iterator[None]:
        """Wait for an actor's turn, and hold it during the block. Outside of `run` there is no waiting."""
        with self._changed:
            acting = actor in self._running
            if acting:
                self._await(actor, operation)
                self.history.append((actor, operation))
        try:
            yield
        finally:
            if acting:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _await(self, actor: str, operation: str) -> None:
        self._waiting[actor] += 1
        self._changed.notify_all()
        end = time.monotonic() + STUCK_AFTER
        while self._stuck is None and not self._may_go(actor):
            if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                self._stuck = AssertionError(f"{actor} waits for its turn to {operation}: {self}")
                self._changed.notify_all()
        if self._stuck is not None:
            raise self._stuck
        self._waiting[actor] -= 1
        self._busy = True
        if self._left is not None:
            self._left -= 1

    def _may_go(self, actor: str) -> bool:
        if self._busy or not all(self._waiting[name] for name in self._running):
            return False
        while self._left == 0:
            self._next(self._turn)
        return self._turn == actor

    def __repr__(self) -> str:
        return f"<Turns: running {self._running}, turn of {self._turn}, waiting {dict(self._waiting)}>"


class Interleaved(Wrapping):
    """A wrapper of a tier that waits for its actor's turn before each operation, also those of writers.

    Args:
        inner: the actor's own handle on the place.
        turns: the schedule.
        actor: the actor's name.
    """

    def __init__(self, inner: Tier, turns: Turns, actor: str) -> None:
        super().__init__(inner)
        self._turns, self._actor = turns, actor

    def put(self, key: str, data: Buffer) -> None:
        with self._turns.turn(self._actor, f"put {key}"):
            self.inner.put(key, data)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        with self._turns.turn(self._actor, f"read {key}"):
            self.inner.read(key, ranges)

    def list(self, prefix: str) -> Iterator[str]:
        with self._turns.turn(self._actor, f"list {prefix}"):
            return iter([*self.inner.list(prefix)])

    def size(self, key: str) -> int:
        with self._turns.turn(self._actor, f"size {key}"):
            return self.inner.size(key)

    def delete(self, key: str) -> None:
        with self._turns.turn(self._actor, f"delete {key}"):
            self.inner.delete(key)

    def discard(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)

    def age(self, key: str) -> float | None:
        with self._turns.turn(self._actor, f"age {key}"):
            return self.inner.age(key)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        with self._turns.turn(self._actor, f"writer {key}"):
            return InterleavedWriter(self.inner.writer(key, size_hint), self._turns, self._actor, key)


class InterleavedWriter(WrappingWriter):
    """A wrapper of a writer that waits for its actor's turn before each operation."""

    def __init__(self, inner: ObjectWriter, turns: Turns, actor: str, key: str) -> None:
        super().__init__(inner)
        self._turns, self._actor, self._key = turns, actor, key

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        with self._turns.turn(self._actor, f"append {self._key}"):
            self.inner.append(buffer, release)

    def close(self) -> None:
        with self._turns.turn(self._actor, f"close {self._key}"):
            super().close()

    def abort(self) -> None:
        with self._turns.turn(self._actor, f"abort {self._key}"):
            self.inner.abort()
