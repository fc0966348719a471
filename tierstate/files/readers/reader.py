"""Shared by all readers of other programs' files: their result, and helpers to build a state from names and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tierstate.manifest.errors import FormatError, TierstateError, untrusted
from tierstate.manifest.format.leaf_path import Path, format_path

from .outline import FindTensor, decode_outline, state_of_outline

OUTLINE = "tierstate"
"""Name of the outline in a file's metadata."""


MAX_METADATA = 1 << 28
"""Largest metadata that is read from a file, in bytes."""


MAX_STEP = (1 << 63) - 1


Progress = Callable[[int], None]
"""Called with the bytes read since the last call."""


@dataclass(frozen=True)
class ImportSource:
    """A state whose tensors are read from an open file while they are saved.

    Attributes:
        state: containers and values; tensors stay in the file.
        step: the training step, if the file has it.
        metadata: the user's metadata, if the file has it.
    """

    state: Any
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def source_from_outline(metadata: Mapping[str, Any], find: FindTensor, what: str) -> ImportSource | None:
    """The state of a file that tierstate exported; None if its metadata has no outline.

    Raises:
        FormatError: the outline is not valid.
    """
    outline = metadata.get(OUTLINE)
    if outline is None:
        return None
    state = state_of_outline(decode_outline(outline, what), find, what)
    own = outline.get("metadata")
    return ImportSource(state, step_in_file(outline.get("step")), own if isinstance(own, dict) else {})


@contextmanager
def errors_name(what: str) -> Iterator[None]:
    """Add the file's name to format errors, and raise as one whatever else libraries raise for what is in the file.
    Errors of the operating system stay what they are."""
    try:
        yield
    except FormatError as error:
        if what in str(error):
            raise
        raise FormatError(f"{what}: {error}") from error
    except (TierstateError, OSError):
        raise
    except Exception as error:
        with untrusted(f"{what} cannot be read", named=False):
            raise error


def step_in_file(step: object) -> int | None:
    """The step in a file, given as int or text; None if it is not a valid step."""
    if isinstance(step, str) and step.isascii() and step.isdigit() and len(step) < 20:
        step = int(step)
    return step if type(step) is int and 0 <= step <= MAX_STEP else None


def nest(items: Iterable[tuple[Path, Any]], what: str) -> Any:
    """Nested dicts from values by path; a value with an empty path must be the only one.

    Raises:
        FormatError: two values have the same path, or one path is inside another value.
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
