"""A checkpoint manager for torchtitan: ``checkpoint=TierCheckpointManager.Config(policy="policy.yaml", run="llama")``.

A step becomes one version of the run: model, optimizers, learning rate schedulers, position in the data, counters of
the trainer, and random generators. What torchtitan reads and writes in formats of its own (folders of DCP, files of
Hugging Face) goes through its own manager. Written for torchtitan 0.3.0.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from torchtitan.components.checkpointer import (
    DATALOADER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    CheckpointManager,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem

import tierstate as ts
from tierstate.manifest.format.leaf_path import Path
from tierstate.providers.values.stateful import Stateful, register_stateful

from .generators import ResumedRng

log = logging.getLogger("tierstate")

CONTENTS, RANKS, RNG = "contents", "ranks", "rng"
"""Leaves of a version beside torchtitan's states: ``all`` or ``model``, the number of ranks, and their generators."""


class TierCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves and loads the states of a torchtitan trainer as versions of a run.

    `save` returns when all is captured but what the optimizers change: that is captured during the next forward and
    backward pass, and `maybe_wait_for_staging`, which the trainer calls before the optimizers' step, waits for it.
    Versions are written in the background. A save that failed is raised by the next one, or by `close`.

    Args:
        config: see `Config`.
        dataloader, model_parts, optimizers, lr_schedulers, states, sd_adapter, base_folder: given by the trainer.

    Raises:
        PolicyError: the policy cannot be used.
        TierstateError: a tier could not be opened.
        RankFailed: not all ranks made a manager in time.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The options of every manager of torchtitan, with two of another default, and two more."""

        enable: bool = True
        """Whether to save and load."""

        policy: str = ""
        """Path of the policy file: which tiers there are."""

        run: str = ""
        """Name of the run: letters, digits, ``.``, ``_`` and ``-``."""

        keep_latest_k: int = 0
        """``keep: {last: K}`` of every tier that has no ``keep`` in the policy. Zero: the policy alone decides."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            if self.enable and not (self.policy and self.run):
                raise ValueError(
                    "TierCheckpointManager.Config needs policy and run: the path of a policy file, and a name, as in "
                    'Config(policy="policy.yaml", run="llama")'
                )

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Any = None
        if not self.enable:
            return
        options = {field.name: getattr(config, field.name) for field in fields(BaseCheckpointManager.Config)}
        # Its options decide when to save and what to load at first; it has no threads, and saves nothing by itself.
        self._files = CheckpointManager(
            CheckpointManager.Config(**options | {"keep_latest_k": 0}),
            dataloader=dataloader,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states=states,
            sd_adapter=sd_adapter,
            base_folder=base_folder,
        )
        self.states = states
        unknown = sorted(set(config.exclude_from_loading) - {*states, RNG})
        if unknown:
            raise ValueError(
                f"exclude_from_loading: there is no {', '.join(unknown)}; there are {', '.join(states)}, {RNG}"
            )
        self._left_out = set(config.exclude_from_loading)
        self._files.exclude_from_loading = [key for key in config.exclude_from_loading if key != RNG]
        self._model_only_at_last = config.last_save_model_only
        self._hugging_face_at_last = config.last_save_in_hf
        self._export_dtype = TORCH_DTYPE_MAP[config.export_dtype]
        # A group of its own, since the trainer's may be of NCCL only, and changes its timeouts.
        group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        policy = with_retention(ts.Policy.load(config.policy), config.keep_latest_k)
        self._checkpointer = ts.Checkpointer(policy, config.run, process_group=group)
        self._checkpointer.guard(optimizers)

    @property
    def checkpointer(self) -> ts.Checkpointer:
        """What saves and restores: for its statistics, tags and versions."""
        return self._checkpointer

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._files._should_save(curr_step, last_step):
            return False
        if last_step and self._hugging_face_at_last:
            self._files._save_last_step(curr_step)
            return True
        state = self._model_alone(curr_step) if last_step and self._model_only_at_last else self._whole()
        self.save_future = self._checkpointer.save(state, step=curr_step)
        if last_step:
            self._wait_for_saving()
        return True

    def _whole(self) -> dict[str, Any]:
        """All that is saved at a step."""
        return {CONTENTS: "all", RANKS: dist.get_world_size(), **self._states(set()), RNG: ts.PerRank(ts.Rng())}

    def _states(self, without: set[str]) -> dict[str, Any]:
        """The trainer's states but for some, in the form in which they are saved and restored."""
        found = {key: value for key, value in self.states.items() if key not in without and value is not None}
        for key in {MODEL, OPTIMIZER} & set(found):
            found[key] = found[key].state_dict()  # dicts of tensors: a restore fills these tensors in place
        if DATALOADER in found:
            found[DATALOADER] = Dataloader(found[DATALOADER])
        return found

    def _model_alone(self, step: int) -> dict[str, Any]:
        """What is saved at the last step: the model, in the dtype of ``export_dtype``; or a seed, as it is."""
        model = self.states[MODEL].state_dict()
        if step > 0:
            model = {
                name: value.to(self._export_dtype)
                if isinstance(value, torch.Tensor) and value.is_floating_point()
                else value
                for name, value in model.items()
            }
        return {CONTENTS: "model", RANKS: dist.get_world_size(), MODEL: model}

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load a step, or the newest version.

        Returns:
            False: there was nothing to load.

        Raises:
            NotFound: there is no such step.
            StateMismatch: the version does not fit the trainer, or has only the model.
            TierstateError: as `Checkpointer.resume`.
        """
        about: dict[str, Any] = {CONTENTS: "", RANKS: 0}
        found = self._find(step, about)
        if found is None:
            return bool(self._files._load(step))
        if found.step == 0:  # a seed
            self._restore(found.id, self._states(set(self.states) - {MODEL}))
            return True
        if about[CONTENTS] != "all":
            raise ts.StateMismatch(
                f"step {found.step} of run {self._checkpointer.run} has only the model, as it was the last step "
                "(last_save_model_only): load an earlier step by load_step, or export it and give the folder as "
                "initial_load_path of a new run"
            )
        self._restore(found.id, self._states(self._left_out))
        if RNG not in self._left_out:
            self._restore_generators(found.id, about[RANKS])
        return True

    def _find(self, step: int, about: dict[str, Any]) -> ts.VersionInfo | None:
        """Restore what a step, or the newest version, is about.

        Returns:
            The version; None if torchtitan's own manager shall load, since the run has no such version, or that manager
            has saved later: the job went on without tiers for a while.
        """
        only = [CONTENTS, RANKS]
        try:
            if step >= 0:
                self._checkpointer.restore(into=about, step=step, only=only)
            elif self._checkpointer.resume(into=about, only=only) is None:
                return None
        except ts.NotFound:
            if step >= 0 and filesystem.isdir(self._files._create_checkpoint_id(step)):
                return None
            raise
        found = self._checkpointer.restored
        assert found is not None
        own = self._files._find_load_step() if step < 0 else step
        # A folder of a lower step may be a copy, whose time is not when it was saved.
        if own < found.step or self._saved_by_itself(own) <= found.time:
            return found
        log.warning(
            "torchtitan's own manager has saved step %d to %s, after step %d of run %s was saved: that is loaded",
            own, self._files.folder, found.step, found.run,
        )  # fmt: skip
        return None

    def _saved_by_itself(self, step: int) -> float:
        """When torchtitan's own manager has saved a step, in seconds since 1970; 0 if it has not, or not all of it."""
        file = filesystem.join(self._files._create_checkpoint_id(step), ".metadata")
        if not filesystem.isfile(file):
            return 0.0
        files, path = url_to_fs(file)
        return float(files.modified(path).timestamp())

    def _restore(self, version: str, state: dict[str, Any]) -> None:
        optimizers = self.states[OPTIMIZER]
        self._checkpointer.restore(into=state, version=version, only=list(state))
        if MODEL in state:
            self.states[MODEL].load_state_dict(state[MODEL])  # for what a module makes of its parameters
        if OPTIMIZER in state:
            filled = {param: dict(own) for one in optimizers for param, own in one.state.items()}
            optimizers.load_state_dict(state[OPTIMIZER])
            for one in optimizers:  # torch has cast moments to the dtype of their parameters; ours have all bits
                for param, own in one.state.items():
                    own.update({k: v for k, v in filled[param].items() if isinstance(v, torch.Tensor)})

    def _restore_generators(self, version: str, ranks: int) -> None:
        if ranks != dist.get_world_size():
            log.warning(
                "%d ranks go on with what %d saved: random generators are not restored", dist.get_world_size(), ranks
            )
            return
        if (dataloader := self.states[DATALOADER]) is not None:
            dataloader.state_dict()  # makes its iterator, which draws a random number, before the generators are set
        self._checkpointer.restore(into={RNG: ts.PerRank(ResumedRng())}, version=version, only=[RNG])

    def _maybe_wait_for_staging(self) -> None:
        self._checkpointer.before_step()

    def _wait_for_saving(self) -> None:
        """Wait until the last save is durable.

        Raises:
            TierstateError: it failed.
        """
        save, self.save_future = self.save_future, None
        lasting = [tier.name for tier in self._checkpointer.policy.tiers if tier.persistent and tier.name in save.tiers]
        durable = self._checkpointer.policy.durable
        if lasting:  # the durable one does not get every save where it has an `every`
            save.wait(durable if durable in lasting else lasting[0])

    def _close(self) -> None:
        if hasattr(self, "_checkpointer"):  # `__init__` may have raised
            self._checkpointer.close()


