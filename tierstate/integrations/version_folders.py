"""Checkpoint folders of frameworks that hold no state, only a reference to a version: a small JSON file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tierstate.checkpointer import Checkpointer, Save
from tierstate.engine.info import VersionInfo
from tierstate.manifest.errors import NotFound, StateMismatch, TierstateError

REFERENCE = "tierstate.json"
"""The name of the file."""


class VersionReference(NamedTuple):
    """What a folder stands for.

    Attributes:
        run: the name of the run.
        version: the version's id; empty in the folder of a save that failed, which Ray Train keeps all the same.
        step: its step.
    """

    run: str
    version: str
    step: int

    def text(self) -> str:
        """The content of the file."""
        return json.dumps(self._asdict()) + "\n"


def read_reference(folder: str | os.PathLike[str]) -> VersionReference | None:
    """What a folder stands for; None for one that holds a framework's own files, or does not exist.

    Raises:
        StateMismatch: the file there is not one of these.
    """
    file = Path(folder) / REFERENCE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return VersionReference(str(found["run"]), str(found["version"]), int(found["step"]))
    except OSError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise StateMismatch(
            f"{file} should name a version of a run, and does not ({error!r}); delete {folder}, and resume from another"
        ) from error


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


def kept_versions(ckpt: Checkpointer) -> set[str]:
    """Ids of the versions that a tier has and keeps. Retention has dropped the others, or is about to: it comes some
    time after the version that it makes room for.

    Raises:
        TierUnavailable: a tier cannot be listed, so it may have others.
    """
    drops = {t.name: t.decision(ckpt._pipeline.pinned(t.name)).drop for t in ckpt._tier_runs}
    return {v.id for v in ckpt.versions() if not v.tiers or any(v.seq not in drops[tier] for tier in v.tiers)}


def write_reference(folder: str | os.PathLike[str], info: VersionInfo) -> None:
    """Write or replace the file in a folder; a reader sees all of it or nothing, also of a folder that is new."""
    text = VersionReference(info.run, info.id, info.step).text()
    folder = Path(folder)
    if not folder.exists():
        parts = folder.with_name(f".{folder.name}.part")
        parts.mkdir(parents=True, exist_ok=True)
        (parts / REFERENCE).write_text(text, encoding="utf-8")
        with suppress(OSError):  # somebody has made it meanwhile
            parts.rename(folder)
            return
        shutil.rmtree(parts)
    part = folder / f".{REFERENCE}.part"
    part.write_text(text, encoding="utf-8")
    part.replace(folder / REFERENCE)


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
