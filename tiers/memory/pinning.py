"""Pinning: register host memory with CUDA (page-lock it), so that copies from devices are asynchronous.

`Pinning` keeps account for one owner, such as an arena. What CUDA refuses is told once, with the limits of this process
and what to do; then nothing more is tried, and the memory is used unpinned.
"""

from __future__ import annotations

import logging
import threading

import torch

from tierstate.manifest.chunk import Buffer
from tierstate.tiers.units import rough_size

from .cudart import clear_last_error, device_in_use, relaxed_capture
from .limits import REMEDY, MemoryLimits

log = logging.getLogger("tierstate")


PORTABLE = 1
"""cudaHostRegisterPortable: the memory counts as pinned for all devices, not only for the one in use."""


_UNPINNED = (0, 4, 713)
"""Answers to ``cudaHostUnregister`` after which memory is not registered: done; ``cudaErrorCudartUnloading``: the
process ends, and its registrations with it; ``cudaErrorHostMemoryNotRegistered``."""


_still_pinned: list[Buffer] = []
"""Memory that CUDA did not unregister, kept mapped: see `Pinning.remove`."""


def pin_memory(buffer: Buffer, device: int | None = None) -> int | None:
    """Register the buffer with CUDA.

    Args:
        device: the CUDA device whose context is used, if this process has used it; else one that it has used.

    Returns:
        0, or CUDA's error; None while this process does not use CUDA.
    """
    if (device := device_in_use(device)) is None:
        return None
    with relaxed_capture(), torch.cuda.device(device):
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), PORTABLE))
        if code != 0:
            clear_last_error()
    return code


def unpin_memory(buffer: Buffer, device: int | None = None) -> int:
    """Undo `pin_memory`, before the memory is unmapped. Returns 0, or CUDA's error."""
    with relaxed_capture(), torch.cuda.device(device_in_use(device)):
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # Twice: the first error may be that of a kernel before, and tells nothing of this call (CUDA Runtime API).
        for _ in range(2):
            code = int(cudart.cudaHostUnregister(buffer.data_ptr()))
            if code != 0:
                clear_last_error()
            if code in _UNPINNED:
                return 0
    return code


class Pinning:
    """The memory that one owner has pinned.

    Args:
        owner: what it is, for messages, such as "an arena of 2 GiB".

    Attributes:
        nbytes: bytes that are pinned now.
        refused: whether CUDA has refused memory. Then no more is pinned: each refusal takes time.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._kept = False
        self.nbytes = 0
        self.refused = False

    def add(self, buffer: Buffer, device: int | None) -> bool | None:
        """Pin memory. Returns whether it is pinned now; None while this process does not use CUDA."""
        if self.refused:
            return False
        code = pin_memory(buffer, device)
        if code == 0:
            with self._lock:
                self.nbytes += buffer.numel()
        elif code is not None:
            self._tell(buffer, code)
        return None if code is None else code == 0

    def _tell(self, buffer: Buffer, code: int) -> None:
        with self._lock:
            first, self.refused = not self.refused, True
        if first:
            log.warning(
                "CUDA refused to pin %s of %s (error %d), of which %s are pinned; the rest is used as it is, and "
                "copies from devices into it are slower. %s. To change it: %s.",
                rough_size(buffer.numel()),
                self._owner,
                code,
                rough_size(self.nbytes),
                MemoryLimits.of_process().told(),
                REMEDY,
            )

    def remove(self, buffer: Buffer, device: int | None) -> bool:
        """Unpin memory that was pinned by `add`. Returns whether it may be unmapped and used otherwise.

        Memory that CUDA does not unregister stays mapped until the process ends. Otherwise other memory could be mapped
        at its addresses, and a device would go on writing to the pages that were there before. This is logged, once,
        and never raised: it concerns nothing that was saved.
        """
        error: object
        try:
            error = unpin_memory(buffer, device)
        except Exception as failure:  # torch's, for a device that has failed
            error = failure
        with self._lock:
            if not error:
                self.nbytes -= buffer.numel()
                return True
            _still_pinned.append(buffer)
            first, self._kept = not self._kept, True
        if first:
            log.warning(
                "CUDA did not unpin memory of %s (%s): it stays with this process until it ends",
                self._owner,
                f"error {error}" if isinstance(error, int) else repr(error),
            )
        return False
