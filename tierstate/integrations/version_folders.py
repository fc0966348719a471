"""Checkpoint folders of frameworks that hold no state, only a reference to a version: a small JSON file."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tierstate.checkpointer import Checkpointer, Save
from tierstate.engine.info import VersionInfo
from tierstate.manifest.errors import NotFound, StateMismatch, TierstateError
from tierstate.tiers.posix.files import exists, is_folder, sync_folder

REFERENCE = "tierstate.json"
"""The name of the file."""


class VersionReference(NamedTuple):
    """What a folder stands for.

    Attributes:
        run: the name of the run.
        version: the version's id; empty in the folder of a save that failed, which Ray Train keeps all the same.
        step: its step.
        seq: its number in the run; 0 where an earlier tierstate has written the file, or it is not known.
    """

    run: str
    version: str
    step: int
    seq: int = 0

    def text(self) -> str:
        """The content of the file."""
        return json.dumps(self._asdict()) + "\n"


def read_reference(folder: str | os.PathLike[str]) -> VersionReference | None:
    """What a folder stands for; None for one that holds a framework's own files, does not exist, or is as good as lost,
    since its reference is torn (`is_torn`).

    Raises:
        StateMismatch: the file there is not one of these.
    """
    file = Path(folder) / REFERENCE
    try:
        text = file.read_text(encoding="utf-8")
        if _is_cut_short(text):
            return None
        found = json.loads(text)
        seq = int(found.get("seq", 0))
        return VersionReference(str(found["run"]), str(found["version"]), int(found["step"]), seq)
    except OSError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateMismatch(
            f"{file} should name a version of a run, and does not ({error!r}); delete {folder}, and resume from another"
        ) from error


def is_torn(folder: str | os.PathLike[str]) -> bool:
    """Whether a crash of the machine, or a full disk, has left a folder with a part of its reference."""
    try:
        return _is_cut_short((Path(folder) / REFERENCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _is_cut_short(text: str) -> bool:
    """Whether this is the beginning of a reference: nothing of it, or zeros, as some file systems leave, too."""
    begin, written = '{"run": ', text.rstrip("\0")
    return written.startswith(begin[: len(written)]) and "}" not in written


def numbered_folders(parent: Path, prefix: str) -> list[tuple[Path, VersionReference]]:
    """The folders ``<prefix>N`` that stand for versions, by their numbers.

    Others are their owner's: copies under names of their own (``checkpoint-best``), and folders with a file of the same
    name that is something else.
    """
    found = list[tuple[int, Path, VersionReference]]()
    for folder in parent.glob(f"{prefix}*"):
        if number := re.fullmatch(f"{re.escape(prefix)}([0-9]+)", folder.name):
            with suppress(StateMismatch):
                if (reference := read_reference(folder)) is not None:
                    found.append((int(number[1]), folder, reference))
    return [(folder, reference) for _, folder, reference in sorted(found)]


def wait_ended(save: Save, tier: str) -> BaseException | None:
    """Wait until a save is committed on a tier that gets it, or has failed there. Returns the error, which the next
    save still raises as the policy's ``on_failure`` says: one that `Save.wait` raises counts as reported.
    """
    return save._save_state.tiers[tier].exception()


def saved_version(ckpt: Checkpointer, save: Save) -> VersionInfo:
    """The version that a save has made: the one of its number, since several may be of one step.

    Raises:
        NotFound: retention has dropped it already.
    """
    for version in reversed(ckpt.versions()):
        if version.seq == save.seq and version.id:
            return version
    raise NotFound(f"the version of step {save.step} is gone, as `keep` says")


def kept_versions(ckpt: Checkpointer) -> Callable[[VersionReference], bool]:
    """Returns a function: whether a tier has the version of a reference and keeps it, or may, since its record cannot
    be read now. Retention has dropped the others, or is about to: it comes some time after the version that it makes
    room for.

    Raises:
        TierUnavailable: a tier cannot be listed, so it may have others.
    """
    drops = {t.name: t.decision(ckpt._pipeline.pinned(t.name)).drop for t in ckpt._tier_runs}
    versions = [
        v for v in ckpt.versions() if v.unreadable or not v.tiers or any(v.seq not in drops[tier] for tier in v.tiers)
    ]
    ids, unread = {v.id for v in versions if v.id}, {v.seq for v in versions if not v.id}
    return lambda reference: reference.version in ids or reference.seq in unread


def write_reference(folder: str | os.PathLike[str], info: VersionInfo) -> None:
    """Write or replace the file in a folder; a reader sees all of it or nothing, also of a folder that is new, and
    after a crash of the machine.
    """
    text = VersionReference(info.run, info.id, info.step, info.seq).text()
    folder = Path(folder)
    if not exists(folder):
        parts = folder.with_name(f".{folder.name}.part")
        parts.mkdir(parents=True, exist_ok=True)
        write_synced(parts / REFERENCE, text)
        try:
            rename_synced(parts, folder)
            return
        except OSError:
            if not is_folder(folder):
                raise
        shutil.rmtree(parts, ignore_errors=True)  # somebody has made the folder meanwhile
    part = folder / f".{REFERENCE}.part"
    write_synced(part, text)
    rename_synced(part, folder / REFERENCE)


def write_synced(file: Path, text: str) -> None:
    """Write a file; its content is on stable storage before anything renames it or refers to it."""
    with file.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def rename_synced(old: Path, new: Path) -> None:
    """Rename a file, or a folder whose files are synced; the names are on stable storage then."""
    if is_folder(old):
        sync_folder(old)
    old.replace(new)
    sync_folder(new.parent)


@contextmanager
def restoring(folder: str | os.PathLike[str], run: str) -> Iterator[VersionReference | None]:
    """The reference of a folder; errors of what is done with it say which folder they are about.

    Raises:
        StateMismatch: it is of another run.
    """
    reference = read_reference(folder)
    if reference is not None and reference.run != run:
        raise StateMismatch(
            f"{os.fspath(folder)} is of the run {reference.run!r}, and here is {run!r}: resume from a folder of that, "
            f"or give run={reference.run!r}"
        )
    try:
        yield reference
    except TierstateError as error:
        error.add_note(f"while resuming from {os.fspath(folder)}")
        raise
