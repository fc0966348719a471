"""Fault injection: a wrapper of a tier in which chosen calls fail, damage data, or have no effect."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tierstate.manifest.chunk import Buffer
from tierstate.tiers.base import ObjectWriter, Range, Release, Tier
from tierstate.tiers.wrappers.base import Wrapping, WrappingWriter

FaultyCall: TypeAlias = Literal["put", "read", "list", "size", "delete", "age", "writer", "append", "close"]


Damage: TypeAlias = Literal["flip", "truncate", "drop"]


@dataclass(frozen=True)
class Fault:
    """One fault: which call fails, and how.

    Attributes:
        operation: the operation; ``append`` and ``close`` are those of writers, counted over all writers.
        at: number of the call, from 1; 0 for every call.
        error: raised instead of the call, or after it: a copy each time, as a tier makes its errors anew.
        after: the call takes effect before ``error`` is raised: its answer is lost.
        damage: without any error, ``flip`` inverts bit ``8 * where`` of the bytes, ``truncate`` loses the bytes from
            ``where`` on, ``drop`` skips the call. A truncated or dropped read leaves the rest of ``out`` as it was.
        where: offset of a byte in what is put, appended, or read by the first range.
    """

    operation: FaultyCall
    at: int = 1
    error: BaseException | None = None
    after: bool = False
    damage: Damage | None = None
    where: int = 0


class Faulty(Wrapping):
    """A wrapper of a tier that injects faults. ``calls`` counts the calls of each operation, also those that failed.

    Example: the third ``put`` takes effect, and its answer is lost::

        tier = Faulty(Memory(), Fault("put", 3, TierUnavailable("no answer"), after=True))
    """

    def __init__(self, inner: Tier, *faults: Fault) -> None:
        super().__init__(inner)
        self.faults = list(faults)
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        """Add a fault; its calls are counted from now on."""
        with self._lock:
            at = fault.at and fault.at + self.calls[fault.operation]
        self.faults.append(Fault(fault.operation, at, fault.error, fault.after, fault.damage, fault.where))

    def heal(self) -> None:
        """Remove all faults."""
        self.faults.clear()

    def begin(self, operation: FaultyCall) -> Fault | None:
        """Count a call; raise its error if that comes before the call, otherwise return its fault, for `end`."""
        with self._lock:
            self.calls[operation] += 1
            n = self.calls[operation]
        fault = next((f for f in self.faults if f.operation == operation and f.at in (0, n)), None)
        if fault is not None and fault.error is not None and not fault.after:
            raise _anew(fault.error)
        return fault

    def put(self, key: str, data: Buffer) -> None:
        fault = self.begin("put")
        if not _dropped(fault):
            self.inner.put(key, damaged(data, fault))
        end(fault)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        fault = self.begin("read")
        if not _dropped(fault):
            before = ranges[0].out.clone() if ranges else None
            self.inner.read(key, ranges)
            if ranges and before is not None and fault is not None and fault.damage:
                got = damaged(ranges[0].out, fault).clone()
                ranges[0].out.copy_(before)
                ranges[0].out[: got.numel()].copy_(got)
        end(fault)

    def list(self, prefix: str) -> Iterator[str]:
        fault = self.begin("list")
        keys = iter(()) if _dropped(fault) else self.inner.list(prefix)
        end(fault)
        return keys

    def size(self, key: str) -> int:
        fault = self.begin("size")
        size = self.inner.size(key)
        end(fault)
        return size

    def delete(self, key: str) -> None:
        fault = self.begin("delete")
        if not _dropped(fault):
            self.inner.delete(key)
        end(fault)

    def discard(self, keys: Iterable[str]) -> None:
        for key in keys:  # one by one, so that a fault may leave any part of them
            self.delete(key)

    def age(self, key: str) -> float | None:
        fault = self.begin("age")
        age = self.inner.age(key)
        end(fault)
        return age

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        fault = self.begin("writer")
        writer = FaultyWriter(self, self.inner.writer(key, size_hint))
        end(fault)
        return writer


class FaultyWriter(WrappingWriter):
    """A wrapper of a writer that injects the faults of its tier. After an error it aborts the object."""

    def __init__(self, tier: Faulty, inner: ObjectWriter) -> None:
        super().__init__(inner)
        self._tier = tier

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        try:
            fault = self._tier.begin("append")
        except BaseException as error:
            self.give_up(error)
            if release is not None:
                release()
            raise
        if _dropped(fault):
            if release is not None:
                release()
        else:
            self.inner.append(damaged(buffer, fault), release)
        try:
            end(fault)
        except BaseException as error:
            self.give_up(error)
            raise

    def close(self) -> None:
        self.check()
        try:
            fault = self._tier.begin("close")
            if _dropped(fault):
                self.inner.abort()
            else:
                self.inner.close()
            end(fault)
        except BaseException as error:
            self.give_up(error)
            raise


def damaged(data: Buffer, fault: Fault | None) -> Buffer:
    """The bytes with the fault's damage; the same buffer if there is no damage."""
    if fault is None or not data.numel():
        return data
    if fault.damage == "truncate":
        return data[: fault.where]
    if fault.damage == "flip":
        data = data.clone()
        data[min(fault.where, data.numel() - 1)] ^= 1
    return data


def end(fault: Fault | None) -> None:
    """Raise the fault's error, if it comes after the call's effect."""
    if fault is not None and fault.error is not None and fault.after:
        raise _anew(fault.error)


def _anew(error: BaseException) -> BaseException:
    """A copy of an error, so that traceback and notes of one call do not get into the next one's; the error itself if
    its class cannot be copied."""
    try:
        return copy(error)
    except Exception:
        return error


def _dropped(fault: Fault | None) -> bool:
    return fault is not None and fault.damage == "drop"
