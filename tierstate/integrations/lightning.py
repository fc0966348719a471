"""Lightning: `TierCheckpointIO` saves the checkpoints of a Trainer as versions of a run; `RngState` saves generators.

At each path that Lightning saves to lies a reference: a small JSON file that names a version. So all that looks for
files works as before: `ModelCheckpoint`, `ckpt_path="last"` and `"best"`, links, `load_from_checkpoint`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core import saving
from lightning.pytorch.trainer.states import TrainerFn

import tierstate as ts

from .generators import ResumedRng
from .lightning_versions import TAG as TAG
from .lightning_versions import PathVersions, Reference, before_requeue, keep_what_is_named

log = logging.getLogger("tierstate")

RNG = "tierstate_rng"
"""Key of a checkpoint under which `RngState` puts the generators of all ranks."""


def refuse_objects(value: Any, at: tuple[str, ...] = ()) -> None:
    """Raise CaptureError for modules and the like: their ``state_dict`` would come back in their place."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        raise ts.CaptureError(
            f"{'.'.join(at)}: a {type(value).__qualname__} in a checkpoint would come back as its state_dict; leave it "
            "out, with save_hyperparameters(ignore=[...]), or put its state_dict() there"
        )
    for key, item in items:
        refuse_objects(item, (*at, str(key)))


