"""DeepSpeed's universal checkpoints: written from versions, and loaded into an engine of any number of ranks.

`export_universal` is for users. `use` loads by the same files where another number of ranks has saved a checkpoint.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

import tierstate as ts
from tierstate.files.lazy_version import open_zero_version
from tierstate.files.readers.deepspeed_folder import CAT_DIM, OPTIMIZER_FILE, PARAM, UNIVERSAL
from tierstate.files.readers.stored import FileValue, read_value
from tierstate.files.readers.zero import DEEPSPEED, FP32, MODEL, MODEL_STATES, OPTIMIZER, OPTIMIZER_STATE, SCALER
from tierstate.providers.values.copies import with_values

_SCALERS = {one.__name__: one for one in (LossScaler, DynamicLossScaler)}

LATEST = "latest_universal"
"""DeepSpeed's file beside the folders of tags, with the name of the last universal one."""

MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""What DeepSpeed looks for in ZeRO-1 and 2, and in ZeRO-3."""


def export_universal(
    policy: ts.Policy | str | os.PathLike[str],
    run: str,
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    version: str | None = None,
    tag: str | None = None,
) -> Path:
    """Write a version as a folder of DeepSpeed's universal checkpoints, which an engine with ``load_universal: true``
    loads on any number of ranks, and in any stage of ZeRO.

    One parameter at a time is in memory. The folder appears as a whole, or not at all; then ``latest_universal`` beside
    it names it.

    Args:
        policy, run: of the version: one that `use` has saved with ZeRO, or that ``tierstate import`` has made of a
            checkpoint of DeepSpeed.
        folder: what is made, such as ``checkpoints/global_step100_universal``. It must not exist.
        step, version, tag: which version; by default the newest.

    Returns:
        The folder.

    Raises:
        AlreadyExists: the folder exists.
        NotFound: there is no such version.
        StateMismatch: the version is of neither kind, or has what these checkpoints have no place for.
        TierstateError: as a restore.
    """
    folder = Path(os.path.abspath(folder))
    if os.path.lexists(folder):
        raise ts.AlreadyExists(f"{folder} exists; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
        made = Path(beside, folder.name)
        made.mkdir()  # by the umask, unlike the temporary folder
        with open_zero_version(policy, run, step=step, version=version, tag=tag) as found:
            write_universal(found.state, made)
        made.rename(folder)
    _write_text(folder.parent / LATEST, folder.name)
    return folder


def _write_text(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def write_universal(state: Mapping[str, Any], folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Write the files of a state of whole parameters.

    Args:
        rank, ranks: which part of the files is written here: several ranks write one folder together.

    Raises:
        StateMismatch: they have no place for what the optimizer has, or a name is none of a file.
    """
    trained: Mapping[str, Any] = state[OPTIMIZER]
    for name in list(trained)[rank::ranks]:
        _write_parameter(folder / UNIVERSAL / _file_name(name), state[MODEL][name], trained[name])
    if rank == 0:
        optimizer, model = _optimizer_state(state), _model_states(state)
        (folder / UNIVERSAL).mkdir(exist_ok=True)
        _save(optimizer, folder / UNIVERSAL / OPTIMIZER_FILE)
        for file in MODEL_FILES:
            _save(model, folder / file)


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or Path(name).name != name or name == OPTIMIZER_FILE or "\0" in name:
        raise ts.StateMismatch(f"{name!r:.80} cannot be the name of a folder, as DeepSpeed makes of each parameter")
    return name


def _write_parameter(folder: Path, weights: Any, states: Mapping[str, Any]) -> None:
    """Write a parameter's files: as DeepSpeed's own script does it for ZeRO-1 and 2, which ZeRO-3 loads, too."""
    folder.mkdir(parents=True)
    if "step" in states:
        torch.save(_read(states["step"]), folder / "step.pt")
    shape = _shape(weights)
    for key, value in {FP32: weights, **states}.items():
        if key == "step":
            continue
        if _shape(value) != shape:
            raise ts.StateMismatch(f"{key!r:.80} of {folder.name} is not of its shape: universal checkpoints lack such")
        # By a path, since torch names what is inside the file by it, and with the flag that fp32 weights have in ZeRO:
        # the bytes are those of DeepSpeed's script then.
        whole = _read(value).detach().requires_grad_(key == FP32)
        torch.save({CAT_DIM: 0, PARAM: whole}, folder / f"{_file_name(key)}.pt")


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, FileValue):
        return value.spec.shape
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _read(value: Any) -> Any:
    return read_value(value) if isinstance(value, FileValue) else value


def read_all(value: Any) -> Any:
    """A tree of containers with all tensors in memory."""
    if isinstance(value, dict):
        return with_values(value, read_all)
    return type(value)(map(read_all, value)) if type(value) in (list, tuple) else _read(value)


def _save(value: Any, path: Path) -> None:
    try:
        torch.save(value, path)
    except (pickle.PicklingError, AttributeError) as error:
        raise ts.StateMismatch(f"{path.name} would hold an object of a class that is not there: {error}") from error


