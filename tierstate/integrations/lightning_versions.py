"""The versions of a run under the paths of Lightning: saves in the background, references, tags, removal."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch
from fsspec.utils import get_protocol
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint

import tierstate as ts
from tierstate.manifest.format.globs import check_globs
from tierstate.manifest.history.log import check_run
from tierstate.tiers.policy.models import KeepKeys

from .version_folders import rename_synced, write_synced

log = logging.getLogger("tierstate")

TAG = "lightning-"
"""Tags of versions that a path names begin with it. Retention keeps what has a tag, whatever `keep` says."""

LAST = ModelCheckpoint.CHECKPOINT_NAME_LAST
"""Files that ``ckpt_path="last"`` finds have names that begin with it."""

_WHAT = "a reference to a version in the tiers of tierstate; tierstate.integrations.lightning loads it"
_MAX_REFERENCE = 1 << 16
_MAX_PENDING = 50
_KEY = re.compile(r"[0-9a-f]{32}")
_VERSION = re.compile(r"([0-9a-f]{32})?")


def before_requeue(path: str) -> bool:
    """Whether this is the checkpoint that Lightning saves before it lets SLURM requeue the job. That ends the process,
    and the job then begins with this checkpoint or not at all.
    """
    return os.path.basename(path).startswith("hpc_ckpt_")


@dataclass(frozen=True)
class Target:
    """A save that a path names.

    Attributes:
        key: in the metadata of the save's version, and in its tag.
        step: the training step.
        version: the version's id; empty until it is durable.
    """

    key: str
    step: int
    version: str = ""


@dataclass(frozen=True)
class Reference:
    """The file at a path.

    Attributes:
        run: the run of the versions.
        targets: the save that the path names, then what it named before. The first one that became durable counts,
            so that a process that is killed during a save leaves what was there before.
    """

    run: str
    targets: tuple[Target, ...]

    def text(self) -> str:
        """What stands in the file."""
        return json.dumps({"what": _WHAT, "run": self.run, "targets": [asdict(t) for t in self.targets]}, indent=1)

    @classmethod
    def read(cls, path: str) -> Self | None:
        """The reference at a path; None if the file there is none.

        Raises:
            FileNotFoundError: nothing is there.
        """
        with get_filesystem(path).open(path, "rb") as file:
            data = file.read(_MAX_REFERENCE)
        try:
            found = json.loads(data)
            targets = tuple(Target(one["key"], int(one["step"]), one["version"]) for one in found["targets"])
            told = found["what"] == _WHAT and isinstance(found["run"], str)
            keys = all(_KEY.fullmatch(t.key) and _VERSION.fullmatch(t.version) for t in targets)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return cls(found["run"], targets) if told and keys and targets else None


class PathVersions:
    """The versions of a run under paths: saves in the background, references, removal.

    A worker thread does what has to wait until a version is durable, in the order of the calls. So a path names its
    new version, and what was removed after a save is gone, only once that save is durable.
    """

    def __init__(self, policy: ts.Policy, run: str, allow_pickle: Sequence[str]) -> None:
        # Checked here, as the tiers are opened at the first save only.
        self.policy, self.run, self.allow_pickle = policy, check_run(run), check_globs(allow_pickle)
        self._lock = threading.RLock()
        self._checkpointer: ts.Checkpointer | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._error: BaseException | None = None
        self._durable, self._durable_once = True, False
        self._removals: list[tuple[str, frozenset[str]]] = []

    def open(self) -> ts.Checkpointer:
        """The Checkpointer of the run, opened at the first call and after `close`."""
        with self._lock:
            if self._checkpointer is None:
                self._checkpointer = self._new(self.run)
            return self._checkpointer

    def save(self, state: Mapping[str, Any], path: str, step: int, metadata: Mapping[str, Any]) -> None:
        """Save a state as a version; returns when it is captured, and the first time when it is durable.

        Raises:
            CaptureError: a part of the state cannot be saved; nothing was changed.
            TierstateError: an earlier save failed, and this one was not made.
        """
        self.raise_error()
        target, about = self.begin(path, step, metadata)
        save = self.open().save(state, step=step, metadata=about)
        if save.skipped:
            self.tell_skipped(path, step)
        else:
            self.follow(path, target, save)

    def begin(self, path: str, step: int, metadata: Mapping[str, Any]) -> tuple[Target, dict[str, Any]]:
        """What a path will name, and the metadata of its version."""
        target = Target(uuid.uuid4().hex, step)
        return target, {**metadata, "lightning": {"path": path, "key": target.key}}

    def tell_skipped(self, path: str, step: int) -> None:
        """Log that the policy has left out a save."""
        log.warning("%s: step %d was not saved: the arena was full (on_full: skip)", path, step)

    def follow(self, path: str, target: Target, save: ts.Save) -> None:
        """Write the reference of a save that is captured, and give its version a tag once it is durable.

        Raises:
            TierstateError: the first save of a job failed.
        """
        self._hold(save.seq)
        if self._durable_once:
            with self._lock:
                self._write(path, (target, *_bounded(self._targets(path))))
        self._submit(lambda: self._commit(path, target, save))
        if not self._durable_once:
            # Nothing to go back to: were there a reference, a process that is killed now could not start anew.
            self.finish()

    def remove(self, path: str) -> None:
        """Remove a path, and its version unless something else needs it, once all earlier saves are durable."""
        filesystem = get_filesystem(path)
        if not (os.path.islink(path) or filesystem.exists(path)):
            return
        targets = self._targets(path)
        if targets or os.path.islink(path):
            keys = frozenset(target.key for target in targets)
            self._submit(lambda: self._remove(path, keys))
        else:
            filesystem.rm(path, recursive=True)  # a checkpoint of Lightning's own

    def load(self, path: str, device: torch.device | None = None) -> Any:
        """The state that a path names.

        Raises:
            FileNotFoundError: nothing is at the path.
            FormatError: what is there is no reference.
            NotFound: no tier has the version any more.
            TierstateError: as `Checkpointer.load`.
        """
        self.settle()
        reference = read_reference(path)
        opened = nullcontext(self.open()) if reference.run == self.run else self._new(reference.run)
        with opened as checkpointer:
            try:
                found = checkpointer.load(version=resolve(checkpointer, reference, path), device=device)
            except ts.TierstateError as error:
                error.add_note(f"{path} refers to it, in run {reference.run!r}")
                raise
        self._durable_once = self._durable_once or reference.run == self.run
        return found

    def settle(self) -> None:
        """Wait until all references are written."""
        if self._worker is not None:
            self._worker.submit(lambda: None).result()

    def finish(self) -> None:
        """Wait until all saves so far are durable, and have their references and tags.

        Raises:
            TierstateError: a save failed.
        """
        self.settle()
        self.raise_error()

    def close(self) -> None:
        """Wait until all saves are durable and all that was removed is gone; then close the tiers.

        Raises:
            TierstateError: a save failed.
        """
        try:
            if self._worker is not None:
                self._worker.shutdown(wait=True)
                self._worker = None
            with self._lock:
                checkpointer, self._checkpointer = self._checkpointer, None
            if checkpointer is not None:
                checkpointer.close()
        finally:
            self.raise_error()

    def _new(self, run: str) -> ts.Checkpointer:
        """A Checkpointer of any run in these tiers."""
        return ts.Checkpointer(self.policy, run, allow_pickle=self.allow_pickle)

    def raise_error(self) -> None:
        """Raise the error of the background, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _submit(self, task: Callable[[], None]) -> None:
        def run() -> None:
            try:
                task()
            except BaseException as error:
                # For the next save or `close`: nobody waits for this thread.
                self._error = self._error or error

        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "tierstate-lightning")
        self._worker.submit(run)

    def _hold(self, seq: int, *, end: bool = False) -> None:
        """Keep a version until it has its tag, however many newer ones there are by then."""
        self.open()._pipeline.hold(seq, end=end)

    def _commit(self, path: str, target: Target, save: ts.Save) -> None:
        try:
            self._name(path, target, save)
        finally:
            self._hold(save.seq, end=True)

    def _name(self, path: str, target: Target, save: ts.Save) -> None:
        error = self._wait(save)
        versions = self.open().versions()
        found = _by_key(versions).get(target.key)
        lasting = {tier.name for tier in self.policy.tiers if tier.persistent}
        if found is None or not lasting & set(found.tiers):
            self._durable = error is None and self._durable
            self._tell(error)
            return
        self.open().tag(_free_tag(versions), version=found.id)
        with self._lock:
            targets = self._targets(path)
            keys = [one.key for one in targets]
            place = keys.index(target.key) if target.key in keys else -1
            if place >= 0 or not self._durable_once:
                self._write(path, (*targets[: max(place, 0)], replace(target, version=found.id)))
                gone = keys[place + 1 :]
            else:  # the file was deleted by other means
                gone = [target.key]
        self._durable = self._durable_once = True
        self._give_up(gone)
        self._carry_out()

    def _wait(self, save: ts.Save) -> BaseException | None:
        """Wait until a save is durable. Returns the error if it failed on all tiers that last."""
        names = [tier.name for tier in self.policy.tiers if tier.persistent and tier.name in save.tiers]
        first: BaseException | None = None
        for name in sorted(names, key=lambda name: name != self.policy.durable):
            try:
                save.wait(name)
                return None
            except ts.TierstateError as error:
                first = first or error
        return first

    def _tell(self, error: BaseException | None) -> None:
        if error is not None and self.policy.on_failure.action == "warn":
            log.warning("a checkpoint was not saved: %s (on_failure: warn)", error)
        elif error is not None:
            raise error

    def _remove(self, path: str, keys: frozenset[str]) -> None:
        self._removals.append((path, keys))
        if self._durable:  # otherwise the older checkpoints are all that there is
            self._carry_out()

    def _carry_out(self) -> None:
        gone: set[str] = set()
        while self._removals:
            path, keys = self._removals.pop(0)
            with self._lock:
                left = tuple(target for target in self._targets(path) if target.key not in keys)
                if left:
                    self._write(path, left)
                else:
                    with suppress(FileNotFoundError):
                        get_filesystem(path).rm(path)
            gone |= keys
        self._give_up(gone)

    def _give_up(self, keys: Collection[str]) -> None:
        """Take back our tags from versions that no path names any more: retention drops them at its next turn."""
        versions = _by_key(self.open().versions()) if keys else {}
        for tag in (tag for key in keys if key in versions for tag in versions[key].tags if tag.startswith(TAG)):
            self.open().untag(tag)

    def _targets(self, path: str) -> tuple[Target, ...]:
        """What the reference at a path names; nothing if it is a link, none, or of another run."""
        if os.path.islink(path):
            return ()  # a link names what belongs to another path
        try:
            found = Reference.read(path)
        except (FileNotFoundError, IsADirectoryError):
            return ()
        return found.targets if found is not None and found.run == self.run else ()

    def _write(self, path: str, targets: tuple[Target, ...]) -> None:
        """Write a reference: whole or not at all."""
        text = Reference(self.run, targets).text()
        if get_protocol(path) == "file":
            _replace_file(Path(path.removeprefix("file://")), text)
        else:
            get_filesystem(path).pipe_file(path, text.encode())


