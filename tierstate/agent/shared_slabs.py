"""The slabs of trainers as their agent sees them: mapped from the trainers' files in memory, with leases of its own.

A trainer captures into slabs of a memfd and hands them over by their offsets. The memory lives as long as one of the
two has the file, so what was handed over outlives the trainer. A slab goes back to its trainer when the last lease here
ends; if the trainer is gone, its memory is given back to the system.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import FormatError
from tierstate.tiers.libc import libc
from tierstate.tiers.memory.pages import PAGE, map_shared

_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_numbers = itertools.count()


def _cannot_shrink(descriptor: int) -> bool:
    """Whether a file is in memory and sealed, so that nobody can take mapped pages away."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


class SharedSlab:
    """One slab of a trainer, with the leases of this process; a `Slab` for those that write from it.

    Attributes:
        buffer: its memory, mapped here.
        offset: where it lies in its file.
    """

    def __init__(self, slabs: SharedSlabs, buffer: Buffer, offset: int) -> None:
        self._slabs, self.buffer, self.offset = slabs, buffer, offset
        self.leases = 0
        self.kept = False

    def lease(self) -> None:
        """Add a lease."""
        with self._slabs.lock:
            self.leases += 1

    def release(self) -> None:
        """End a lease; the last one gives the slab back."""
        with self._slabs.lock:
            self.leases -= 1
            if self.leases:
                return
            self.kept = False
        self._slabs.give_back(self)


class SharedSlabs:
    """The file of one trainer's slabs.

    Args:
        descriptor: the memfd; closed when the last slab is back and `abandon` was called.
        slab_size: bytes of each slab.
        back: called with the offset of a slab that is free again, while the trainer lives.
        kept: called with the offset of a slab that a memory tier keeps.

    Attributes:
        number: of this file, among all that the agent has had.

    Raises:
        FormatError: it is no file in memory.
    """

    def __init__(
        self, descriptor: int, slab_size: int, back: Callable[[int], None], kept: Callable[[int], None]
    ) -> None:
        if slab_size <= 0 or slab_size % PAGE or not _cannot_shrink(descriptor):
            raise FormatError(f"descriptor {descriptor} is no sealed memfd with slabs of {slab_size} bytes")
        self.descriptor, self.slab_size, self.number = descriptor, slab_size, next(_numbers)
        self._back, self._kept = back, kept
        self.lock = threading.RLock()
        self._slabs: dict[int, SharedSlab] = {}
        self._by_address: dict[int, SharedSlab] = {}
        self._out: set[int] = set()
        self._gone = self._left = self._closed = False

    def take(self, offset: int) -> SharedSlab:
        """A slab that was handed over, with one lease.

        Raises:
            FormatError: the file has no such slab, or it is out already.
        """
        with self.lock:
            if offset < 0 or offset % PAGE or offset + self.slab_size > os.fstat(self.descriptor).st_size:
                raise FormatError(f"a slab at {offset} was handed over, which the file does not have")
            if offset in self._out:
                raise FormatError(f"the slab at {offset} was handed over twice")
            slab = self._slabs.get(offset)
            if slab is None:
                buffer = map_shared(self.descriptor, offset, self.slab_size)
                slab = self._slabs[offset] = SharedSlab(self, buffer, offset)
                self._by_address[buffer.data_ptr()] = slab
            slab.leases = 1
            self._out.add(offset)
            return slab

    def find(self, address: int) -> SharedSlab | None:
        """The slab whose memory begins at this address; None if it is not out."""
        with self.lock:
            slab = self._by_address.get(address)
            return slab if slab is not None and slab.offset in self._out else None

    def keep(self, slab: SharedSlab) -> int:
        """A memory tier keeps a slab from now on. Returns the bytes that this keeps in addition."""
        with self.lock:
            if slab.kept:
                return 0
            slab.kept = True
        self._kept(slab.offset)
        return self.slab_size

    def give_back(self, slab: SharedSlab) -> None:
        """The last lease of a slab has ended."""
        with self.lock:
            self._out.discard(slab.offset)
            gone = self._gone
            if gone:
                if not self._left:
                    self._free(slab.offset)
                self._close_if_done()
        if not gone:
            self._back(slab.offset)

    def abandon(self) -> None:
        """The trainer is gone: free every slab that was not handed over, and each other one when it is back."""
        with self.lock:
            if self._gone:
                return
            self._gone = True
            size = os.fstat(self.descriptor).st_size
            start = 0
            for offset in [*sorted(self._out), size]:
                self._free(start, offset - start)
                start = offset + self.slab_size
            self._close_if_done()

    def leave(self) -> None:
        """The trainer lives and uses its slabs itself from now on: none is freed, nor told when it is back."""
        with self.lock:
            if not self._gone:
                self._gone = self._left = True
                self._close_if_done()

    @property
    def is_closed(self) -> bool:
        """Whether the trainer is gone and nothing of its file is out."""
        with self.lock:
            return self._closed

    @property
    def held(self) -> int:
        """Bytes of the slabs that are out."""
        with self.lock:
            return len(self._out) * self.slab_size

    def _free(self, offset: int, nbytes: int | None = None) -> None:
        length = self.slab_size if nbytes is None else nbytes
        if nbytes is None and (slab := self._slabs.pop(offset, None)) is not None:
            del self._by_address[slab.buffer.data_ptr()]
        if length > 0:
            arguments = ctypes.c_int64(offset), ctypes.c_int64(length)
            libc().fallocate(self.descriptor, _PUNCH_HOLE | _KEEP_SIZE, *arguments)

    def _close_if_done(self) -> None:
        if self._gone and not self._out and not self._closed:
            self._closed = True
            self._slabs.clear()
            self._by_address.clear()
            with suppress(OSError):
                os.close(self.descriptor)


class AllSlabs:
    """The slabs of all trainers, as the memory tier's arena: it finds the slab in which a buffer lies.

    Args:
        slab_size: bytes of each slab, the same for all trainers of a policy.
    """

    def __init__(self, slab_size: int) -> None:
        self.slab_size = slab_size
        self._files: list[SharedSlabs] = []
        self._lock = threading.Lock()

    def add(self, slabs: SharedSlabs) -> None:
        """Take in the file of a new trainer."""
        with self._lock:
            self._files.append(slabs)

    def forget_closed(self) -> None:
        """Forget the files that are closed, of which nothing is out."""
        with self._lock:
            self._files = [slabs for slabs in self._files if not slabs.is_closed]

    def keep(self, buffer: Buffer) -> int:
        """Take the slab with this buffer for longer. Returns the bytes that this keeps in addition."""
        found = self._find(buffer)
        return 0 if found is None else found[0].keep(found[1])

    def place(self, buffer: Buffer) -> tuple[SharedSlabs, int] | None:
        """The file in which a buffer lies, and the offset of its first byte there; None if it is private memory."""
        found = self._find(buffer)
        if found is None:
            return None
        slabs, slab = found
        return slabs, slab.offset + buffer.data_ptr() - slab.buffer.data_ptr()

    def _find(self, buffer: Buffer) -> tuple[SharedSlabs, SharedSlab] | None:
        address = buffer.untyped_storage().data_ptr()
        with self._lock:
            files = list(self._files)
        for slabs in files:
            if (slab := slabs.find(address)) is not None:
                return slabs, slab
        return None
