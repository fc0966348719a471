"""Foreign files: what every reader of another program's files gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tierstate.manifest.errors import FormatError
from tierstate.manifest.leaf import Path, format_path

from .outline import Find, assemble, decode_outline

OUTLINE = "tierstate"
"""Name of the outline among a file's metadata."""

MAX_METADATA = 1 << 28
"""Bytes of metadata that are read of any file."""

MAX_STEP = (1 << 63) - 1

Progress = Callable[[int], None]
"""Called with the bytes read since the last call."""


@dataclass(frozen=True)
class Foreign:
    """A state that lies in a file, to be saved while the file is open.

    Attributes:
        state: containers and values; tensors stay in the file.
        step: the training step, where the file says it.
        metadata: the user's metadata, where the file has it.
    """

    state: Any
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def outlined(metadata: Mapping[str, Any], find: Find, what: str) -> Foreign | None:
    """The state of a file that was exported; None where its metadata has no outline.

    Raises:
        FormatError: it has one that cannot be used.
    """
    outline = metadata.get(OUTLINE)
    if outline is None:
        return None
    state = assemble(decode_outline(outline, what), find, what)
    own = outline.get("metadata")
    return Foreign(state, checked_step(outline.get("step")), own if isinstance(own, dict) else {})


@contextmanager
def named(what: str) -> Iterator[None]:
    """Errors about what a file says begin with its name."""
    try:
        yield
    except FormatError as error:
        if what in str(error):
            raise
        raise FormatError(f"{what}: {error}") from error


def checked_step(step: object) -> int | None:
    """A step that a file says, as int or text; None where that is none."""
    if isinstance(step, str) and step.isascii() and step.isdigit() and len(step) < 20:
        step = int(step)
    return step if type(step) is int and 0 <= step <= MAX_STEP else None


def nest(items: Iterable[tuple[Path, Any]], what: str) -> Any:
    """Values by their paths as dicts within dicts; a value whose path is empty is all there is.

    Raises:
        FormatError: two values lie at one path, or one lies in another.
    """
    root: dict[Any, Any] = {}
    for path, value in items:
        at = root
        for key in path[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise FormatError(f"{what}: {format_path(path)} lies in a tensor")
        if not path:
            return value
        if path[-1] in at:
            raise FormatError(f"{what}: {format_path(path)} is there twice")
        at[path[-1]] = value
    return root