def keep_what_is_named(policy: ts.Policy) -> ts.Policy:
    """The policy in which tiers that keep everything keep the newest version, and those with a tag.

    Raises:
        PolicyError: a tier would drop versions that have a tag.
    """
    tiers = []
    for tier in policy.tiers:
        if tier.persistent and tier.keep.tags is False and not tier.keep.all:
            raise ts.PolicyError(
                f"tiers.{tier.name}.keep.tags: with 'false' it would drop checkpoints that Lightning still has a path "
                "for; leave it out"
            )
        replaced = tier.persistent and tier.keep.all
        tiers.append(tier.model_copy(update={"keep": KeepKeys(last=1)}) if replaced else tier)
    return policy.model_copy(update={"tiers": tuple(tiers)})


def _replace_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        write_synced(written, text)
        rename_synced(written, path)
    finally:
        written.unlink(missing_ok=True)


def _bounded(targets: Sequence[Target]) -> list[Target]:
    """The newest that are not durable yet, and the newest that is: while a tier is away the file does not grow."""
    return [t for t in targets if not t.version][:_MAX_PENDING] + [t for t in targets if t.version][:1]


def _free_tag(versions: Iterable[ts.VersionInfo]) -> str:
    """The first of our tags that no version has: a tag that was ever given leaves an object in each tier."""
    used = {tag for version in versions for tag in version.tags}
    return next(name for n in count() if (name := f"{TAG}{n}") not in used)


