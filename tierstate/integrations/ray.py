"""Ray Train: the checkpoints that workers report are references to versions, and a restarted worker restores one.

In the training function, on each worker:

    found = restore(ckpt, ray.train.get_checkpoint(), state)
    ...
    report({"loss": loss}, ckpt.save(state, step=step))

Nothing is uploaded: the folder that Ray keeps for a checkpoint has one small file. Written for Ray 2.60, whose Train
has its second version by default.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from tierstate.checkpointer import Checkpointer, Save
from tierstate.engine.info import VersionInfo
from tierstate.manifest.errors import NotFound, StateMismatch

from .version_folders import REFERENCE, VersionReference, is_torn, restoring, wait_ended

__all__ = ["report", "restore"]

log = logging.getLogger("tierstate")


def report(metrics: Mapping[str, Any], save: Save | None = None, *, checkpoint_dir_name: str | None = None) -> None:
    """Report metrics, and a save as the checkpoint that belongs to them: `ray.train.report`.

    Returns at once; a thread of Ray reports when the version is durable, so that Ray never restarts from one that a
    crash has taken. All workers call it as often, as Ray asks; the folder is written by the worker of rank 0. Without a
    save, and with one that the ``durable`` tier does not get, only the metrics are reported.

    A save that fails does not end the training: its folder says so, and stands for the newest version. The next `save`
    raises, if the policy's ``on_failure`` says so.

    Args:
        metrics: as `ray.train.report` takes them.
        save: what `Checkpointer.save` returned.
        checkpoint_dir_name: name of the folder; by default Ray's.
    """
    context = ray.train.get_context()
    reported: dict[str, Any] = {}
    if save is not None and not save.skipped and save._durable in save.tiers and context.get_world_rank() == 0:
        storage = context.get_storage()

        def upload(_: Checkpoint, name: str) -> Checkpoint:
            return _write(save, storage, name)

        # Ray wants a folder that it would upload; there is none, and the function takes no notice of it.
        nothing = Checkpoint(storage.experiment_fs_path, storage.storage_filesystem)
        reported = {"checkpoint": nothing, "checkpoint_upload_fn": upload}
    ray.train.report(
        dict(metrics),
        checkpoint_dir_name=checkpoint_dir_name,
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=False,
        **reported,
    )


def _write(save: Save, storage: Any, name: str) -> Checkpoint:
    """Runs in a thread of Ray: when the version is durable, write the folder that stands for it."""
    error = wait_ended(save, save._durable)
    if error is not None:
        log.warning("%s stands for no version of its own: the save of step %d failed: %s", name, save.step, error)
    path, files = storage.build_checkpoint_path_from_name(name), storage.storage_filesystem
    files.create_dir(path)
    reference = VersionReference(save.run, "" if error is not None else save.version, save.step, save.seq)
    with files.open_output_stream(str(PurePosixPath(path, REFERENCE))) as out:
        out.write(reference.text().encode())
    return Checkpoint(path, files)


def restore(ckpt: Checkpointer, checkpoint: Checkpoint | None, state: Any, **options: Any) -> VersionInfo | None:
    """Restore in place the version that a checkpoint of Ray stands for; all workers call it.

    In a worker that Ray has restarted, and whose tiers have dropped that version, this is the newest version: Ray
    learns of a version some time after it is durable, and `keep` may be ahead of it by then.

    Args:
        checkpoint: what `ray.train.get_checkpoint` returned, or one of a `ray.train.Result`.
        options: as `Checkpointer.restore` takes them: ``only``, ``rename``, ``on_damage``, ``allow_lossy``.

    Returns:
        The version; None if there is no checkpoint, or if no save was ever durable: the training begins anew.

    Raises:
        NotFound: no tier has the version any more, as ``keep`` says, and this is no restart, or there is no other.
        StateMismatch: the checkpoint is no reference, or of another run, or the state differs from what was saved.
        TierstateError: as `Checkpointer.restore`.
    """
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder, restoring(folder, ckpt.run) as reference:
        if reference is None and is_torn(folder):
            log.warning("%s of %s is torn; the newest version is restored", REFERENCE, checkpoint.path)
            return ckpt.resume(into=state, **options)
        if reference is None:
            raise StateMismatch(
                f"{checkpoint.path} has no {REFERENCE}: it was not reported by tierstate.integrations.ray.report; load "
                "it as the code that wrote it did"
            )
        if not reference.version:
            log.warning("the save of step %d had failed; the newest version is restored", reference.step)
            return ckpt.resume(into=state, **options)
        try:
            ckpt.restore(into=state, version=reference.version, **options)
        except NotFound as error:
            error.add_note(
                "Ray keeps folders as its CheckpointConfig says, and tiers keep versions as `keep` in the policy says: "
                "let each tier keep at least as many"
            )
            # All workers have this error, and all were given this checkpoint.
            if not _is_of_restart(checkpoint) or (newest := ckpt.resume(into=state, **options)) is None:
                raise
            log.warning(
                "Ray restarts from step %d, whose version is gone, as `keep` says; the newest one is restored, of step "
                "%d. Let each tier keep a few more than Ray, which learns of versions late",
                reference.step,
                newest.step,
            )
        return ckpt.restored


def _is_of_restart(checkpoint: Checkpoint) -> bool:
    """Whether this is a worker, and the checkpoint the one from which Ray has started it."""
    try:
        given = ray.train.get_checkpoint()
    except RuntimeError:  # no worker
        return False
    return given is not None and given.path == checkpoint.path