def monitored_metrics(checkpoint: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that ModelCheckpoints monitor: for `tierstate ls`, and for ``keep: {best: ...}``."""
    found = {}
    for state in (checkpoint.get("callbacks") or {}).values():
        if isinstance(state, Mapping) and isinstance(state.get("monitor"), str):
            with suppress(TypeError, ValueError, RuntimeError):
                found[state["monitor"]] = float(state.get("current_score"))  # type: ignore[arg-type]
    return found


class TierCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Saves checkpoints as versions of a run: ``Trainer(plugins=[TierCheckpointIO("policy.yaml", run="gpt")])``.

    `save_checkpoint` returns when the state is captured; it is written in the background. Only the first save of a job
    that has resumed nothing, and the one before SLURM requeues it, wait until they are durable. `teardown`, at the end
    of `fit`, waits for all. A failure is raised by the next save, or there.

    A version has a tag as long as a path names it, so that retention keeps it. When Lightning removes the path, tiers
    without a ``keep`` in the policy drop it, but for the newest; in tiers with one, `keep` decides from then on.

    Args:
        policy: which tiers there are; a `Policy`, or the path of a policy file.
        run: name of the run.
        allow_pickle: globs of the parts of a checkpoint that may be pickles, such as ``hyper_parameters.**``.

    Raises:
        PolicyError: the policy cannot be used.
        TypeError, ValueError: another argument is not valid.
    """

    def __init__(
        self, policy: ts.Policy | str | os.PathLike[str], run: str, *, allow_pickle: Sequence[str] = ()
    ) -> None:
        loaded = policy if isinstance(policy, ts.Policy) else ts.Policy.load(policy)
        self._versions = PathVersions(keep_what_is_named(loaded), run, allow_pickle)
        self._arguments = (loaded, run, self._versions.allow_pickle)
        _made.pop(run, None)
        _made[run] = self
        saving.pl_load = _load_for_lightning

    def __reduce__(self) -> tuple[Any, ...]:
        policy, run, allow_pickle = self._arguments
        return _remake, (policy, run, allow_pickle)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save a checkpoint as a version, and a reference to it at the path.

        Raises:
            TypeError: ``storage_options`` were given.
            CaptureError: a value cannot be saved; the message names its key. Nothing was changed.
            TierstateError: an earlier save failed; this one was not made.
        """
        if storage_options is not None:
            raise TypeError("TierCheckpointIO takes no storage_options: the policy says how each tier is used")
        refuse_objects(checkpoint)
        step = checkpoint.get("global_step", checkpoint.get("step", 0))
        self._versions.save(checkpoint, os.fspath(path), int(step), monitored_metrics(checkpoint))
        if "pytorch-lightning_version" not in checkpoint or before_requeue(os.fspath(path)):
            # Of Fabric, which never calls `teardown`, or of a launcher whose process ends without it, as SLURM ends it.
            self._versions.finish()

    def load_checkpoint(self, path: Any, map_location: Any | None = None, weights_only: bool | None = None) -> Any:
        """The checkpoint that a path refers to.

        Args:
            map_location: a device; by default, and for all else that torch takes, the host.
            weights_only: without effect, as nothing is unpickled but what ``allow_pickle`` names.

        Raises:
            FileNotFoundError: nothing is at the path.
            FormatError: what is there is no reference.
            NotFound: no tier has the version.
            TierstateError: as `Checkpointer.load`.
        """
        device = torch.device(map_location) if isinstance(map_location, (str, torch.device)) else None
        return self._versions.load(os.fspath(path), device)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a path, and its version, once all earlier saves are durable."""
        self._versions.remove(os.fspath(path))

    def teardown(self) -> None:
        """Wait until all saves are durable, and close the tiers. The next call of another method opens them again.

        Raises:
            TierstateError: a save failed.
        """
        self._versions.close()


def _remake(policy: ts.Policy, run: str, allow_pickle: Sequence[str]) -> TierCheckpointIO:
    return TierCheckpointIO(policy, run, allow_pickle=allow_pickle)


_made: dict[str, TierCheckpointIO] = {}
"""The newest `TierCheckpointIO` of each run, for `load_from_checkpoint`; the last one made is the last."""

_load_of_lightning = saving.pl_load


def _load_for_lightning(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """In place of the function by which `load_from_checkpoint` loads, which asks no plugin: also loads references."""
    if isinstance(path_or_url, (str, os.PathLike)) and not str(path_or_url).startswith("http"):
        path = os.fspath(path_or_url)
        if (found := Reference.read(path)) is not None:
            made = _made.get(found.run) or next(reversed(_made.values()))
            return made.load_checkpoint(path, map_location)
    return _load_of_lightning(path_or_url, map_location=map_location, weights_only=weights_only)


class RngState(Callback):  # type: ignore[misc]
    """Saves the random generators of each rank with each checkpoint, which Lightning does not, and restores them.

    Without it a model with dropout goes on with other random numbers after a resume.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None
        self._ended: dict[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget what an earlier call of the trainer has loaded, and ended before it was set again."""
        self._loaded = self._ended = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the generators of all ranks."""
        mine = ts.Rng().state_dict()
        every = [mine] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(every, mine)
        ended = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        checkpoint[RNG] = {"ranks": every, "epoch_ended": bool(ended)}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Set the generators, if a training resumes and the checkpoint has those of as many ranks.

        After the end of an epoch the next one draws its order from them, when the loader makes its iterator.
        """
        found = checkpoint.get(RNG)
        if found is None or trainer.state.fn != TrainerFn.FITTING:  # `validate`, `test` and `predict` come here too
            return
        if len(found["ranks"]) != trainer.world_size:
            saved = len(found["ranks"])
            log.warning("%d ranks resume what %d saved: the generators are not restored", trainer.world_size, saved)
            return
        mine = found["ranks"][trainer.global_rank]
        ResumedRng().load_state_dict(mine)
        self._loaded, self._ended = (None, mine) if found["epoch_ended"] else (mine, None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Within an epoch: set them again, as the new iterator has drawn a number that the old one had drawn before."""
        if self._loaded is not None:
            ResumedRng().load_state_dict(self._loaded)
            self._loaded = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The next epoch goes on, with the order that was drawn for it."""
        self._ended = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """With ``max_steps`` Lightning makes an iterator for the epoch that has ended, and ends it once more: set them
        again, as the next epoch draws its order after that. ModelCheckpoint saves after this, too.
        """
        if self._ended is not None:
            ResumedRng().load_state_dict(self._ended)
            self._ended = None