def _by_key(versions: Iterable[ts.VersionInfo]) -> dict[str, ts.VersionInfo]:
    """The versions that were saved under a path, by key, oldest first."""
    told = [(version.metadata.get("lightning"), version) for version in versions]
    return {str(about["key"]): v for about, v in told if isinstance(about, Mapping) and "key" in about}


def read_reference(path: str) -> Reference:
    """The reference at a path.

    Raises:
        FormatError: the file is none.
    """
    found = Reference.read(path)
    if found is None:
        raise ts.FormatError(
            f"{path} is no reference to a version; a checkpoint of Lightning's own is a pickle, which a Trainer "
            "without this plugin loads: load it once there, then save with the plugin"
        )
    return found


def resolve(checkpointer: ts.Checkpointer, reference: Reference, path: str) -> str:
    """The id of the version that a reference names.

    Raises:
        NotFound: none of its saves became durable.
        WrongTier, Unreadable: a tier is missing that may have it.
    """
    wanted = reference.targets[0]
    if wanted.version:
        return wanted.version
    known = _by_key(checkpointer.versions())
    if wanted.key in known:
        return known[wanted.key].id
    _check_all_answer(checkpointer)
    ids = [
        target.version or known[target.key].id for target in reference.targets if target.version or target.key in known
    ]
    if not ids and (os.path.islink(path) or os.path.basename(path).startswith(LAST)):
        # It stands for the newest checkpoint. With `save_last="link"` what it was before is not known any more.
        ids = [version.id for version in reversed(known.values()) if version.step <= wanted.step]
    lost = f"{path}: its process ended before the save of step {wanted.step} had reached a tier that survives it"
    if not ids:
        newest = max((version.step for version in known.values()), default=None)
        raise ts.NotFound(f"{lost}; " + ("no other is there" if newest is None else f"the newest is step {newest}"))
    log.warning("%s; what was there before is loaded", lost)
    return ids[0]


def _check_all_answer(checkpointer: ts.Checkpointer) -> None:
    """Raise if a tier is missing, or cannot be listed: it may have what was not found in the others."""
    catalog = checkpointer._catalog()
    catalog.seqs()
    catalog.check_empty()
