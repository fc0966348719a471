"""Hugging Face's accelerate: `save_state` saves a version of a run, and `load_state` restores it bit for bit.

One line, after `Accelerator()` is made, switches it on:

    versions = use(accelerator, "policy.yaml", run="gpt")

accelerate's own files (weights, optimizers, RNG) are not written. The folder that `save_state` is given holds only a
reference to the version; it is made when the version is durable. Written for accelerate 1.15.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate import __version__ as accelerate_version
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from tierstate.checkpointer import Checkpointer, Save
from tierstate.manifest.errors import NotFound, StateMismatch, error_text
from tierstate.manifest.format.version import MAX_SEQ
from tierstate.providers.values.stateful import PerRank, Rng
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.posix.files import is_folder

from .generators import ResumedRng
from .version_folders import (
    REFERENCE,
    VersionReference,
    numbered_folders,
    restoring,
    saved_version,
    wait_ended,
    write_reference,
)

__all__ = ["AcceleratorVersions", "use"]

log = logging.getLogger("tierstate")


OWN_FILES = "random_states_*.pkl"
"""Files that accelerate itself has in each folder that it has saved to."""


OBJECTS = ("models", "optimizers", "schedulers", "custom", "scaler", "rng")
"""Parts of the state that are restored in place; the others are plain values."""


def use(accelerator: Accelerator, policy: Policy | str | os.PathLike[str], run: str) -> AcceleratorVersions:
    """Let `accelerator.save_state` and `accelerator.load_state` save and restore versions.

    Args:
        policy: a `Policy`, or the path of a policy file. ``total_limit`` of the `ProjectConfiguration` is the ``keep``
            of tiers that have none.
        run: name of the run.

    Raises:
        ValueError: the accelerator trains in a way that is not taken over; the message says which.
        PolicyError: the policy cannot be used.
    """
    _refuse(accelerator)
    policy = policy if isinstance(policy, Policy) else Policy.load(policy)
    if limit := accelerator.project_configuration.total_limit:
        policy = policy.keeping_last(limit)
    return AcceleratorVersions(accelerator, policy, run)


def _refuse(accelerator: Any) -> None:
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ValueError(f"not with tierstate: {accelerator.distributed_type} saves its state itself")
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("not with tierstate: FSDP in its first version; use fsdp_version=2")


class AcceleratorVersions:
    """The versions of what an accelerator has prepared. Made by `use`.

    Attributes:
        ckpt: the Checkpointer, for everything else: `versions`, `tag`, `preempted`.
    """

    def __init__(self, accelerator: Any, policy: Policy, run: str) -> None:
        self._accelerator, self._run = accelerator, run
        self._durable = policy.durable
        self.ckpt = Checkpointer(policy, run, dist.group.WORLD if accelerator.num_processes > 1 else None)
        self._publisher = ThreadPoolExecutor(1, "tierstate-accelerate")
        self._published: Future[None] | None = None
        self._skipping: tuple[Any, Any] | None = None
        self._resumed: list[Any] = []
        self._told_of_order = False
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._load_files, self._skip = accelerator.load_state, accelerator.skip_first_batches
        self._end_training = accelerator.end_training
        accelerator.save_state, accelerator.load_state = self.save_state, self.load_state
        accelerator.skip_first_batches, accelerator.end_training = self._skip_first_batches, self._end

    def wait(self) -> None:
        """Wait until all saves so far are durable and have their folders, or have failed."""
        if self._published is not None:
            self._published.result()

    def close(self) -> None:
        """Finish all saves, and give the accelerator its own methods back. `accelerator.end_training` does it too.

        Raises:
            TierstateError: saves failed, and were not told yet.
        """
        self._publisher.shutdown()
        for name in ("save_state", "load_state", "skip_first_batches", "end_training"):
            vars(self._accelerator).pop(name, None)
        self.ckpt.close()

    def _end(self) -> None:
        self.close()
        self._end_training()

    # ---- Saving

    def save_state(self, output_dir: str | None = None, *_: Any, step: int | None = None, **__: Any) -> Path:
        """Save a version: `Accelerator.save_state`. Returns when all but the parameters and the optimizers' state is
        captured; these are while the next forward and backward pass runs.

        Args:
            output_dir: the folder that will stand for the version, once that is durable.
            step: the version's step; by default the last number in the folder's name, or else the number of the save.

        Raises:
            CaptureError: something has a state that cannot be saved without pickle; nothing was saved.
            TierstateError: earlier saves failed.
        """
        accelerator, project = self._accelerator, self._accelerator.project_configuration
        if accelerator._save_model_state_pre_hook:
            raise ValueError("hooks of register_save_state_pre_hook write files of their own; remove them first")
        if project.automatic_checkpoint_naming:
            output_dir = os.path.join(accelerator.project_dir, "checkpoints", f"checkpoint_{project.iteration}")
            if os.path.exists(output_dir):
                raise ValueError(f"{output_dir} exists; say by save_iteration with which number to go on")
        if output_dir is None:
            raise ValueError("save_state needs a folder, or automatic_checkpoint_naming")
        if not accelerator.sync_gradients:
            log.warning("save_state between two steps of the optimizer: the gradients so far are not saved")
        folder = Path(output_dir).expanduser()
        numbers = re.findall(r"\d+", folder.name)
        for optimizer in accelerator._optimizers:
            self.ckpt.guard(optimizer)
        number = step if step is not None else int(numbers[-1]) if numbers else project.iteration
        metadata = {"folder": folder.name, "accelerate": accelerate_version}
        with first_ones_buffers(accelerator._models, accelerator.device):
            save = self.ckpt.save(self._state(), step=number, metadata=metadata)
        project.iteration += 1
        if not save.skipped and self._writes_folders():
            self._published = self._publisher.submit(self._publish, save, folder)
        return folder

    def _writes_folders(self) -> bool:
        accelerator = self._accelerator
        each_node = accelerator.project_configuration.save_on_each_node
        return bool(accelerator.is_local_main_process if each_node else accelerator.is_main_process)

    def _state(self) -> dict[str, Any]:
        loaders = [self._position(loader) for loader in self._accelerator._dataloaders]
        active = self._active()
        if active is not None and not self._told_of_order:
            self._tell_of_order(active, loaders[active])
        progress = {"step": self._accelerator.step, "active": active}
        return self._objects() | {"loaders": PerRank(loaders), "progress": PerRank(progress)}

    def _objects(self) -> dict[str, Any]:
        """What is filled in place, also by a restore."""
        accelerator = self._accelerator
        unwrap = functools.partial(accelerator.unwrap_model, keep_torch_compile=False)
        scaler = {} if accelerator.scaler is None else {"scaler": accelerator.scaler}
        return {
            "models": [unwrap(model) for model in accelerator._models],
            "optimizers": [optimizer.optimizer for optimizer in accelerator._optimizers],
            "schedulers": list(accelerator._schedulers),
            "custom": list(accelerator._custom_objects),
            "rng": PerRank(ResumedRng(), missing="keep"),
        } | scaler

    def _in_use(self, loader: Any) -> Any:
        """The loader itself, or the one that skips its first batches, if that is iterated now."""
        active = self._accelerator.gradient_state.active_dataloader
        skipping, of = self._skipping or (None, None)
        return skipping if of is loader and active is skipping else loader

    def _position(self, loader: Any) -> dict[str, Any]:
        one = self._in_use(loader)
        over = one is self._accelerator.gradient_state.active_dataloader and one.end_of_dataloader
        found: dict[str, Any] = {"iteration": getattr(one, "iteration", 0) + bool(over)}
        if (sampler := _seedable(loader)) is not None:
            found["seed"] = sampler.initial_seed
        if getattr(loader, "use_stateful_dataloader", False):
            found["state"] = self._stateful_position(loader)
        return found

    def _stateful_position(self, loader: Any) -> dict[str, Any] | None:
        """What torchdata's loader goes on with: nothing at the end of an epoch, and where nobody iterates it, as one
        for evaluation in a step of the training. Its next iterator then draws a seed, as ever. None: the first one is
        still to come, which `prepare` has made already, so that it draws nothing.
        """
        if any(loader is one for one in self._accelerator.gradient_state.dataloader_references):
            return {} if loader.end_of_dataloader else loader.state_dict()
        return None if _awaits_first_iterator(loader) else loader.next_iter_state or {}

    def _active(self) -> int | None:
        """The place of the loader in whose middle this is. Right after a restore that is as at the save."""
        active = self._accelerator.gradient_state.active_dataloader
        if active is None and self._pending is not None:
            return self._pending[0]
        for place, loader in enumerate(self._accelerator._dataloaders):
            one = self._in_use(loader)
            if one is active and not one.end_of_dataloader:
                return place
        return None

    def _tell_of_order(self, place: int, position: Mapping[str, Any]) -> None:
        """Log, once, that a restore goes on with other samples in this epoch, though at the right place."""
        if why := _why_order_is_lost(self._accelerator._dataloaders[place], position):
            self._told_of_order = True
            log.warning(
                "the order of an interrupted epoch cannot be made again (%s): after a restore within it some samples "
                "come twice and others not at all",
                why,
            )

    def _publish(self, save: Save, folder: Path) -> None:
        """Runs in a thread: when the version is durable, make the folder that stands for it."""
        try:
            if self._durable in save.tiers:
                if (error := wait_ended(save, self._durable)) is not None:
                    raise error
                write_reference(folder, saved_version(self.ckpt, save))
                self._rotate(folder.parent)
        except Exception as why:  # of any type, as this thread raises to nobody; the next save tells of a failed one
            log.warning("%s does not stand for a version: %s", folder, error_text(why))

    def _rotate(self, parent: Path) -> None:
        """Delete folders beyond ``total_limit``, as accelerate does where it names them."""
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming and project.total_limit:
            for folder, _ in numbered_folders(parent, "checkpoint_")[: -project.total_limit]:
                shutil.rmtree(folder, ignore_errors=True)

    # ---- Restoring

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Restore a version: `Accelerator.load_state`. A folder with accelerate's own files is loaded as ever.

        Args:
            input_dir: a folder that `save_state` was given, also if it is lost; by default the newest version.

        Raises:
            NotFound: there is no such version.
            StateMismatch: what is prepared here differs from what was saved (all differences are listed), or the
                folder is of another run, or accelerate itself has saved into it later; nothing was changed.
        """
        self.wait()
        if input_dir is None:
            return self._restore(None)
        folder = Path(input_dir).expanduser()
        with restoring(folder, self._run) as reference:
            if reference is not None:
                _refuse_later_files(folder, reference)
            version = self._of_folder(folder, reference)
            if version is not None:
                return self._restore(version)
        if not is_folder(folder):
            raise NotFound(f"{folder} does not exist, and run {self._run!r} has no version that was saved by that name")
        self._load_files(input_dir, *args, **kwargs)

    def _of_folder(self, folder: Path, reference: VersionReference | None) -> str | None:
        """The id of the version that a folder stands for; None if it may have accelerate's own files.

        A folder that was given to several saves may name a version that `keep` has dropped for the last of them: the
        process was killed before the folder named that, or its disk was full.
        """
        versions = [version for version in reversed(self.ckpt.versions()) if version.tiers]
        if reference is not None and any(version.id == reference.version for version in versions):
            return reference.version
        after = -1 if reference is None else reference.seq or MAX_SEQ
        for version in versions:
            if version.seq > after and version.metadata.get("folder") == folder.name and not _holds_files(folder):
                if reference is not None:
                    log.warning("%s names a version that is gone; step %d was saved to it later", folder, version.step)
                return version.id
        return None if reference is None else reference.version

    def _restore(self, version: str | None) -> None:
        accelerator = self._accelerator
        if accelerator._load_model_state_pre_hook:
            raise ValueError("hooks of register_load_state_pre_hook read files of their own; remove them first")
        only = [name for part in OBJECTS for name in (part, f"{part}.**")]
        # Not by `info` first: this host may be new to the job, and have no record of the version that others have.
        plain = self.ckpt.load(version=version, only=["loaders.**", "progress.**"])
        info = self.ckpt.restored
        assert info is not None
        self.ckpt.restore(self._objects(), version=info.id, only=only)
        rank = accelerator.process_index
        if rank not in plain["progress"]:
            log.warning("%s was saved by fewer processes: the data of process %d starts anew", info.id, rank)
            return
        accelerator.step = plain["progress"][rank]["step"]
        for loader, saved in zip(accelerator._dataloaders, plain["loaders"].get(rank, []), strict=False):
            self._set_position(loader, saved)
        self._resumed = [loader for loader in accelerator._dataloaders if hasattr(loader, "iteration")]
        active = plain["progress"][rank]["active"]
        self._set_random_later(active)
        if self._pending is not None:
            self._tell_of_order(active, plain["loaders"][rank][active])
        name, project = info.metadata.get("folder", ""), accelerator.project_configuration
        if project.automatic_checkpoint_naming and (numbers := re.findall(r"\d+", name)):
            project.iteration = int(numbers[-1]) + 1

    def _set_position(self, loader: Any, saved: Mapping[str, Any]) -> None:
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(saved["iteration"])
        if "seed" in saved and (sampler := _seedable(loader)) is not None:
            sampler.initial_seed = saved["seed"]
        if "state" in saved and getattr(loader, "use_stateful_dataloader", False):
            state = saved["state"]
            if state is not None or not _awaits_first_iterator(loader):
                loader.load_state_dict(state or {})

    def _set_random_later(self, active: int | None) -> None:
        """A new iterator draws a seed from the random generator, which the one at the save had done before. So in the
        middle of an epoch the generators are set again, when its first batch is there.
        """
        self._pending = None
        loaders = self._accelerator._dataloaders
        for loader in loaders:  # nothing waits for one that an earlier restore has watched
            vars(loader.base_dataloader).pop("__iter__", None)
        if active is not None and active < len(loaders):
            self._pending = active, Rng().state_dict()
            self._watch(loaders[active])

    def _watch(self, loader: Any) -> None:
        base, skipped = loader.base_dataloader, getattr(loader, "skip_batches", 0)

        def iterate() -> Iterator[Any]:
            vars(base).pop("__iter__", None)
            for place, batch in enumerate(base.__iter__()):
                if place == skipped and self._pending is not None:
                    Rng().load_state_dict(self._pending[1])
                    self._pending = None
                yield batch

        # accelerate's loaders call this by its name, so that one of the object itself counts.
        base.__iter__ = iterate

    def _skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """`Accelerator.skip_first_batches`: after a restore the loader itself goes on with the epoch after this."""
        found = self._skip(dataloader, num_batches)
        self._skipping = (found, dataloader)
        if self._pending is not None and "__iter__" in vars(dataloader.base_dataloader):
            vars(dataloader.base_dataloader).pop("__iter__")
            self._watch(found)
        if any(dataloader is one for one in self._resumed):
            self._resumed = [one for one in self._resumed if one is not dataloader]
            dataloader.iteration += 1
        return found


