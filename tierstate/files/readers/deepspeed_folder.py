"""Reads checkpoint folders of DeepSpeed: those of ZeRO, and universal ones; DeepSpeed is not needed.

The state has whole parameters by name (see `zero`). Files are mapped and read by torch's weights-only unpickler, which
knows a few classes of DeepSpeed by plain ones of ours.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tierstate.manifest.errors import FormatError, Unsafe
from tierstate.providers.values.copies import with_values
from tierstate.tiers.posix.files import exists

from .reader import ImportSource, Progress, errors_name, step_in_file
from .zero import (
    DEEPSPEED,
    FP32,
    MODEL,
    MODEL_STATES,
    OPTIMIZER,
    OPTIMIZER_STATE,
    SCALER,
    is_zero,
    whole_parameters,
    without_moments,
    without_weights,
)

UNIVERSAL = "zero"
"""The folder in a universal checkpoint that has a folder for each parameter."""

OPTIMIZER_FILE = "optimizer_state.pt"
"""Name of the file beside these."""

PARAM, CAT_DIM = "param", "cat_dim"
"""Keys of a file with a parameter: the tensor, and the axis along which tensor parallel ranks would cut it."""

_FIRST_MODEL = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


class _Fragment:
    """Where a parameter lies in a partition."""

    start: int
    numel: int


class _LossScaler:
    """The attributes of a loss scaler."""


class _DynamicLossScaler:
    """The attributes of one that changes."""


class _Stage(int):
    """The stage of ZeRO."""


_SCALERS = {_LossScaler: "LossScaler", _DynamicLossScaler: "DynamicLossScaler"}

_CLASSES: list[Any] = [
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
"""What is made in place of DeepSpeed's classes."""


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder is a checkpoint of ZeRO, or a universal one."""
    return exists(folder / UNIVERSAL / OPTIMIZER_FILE) or is_zero(path.stem for path in folder.glob("*.pt"))


@contextmanager
def open_deepspeed(folder: Path, progress: Progress) -> Iterator[ImportSource]:
    """The state in a folder, of whole parameters. No code in it is run.

    Raises:
        Unsafe: loading a value would run code.
        FormatError: as `whole_parameters`.
    """
    if exists(folder / UNIVERSAL / OPTIMIZER_FILE):
        with errors_name(str(folder)):
            found = _universal(folder)
    else:
        files = {path.stem: _load(path) for path in sorted(folder.glob("*_states.pt"))}
        found = whole_parameters(files, str(folder), progress)
    yield found


def _universal(folder: Path) -> ImportSource:
    model = _load(next((folder / name for name in _FIRST_MODEL if exists(folder / name)), folder / _FIRST_MODEL[0]))
    shapes = {name: shape for group in model.get("param_shapes") or () for name, shape in group.items()}
    there = sorted(path for path in (folder / UNIVERSAL).iterdir() if exists(path / f"{FP32}.pt"))
    # DeepSpeed puts buffers among the parameters, as float32; in the module they are of their own type.
    trained = [path for path in there if not shapes or path.name in shapes]
    states = {path.name: _states(path, shapes.get(path.name)) for path in trained}
    weights = {name: found.pop(FP32) for name, found in states.items()}
    rest = {
        MODEL_STATES: without_weights(model),
        OPTIMIZER_STATE: without_moments(_load(folder / UNIVERSAL / OPTIMIZER_FILE)),
    }
    state = {MODEL: _module(model, weights), OPTIMIZER: states, DEEPSPEED: rest}
    return ImportSource(state, step_in_file(model.get("global_steps")))


def _module(model: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The weights, those that share memory with them, and what only the module has."""
    others, shared = model.get("module") or {}, model.get("shared_params") or {}
    left = {name: value for name, value in others.items() if name not in weights and shared.get(name) not in weights}
    # In stage 3 what stands for a parameter is empty. Beside tensors there may be what `get_extra_state` gave.
    kept = model.get("buffer_names") or ()
    left = {n: one for n, one in left.items() if not isinstance(one, torch.Tensor) or one.numel() or n in kept}
    return {**weights, **left, **{name: weights[root] for name, root in shared.items() if root in weights}}


def _states(folder: Path, shape: Any) -> dict[str, Any]:
    """A parameter's weights and moments, by DeepSpeed's names."""
    return {path.stem: _state(path, shape) for path in sorted(folder.glob("*.pt"))}


def _state(path: Path, shape: Any) -> Any:
    found = _load(path)
    if path.stem == "step":
        return found
    found = found[PARAM] if isinstance(found, dict) else found
    if not isinstance(found, torch.Tensor) or not found.is_contiguous():
        raise FormatError(f"{path} holds no plain tensor")
    flat = shape is not None and tuple(found.shape) == (math.prod(shape),)  # so it is where stage 3 has saved it
    return found.detach().reshape(tuple(shape)) if flat else found.detach()


def _load(path: Path) -> Any:
    """The content of a file, mapped, with plain values in place of DeepSpeed's objects."""
    try:
        with torch.serialization.safe_globals(_CLASSES):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise Unsafe(
            f"{path} holds more than tensors and plain values, as client_state may, and to load that would run its "
            f"code: {error!s:.300}"
        ) from error
    except OSError:
        raise
    except Exception as error:  # torch may raise anything for bytes that it did not write
        raise FormatError(f"{path} cannot be read as a file of torch.save: {error!r:.200}") from error
    if not isinstance(found, dict) and path.name.endswith("_states.pt"):
        raise FormatError(f"{path} is none of DeepSpeed's: it holds no dict")
    return _plain(found)


def _plain(value: Any) -> Any:
    """A tree of containers without objects that stand for DeepSpeed's."""
    if type(value) in _SCALERS:
        return {SCALER: _SCALERS[type(value)], **vars(value)}
    if isinstance(value, _Stage):
        return int(value)
    if isinstance(value, dict):
        return with_values(value, _plain)
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
