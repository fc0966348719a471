"""Data loaders whose position is saved and restored: the epoch, the batches handed out, and the order of what follows.

A `DataLoader` keeps nothing of that itself, and each new iterator of one draws from the process's random generators, so
that a loop which makes a new iterator after a restore goes on with other numbers. `Loader` gives the loader a stream of
random numbers of its own, from a seed and the number of the epoch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from .samplers import check_samplers, has_state, load_sampler, sampler_state, samplers_of
from .stateful import Rng

_ORDERED_AT_FIRST = (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
"""Samplers that draw from the process's generators for their first index at most."""


_ITERATORS = ("__iter__", "_get_iterator")


_USE = "use torchdata's StatefulDataLoader, or a torch.utils.data.DataLoader over a dataset with indices"


class Loader:
    """A data loader that goes on after a restore with exactly the batches that it would have handed out.

    Iterate over it in place of the loader, and put it into the state (with several ranks as ``ts.PerRank(loader)``).
    The first ``iter`` after a restore goes on in the epoch that was saved, behind the last batch that was handed out;
    batches before are skipped by the sampler and not read. An epoch ends when its iterator is exhausted, when another
    one begins, or with `end_epoch`.

    Making an iterator changes none of the process's random generators, so it does not matter whether that is before or
    after ``ts.Rng`` is restored. What the sampler draws comes from its own ``generator``, whose state is saved too, or
    else from ``seed`` and the number of the epoch. What a dataset draws within worker processes comes from the seed and
    the number of the batch (not with torchdata's loader: after a restore within an epoch its workers draw other
    numbers); without workers it comes from the process's generators, which ``ts.Rng`` saves (for the first batch of a
    loader that saves its position itself: from the seed).

    Args:
        loader: a ``torch.utils.data.DataLoader``, with any number of workers; or a loader with ``state_dict`` and
            ``load_state_dict`` (torchdata's ``StatefulDataLoader``), which then does the skipping.
        seed: of the random numbers of samplers and workers; by default ``torch.initial_seed()``.

    Raises:
        ValueError: the position of this loader cannot be saved; the message says what can be used.
    """

    def __init__(self, loader: Any, *, seed: int | None = None) -> None:
        self.loader = loader
        self._seed = torch.initial_seed() if seed is None else seed
        self._epoch = 0
        self._batches: int | None = None
        self._exhausted = False
        self._start: list[dict[str, Any]] = []
        self._pending: dict[str, Any] | None = None
        self._current: object = None
        self._source: _Source = _source_of(loader)

    @property
    def epoch(self) -> int:
        """The number of the epoch under way, or else of the next one; the first is 0."""
        return self._epoch

    @property
    def batches(self) -> int:
        """How many batches of this epoch were handed out."""
        return self._batches or 0

    def __len__(self) -> int:
        """How many batches a whole epoch has."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        pending, self._pending = self._pending, None
        if pending is None:
            self.end_epoch()
        used: list[tuple[torch.Generator, torch.Tensor]] = []
        if self._batches is None:
            self._batches, self._start = 0, self._source.state()
        else:
            used = self._source.used_since(self._start)
            self._source.load(self._start)  # whatever changed them since: this is the epoch that was saved
        batches = self._source.begin(_Stream(_mixed(self._seed, self._epoch)), self.batches, pending or {})
        for generator, state in used:
            generator.set_state(state)
        this = self._current = object()
        return self._handed_out(batches, this)

    def _handed_out(self, batches: Iterator[Any], this: object) -> Iterator[Any]:
        while True:
            if self._current is not this:
                raise RuntimeError(
                    "the epoch of this iterator is over, or the loader was restored: make a new iterator"
                )
            try:
                batch = next(batches)
            except StopIteration:
                self.end_epoch()
                self._exhausted = True
                return
            assert self._batches is not None
            self._batches += 1
            yield batch

    def end_epoch(self) -> None:
        """End the epoch under way, if there is one, so that the next ``iter`` begins another one, also after a restore.
        For loops that leave an epoch early.
        """
        if self._batches is not None:
            self._epoch, self._batches, self._exhausted = self._epoch + 1, None, False
            self._current = self._pending = None

    def state_dict(self) -> dict[str, Any]:
        """The position: a tree of plain values and tensors."""
        if self._pending is not None:
            return self._pending
        under_way = self._batches is not None
        state: dict[str, Any] = {"seed": self._seed, "epoch": self._epoch, "batches": self._batches}
        state["samplers"] = self._start if under_way else self._source.state()
        return state | (self._source.position(under_way=under_way) if under_way or self._exhausted else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position. Iterators that there are already cannot go on.

        Raises:
            ValueError: the state is of a loader that is built otherwise.
        """
        self._source.check(state)
        self._seed, self._epoch, self._batches = state["seed"], state["epoch"], state["batches"]
        self._pending, self._start, self._current = dict(state), state["samplers"], None
        self._source.load(self._start)


