"""The read set of a lazy capture: proves that tensors read after `save` has returned were not changed in between.

This is optimistic concurrency control: note the version of everything that is read, read, and then validate that no
version has moved (Kung and Robinson, 1981). A tensor's version is torch's own counter of in-place changes, which
autograd uses too. What does not count, such as writes through ``.data``, is looked for in a sample of the bytes.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.leaf_path import Path as LeafPath
from tierstate.tiers.latch import Latch
from tierstate.tiers.thread_stacks import thread_stacks

PATIENCE = 0.5
"""Seconds that a validation waits for each thread to come to its next instruction, before it compares bytes."""


SAMPLES = 4
"""Words of 4 bytes of each source in host memory that are compared: the first, the last, and others in between."""


GOLDEN = 0.6180339887498949
"""Fractions of multiples of it are spread evenly: the sample of each save is at other places."""


DEPTH = 16
"""Frames of a thread's stack that tell where it is."""


NAMED = 3
"""Leaves that an error names."""


class ThreadState(NamedTuple):
    """What a thread is at.

    Attributes:
        at: the instructions at which its innermost functions are.
        ran: if it sleeps, for how long and how often it has run, as Linux says; empty if that is not known.
    """

    at: tuple[tuple[CodeType, int], ...]
    ran: str

    @property
    def waiting(self) -> bool:
        """Whether it is in a function that only waits."""
        return bool(self.at) and self.at[0][0] in _WAITING


_WAITING = {
    function.__code__
    for function in (
        Latch.wait,
        threading.Condition.wait,
        threading.Thread.join,
        getattr(threading.Thread, "_wait_for_tstate_lock", threading.Thread.join),  # until Python 3.12
        selectors.DefaultSelector.select,
    )
}
"""Functions in which a thread only waits: it changes no tensor while it is there."""


@dataclass(eq=False, repr=False)
class ReadSet:
    """The tensors of the leaves that are captured after `save` has returned, with their versions at the call.

    Attributes:
        leaves: ``(n,)``: index of each leaf.
        values: its tensor, as the state has it; the local one, if it is sharded.
        others: tensors whose memory the leaves share: those of the guarded optimizers, and the local ones of DTensors.
            A DTensor counts what is done to it, and not what is done to its local tensor.
        addresses: where each of them was.
        versions: of the values and the others.
        identities: of the others, below Python, which `torch.utils.swap_tensors` exchanges.
        storages: of the values; kept, so that a tensor that gets other memory does not free it.
        starts, ends: addresses at which each storage begins and ends.
        owner, at, words: the sample: of each word the leaf, the address, and the bytes that were there.
        threads: what each thread was at, by its ident.
        unstable: where the paths of leaves go that have changed.
    """

    leaves: Array
    values: Sequence[torch.Tensor]
    others: Sequence[torch.Tensor]
    addresses: Sequence[int]
    versions: list[int]
    identities: list[int]
    storages: list[torch.UntypedStorage]
    starts: list[int]
    ends: list[int]
    owner: Array
    at: Array
    words: Array
    threads: dict[int, ThreadState]
    unstable: set[LeafPath]

    @classmethod
    def of(
        cls,
        leaves: Array,
        values: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        addresses: Sequence[int],
        host: tuple[Array, Array, Array],
        turn: int,
        unstable: set[LeafPath],
    ) -> Self | None:
        """The read set as it is now; None if a tensor does not count its changes (inference tensors do not).

        Args:
            leaves, values, others, addresses, unstable: as the attributes.
            host: ``(m,)`` each: leaf, address and length in bytes of the sources in host memory.
            turn: the number of the save, which decides where the samples are.
        """
        try:
            versions = [tensor._version for tensor in (*values, *others)]
        except RuntimeError:
            return None
        identities = [tensor._cdata for tensor in others]
        storages = [value.untyped_storage() for value in values]
        starts = [storage.data_ptr() for storage in storages]
        ends = [start + storage.nbytes() for start, storage in zip(starts, storages, strict=True)]
        owner, at = _sample_places(*host, turn)
        sample = owner, at, _read(at)
        return cls(
            leaves,
            values,
            others,
            addresses,
            versions,
            identities,
            storages,
            starts,
            ends,
            *sample,
            _threads(),
            unstable,
        )

    def only(self, leaves: Array) -> Self:
        """The read set of some of the leaves: the others are read from a copy."""
        kept, some = np.flatnonzero(np.isin(self.leaves, leaves)).tolist(), np.isin(self.owner, leaves)
        return replace(
            self,
            leaves=self.leaves[kept],
            values=[self.values[i] for i in kept],
            versions=[*(self.versions[i] for i in kept), *self.versions[len(self.values) :]],
            storages=[self.storages[i] for i in kept],
            starts=[self.starts[i] for i in kept],
            ends=[self.ends[i] for i in kept],
            owner=self.owner[some],
            at=self.at[some],
            words=self.words[some],
        )

    def freed(self) -> set[int]:
        """Leaves whose memory was freed or moved by resizing its storage: it must not be read any more."""
        kept = zip(self.leaves.tolist(), self.storages, self.starts, self.ends, strict=True)
        return {
            leaf for leaf, storage, start, end in kept if storage.data_ptr() != start or start + storage.nbytes() < end
        }

    def settle(self, stop: Callable[[], bool]) -> bool:
        """Wait until no operation is under way any more that may have begun before this call.

        Torch counts a change when the operation ends, and runs it without the interpreter's lock. So a change may be
        under way that no version shows yet. It has ended when its thread is at another instruction, or waits.

        Returns:
            False if some thread stayed where it was for PATIENCE seconds, or ``stop`` returned true.
        """
        before, end, pause = _threads(), time.monotonic() + PATIENCE, 0.0001
        # One that has not run since the call is waiting for something, or in an operation from before the call.
        left = {i: state for i, state in before.items() if not state.waiting and not self._rested(i, state)}
        while left:
            now = _threads()
            left = {i: state for i, state in left.items() if i in now and not now[i].waiting and now[i].at == state.at}
            if left and (stop() or time.monotonic() > end):
                return False
            time.sleep(pause if left else 0)
            pause = min(2 * pause, 0.005)
        return True

    def _rested(self, ident: int, state: ThreadState) -> bool:
        """Whether a thread has not run since the call."""
        return bool(state.ran) and state == self.threads.get(ident)

    def changed(self) -> set[int]:
        """Leaves that have changed since the call, as far as versions and samples show."""
        if freed := self.freed():
            return freed  # their samples must not be read
        count, now = len(self.values), [tensor._version for tensor in (*self.values, *self.others)]
        moved = {i for i, (version, then) in enumerate(zip(now, self.versions, strict=True)) if version != then}
        identities = zip(self.others, self.identities, strict=True)
        moved |= {i for i, (tensor, then) in enumerate(identities, count) if tensor._cdata != then}
        changed = {int(self.leaves[i]) for i in moved if i < count}
        changed.update(*(self._around(self.addresses[i - count]) for i in moved if i >= count))
        return changed | {*self.owner[_read(self.at) != self.words].tolist()}

    def _around(self, address: int) -> set[int]:
        """Leaves in whose storage an address lies."""
        spans = zip(self.leaves.tolist(), self.starts, self.ends, strict=True)
        return {leaf for leaf, start, end in spans if start <= address < end}

    def refuse(self, leaves: Sequence[Leaf]) -> CaptureError:
        """The error of a save during which these leaves were changed. The next save copies them before it returns."""
        self.unstable.update(leaf.path for leaf in leaves)
        names = ", ".join(leaf.name for leaf in leaves[:NAMED])
        more = f" and {len(leaves) - NAMED} more" if len(leaves) > NAMED else ""
        return CaptureError(
            f"leaf {names}{more}: changed between the return of save and its capture, by something else than the step "
            "of an optimizer, such as max_norm, load_state_dict, clipping or an average. This save is given up, and "
            "the next ones copy it before they return. To have it copied beside the training again, call "
            "wait_captured() of the last save before the change"
        )


