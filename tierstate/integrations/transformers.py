"""Hugging Face's Trainer: each checkpoint is a version of a run, from which training resumes bit for bit.

One of these lines switches it on:

    trainer = TierTrainer(model, args, ..., policy="policy.yaml")     # in place of Trainer
    class MyTrainer(TierTrainerMixin, SFTTrainer): ...                # before another trainer's class
    use(trainer, "policy.yaml")                                       # a trainer that is made already

The Trainer's own files (weights, optimizer, RNG) are not written. A folder ``checkpoint-N`` holds `trainer_state.json`
and a reference to the version, so that ``resume_from_checkpoint``, ``save_total_limit`` and ``load_best_model_at_end``
find what they look for. Written for transformers 5.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers import __version__ as transformers_version
from transformers.trainer_callback import ExportableState
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import HubStrategy, rotate_checkpoints

from tierstate.checkpointer import Checkpointer, Save
from tierstate.engine.info import VersionInfo
from tierstate.manifest.errors import NotFound, StateMismatch, TierstateError, error_text
from tierstate.manifest.history.log import LONGEST_RUN, check_run
from tierstate.providers.values.stateful import PerRank, Rng
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.policy.yaml import escape_variables
from tierstate.tiers.posix.files import is_folder

from .accelerate import first_ones_buffers
from .generators import ResumedRng
from .version_folders import (
    REFERENCE,
    VersionReference,
    is_torn,
    kept_versions,
    numbered_folders,
    read_reference,
    rename_synced,
    restoring,
    saved_version,
    wait_ended,
    write_reference,
    write_synced,
)

__all__ = ["TierTrainer", "TierTrainerMixin", "use"]

log = logging.getLogger("tierstate")


TRAINER_STATE = "trainer_state.json"

PREFIX = "checkpoint-"
"""How the names of the Trainer's folders begin; the step follows."""

BEST = "best"
"""The tag of the best model's version: retention keeps it."""

RESULT_CHANGING = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "seed", "data_seed")
"""Training arguments that a resumed training needs as they were, to go on bit for bit; they are in the metadata."""


NOT_CALLED = (
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
)
"""Methods of a trainer in whose place `TierTrainer` saves and restores."""


class TierTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose checkpoints are versions of a tierstate run.

    Args:
        policy: a `Policy`, or the path of a policy file; by default versions lie in the folder ``tierstate`` of
            ``output_dir``. ``save_total_limit`` is the ``keep`` of tiers that have none.
        run: name of the run; by default the last part of ``output_dir``. Jobs that share a policy need names of their
            own.
        args, kwargs: as of `transformers.Trainer`.

    Raises:
        ValueError: the training arguments ask for something that cannot be had with versions, or ``run`` cannot name a
            run; the message says what.
        PolicyError: the policy cannot be used.
    """

    _versions: TrainerVersions

    def __init__(
        self, *args: Any, policy: Policy | str | os.PathLike[str] | None = None, run: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        _switch_on(self, policy, run)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As of `transformers.Trainer`; returns when all saves are finished.

        Raises:
            TierstateError: saves failed, or the version to resume from cannot be read.
        """
        if trial is not None:
            raise ValueError("a hyperparameter search saves many runs; search with a plain Trainer, then use tierstate")
        with self._versions.opened():
            self._versions.prepare(resume_from_checkpoint or None)
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        with self._versions.opened():
            self._versions.save()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if _reference(resume_from_checkpoint) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._versions.restore(resume_from_checkpoint, {"model": self.model if model is None else model})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or _reference(checkpoint) is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            self._versions.restore_progress(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or _reference(checkpoint) is None:
            super()._load_scaler(checkpoint)
        elif (scaler := getattr(self.accelerator, "scaler", None)) is not None:
            self._versions.restore(checkpoint, {"scaler": scaler})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or _reference(checkpoint) is None:
            super()._load_rng_state(checkpoint)
        else:
            self._versions.restore(checkpoint, {"rng": PerRank(ResumedRng(), missing="keep")})

    def _load_best_model(self) -> None:
        self._versions.wait_published()
        if _reference(self.state.best_model_checkpoint) is None:
            super()._load_best_model()
        else:
            log.info("loading the best model from %s (%s)", self.state.best_model_checkpoint, self.state.best_metric)
            self._versions.restore(self.state.best_model_checkpoint, {"model": self.model})

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._versions.wait_published()  # it looks for the folders
        return super()._finalize_training(*args, **kwargs)


TierTrainerMixin = TierTrainer
"""The same class, to be named before another trainer's: ``class MyTrainer(TierTrainerMixin, SFTTrainer)``."""


def use(trainer: Trainer, policy: Policy | str | os.PathLike[str] | None = None, run: str | None = None) -> None:
    """Switch a trainer that is made already to versions, whatever its class. Arguments, errors: as of `TierTrainer`."""
    own = type(trainer)
    if not issubclass(own, TierTrainer):
        trainer.__class__ = type(f"Tier{own.__name__}", (TierTrainer, own), {})
    _switch_on(trainer, policy, run)


def _switch_on(trainer: Any, policy: Policy | str | os.PathLike[str] | None, run: str | None) -> None:
    _refuse(trainer)
    _tell_what_is_not_called(type(trainer))
    args: TrainingArguments = trainer.args
    if policy is None:
        policy = _default_policy(os.path.join(args.output_dir, "tierstate"))
    policy = policy if isinstance(policy, Policy) else Policy.load(policy)
    if args.save_total_limit and args.save_total_limit > 0:
        policy = policy.keeping_last(args.save_total_limit)
    trainer._versions = TrainerVersions(trainer, policy, run or _run_of(args.output_dir))
    trainer.remove_callback(_Callback)  # of a policy that was given before
    _take_over_signals(trainer)
    trainer.add_callback(_Callback(trainer._versions))


def _run_of(output_dir: str) -> str:
    """The last part of a path as a name of a run, which has plain letters and begins with one or with a digit. Of one
    that is too long the beginning, and a digest of all of it.
    """
    name = re.sub(r"^(?![A-Za-z0-9])", "run", re.sub(r"[^A-Za-z0-9._-]", "-", Path(output_dir).resolve().name))
    if len(name) <= LONGEST_RUN:
        return name
    return f"{name[: LONGEST_RUN - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _refuse(trainer: Any) -> None:
    """Raise ValueError if the trainer saves in a way that is not taken over."""
    fsdp = trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2
    refused = {
        "deepspeed: its engine has state of its own": trainer.is_deepspeed_enabled,
        "fsdp in its first version: use fsdp_version 2": fsdp or getattr(trainer, "is_fsdp_xla_enabled", False),
        "push_to_hub with hub_strategy other than 'end': the folders hold no model": trainer.args.push_to_hub
        and trainer.args.hub_strategy != HubStrategy.END,
    }
    if found := [why for why, is_so in refused.items() if is_so]:
        raise ValueError(f"not with tierstate: {'; '.join(found)}")


def _tell_what_is_not_called(kind: type) -> None:
    """Log what a trainer's class would do beside saving, and does not: some have state of their own there."""
    order = kind.__mro__
    between = order[order.index(TierTrainer) + 1 : order.index(Trainer)]
    if found := [f"{one.__name__}.{name}" for one in between for name in NOT_CALLED if name in vars(one)]:
        log.warning(
            "not called with tierstate: %s. What they save beside the Trainer's own state, or do beside saving, is "
            "left out; put such state into a callback that is an ExportableState",
            ", ".join(found),
        )


def _default_policy(path: str) -> Policy:
    """One directory, and the newest version in memory."""
    place = json.dumps(escape_variables(path))
    tiers = f"{{host: {{type: host, capacity: 1GiB, keep: {{last: 1}}}}, nvme: {{type: nvme, path: {place}}}}}"
    return Policy.parse(f"version: 1\narena: {{size: 512MiB}}\ntiers: {tiers}\n", "<default policy>")


def _take_over_signals(trainer: Any) -> None:
    """``enable_jit_checkpoint`` saves in the middle of a step, after its random numbers are drawn; ours at its end."""
    for callback in [c for c in trainer.callback_handler.callbacks if isinstance(c, JITCheckpointCallback)]:
        trainer.remove_callback(callback)
        theirs = callback.jit_manager
        if theirs is not None and signal.getsignal(signal.SIGTERM) == theirs._sigterm_handler:
            signal.signal(signal.SIGTERM, theirs._original_sigterm_handler)


class _Callback(TrainerCallback):  # type: ignore[misc]
    """What has to be done at certain points of the training loop.

    Args:
        versions: those of the trainer that calls.
    """

    def __init__(self, versions: TrainerVersions) -> None:
        self._versions = versions

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """All is made and restored: guard the optimizer."""
        self._versions.begin_training(kwargs["optimizer"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and stop if a signal has announced the end of the process."""
        if self._versions.preempted():
            if control.should_evaluate:
                # It comes before the save, and may take longer than is left. It also draws random numbers, so that
                # only what is saved after it goes on to the last bit.
                self._versions.save()
            control.should_save = control.should_training_stop = True


class TrainerVersions:
    """The versions of one trainer, and the folders ``checkpoint-N`` that stand for them.

    A folder is written by a thread, when its version is durable: it never names a version that a crash has taken.

    Args:
        trainer: a `transformers.Trainer`.
        policy: the tiers and the rules.
        run: the name of the run.
    """

    def __init__(self, trainer: Any, policy: Policy, run: str) -> None:
        self._trainer, self._policy, self._run = trainer, policy, check_run(run)
        self._ckpt: Checkpointer | None = None
        self._publisher: ThreadPoolExecutor | None = None
        self._published: Future[None] | None = None
        self._saved: set[int] = set()
        self._best_pending = False
        self._guarded: Any = None
        self._loss: Mapping[str, Any] | None = None

    @property
    def _output_dir(self) -> Path:
        return Path(self._trainer.args.output_dir)

    def _folder(self, step: int) -> Path:
        return self._output_dir / f"{PREFIX}{step}"

    @contextmanager
    def opened(self) -> Iterator[Checkpointer]:
        """The Checkpointer, opened by the outermost call, which finishes all saves at its end."""
        if self._ckpt is not None:
            yield self._ckpt
            return
        args = self._trainer.args
        group = dist.group.WORLD if args.world_size > 1 else None
        preemption = True if getattr(args, "enable_jit_checkpoint", False) else None
        with (
            Checkpointer(self._policy, self._run, group, preemption=preemption) as self._ckpt,
            ThreadPoolExecutor(1, "tierstate-trainer") as self._publisher,
        ):
            try:
                yield self._ckpt
                self.wait_published()
            finally:
                self._ckpt, self._guarded, self._loss = None, None, None

    def preempted(self) -> bool:
        """Whether a signal has announced the end of this process; all ranks must ask."""
        return self._ckpt is not None and self._ckpt.preempted

    def begin_training(self, optimizer: Any) -> None:
        """Guard the optimizer, and take up the sum of the losses that were not logged yet."""
        with self.opened() as ckpt:
            if self._guarded is not optimizer:
                if self._guarded is not None:
                    ckpt.unguard(self._guarded)
                ckpt.guard(optimizer)
                self._guarded = optimizer
        trainer, loss, self._loss = self._trainer, self._loss, None
        if loss is not None:
            trainer._tr_loss += loss["sum"].to(trainer._tr_loss.device)
            trainer._globalstep_last_logged = loss["last_logged"]
            trainer._total_loss_scalar -= trainer._tr_loss.item()  # the mean at the end is of this training's steps

    # ---- Saving

    def save(self) -> None:
        """Save a version for the trainer's present step."""
        assert self._ckpt is not None
        trainer, state = self._trainer, self._trainer.state
        if self._best_pending:
            self.wait_published()  # or retention could drop it before it has its tag
        self._note_best()
        text = self._trainer_state()
        with first_ones_buffers([trainer.model], trainer.args.device):
            save = self._ckpt.save(self._state(text), step=state.global_step, metadata=self._metadata())
        if save.skipped:
            log.warning("step %d was not saved: the arena is full, and the policy says on_full: skip", save.step)
            return
        self._saved.add(save.step)
        best = state.best_global_step == save.step
        if trainer.args.should_save and self._publisher is not None:
            self._published = self._publisher.submit(self._publish, self._ckpt, save, text, best)
            self._best_pending = best

    def _note_best(self) -> None:
        state = self._trainer.state
        step = state.best_global_step
        if step and (step == state.global_step or step in self._saved or is_folder(self._folder(step))):
            state.best_model_checkpoint = str(self._folder(step))

    def _state(self, text: str) -> dict[str, Any]:
        trainer = self._trainer
        # It says whether a process is the first one, so it differs; the first one's is used.
        state: dict[str, Any] = {"model": trainer.model, "trainer": PerRank(text if trainer.args.should_save else "")}
        if trainer.args.save_only_model:
            return state
        loss = {"sum": trainer._tr_loss.detach().clone(), "last_logged": trainer._globalstep_last_logged}
        state |= {"optimizer": _inner(trainer.optimizer), "scheduler": trainer.lr_scheduler}
        state |= {"rng": PerRank(Rng()), "loss": PerRank(loss)}
        scaler = getattr(trainer.accelerator, "scaler", None)
        return state | ({} if scaler is None else {"scaler": scaler})

    def _trainer_state(self) -> str:
        """The `TrainerState`, and those of callbacks, as JSON: what the file of that name has."""
        trainer, found = self._trainer, dict[str, Any]()
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback.state())
        trainer.state.stateful_callbacks = {name: one[0] if len(one) == 1 else one for name, one in found.items()}
        return json.dumps(dataclasses.asdict(trainer.state), indent=2, sort_keys=True) + "\n"

    def _metadata(self) -> dict[str, Any]:
        """What was logged at this step (so that ``keep: {best: {metric: eval_loss}}`` works), and the arguments."""
        state, args = self._trainer.state, self._trainer.args
        logged: dict[str, Any] = {}
        for line in reversed(state.log_history):
            if line.get("step") != state.global_step:
                break
            logged = line | logged
        essential = {name: getattr(args, name, None) for name in RESULT_CHANGING}
        return {**logged, "epoch": state.epoch, "arguments": essential, "transformers": transformers_version}

    # ---- The folders

    def wait_published(self) -> None:
        """Wait until every save so far is durable and has its folder, or has failed."""
        if self._published is not None:
            self._published.result()
        self._best_pending = False

    def _publish(self, ckpt: Checkpointer, save: Save, text: str, best: bool) -> None:
        """Runs in a thread: wait for a version, then give it its tag and folder, and drop folders that are over."""
        try:
            durable = self._policy.durable
            if (failed := wait_ended(save, durable if durable in save.tiers else save.tiers[0])) is not None:
                raise failed
            info = saved_version(ckpt, save)
            if best:
                ckpt.tag(BEST, version=info.id)
            if best or durable in save.tiers:
                self._write_folder(info, text)
            self._rotate(ckpt)
        except Exception as error:  # of any type, as this thread raises to nobody; the next save tells of a failed one
            log.warning("checkpoint-%d has no folder: %s", save.step, error_text(error))

    def _write_folder(self, info: VersionInfo, text: str) -> None:
        folder = self._folder(info.step)
        parts = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
        write_synced(parts / TRAINER_STATE, text)
        write_reference(parts, info)
        os.utime(parts, (info.time, info.time))  # the Trainer deletes the oldest by this
        if is_folder(folder):
            shutil.rmtree(folder)
        rename_synced(parts, folder)

    def _rotate(self, ckpt: Checkpointer) -> None:
        """Delete folders whose versions go, then those beyond ``save_total_limit``, as the Trainer does."""
        try:
            is_kept = kept_versions(ckpt)
        except TierstateError as error:
            log.warning("folders of versions that are gone stay for now: %s", error)
            return
        for folder, reference in numbered_folders(self._output_dir, PREFIX):
            if reference.run == self._run and not is_kept(reference) and not _is_native(folder):
                shutil.rmtree(folder, ignore_errors=True)
        rotate_checkpoints(
            output_dir=str(self._output_dir),
            save_total_limit=self._trainer.args.save_total_limit,
            best_model_checkpoint=self._trainer.state.best_model_checkpoint,
            use_mtime=True,
        )

    def prepare(self, resume: str | Literal[True] | None) -> None:
        """Before training: make the folders that this resumption needs and a crash, or a lost disk, has taken."""
        with self.opened() as ckpt:
            if not resume:
                if ckpt.versions():
                    log.warning(
                        "run %s has versions already, and this training starts anew: they stay, and its own come "
                        "after them. train(resume_from_checkpoint=True) goes on from the newest",
                        self._run,
                    )
                return
            for version in self._agree(self._lacking(ckpt, resume) if self._trainer.args.should_save else []):
                text = ckpt.load(version=version, only=["trainer.**"])["trainer"][0]
                if self._trainer.args.should_save:
                    self._write_folder(ckpt.info(version=version), self._relocated(text))
            self._trainer.accelerator.wait_for_everyone()

    def _lacking(self, ckpt: Checkpointer, resume: str | Literal[True]) -> list[str]:
        """Ids of versions that need a folder: the newest and the best one, or the one of the wanted folder."""
        self._output_dir.mkdir(parents=True, exist_ok=True)
        versions = [version for version in ckpt.versions() if version.tiers]
        if resume is True:
            with suppress(NotFound):
                ckpt.info()  # raises where the newest cannot be read: an older one is no substitute
            self._rotate(ckpt)
            for folder in filter(_is_torn, self._output_dir.glob(f"{PREFIX}[0-9]*")):
                _remove(folder)  # the Trainer would resume from it, if it is the last
            best = [version for version in versions if BEST in version.tags]
            wanted = {version.step: version for version in best + versions[-1:]}
        else:
            folder = Path(resume).resolve()
            there = is_folder(folder) and not _is_torn(folder)
            wanted = {v.step: v for v in versions if not there and self._folder(v.step).resolve() == folder}
        wanted = {step: version for step, version in wanted.items() if not _is_native(self._folder(step))}
        whole = {step: folder for step in wanted if not _is_torn(folder := self._folder(step))}
        found = {step: read_reference(whole[step]) if step in whole else None for step in wanted}
        return [v.id for step, v in wanted.items() if (has := found[step]) is None or has.version != v.id]

    def _agree(self, versions: list[str]) -> list[str]:
        """What the first rank says, on all ranks: all of them read together."""
        found = [versions]
        broadcast_object_list(found)
        return found[0]

    def _relocated(self, text: str) -> str:
        """The trainer's state with the best model's folder in this ``output_dir``, wherever it was."""
        state = json.loads(text)
        if best := state.get("best_model_checkpoint"):
            state["best_model_checkpoint"] = str(self._output_dir / Path(best).name)
        return json.dumps(state, indent=2, sort_keys=True) + "\n"

    # ---- Restoring

    def restore(self, folder: str | os.PathLike[str], into: dict[str, Any]) -> None:
        """Restore parts of the version that a folder stands for, in place. Parts that it lacks are left, and told.

        Raises:
            StateMismatch: the folder is of another run, or the version does not fit.
            NotFound: no tier has the version any more.
        """
        with self.opened() as ckpt, restoring(folder, self._run) as reference:
            if reference is None:
                raise NotFound(f"{os.fspath(folder)} stands for no version of a tierstate run")
            version = reference.version
            saved = self._saved_parts(ckpt, version)
            if lacking := into.keys() - saved:
                log.warning("%s has no %s (save_only_model): they stay as they are", folder, ", ".join(sorted(lacking)))
            if found := {part: value for part, value in into.items() if part in saved}:
                ckpt.restore(found, version=version, only=[name for part in found for name in (part, f"{part}.**")])

    @staticmethod
    def _saved_parts(ckpt: Checkpointer, version: str) -> set[str]:
        """The parts that a version has. All ranks ask: a host that is new to the job has no record of it itself."""
        mine = list[str]()
        with suppress(NotFound):
            mine = sorted({str(leaf.path[0]) for leaf in ckpt.leaves(version=version) if leaf.path})
        if not (found := {part for one in gather_object([mine]) for part in one}):
            raise NotFound(f"version {version} of run {ckpt.run!r} is in no tier any more")
        return found

    def restore_progress(self, folder: str) -> None:
        """Restore optimizer, scheduler, and the sum of the losses that were not logged yet."""
        trainer = self._trainer
        with self.opened() as ckpt, restoring(folder, self._run) as reference:
            if reference is not None:
                with suppress(NotFound):  # here; others may have it, or all are told so by `restore`
                    self._compare_arguments(ckpt.info(version=reference.version), folder)
        nothing = {"sum": torch.tensor(0.0, device=trainer.args.device), "last_logged": trainer.state.global_step}
        loss = PerRank(nothing, missing="keep")
        parts = {"optimizer": _inner(trainer.optimizer), "scheduler": trainer.lr_scheduler, "loss": loss}
        self.restore(folder, parts)
        self._loss = loss.value

    def _compare_arguments(self, info: VersionInfo, folder: str) -> None:
        saved, args = info.metadata.get("arguments", {}), self._trainer.args
        changed = {name: was for name, was in saved.items() if was != getattr(args, name, None)}
        for name, was in changed.items():
            log.warning(
                "%s was saved with %s=%s, and it is %s now: losses will not be those of an uninterrupted training",
                folder, name, was, getattr(args, name, None),
            )  # fmt: skip


def _reference(folder: str | os.PathLike[str]) -> VersionReference | None:
    """What a folder stands for; None for one that holds a checkpoint of the Trainer's own."""
    return None if _is_native(folder) else read_reference(folder)


def _is_native(folder: str | os.PathLike[str]) -> bool:
    """Whether a plain Trainer has written a checkpoint into a folder. A reference beside it is of a version that the
    folder stood for before: when a version gets a folder, it replaces all of it.
    """
    return any(Path(folder).glob("rng_state*.pth"))


def _is_torn(folder: Path) -> bool:
    """Whether a crash has left a part of a folder that stands for a version."""
    try:
        if read_reference(folder) is not None:
            json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
    except StateMismatch:
        return False
    except (OSError, ValueError):
        return True
    return is_torn(folder)


def _remove(folder: Path) -> None:
    """Delete a torn folder, unless somebody has put something into it."""
    if {file.name for file in folder.iterdir()} <= {REFERENCE, TRAINER_STATE}:
        shutil.rmtree(folder, ignore_errors=True)


def _inner(optimizer: Any) -> Any:
    """The optimizer that accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
