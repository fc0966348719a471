"""Reads checkpoint folders of Megatron-core (``torch_dist``): a DCP folder, and beside it what all ranks have alike.

Each global tensor is under Megatron's key, each sharded object under its unique key, and the common state under
``common``: the leaves that `tierstate.integrations.megatron` saves. Megatron is not needed.
"""

from __future__ import annotations

import io
import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct

from tierstate.manifest.errors import FormatError, Unsafe
from tierstate.tiers.posix.files import exists

from .dcp import open_dcp
from .reader import ImportSource, Progress, step_in_file

COMMON = "common"
"""Leaf with what is the same on all ranks: the content of ``common.pt``."""

COMMON_FILE, CONFIG_FILE = "common.pt", "metadata.json"
"""Names of Megatron's files beside those of DCP."""

COMMON_STATE = "common_state"
"""Key of the object that later versions of Megatron-core save in place of that file."""

OBJECT = re.compile(r"/shard_[\d.]+_[\d.]+$")
"""How the unique key of a sharded object ends: its place among the objects of its key, and how many there are."""

_NAMESPACE, _BYTES_IO = "argparse.Namespace", "io.BytesIO"
"""Keys of the dicts that stand for such values of Megatron in a version."""

_VALUES: list[Any] = [
    Namespace,
    io.BytesIO,
    np.ndarray,
    np.dtype,
    np.dtypes.UInt32DType,
    (_reconstruct, "numpy.core.multiarray._reconstruct"),
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
]
"""What may be in a value besides tensors and plain ones: Megatron's arguments, and the state of NumPy's generator."""


def is_torch_dist(folder: Path) -> bool:
    """Whether a folder is a checkpoint of Megatron-core in its own format."""
    try:
        found = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("sharded_backend") == "torch_dist"


@contextmanager
def open_torch_dist(folder: Path, progress: Progress, *, skip_values: bool = False) -> Iterator[ImportSource]:
    """The state in a folder, as in `open_dcp`. No code in it is run.

    Args:
        skip_values: leave out the common state.

    Raises:
        Unsafe: loading a value would run code.
        FormatError: the folder is damaged.
    """
    with torch.serialization.safe_globals(_VALUES):
        with open_dcp(folder, progress) as found:
            state = {key: _object(key, value) for key, value in found.state.items()}
        common = [state.pop(key) for key in list(state) if key.startswith(f"{COMMON_STATE}/shard_")]
        if not skip_values and (common or exists(folder / COMMON_FILE)):
            if COMMON in state:
                raise FormatError(f"{folder}: a tensor is called {COMMON!r}, as the common state would be")
            state[COMMON] = common[0] if common else as_plain(_common(folder / COMMON_FILE))
    iteration = state[COMMON].get("iteration") if isinstance(state.get(COMMON), dict) else None
    yield replace(found, state=state, step=step_in_file(iteration))


def _object(key: str, value: Any) -> Any:
    """What Megatron has put into a list of one item."""
    held = OBJECT.search(key) and isinstance(value, list) and len(value) == 1
    return as_plain(value[0]) if held else value


def _common(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise Unsafe(
            f"{path} holds what would run code to be loaded, or a class of Megatron's: leave it out by --skip-values "
            f"(skip_values=True): {error!s:.300}"
        ) from error
    except Exception as error:  # whatever torch makes of bytes that it never wrote
        raise FormatError(f"{path} is nothing that torch loads: {error!r:.200}") from error


def as_plain(value: Any) -> Any:
    """A value with dicts in place of namespaces and files in memory, of which Megatron has some."""
    if isinstance(value, Namespace):
        return {_NAMESPACE: as_plain(vars(value))}
    if isinstance(value, io.BytesIO):
        return {_BYTES_IO: value.getvalue()}
    return _mapped(value, as_plain)


def from_plain(value: Any) -> Any:
    """The inverse of `as_plain`."""
    if type(value) is dict and len(value) == 1:
        (key, content), *_ = value.items()
        if key == _NAMESPACE:
            return Namespace(**from_plain(content))
        if key == _BYTES_IO:
            return io.BytesIO(content)
    return _mapped(value, from_plain)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) is dict:
        return {key: change(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(one) for one in value)
    return value