def _mixed(*numbers: int) -> int:
    """A seed of 63 bits from these numbers, so that no two lists of numbers give streams that are alike."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


class _Stream:
    """States of the process's generators that are apart from the present ones.

    Args:
        seed: from which they begin.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = Rng(cuda=False)
        self._state: dict[str, Any] | None = None

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """What is drawn meanwhile is drawn from this stream; then the generators are as they were."""
        before = self._rng.state_dict()
        try:
            if self._state is None:
                _seed_all(self.seed)
            else:
                self._rng.load_state_dict(self._state)
            yield
            self._state = self._rng.state_dict()
        finally:
            self._rng.load_state_dict(before)


class _Source:
    """What a `Loader` iterates over, and the samplers whose state is saved.

    Args:
        loader: the given loader.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.samplers = list(samplers_of(loader))

    def begin(self, stream: _Stream, skip: int, position: Mapping[str, Any]) -> Iterator[Any]:
        """The batches of an epoch.

        Args:
            stream: what samplers draw from.
            skip: how many batches to leave out.
            position: the state that was restored, if it was.
        """
        raise NotImplementedError

    def state(self) -> list[dict[str, Any]]:
        """The states of the samplers."""
        return [sampler_state(sampler) for sampler in self.samplers]

    def used_since(self, samplers: list[dict[str, Any]]) -> list[tuple[torch.Generator, torch.Tensor]]:
        """Generators of samplers that the loop has restored or drawn from since these states were set, as they are now.

        They are the loop's too, so that an iterator that is made now must leave them as they are.
        """
        pairs = [
            (one.generator, saved["generator"])
            for one, saved in zip(self.samplers, samplers, strict=True)
            if saved.get("generator") is not None
        ]
        return [(one, now) for one, saved in pairs if not torch.equal(now := one.get_state(), saved.cpu())]

    def position(self, *, under_way: bool) -> dict[str, Any]:
        """What is saved beside, in an epoch or when one is exhausted."""
        return {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless this is a state of such a loader."""
        check_samplers(state["samplers"], self.state())

    def load(self, samplers: list[dict[str, Any]]) -> None:
        """Set the states of the samplers."""
        for sampler, state in zip(self.samplers, samplers, strict=True):
            load_sampler(sampler, state)