def _threads() -> dict[int, ThreadState]:
    """The state of each other thread, by its ident; without the threads of this package."""
    known = {thread.ident: thread for thread in threading.enumerate()}
    found = {}
    for ident, at in thread_stacks(DEPTH).items():
        thread = known.get(ident)
        if ident == threading.get_ident() or (thread is not None and thread.name.startswith("tierstate-")):
            continue
        state = ThreadState(at, "")
        found[ident] = state if state.waiting or thread is None else state._replace(ran=_ran(thread.native_id))
    return found


def _ran(thread: int | None) -> str:
    """For how long a thread has run, if it sleeps; of one that runs Linux does not say it exactly."""
    try:
        state, ran = (Path(f"/proc/self/task/{thread}/{name}").read_text("utf-8") for name in ("stat", "schedstat"))
    except OSError:
        return ""
    return "" if state.rpartition(")")[2].split()[0] == "R" else ran


def _sample_places(leaf: Array, address: Array, nbytes: Array, turn: int) -> tuple[Array, Array]:
    """Leaf and address of each word of the sample."""
    first, past = -(-address // 4), (address + nbytes) // 4
    some = past > first
    leaf, first, last = leaf[some], first[some], past[some] - 1 - first[some]
    inner = [(last * ((turn * GOLDEN + i / (SAMPLES - 2)) % 1)).astype("i8") for i in range(SAMPLES - 2)]
    at = [first + within for within in (0 * last, last, *inner)]
    return np.tile(leaf, SAMPLES), 4 * np.concatenate(at)


class _Memory:
    """Host memory as an array of words, for NumPy to gather from. Only addresses that are known are read."""

    def __init__(self, low: int, high: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (low, True),
            "shape": ((high - low) // 4 + 1,),
            "typestr": "<u4",
            "version": 3,
        }


def _read(at: Array) -> Array:
    """``(n,)`` of uint32: the words at these addresses."""
    if not len(at):
        return np.zeros(0, "<u4")
    low, high = int(at.min()), int(at.max())
    words: Array = np.asarray(_Memory(low, high))[(at - low) // 4]
    return words
