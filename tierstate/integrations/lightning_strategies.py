"""Lightning's sharding strategies with versions as checkpoints: `TierModelParallelStrategy` (FSDP2, tensor parallelism)
and `TierFSDPStrategy` (FSDP1).

One line switches it on: ``Trainer(strategy=TierModelParallelStrategy("policy.yaml", run="gpt"))``. Each rank saves its
own shards, and all ranks together one version. Nothing is gathered. A version restores into any other number of ranks,
and has the form of an ordinary checkpoint: `TierCheckpointIO` reads it in a process without any strategy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions as Options
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import tierstate as ts

from .lightning import TierCheckpointIO, monitored_metrics, refuse_objects
from .lightning_versions import PathVersions, Reference, before_requeue, read_reference, resolve

T = TypeVar("T")

MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
"""Keys of a checkpoint of Lightning that are restored in place."""

GATHERING = ("save_distributed_checkpoint", "state_dict_type")
"""Options of Lightning's strategies that say whether rank 0 gathers the whole state."""


class RankVersions(PathVersions):
    """The versions under paths, saved and restored by all ranks together.

    All ranks call the same methods in the same order. Only rank 0 writes references, gives tags and removes.
    """

    _world: Any = None
    _group: Any = None

    def save(self, state: Mapping[str, Any], path: str, step: int, metadata: Mapping[str, Any]) -> None:
        """Save a checkpoint as one version of all ranks; returns when it is captured, and the first time of a job when
        it is durable. Path, step and metadata are those of rank 0.

        Raises:
            RankFailed: another rank failed; the message has its error.
            CaptureError, TierstateError: as `PathVersions.save`; raised on all ranks if it is on one.
        """
        path, step, target, about = self.by_first(lambda: (path, step, *self._checked(state, path, step, metadata)))
        own = state if self._first else sharded_parts(state)
        saves: list[ts.Save] = []

        def capture() -> bool:
            saves.append(self.open().save(own, step=step, metadata=about))
            return saves[0].skipped

        try:
            skipped = any(self.agree(capture))
        except ts.TierstateError:
            self._end(saves)
            raise
        if skipped:
            self.tell_skipped(path, step)
        else:
            self.by_first(lambda: self.follow(path, target, saves[0]))
        if before_requeue(path):
            self.by_first(self.finish)

    def _end(self, saves: Sequence[ts.Save]) -> None:
        """Wait for what comes of a save that another rank did not make, so that it is not raised a second time."""
        for save, tier in ((one, tier) for one in saves for tier in one.tiers):
            with suppress(ts.TierstateError):
                save.wait(tier, self.policy.ranks.timeout)

    def _checked(self, state: Mapping[str, Any], path: str, step: int, metadata: Mapping[str, Any]) -> Any:
        self.raise_error()
        refuse_objects(state)
        return self.begin(path, step, metadata)

    def remove(self, path: str) -> None:
        """Remove a path and its version; see `PathVersions.remove`."""
        self.open()  # by all ranks together; the thread that removes the version is rank 0's
        if self._first:
            super().remove(path)

    @contextmanager
    def restoring(self, path: str) -> Iterator[SavedCheckpoint]:
        """The checkpoint that a path names on rank 0, for all ranks.

        Raises:
            FileNotFoundError: nothing is at the path.
            FormatError: what is there is no reference.
            NotFound: no tier has the version.
            RankFailed: another rank has raised one of these.
        """
        path, reference = self.by_first(lambda: (path, self._read(path)))
        opened = nullcontext(self.open()) if reference.run == self.run else self._new(reference.run)
        with opened as checkpointer:
            try:
                yield SavedCheckpoint(checkpointer, self.by_first(lambda: resolve(checkpointer, reference, path)))
            except ts.TierstateError as error:
                error.add_note(f"{path} refers to it, in run {reference.run!r}")
                raise
        self._durable_once = self._durable_once or reference.run == self.run

    def _read(self, path: str) -> Reference:
        self.settle()
        return read_reference(path)

    def agree(self, what: Callable[[], T]) -> list[T]:
        """Call a function on every rank; its results by rank. If it raises on one rank, all ranks raise."""
        mine, error = None, None
        try:
            mine = what()
        except Exception as caught:
            error = caught
        told = self._gather((mine, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        if failed := {rank: text for rank, (_, text) in enumerate(told) if text is not None}:
            raise ts.RankFailed("; ".join(f"rank {rank}: {text}" for rank, text in failed.items()), list(failed))
        return [result for result, _ in told]

    def by_first(self, what: Callable[[], T]) -> T:
        """Call a function on rank 0; its result, on all ranks. If it raises, all ranks raise."""
        result: Any = self.agree(lambda: what() if self._first else None)[0]
        return result  # type: ignore[no-any-return]

    @property
    def _first(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def _gather(self, own: Any) -> list[Any]:
        group = self._ranks()
        if group is None:
            return [own]
        every = [own] * dist.get_world_size(group)
        dist.all_gather_object(every, own, group=group)
        return every

    def _ranks(self) -> Any:
        """A group of its own of all ranks, as the trainer's may be of NCCL only; None if there is one rank."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        if self._world is not dist.group.WORLD:
            self._world, self._group = dist.group.WORLD, dist.new_group(backend="gloo")
        return self._group

    def _new(self, run: str) -> ts.Checkpointer:
        return ts.Checkpointer(self.policy, run, self._ranks(), allow_pickle=self.allow_pickle)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A version that holds a checkpoint, as all ranks restore it together.

    Attributes:
        checkpointer: of the ranks.
        version: its id.
    """

    checkpointer: ts.Checkpointer
    version: str

    def names(self, *parent: str) -> dict[str, str]:
        """The keys in the checkpoint, or below a key of it, and for each a glob that matches it alone."""
        depth = len(parent) + 1
        found = self.checkpointer.leaves(version=self.version)
        return {leaf.path[-1]: leaf.name for leaf in found if len(leaf.path) == depth and leaf.path[:-1] == parent}

    def restore(self, key: str, into: Any, globs: Sequence[str] = ()) -> None:
        """Restore what is under a key in place: all of it, or only what some globs match."""
        only = _whole(globs or [key])
        self.checkpointer.restore({key: into}, version=self.version, only=only)

    def rest(self) -> dict[str, Any]:
        """All that is not model and optimizers."""
        globs = [glob for key, glob in self.names().items() if key not in (MODEL, OPTIMIZERS)]
        found: dict[str, Any] = self.checkpointer.load(version=self.version, only=_whole(globs))
        return found


def _whole(globs: Sequence[str]) -> list[str]:
    return [one for glob in globs for one in (glob, f"{glob}.**")]


def sharded_parts(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank other than 0 saves of a checkpoint: its shards.

    All else is rank 0's, as in Lightning's own files, also where it differs between ranks: times, metrics, buffers.
    """
    found: dict[str, Any] = _shards({key: value for key, value in checkpoint.items() if key != OPTIMIZERS}) or {}
    if OPTIMIZERS in checkpoint:
        found[OPTIMIZERS] = [_shards(state) or {} for state in checkpoint[OPTIMIZERS]]
    return found


def _shards(value: Any) -> Any:
    """The shards in a value, in dicts of the kind in which they are; None if there are none."""
    if not isinstance(value, dict):
        return value if isinstance(value, (DTensor, ShardedTensor, ts.Shard, ts.PerRank)) else None
    found = {key: shards for key, item in value.items() if (shards := _shards(item)) is not None}
    kept = copy(value)  # with the attributes of a module's state: all ranks say the same of a dict
    kept.clear()
    kept.update(found)
    return kept if found else None


class TierStrategyMixin:
    """Gives a sharding strategy of Lightning versions as checkpoints: ``class Mine(TierStrategyMixin, SomeStrategy)``.

    The strategy shards the model by DTensors, and has its optimizers in ``optimizers``. `save_checkpoint` returns when
    the state is captured; it is written in the background. Only the first save of a job that has resumed nothing, and
    the one before SLURM requeues it, wait until they are durable. `teardown`, at the end of `fit`, waits for all. All
    ranks raise what one of them raises.

    Args:
        policy: which tiers there are; a `Policy`, or the path of a policy file. The same on all ranks.
        run: name of the run.
        allow_pickle: globs of the parts of a checkpoint that may be pickles, such as ``hyper_parameters.**``.
        options: those of the strategy.

    Raises:
        PolicyError: the policy cannot be used.
        TypeError: an option says that rank 0 gathers the state.
        TypeError, ValueError: another argument is not valid.
    """

    model: Any
    optimizers: list[Any]
    lightning_module: Any

    def __init__(
        self,
        policy: ts.Policy | str | os.PathLike[str],
        run: str,
        *,
        allow_pickle: Sequence[str] = (),
        **options: Any,
    ) -> None:
        if refused := sorted(set(GATHERING) & set(options)):
            raise TypeError(f"{type(self).__name__} takes no {refused[0]}: each rank saves its own shards")
        super().__init__(**options)
        self._alone = TierCheckpointIO(policy, run, allow_pickle=allow_pickle)  # for `load_from_checkpoint`
        self._versions = RankVersions(self._alone._versions.policy, run, self._alone._versions.allow_pickle)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state, with this rank's shards."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> Any:
        """An optimizer's state, with this rank's shards."""
        return _bare(optimizer).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save a checkpoint as a version of all ranks, and a reference to it at the path.

        Raises:
            TypeError: ``storage_options`` were given.
            CaptureError: a value cannot be saved; the message names its key.
            RankFailed: another rank failed.
            TierstateError: an earlier save failed; this one was not made.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options: the policy says how each tier is used")
        step = int(checkpoint.get("global_step", 0))
        self._versions.save(checkpoint, os.fspath(filepath), step, monitored_metrics(checkpoint))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore model and, to go on training, optimizers in place; returns the rest of the checkpoint.

        Args:
            weights_only: without effect, as nothing is unpickled but what ``allow_pickle`` names.

        Raises:
            FileNotFoundError: nothing is at the path.
            FormatError: what is there is no reference.
            NotFound: no tier has the version.
            StateMismatch: the model or an optimizer is another one.
            RankFailed: another rank failed.
        """
        with self._versions.restoring(os.fspath(checkpoint_path)) as saved:
            self._restore_model(saved)
            if self.lightning_module.trainer.state.fn == TrainerFn.FITTING and OPTIMIZERS in saved.names():
                self._restore_optimizers(saved)
            return saved.rest()

    def _restore_model(self, saved: SavedCheckpoint) -> None:
        state, strict = self.lightning_module_state_dict(), self.lightning_module.strict_loading
        if strict:
            saved.restore(MODEL, state)
        elif common := {key: glob for key, glob in saved.names(MODEL).items() if key in state}:
            saved.restore(MODEL, {key: state[key] for key in common}, list(common.values()))
        # For what a module makes of its state, and for states that are copies (FSDP1).
        set_model_state_dict(self.model, state, options=Options(strict=strict))

    def _restore_optimizers(self, saved: SavedCheckpoint) -> None:
        saved.restore(OPTIMIZERS, [_bare(optimizer) for optimizer in self.optimizers])

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has restored the model."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has restored the optimizers."""

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a path, and its version, once all earlier saves are durable. All ranks call it."""
        self._versions.remove(os.fspath(filepath))

    def teardown(self) -> None:
        """Wait until all saves are durable, and close the tiers. The next save or load opens them again.

        Raises:
            TierstateError: a save failed.
        """
        try:
            self._versions.close()
        finally:
            self._alone.teardown()
            super().teardown()  # type: ignore[misc]


def _bare(optimizer: Any) -> Any:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


class TierModelParallelStrategy(TierStrategyMixin, ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's `ModelParallelStrategy` with versions as checkpoints; see `TierStrategyMixin`."""


class TierFSDPStrategy(TierStrategyMixin, FSDPStrategy):  # type: ignore[misc]
    """Lightning's `FSDPStrategy` with versions as checkpoints; see `TierStrategyMixin`.

    FSDP1 gathers and copies shards for each save, on the training thread. Its optimizer states are saved by the names
    of parameters, so that only this strategy reads them.
    """

    def optimizer_state(self, optimizer: Any) -> Any:
        """An optimizer's state by names of parameters, with this rank's shards."""
        return get_optimizer_state_dict(self.model, _bare(optimizer))

    def _restore_optimizers(self, saved: SavedCheckpoint) -> None:
        states = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
        saved.restore(OPTIMIZERS, states)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            set_optimizer_state_dict(self.model, _bare(optimizer), state)