class _Indexed(_Source):
    """A `DataLoader` over a dataset with indices: another one with the same options, over our indices and seeds."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        batched = loader.batch_sampler is not None
        self._index_sampler: Any = loader.batch_sampler if batched else loader.sampler
        self._fetches = _Fetches()
        self._generator = torch.Generator()
        how: dict[str, Any] = {"batch_sampler": self._fetches} if batched else {"sampler": self._fetches}
        if not batched:
            how["batch_size"] = None
        names = ("num_workers", "collate_fn", "pin_memory", "timeout", "prefetch_factor", "persistent_workers")
        how |= {name: getattr(loader, name) for name in (*names, "multiprocessing_context")}
        if loader.num_workers:
            how["worker_init_fn"] = _WorkerStart(loader.worker_init_fn)
        self._inner = DataLoader(_Items(loader.dataset), generator=self._generator, **how)
        self._ahead = loader.num_workers * (loader.prefetch_factor or 0)

    def begin(self, stream: _Stream, skip: int, position: Mapping[str, Any]) -> Iterator[Any]:
        known = all(type(sampler) in _ORDERED_AT_FIRST for sampler in self.samplers)
        # These draw 32 indices at a time, and the loop may draw from the same generator in between.
        whole = any(type(sampler) is RandomSampler and sampler.replacement for sampler in self.samplers)
        self._fetches.indices = _indices(self._index_sampler, stream, skip, lazy=not known, whole=known and whole)
        self._generator.manual_seed(stream.seed)
        batches = iter(self._inner)
        # The generators may be in use elsewhere too. With other workers the sampler is not as far ahead as it was.
        if position.get("ahead") == self._ahead:
            for sampler, state in zip(self.samplers, position["generators"], strict=True):
                if state is not None:
                    sampler.generator.set_state(state.cpu())
        return batches

    def position(self, *, under_way: bool) -> dict[str, Any]:
        if not under_way:
            return {}
        generators = [getattr(sampler, "generator", None) for sampler in self.samplers]
        now = [one.get_state() if isinstance(one, torch.Generator) else None for one in generators]
        return {"generators": now, "ahead": self._ahead, "whole": self._whole()}

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        saved, here = state.get("whole"), self._whole()
        if saved is not None and here is not None and saved != here:
            raise ValueError(
                f"was saved behind batch {state['batches']} of {saved}, and an epoch has {here} here: with another "
                "batch size, number of ranks or dataset that is another place in the data. Go on as it was to the end "
                "of the epoch, or leave the loader out of the restore"
            )

    def _whole(self) -> int | None:
        """How many batches an epoch has; None where samplers of other kinds may say something else each time."""
        known = all(type(sampler) in _ORDERED_AT_FIRST for sampler in self.samplers)
        return len(self._index_sampler) if known else None


class _Fetch(NamedTuple):
    """What a dataset is asked for: an index or a list of them, and the seed of what it draws in a worker."""

    index: Any
    seed: int


def _indices(sampler: Any, stream: _Stream, skip: int, *, lazy: bool, whole: bool) -> Iterator[_Fetch]:
    """What the sampler gives after the first ``skip`` indices, which it has given when this returns.

    It draws from the stream: always if ``lazy``, or else only before this returns. So what the loop draws later from a
    generator that the sampler uses too does not change the order of the epoch.

    Args:
        whole: the sampler gives all its indices before this returns.
    """
    with stream.swapped_in():
        indices = iter(list(sampler)) if whole else iter(sampler)

    def given(number: int) -> Any:
        if not lazy and number:
            return next(indices, _END)
        with stream.swapped_in():
            return next(indices, _END)

    def rest(first: list[Any]) -> Iterator[_Fetch]:
        for number in count(skip):
            if (index := first.pop() if first else given(number)) is _END:
                return
            yield _Fetch(index, _mixed(stream.seed, number))

    for number in range(skip):
        given(number)
    return rest([] if lazy or skip else [given(0)])


_END = object()


class _Fetches:
    """The sampler of the inner loader.

    Attributes:
        indices: what the next iterator gives.
    """

    def __init__(self) -> None:
        self.indices: Iterator[_Fetch] = iter(())

    def __iter__(self) -> Iterator[_Fetch]:
        return self.indices


class _Items(Dataset[Any]):
    """A dataset that sets the random generators of a worker before it fetches what belongs together."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitems__(self, fetch: _Fetch) -> Any:
        _set_worker(fetch)
        get = getattr(self._dataset, "__getitems__", None)
        return get(fetch.index) if get else [self._dataset[index] for index in fetch.index]

    def __getitem__(self, fetch: _Fetch) -> Any:
        _set_worker(fetch)
        return self._dataset[fetch.index]