class Dataloader:
    """A torchtitan dataloader as a part of a state, without the pickles in which it gives its position.

    Its ``state_dict`` has one pickle per rank of data parallelism, under ``dp_rank_N``. What is in it is saved as plain
    values, so that a version has no pickle, and a restore runs no code from it. A rank restores its own position only.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def get(self) -> dict[str, Any]:
        """The state, with what is in the pickles in their place."""
        state = self.loader.state_dict()
        return {key: pickle.loads(value) if _is_pickle(key, value) else value for key, value in state.items()}

    def put(self, state: Mapping[str, Any]) -> None:
        """Load a state, as the loader has it."""
        pickled = any(_is_pickle(key, value) for key, value in self.loader.state_dict().items())
        self.loader.load_state_dict(
            {k: pickle.dumps(v) if pickled and k.startswith(OWN_POSITION) else v for k, v in state.items()}
        )

    def takes(self) -> Callable[[Path], bool]:
        """Returns a function: whether this rank restores what is at a path below the loader's."""
        own = set(self.loader.state_dict())
        return lambda path: not str(path[0]).startswith(OWN_POSITION) or path[0] in own


OWN_POSITION = "dp_rank_"
"""How the keys in a dataloader's state begin that are of one rank of data parallelism."""


def _is_pickle(key: str, value: Any) -> bool:
    return key.startswith(OWN_POSITION) and isinstance(value, bytes)


register_stateful(Dataloader, Stateful(Dataloader.get, Dataloader.put, takes=Dataloader.takes))


def with_retention(policy: ts.Policy, last: int) -> ts.Policy:
    """The policy, with ``keep: {last: ...}`` for the tiers that have no ``keep`` of their own; 0: as it is.

    Raises:
        PolicyError: all tiers have one.
    """
    if last == 0:
        return policy
    own = {name for name, keys in policy._document["tiers"].items() if "keep" in keys}
    if own == {tier.name for tier in policy.tiers}:
        raise ts.PolicyError(
            f"keep_latest_k={last}, and all tiers of the policy have a `keep`: take keep_latest_k away, or the "
            "`keep` of a tier"
        )
    return policy.keeping_last(last)
