"""Whole parameters from the partitions that DeepSpeed's ZeRO (stages 1 to 3, bf16_optimizer) saves; without DeepSpeed.

A partition is a flat run of elements of many parameters, with padding. Each parameter, and each of its moments, becomes
a value that is read from the pieces of all ranks while it is saved: no partition and no parameter is put together in
memory.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format.leaf import Spec
from tierstate.providers.tensors.dtypes import torch_name

from .reader import ImportSource, Progress, errors_name, step_in_file
from .stored import FileValue, check_file_spec, read_value

SCALER = "deepspeed.loss_scaler"
"""Key of the dict that stands for a loss scaler: the name of its class. Its attributes are beside it."""

MODEL, OPTIMIZER, DEEPSPEED = "model", "optimizer", "deepspeed"
"""The keys of a state of whole parameters: fp32 weights and buffers, the optimizer's state, and all the rest."""

MODEL_STATES, OPTIMIZER_STATE = "model_states", "optimizer_state"
"""The keys of the rest: what each rank has alike besides the weights, and the optimizer without its moments."""

FP32 = "fp32"
"""DeepSpeed's name for a parameter's weights among the states of the optimizer."""

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states")

_OF_PARTITIONS = {
    "base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings", "group_paddings",
    "param_alignment_paddings", "partition_count", "zero_stage", "optimizer_state_dict", "fp32_flat_groups",
}  # fmt: skip
"""Keys of an optimizer's file that say how it was partitioned."""