class _WorkerStart:
    """What a worker process runs first: `get_worker_info` then has the dataset itself, as without a `Loader`, and what
    is set on that (an open file, say) is set for the items, too.

    Args:
        own: the ``worker_init_fn`` of the user's loader, which runs then.
    """

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self._own = own

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset._dataset)  # it has a __setattr__ that refuses
        if self._own is not None:
            self._own(worker)


def _set_worker(fetch: _Fetch) -> None:
    if get_worker_info() is not None:
        _seed_all(fetch.seed)


class _Stateful(_Source):
    """A loader that saves its position itself, or a `DataLoader` without workers over a dataset that does.

    Args:
        loader: the loader.
        holder: what has ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, loader: Any, holder: Any) -> None:
        super().__init__(loader)
        self._holder = holder

    def begin(self, stream: _Stream, skip: int, position: Mapping[str, Any]) -> Iterator[Any]:
        # Of torchdata's nodes: whether another epoch begins where nothing is left of one.
        if hasattr(self.loader, "restart_on_stop_iteration"):
            self.loader.restart_on_stop_iteration = not skip
        with stream.swapped_in():
            if "position" in position:
                self._holder.load_state_dict(position["position"])
            batches: Iterator[Any] = iter(self.loader)
        dataset: Any = getattr(self.loader, "dataset", None)
        if not skip and hasattr(dataset, "_starting_state_dict"):
            dataset._starting_state_dict = None  # datasets of Hugging Face begin all later epochs there too
        if (
            skip or self._holder is not self.loader
        ):  # a dataset that begins anew may do so within an epoch of the loader
            return batches
        return _with_first_from(_Stream(stream.seed), batches)

    def position(self, *, under_way: bool) -> dict[str, Any]:
        # A loader also keeps what is behind an exhausted epoch; a dataset would go on at its end.
        return {"position": self._holder.state_dict()} if under_way or self._holder is self.loader else {}

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        if state["batches"] is not None and "position" not in state:
            raise ValueError("was saved with a DataLoader that does not save its position itself, as this one does")


def _with_first_from(stream: _Stream, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, of which the first is made with draws from the stream: samplers in nodes of torchdata draw their
    order then, and when a restore makes them give again what they have given.
    """
    with stream.swapped_in():
        first = next(batches, _END)
    if first is not _END:
        yield first
        yield from batches


def _source_of(loader: Any) -> _Source:
    kind = type(loader).__qualname__
    if hasattr(loader, "base_dataloader"):
        raise ValueError(
            f"a {kind} of accelerate counts epochs that it does not save, and is a batch ahead of the loop: wrap the "
            "DataLoader that you give to prepare() in its place, and move its batches to the device yourself; where "
            "there are several processes, with a DistributedSampler"
        )
    if has_state(loader):
        return _Stateful(loader, loader)
    if not isinstance(loader, DataLoader):
        raise ValueError(f"a {kind} has no state_dict and load_state_dict, and is no DataLoader: {_USE}")
    if any(getattr(type(loader), name, None) is not getattr(DataLoader, name) for name in _ITERATORS):
        raise ValueError(f"a {kind} iterates in a way of its own, and has no state_dict: {_USE}")
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ValueError("with in_order=False batches come in no order that can be restored: leave it out")
    if not isinstance(loader.dataset, IterableDataset):
        return _Indexed(loader)
    if has_state(loader.dataset) and not loader.num_workers:
        return _Stateful(loader, loader.dataset)
    why = "in worker processes its position cannot be seen" if loader.num_workers else "it has no state_dict"
    raise ValueError(f"the dataset {type(loader.dataset).__qualname__} gives no indices, and {why}: {_USE}")