@contextmanager
def first_ones_buffers(models: Iterable[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """While this is open, all processes have the first one's buffers (the means of batch normalization, for example): a
    version has one copy, of which each tensor may be of any process. A save captures buffers before it returns.

    Args:
        device: by which processes talk; NCCL takes no tensors of the host.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    buffers = [one for model in models for one in model.buffers() if several and not isinstance(one, DTensor)]
    own = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        moved = buffer.to(device)
        dist.broadcast(moved, 0)
        buffer.copy_(moved)
    try:
        yield
    finally:
        for buffer, was in zip(buffers, own, strict=True):
            buffer.copy_(was)


def _seedable(loader: Any) -> SeedableRandomSampler | None:
    """The sampler whose order follows from a seed and the epoch (``use_seedable_sampler``), if there is one."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    return sampler if isinstance(sampler, SeedableRandomSampler) else None


def _why_order_is_lost(loader: Any, position: Mapping[str, Any]) -> str:
    """Why the loader could not give the samples of the epoch in its order again; empty where nothing is known."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    if isinstance(sampler, SeedableRandomSampler):
        # For a stateful loader's state `prepare` makes an iterator before this sampler is in place, and workers fetch
        # what the one before gives.
        stateful = getattr(loader, "use_stateful_dataloader", False)
        early = stateful and loader.base_dataloader.num_workers > 0 and not position["iteration"]
        return "it is the first one of a stateful loader with workers" if early else ""
    if isinstance(sampler, RandomSampler):
        return "DataLoaderConfiguration(use_seedable_sampler=True) mends it"
    drawn = isinstance(sampler, (SubsetRandomSampler, WeightedRandomSampler))
    return f"its {type(sampler).__name__} draws it from a random generator" if drawn else ""


def _awaits_first_iterator(loader: Any) -> bool:
    """Whether torchdata's loader has the iterator that it made for its first state, and would begin with that."""
    return bool(loader._initial_iter_for_state_dict)


def _refuse_later_files(folder: Path, reference: VersionReference) -> None:
    """Raise StateMismatch where accelerate has saved its own files into a folder that stands for a version."""
    own = [file.stat().st_mtime_ns for file in folder.glob(OWN_FILES)]
    if own and max(own) > (folder / REFERENCE).stat().st_mtime_ns:
        raise StateMismatch(
            f"{folder} stands for the version of step {reference.step}, and accelerate has saved its own files there "
            f"later: delete {REFERENCE} to load those, or {OWN_FILES} to load the version"
        )


def _holds_files(folder: Path) -> bool:
    """Whether accelerate has saved its own files here."""
    return is_folder(folder) and any(folder.glob(OWN_FILES))