_OF_WEIGHTS = {"module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
"""Keys of a model's file that hold weights, or say how they were partitioned."""


def is_zero(names: Iterable[str]) -> bool:
    """Whether files of these names, without ``.pt``, are a checkpoint of ZeRO."""
    return any(map(_OPTIMIZER_FILE.fullmatch, names))


def whole_parameters(files: Mapping[str, Any], what: str, progress: Progress) -> ImportSource:
    """The state in the files of a checkpoint: ``model``, ``optimizer`` by parameter, and ``deepspeed`` with the rest.

    Args:
        files: the content of each file by its name without ``.pt``; it may be untrusted. Tensors are mapped, or lazy.
        what: names the checkpoint in errors.
        progress: called with the bytes read since the last call.

    Raises:
        FormatError: a rank's file is missing, the pieces are not the whole of a parameter, or the checkpoint is of a
            kind that is not read: tensor or pipeline parallel, with experts, or with ``elastic_checkpoint``.
    """
    with errors_name(what):
        return _Checkpoint(files, progress).source()


def without_weights(model: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's file has besides weights."""
    return {key: value for key, value in model.items() if key not in _OF_WEIGHTS}


def without_moments(optimizer: Mapping[str, Any], names: Sequence[Sequence[str]] = ()) -> dict[str, Any]:
    """What an optimizer's file has besides partitions, with its groups.

    Args:
        names: the parameters of each partitioned group, by which the groups name them; none: groups stay as they are.
    """
    inner = optimizer.get("base_optimizer_state") or optimizer.get("optimizer_state_dict") or optimizer
    groups = [dict(group) for group in inner["param_groups"]]
    for group in groups if names else ():
        group["params"] = [name for index in group["params"] for name in names[index]]
    return {key: value for key, value in optimizer.items() if key not in _OF_PARTITIONS} | {"param_groups": groups}


class _Piece(NamedTuple):
    """A run of elements in a rank's partition."""

    rank: int
    start: int
    numel: int


class _Group(NamedTuple):
    """Parameters that were partitioned together.

    Attributes:
        shapes: by parameter.
        states: for each rank its flat partitions, and values such as the step, by DeepSpeed's names.
        pieces: by parameter; in the order of its elements.
    """

    shapes: Mapping[str, Sequence[int]]
    states: Sequence[Mapping[str, Any]]
    pieces: Mapping[str, Sequence[_Piece]]


class _Checkpoint:
    def __init__(self, files: Mapping[str, Any], progress: Progress) -> None:
        self._progress = progress
        if others := [name for name in files if name.startswith(("layer_", "expp_rank_"))]:
            raise FormatError(f"{others[0]!r:.80} is of a pipeline, or of experts, which are not read")
        self._models = _by_rank(files, _MODEL_FILE)
        self._optimizers = [one["optimizer_state_dict"] for one in _by_rank(files, _OPTIMIZER_FILE)]
        self._first = self._models[0]
        self._ranks = len(self._optimizers)
        self._partitioned = "fp32_flat_groups" in self._optimizers[0]  # stage 3: the weights are, too
        if self._partitioned and len(self._models) != self._ranks:
            raise FormatError(f"{self._ranks} ranks have saved it, and {len(self._models)} files have their weights")
        self._check_counts()

    def _check_counts(self) -> None:
        for one in self._optimizers:
            counts = one["partition_count"]
            if {*(counts if isinstance(counts, list) else [counts])} - {self._ranks}:
                raise FormatError(f"it was partitioned for {counts!r:.80} ranks, and {self._ranks} are there")
            if one.get("ds_zero_partition_groups"):
                raise FormatError("its experts are partitioned by themselves, which is not read")

    def source(self) -> ImportSource:
        listed = [{name: _dimensions(shape) for name, shape in one.items()} for one in self._first["param_shapes"]]
        groups = [self._group(i, shapes) for i, shapes in enumerate(listed)]
        states = {name: self._states(group, name) for group in groups for name in group.shapes}
        if len(states) != sum(len(group.shapes) for group in groups):
            raise FormatError("a parameter is in two groups")
        names = [list(group.shapes) for group in groups]
        rest = {
            MODEL_STATES: without_weights(self._first),
            OPTIMIZER_STATE: without_moments(self._optimizers[0], names),
        }
        model = self._model({name: found.pop(FP32) for name, found in states.items()})
        step = step_in_file(self._first.get("global_steps"))
        return ImportSource({MODEL: model, OPTIMIZER: states, DEEPSPEED: rest}, step)

    def _group(self, index: int, shapes: Mapping[str, Sequence[int]]) -> _Group:
        states = [self._state(one, index) for one in self._optimizers]
        runs = [self._runs(rank, index, shapes) for rank in range(self._ranks)]
        for rank, named in enumerate(runs):
            _check_apart(named, math.prod(_shape(states[rank][FP32])))
        pieces = {
            name: [_Piece(rank, *named[name]) for rank, named in enumerate(runs) if name in named] for name in shapes
        }
        return _Group(shapes, states, pieces)

    def _state(self, optimizer: Mapping[str, Any], index: int) -> dict[str, Any]:
        """A rank's partitions of a group."""
        if self._partitioned:
            return {
                **optimizer["optimizer_state_dict"]["state"].get(index, {}),
                FP32: optimizer["fp32_flat_groups"][index],
            }
        base = optimizer["base_optimizer_state"]
        if not isinstance(base, dict):
            raise FormatError("it was saved with elastic_checkpoint, which is not read")
        (inside,) = base["param_groups"][index]["params"]
        return {**base["state"].get(inside, {}), FP32: optimizer["single_partition_of_fp32_groups"][index]}

    def _runs(self, rank: int, index: int, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Where each parameter is in a rank's partition of a group: the first element, and how many."""
        if not self._partitioned:
            found = self._optimizers[rank]["param_slice_mappings"][index]
            return {name: _dimensions((one.start, one.numel)) for name, one in found.items()}
        runs: dict[str, tuple[int, ...]] = {}
        start = 0
        for name, shape in shapes.items():
            share, numel = self._share(rank, math.prod(shape))
            runs[name] = (start, numel)
            start += share
        return runs

    def _share(self, rank: int, numel: int) -> tuple[int, int]:
        """How many elements of a parameter each rank has in stage 3, and how many of this rank's are no padding."""
        share = -(-numel // self._ranks)
        return share, max(0, min(share, numel - rank * share))

    def _states(self, group: _Group, name: str) -> dict[str, Any]:
        """All that ZeRO keeps of a parameter, by DeepSpeed's names: whole, or a value that is the same on all ranks."""
        pieces = [piece for piece in group.pieces[name] if piece.numel] or group.pieces[name][:1]
        if not pieces:
            raise FormatError(f"no rank has anything of parameter {name!r:.80}")
        held = [group.states[piece.rank] for piece in pieces]
        found = {key: [one[key] for one in held] for key in held[0]}
        return {
            key: self._whole(name, key, group.shapes[name], values, pieces)
            if _shape(values[0])
            else _same(name, key, values)
            for key, values in found.items()
        }

    def _whole(
        self, name: str, key: str, shape: Sequence[int], values: Sequence[Any], pieces: Sequence[_Piece]
    ) -> FileValue:
        flats = [_flat(name, value) for value in values]
        if sum(piece.numel for piece in pieces) != math.prod(shape):
            raise FormatError(f"the pieces of {name!r:.80} are not the whole of {tuple(shape)!r:.80}")
        dtypes = {(one.spec.dtype, one.spec.itemsize) for one in flats}
        if len(dtypes) != 1:
            raise FormatError(f"the pieces of {name!r:.80} are of several types")
        spec = check_file_spec(Spec("tensor", *dtypes.pop(), tuple(shape)))
        runs = []
        for flat, piece in zip(flats, pieces, strict=True):
            if not 0 <= piece.start <= piece.start + piece.numel <= math.prod(flat.spec.shape):
                raise FormatError(f"{key} of {name!r:.80} on rank {piece.rank} is shorter than its parameters are")
            runs.append((flat, piece.start * spec.itemsize, piece.numel * spec.itemsize))
        return FileValue(spec, partial(_read, runs, self._progress), (id(self), name, key))

    def _model(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The weights in the order of the module, with frozen ones, those that share memory, and buffers."""
        given = {**weights, **self._frozen()}
        shared, buffers = self._first.get("shared_params") or {}, self._first.get("buffer_names") or ()
        found = {}
        for name, value in self._first["module"].items():
            if (root := shared.get(name, name)) in given:
                found[name] = given[root]
            elif not self._partitioned or name in buffers or 0 not in _shape(value):
                found[name] = value  # in stage 3 the others are empty
        return {**{name: one for name, one in given.items() if name not in found}, **found}

    def _frozen(self) -> dict[str, FileValue]:
        """The parameters that are not trained, of which each rank has a piece in stage 3."""
        found = {}
        for name, shape in (self._first.get("frozen_param_shapes") or {}).items() if self._partitioned else ():
            values, shape = [one["frozen_param_fragments"][name] for one in self._models], _dimensions(shape)
            pieces = [_Piece(rank, 0, self._share(rank, math.prod(shape))[1]) for rank in range(self._ranks)]
            found[name] = self._whole(name, "weights", shape, values, pieces)
        return found


def _by_rank(files: Mapping[str, Any], pattern: re.Pattern[str]) -> list[Any]:
    """The contents of the files of all ranks, in their order."""
    found = {}
    for name, content in files.items():
        if match := pattern.fullmatch(name):
            if int(match[2]):
                raise FormatError(f"{name!r:.80} is of a tensor or pipeline parallel model, which is not read")
            if int(match[1] or 0) in found:
                raise FormatError(f"{name!r:.80} is there in two ways, as of two checkpoints in one folder")
            found[int(match[1] or 0)] = content
    missing = sorted({*range(max(found, default=0) + 1)} - set(found))
    if missing:
        raise FormatError(f"the file of rank {missing[0]} is missing beside {len(found)} others")
    return [found[rank] for rank in range(len(found))]


def _check_apart(runs: Mapping[str, tuple[int, ...]], numel: int) -> None:
    """Raises FormatError if these do not lie one behind the other in a partition: no file has more than its bytes."""
    ordered = sorted((start, start + length) for start, length in runs.values())
    if any(not 0 <= start <= end <= numel for start, end in ordered if end > start):
        raise FormatError("a partition is shorter than its parameters are")
    if any(end > start for (_, end), (start, _) in pairwise(ordered)):
        raise FormatError("parameters overlap in a partition")


def _dimensions(numbers: Iterable[Any]) -> tuple[int, ...]:
    """A shape, or another tuple of lengths, from a file."""
    found = tuple(numbers)
    if not all(type(one) is int and one >= 0 for one in found):
        raise FormatError(f"{found!r:.80} are no lengths")
    return found


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, also of a lazy one; empty for a value."""
    if isinstance(value, FileValue):
        return tuple(value.spec.shape)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _same(name: str, key: str, values: Sequence[Any]) -> Any:
    """A value that all ranks have alike."""
    read = [read_value(value) if isinstance(value, FileValue) else value for value in values]
    if any(one != read[0] for one in read[1:]):
        raise FormatError(f"the ranks have another {key} of {name!r:.80} each, as of several steps")
    return read[0]


def _flat(name: str, value: Any) -> FileValue:
    """A rank's partition, as bytes that are read when they are wanted."""
    if isinstance(value, FileValue):
        return value
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or not value.is_contiguous():
        raise FormatError(f"a partition of {name!r:.80} is no plain tensor")
    spec = Spec("tensor", torch_name(value.dtype), value.dtype.itemsize, tuple(value.shape))
    return FileValue(spec, partial(_copy, value.detach().reshape(-1).view(torch.uint8)))


def _copy(source: Buffer, start: int, out: Buffer) -> None:
    out.copy_(source[start : start + out.numel()])


def _read(runs: Sequence[tuple[FileValue, int, int]], progress: Progress, start: int, out: Buffer) -> None:
    """Fill a buffer with bytes of a value that lies in several runs of bytes."""
    ends = list(accumulate(length for _, _, length in runs))
    done = 0
    for flat, offset, length in _from(runs, ends, start):
        nbytes = min(length, out.numel() - done)
        flat.read(offset, out[done : done + nbytes])
        done += nbytes
        if done == out.numel():
            break
    progress(out.numel())


def _from(
    runs: Sequence[tuple[FileValue, int, int]], ends: Sequence[int], start: int
) -> Iterator[tuple[FileValue, int, int]]:
    """The runs without their first bytes."""
    first = bisect_right(ends, start)
    for i in range(first, len(runs)):
        flat, offset, length = runs[i]
        skipped = start - (ends[i] - length) if i == first else 0
        yield flat, offset + skipped, length - skipped
