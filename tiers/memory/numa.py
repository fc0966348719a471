"""NUMA: memory and threads that serve a CUDA device are placed on its node, where the machine has several.

A device reads and writes memory of another node by way of the link between the processors, which is slower and which
others use too. The node of a device is what sysfs says of its place on the PCI bus. Where there is one node, or the
device's is not known, nothing is done. No library is needed: memory is placed by the system call ``mbind``.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tierstate.manifest.chunk import Buffer
from tierstate.tiers.libc import libc

log = logging.getLogger("tierstate")


SYSTEM = Path("/sys")
"""Where sysfs is mounted."""


_MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259}
"""The number of the system call ``mbind``, by machine."""


_PREFERRED = 1
"""MPOL_PREFERRED: of this node while it has memory, else of any other. A bound process would be killed instead."""


_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One node: its number, and its CPUs."""

    number: int
    cpus: frozenset[int]

    def place(self, buffer: Buffer) -> bool:
        """Ask for memory of this node for the pages of a buffer that have none yet. Returns whether that was done.

        Args:
            buffer: whole pages, not faulted in.
        """
        words = self.number // _WORD + 1
        mask = (ctypes.c_ulong * words)()
        mask[self.number // _WORD] = 1 << self.number % _WORD
        # One more than there are bits: the kernel takes one off.
        error = _mbind(buffer.data_ptr(), buffer.numel(), _PREFERRED, mask, words * _WORD + 1)
        if error:
            # Refused in containers, and by kernels without NUMA: the memory is used wherever it lies.
            log.debug("memory is not placed on NUMA node %d: %s", self.number, os.strerror(error))
        return not error


def _mbind(address: int, nbytes: int, mode: int, mask: ctypes.Array[ctypes.c_ulong], bits: int) -> int:
    """The system call. Returns 0, or the error's number."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return 38  # ENOSYS
    start, length, most = ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_ulong(bits)
    answer = libc().syscall(ctypes.c_long(number), start, length, ctypes.c_int(mode), mask, most, ctypes.c_uint(0))
    return ctypes.get_errno() if answer else 0


@contextmanager
def running_on(node: NumaNode | None) -> Iterator[None]:
    """In the block, this thread and those that it starts run on the node's CPUs, of those that they may use.

    Without a node, or if the thread may use none of its CPUs, nothing is changed.
    """
    allowed = os.sched_getaffinity(0) if node is not None else set()
    here = allowed & node.cpus if node is not None else set()
    if not here or here == allowed or not _bind(here):
        yield
        return
    try:
        yield
    finally:
        # Unless somebody else has moved the thread meanwhile.
        if os.sched_getaffinity(0) == here:
            _bind(allowed)


def _bind(cpus: set[int]) -> bool:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        log.debug("a thread is not bound to the CPUs of a NUMA node: %s", error)
        return False
    return True


def node_of_device(device: int | None) -> NumaNode | None:
    """The node of a CUDA device; None for no device, if the node is not known, or if the machine has one node only.

    Args:
        device: a device of a process that uses CUDA already: it is asked for its place on the PCI bus.
    """
    return None if device is None else _node_of_device(device, SYSTEM)


@lru_cache(maxsize=64)
def _node_of_device(device: int, system: Path) -> NumaNode | None:
    if len(nodes(system)) < 2:
        return None
    found: Any = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_bus_id"):  # an older torch
        return None
    return node_at(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0", system)


def node_at(place: str, system: Path = SYSTEM) -> NumaNode | None:
    """The node of a PCI device; None if the machine has one node only, or does not tell.

    Args:
        place: its address on the bus, such as ``0000:3b:00.0``.
        system: where sysfs is mounted.
    """
    number, online = _number(system / "bus/pci/devices" / place / "numa_node"), nodes(system)
    if number not in online or len(online) < 2:  # -1: the firmware does not tell
        return None
    cpus = _listed(system / f"devices/system/node/node{number}/cpulist")
    return NumaNode(number, frozenset(cpus)) if cpus else None  # a node without CPUs may be the device's own memory


def nodes(system: Path = SYSTEM) -> list[int]:
    """The nodes that have memory."""
    return _listed(system / "devices/system/node/has_memory") or _listed(system / "devices/system/node/online")


def _number(file: Path) -> int:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return -1


def _listed(file: Path) -> list[int]:
    """The numbers of a list such as ``0-3,8``; none if there is no such file."""
    found: list[int] = []
    with suppress(OSError, ValueError):
        for part in filter(None, file.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    return found