def _optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer without its moments: where ZeRO-1 and 2 look for it, and where ZeRO-3 does."""
    found: dict[str, Any] = with_scalers(read_all(state[DEEPSPEED][OPTIMIZER_STATE]))
    found.setdefault("ds_version", state[DEEPSPEED][MODEL_STATES].get("ds_version"))  # ZeRO-1 insists on it
    steps = [{"step": _read(one["step"])} for one in state[OPTIMIZER].values() if "step" in one]
    return found | {
        "optimizer_state_dict": {"state": dict(enumerate(steps[:1])), "param_groups": found["param_groups"]}
    }


def _model_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """All but the parameters that are trained: what each rank has alike, with frozen parameters and buffers."""
    rest = read_all(state[DEEPSPEED][MODEL_STATES])
    kept = {*state[OPTIMIZER], *(rest.get("shared_params") or ())}
    shapes = {name: torch.Size(_shape(state[MODEL][name]) or ()) for name in state[OPTIMIZER]}
    module = {name: _read(value) for name, value in state[MODEL].items() if name not in kept}
    return {"module": module, "optimizer": None, "param_shapes": [shapes], **rest}


@contextmanager
def universal_loading(engine: Any) -> Iterator[None]:
    """Within, the engine loads universal checkpoints."""
    before, engine._config.load_universal_checkpoint = engine._config.load_universal_checkpoint, True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = before


@contextmanager
def whole_weights(read: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Within, ZeRO-3 that loads a checkpoint without its optimizer takes what ``read`` returns as the module's state:
    DeepSpeed would read the files of all ranks itself, of the tag that ``latest`` names.
    """
    from deepspeed.runtime import engine

    before = engine.get_fp32_state_dict_from_zero_checkpoint
    engine.get_fp32_state_dict_from_zero_checkpoint = lambda *_args, **_options: read()
    try:
        yield
    finally:
        engine.get_fp32_state_dict_from_zero_checkpoint = before


def load_groups(engine: Any, folder: Path) -> None:
    """Load each group's own settings, and give each a step of its own.

    In ZeRO-3 DeepSpeed gives all groups the settings of the first, and one tensor as their step: each of them would
    count it up.

    Raises:
        StateMismatch: the checkpoint has another number of groups.
    """
    saved = torch.load(folder / UNIVERSAL / OPTIMIZER_FILE, map_location="cpu", weights_only=False)["param_groups"]
    groups = engine.optimizer.param_groups
    if len(groups) != len(saved):
        raise ts.StateMismatch(f"the optimizer has {len(groups)} groups of parameters, and the checkpoint {len(saved)}")
    for own, other in zip(groups, saved, strict=True):
        own.update((key, value) for key, value in other.items() if key != "params")
    for state in engine.optimizer.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def load_unpartitioned(engine: Any, folder: Path, *, strict: bool) -> None:
    """Load what DeepSpeed does not of a universal checkpoint: buffers and frozen parameters.

    Args:
        strict: raise where the checkpoint lacks one of them.

    Raises:
        StateMismatch: it lacks one, or has it with another shape.
    """
    saved = torch.load(folder / MODEL_FILES[0], map_location="cpu", weights_only=False)["module"]
    module = engine.module
    persistent = module.state_dict(keep_vars=True)
    frozen = [(name, one) for name, one in module.named_parameters() if not one.requires_grad]
    buffers = [(name, one) for name, one in module.named_buffers() if name in persistent]
    missing = sorted(name for name, _ in frozen + buffers if name not in saved)
    if missing and strict:
        raise ts.StateMismatch(
            f"the checkpoint has no {', '.join(missing[:10])}; load_module_strict=False leaves them out"
        )
    for name, one in frozen + buffers:
        if name in saved:
            _fill(one, saved[name], name)


def _fill(own: torch.Tensor, saved: torch.Tensor, name: str) -> None:
    with torch.no_grad(), deepspeed.zero.GatheredParameters([own], modifier_rank=0):
        if dist.get_rank() == 0 or not hasattr(own, "ds_id"):
            if own.shape != saved.shape:
                raise ts.StateMismatch(f"{name} is {tuple(own.shape)}, and {tuple(saved.shape)} in the checkpoint")
            own.copy_(saved)


def with_plain_scalers(state: Any) -> Any:
    """A state with a dict in place of each loss scaler. What holds none stays the same object."""

    def plain(value: Any) -> Any:
        return {SCALER: type(value).__name__, **vars(value)} if type(value) in _SCALERS.values() else value

    return _mapped(state, plain)


def with_scalers(state: Any) -> Any:
    """The inverse of `with_plain_scalers`."""

    def scaler(value: Any) -> Any:
        if type(value) is not dict or SCALER not in value:
            return value
        if value[SCALER] not in _SCALERS:
            raise ts.FormatError(f"{value[SCALER]!r:.60} is no loss scaler of DeepSpeed")
        made = object.__new__(_SCALERS[value[SCALER]])
        made.__dict__ |= {name: one for name, one in value.items() if name != SCALER}
        return made

    return _mapped(state, scaler)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of dicts with changed values; a dict in which nothing changes stays the same object."""
    if (changed := change(value)) is not value or type(value) is not dict:
        return changed
    items = {key: _mapped(one, change) for key, one in value.items()}
    return value if all(items[key] is one for key, one in value.items()) else items
