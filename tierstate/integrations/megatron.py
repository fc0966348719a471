"""Megatron-core: `dist_checkpointing.save` and `load` with a strategy that keeps a checkpoint as a version of a run.

    tiers = TierCheckpoints("policy.yaml", run="gpt")
    dist_checkpointing.save(sharded_state_dict, folder, tiers.save_strategy)
    state_dict = dist_checkpointing.load(sharded_state_dict, folder, tiers.load_strategy)

In the version each global tensor is a leaf under Megatron's key, whole, so that it loads under any other parallelism.
The folder holds what Megatron reads first (``metadata.json``, ``common.pt``) and a reference to the version. With
Megatron-Bridge it is `TierCheckpointManager`. Written for megatron-core 0.16.1.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import __version__ as core_version
from megatron.core.dist_checkpointing.core import (
    CONFIG_FNAME,
    CheckpointingConfig,
    maybe_load_config,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

import tierstate as ts
from tierstate.engine.ranks.restore.agreement import GroupQuery
from tierstate.files.readers.torch_dist import COMMON, COMMON_STATE, OBJECT, as_plain, from_plain
from tierstate.manifest.boxes import Box, Shape
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Spec
from tierstate.manifest.format.leaf_path import format_key
from tierstate.providers.base import Provider
from tierstate.providers.registry import REGISTRY
from tierstate.providers.sharded.mesh import LocalBox, LocalBoxes
from tierstate.providers.sharded.shards import ShardProvider, ShardsProvider
from tierstate.providers.tensors.dtypes import torch_dtype, torch_name
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.tree.walk import StateWalk

from .version_folders import REFERENCE, read_reference, restoring, saved_version, write_reference

log = logging.getLogger("tierstate")

BACKEND = "tierstate"
"""The format that ``metadata.json`` names: a folder of this kind cannot be read without tierstate."""


class Shards:
    """The boxes of one global tensor that this rank holds, for a state that is saved or restored.

    Args:
        parts: local tensors and their boxes; no box twice when it is saved.
        shape, dtype: those of the global tensor.
    """

    def __init__(self, parts: Sequence[tuple[torch.Tensor, Box]], shape: Shape, dtype: torch.dtype) -> None:
        self.parts, self.shape, self.dtype = parts, shape, dtype

    def __state_provider__(self) -> Provider:
        spec = Spec(TensorProvider.kind, torch_name(self.dtype), self.dtype.itemsize, self.shape)
        if 0 in self.shape:
            nothing = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            return ShardProvider(nothing, spec, Box.whole(self.shape), holder=self)
        held = [(tensor, box) for tensor, box in self.parts if box.volume]
        if len(held) == 1:
            return ShardProvider(*_of_spec(held[0], spec), holder=self)
        frame = LocalBoxes(self.shape, tuple(LocalBox(box, (0,) * len(self.shape)) for _, box in held))
        return ShardsProvider(spec, [ShardProvider(*_of_spec(one, spec)) for one in held], frame=frame, holder=self)


def _of_spec(part: tuple[torch.Tensor, Box], spec: Spec) -> tuple[torch.Tensor, Spec, Box]:
    return part[0], spec, part[1]


def as_state(sharded_state_dict: Any) -> dict[str, Any]:
    """What this rank saves of a sharded state dict without factories: its main replicas, by Megatron's keys.

    Keys are of the global tensors, so all ranks have the same for the same tensor, whatever their layers are called in
    the state dict; an object is under its ``unique_key``. A tensor of which this rank has several parts is one leaf.

    Raises:
        CaptureError: two tensors of one key have different global shapes or dtypes, or a key is ``common``.
    """
    state: dict[str, Any] = {}
    tensors: dict[str, list[ShardedTensor]] = {}
    for one in nested_values(sharded_state_dict):
        if not is_main_replica(one.replica_id) or one.key == COMMON_STATE:
            continue
        if one.key == COMMON:
            raise CaptureError(f"{COMMON!r} is where tierstate has what is the same on all ranks; rename this key")
        if isinstance(one, ShardedTensor):
            tensors.setdefault(one.key, []).append(one)
        else:
            state[one.unique_key] = as_plain(one.data)
    for key, shards in tensors.items():
        if len({(one.global_shape, one.dtype) for one in shards}) > 1:
            found = ", ".join(f"{tuple(one.global_shape)} {one.dtype}" for one in shards)
            raise CaptureError(f"{key}: this rank holds parts of different tensors under this key: {found}")
        parts = {_box(one): (_view(one), _box(one)) for one in shards}
        state[key] = Shards(list(parts.values()), tuple(shards[0].global_shape), shards[0].dtype)
    return state


def _box(shard: ShardedTensor) -> Box:
    """The box of a shard in the global tensor, also along the axes that the local one lacks."""
    return Box(tuple(shard.global_offset), (1,) * shard.prepend_axis_num + tuple(shard.local_shape))


def _view(shard: ShardedTensor) -> torch.Tensor:
    """The local tensor with as many axes as the global one."""
    if shard.data is None:
        raise CaptureError(f"{shard.key}: there is no tensor, only its description")
    tensor: torch.Tensor = shard.data.detach()
    return tensor[(None,) * shard.prepend_axis_num] if shard.prepend_axis_num else tensor


class _Wanted(NamedTuple):
    """A tensor that is loaded.

    Attributes:
        shard: the shard of the model or optimizer.
        view: the part of its memory that is filled, with all axes of the global tensor.
        into: what is restored: `view`, or a tensor of the stored dtype.
        box: where that lies in the stored tensor.
    """

    shard: ShardedTensor
    view: torch.Tensor
    into: torch.Tensor
    box: Box


def _wanted(shard: ShardedTensor, stored: Spec) -> _Wanted:
    """How a shard is filled from a stored tensor, of its global shape or, where it may differ, of another."""
    if shard.data is None:
        shard.init_data("cpu")
    if shard.allow_shape_mismatch:
        shard.data.detach().zero_()  # what the stored tensor lacks, as Megatron does
    view, box = _view(shard), _box(shard)
    if stored.shape != tuple(shard.global_shape):
        ends = zip(box.offset, box.shape, stored.shape, strict=True)
        box = Box(box.offset, tuple(max(0, min(at + n, end) - at) for at, n, end in ends))
        view = view[tuple(slice(n) for n in box.shape)]
    dtype = torch_dtype(stored.dtype)
    into = view if view.dtype == dtype else torch.empty(view.shape, dtype=dtype, device=view.device)
    return _Wanted(shard, view, into, box)


def _misfits(wanted: Iterable[ShardedTensor | ShardedObject], stored: Mapping[str, Spec]) -> list[str]:
    """What the version does not have as it is wanted, a line for each key."""
    found = {}
    for one in wanted:
        if isinstance(one, ShardedObject):
            if one.unique_key not in stored:
                found[one.unique_key] = "is not in the version"
        elif one.key not in stored:
            found[one.key] = "is not in the version"
        elif (spec := stored[one.key]).kind != TensorProvider.kind:
            found[one.key] = f"is a {spec.kind} in the version, and a tensor here"
        elif len(spec.shape) != len(one.global_shape) or not (
            one.allow_shape_mismatch or spec.shape == tuple(one.global_shape)
        ):
            found[one.key] = f"has the global shape {spec.shape} in the version, and {tuple(one.global_shape)} here"
    return [f"{key} {why}" for key, why in found.items()]


class _Pending(NamedTuple):
    """A save under way.

    Attributes:
        save: its handle.
        folder: the folder that will stand for it.
        done: ends when it is durable and the folder refers to it.
        mark: a file that is there until then, for the process that Megatron starts to wait for an asynchronous save.
    """

    save: ts.Save
    folder: str
    done: Future[None]
    mark: str


class TierCheckpoints:
    """Checkpoints of Megatron as versions of a run. Made on all ranks, once; each rank then calls the same.

    Args:
        policy: the tiers and the rules; a `Policy`, or the path of a policy file.
        run: the name of the run.
        process_group: the ranks that save and load; by default all.
        allow_pickle: as that of `Checkpointer`: globs of leaves that may be pickles.

    Attributes:
        ckpt: the Checkpointer, for everything else: `versions`, `tag`, `preempted`.
        save_strategy: for ``dist_checkpointing.save``.
        load_strategy: for ``dist_checkpointing.load``.

    Raises:
        PolicyError, TierstateError, RankFailed: as `Checkpointer`.
    """

    def __init__(
        self,
        policy: ts.Policy | str | os.PathLike[str],
        run: str,
        process_group: Any = None,
        *,
        allow_pickle: Sequence[str] = (),
    ) -> None:
        policy = policy if isinstance(policy, ts.Policy) else ts.Policy.load(policy)
        group = dist.group.WORLD if process_group is None else process_group
        self.ckpt = ts.Checkpointer(policy, run, group, allow_pickle=allow_pickle)
        together = self.ckpt._together
        self._query = None if together is None else GroupQuery(together.team, "megatron")
        self._first = together is None or together.team.rank == 0
        self._waiter = ThreadPoolExecutor(1, "tierstate-megatron")
        self._saved = 0
        self._marks = tempfile.TemporaryDirectory(prefix="tierstate-megatron-")
        self._told_common = False
        self.save_strategy = TierSaveShardedStrategy(self)
        self.load_strategy = TierLoadShardedStrategy(self)
        _make_default(self)

    def close(self) -> None:
        """Finish all saves and close the tiers. All ranks call it, before the process group is destroyed.

        Raises:
            TierstateError: a save failed, and was not raised yet.
        """
        self._waiter.shutdown()
        self._marks.cleanup()
        self.ckpt.close()

    def gather(self, answer: Callable[[], Any]) -> list[Any]:
        """What this returns on all ranks, by rank, as JSON values; if one raises, all do."""
        return [answer()] if self._query is None else self._query.ask_json("megatron", answer)

    # ---- Saving

    def begin(self, sharded_state_dict: Any, folder: str) -> _Pending:
        """Save a version. Returns when it is captured on all ranks.

        Raises:
            CaptureError: a value cannot be saved without a pickle; nothing was saved.
            TierFull: the arena is full, and the policy says ``on_full: skip``.
            TierstateError: an earlier save failed, and this one was not made.
        """
        numbers, self._saved = re.findall(r"\d+", Path(folder).name), self._saved + 1
        step = int(numbers[-1]) if numbers else self._saved
        metadata = {"folder": Path(folder).name, "megatron_core": core_version}

        saves: list[ts.Save] = []

        def save() -> None:
            if self._first:
                self._withdraw(folder)
            state = as_state(sharded_state_dict) | self._common(sharded_state_dict, folder)
            saves.append(self.ckpt.save(state, step=step, metadata=metadata))

        try:
            self.gather(save)  # a rank that goes on alone would wait for the others in Megatron's barrier
        except BaseException:
            for one in saves:  # it cannot be committed without the others, and says so here and not later
                with suppress(ts.TierstateError):
                    one.wait()
            raise
        (made,) = saves
        if any(self.gather(lambda: made.skipped)):
            raise ts.TierFull(
                f"{folder} was not saved: the arena is full, and the policy says on_full: skip. Megatron takes every "
                "save that returns for one that was made: with it, use on_full: block"
            )
        mark = os.path.join(self._marks.name, str(made.seq))
        with suppress(OSError):  # without it Megatron's process ends at once, and `finish` waits
            Path(mark).touch()
        return _Pending(made, folder, self._waiter.submit(self._publish, made, folder, mark), mark)

    def _withdraw(self, folder: str) -> None:
        """From here on a folder that is written again stands for nothing, until it stands for this save."""
        for name in (CONFIG_FNAME, REFERENCE):
            Path(folder, name).unlink(missing_ok=True)

    def _common(self, sharded_state_dict: Any, folder: str) -> dict[str, Any]:
        """The leaf with what is the same on all ranks, for the first rank to save."""
        if not self._first:
            return {}
        path = Path(folder, COMMON_STATE_FNAME)
        given = [
            one
            for one in nested_values(sharded_state_dict)
            if isinstance(one, ShardedObject) and one.key == COMMON_STATE
        ]
        if given:  # later versions of Megatron-core do not write the file, and read it where it is
            _write_common(path, given[0].data)
        try:
            # The same as this process has just saved, but read as Megatron reads it: without running code.
            common = as_plain(torch.load(path, map_location="cpu", weights_only=True))
            list(StateWalk(REGISTRY, self.ckpt._pickles).take(common, (COMMON,)).walk())
        except Exception as error:
            if not self._told_common:
                log.warning("%s stays in its folder only, and is no part of the version: %s", path.name, error)
            self._told_common = True
            return {}
        return {COMMON: common}

    def _publish(self, save: ts.Save, folder: str, mark: str) -> None:
        """Runs in a thread: wait until a version is durable, then let the folder stand for it."""
        try:
            lasting = [tier.name for tier in self.ckpt.policy.tiers if tier.persistent and tier.name in save.tiers]
            durable = self.ckpt.policy.durable
            save.wait(durable if durable in save.tiers else (*lasting, *save.tiers)[0])
            if self._first:
                write_reference(folder, saved_version(self.ckpt, save))
        finally:
            save._save_state.told |= set(save.tiers)  # `finish` raises it
            with suppress(OSError):
                os.unlink(mark)

    def finish(self, pending: _Pending) -> None:
        """Wait until a save is durable and its folder refers to it.

        Raises:
            TierstateError: it failed; raised on all ranks, so that Megatron does not take it for the newest.
        """
        self.gather(pending.done.result)

    # ---- Loading

    def make_folder(
        self,
        folder: str | os.PathLike[str],
        *,
        step: int | None = None,
        version: str | None = None,
        tag: str | None = None,
    ) -> None:
        """Make the folder of a version, such as one that is lost, or one for a version that was imported.

        Args:
            step, version, tag: as in `Checkpointer.restore`; by default the newest.

        Raises:
            NotFound: there is no such version.
            StateMismatch: it has no common state, which Megatron loads from the folder.
        """
        common = from_plain(self.ckpt.load(step=step, version=version, tag=tag, only=[COMMON])[COMMON])
        info = self.ckpt.restored
        assert info is not None

        def write() -> None:
            if self._first:
                Path(folder).mkdir(parents=True, exist_ok=True)
                _write_common(Path(folder, COMMON_STATE_FNAME), common)
                write_reference(folder, info)
                save_config(CheckpointingConfig(BACKEND), str(folder))

        self.gather(write)

    def load(self, sharded_state_dict: Any, folder: str) -> Any:
        """The sharded state dict, with what a version has in place of its shards; tensors are filled in place.

        Raises:
            NotFound: the folder refers to no version, or no tier has it any more.
            StateMismatch: keys are missing or have another global shape, all of which are listed; nothing was changed.
        """
        with restoring(folder, self.ckpt.run) as reference:
            if reference is None:
                raise ts.NotFound(
                    f"{folder} refers to no version of a run ({REFERENCE} is missing or torn): its save did not become "
                    "durable, or a crash has taken its reference, which TierCheckpoints.make_folder writes again"
                )
            version = reference.version
            stored = self.stored(version)
            flat = list(nested_values(sharded_state_dict))
            self.gather(lambda: _check(_misfits(flat, stored)))
            tensors = [_wanted(one, stored[one.key]) for one in flat if isinstance(one, ShardedTensor)]
            self._restore(tensors, stored, version)
            values = self._load({one.unique_key for one in flat if isinstance(one, ShardedObject)}, version)
        return dict_list_map_outplace(
            lambda one: one.data.detach() if isinstance(one, ShardedTensor) else values[one.unique_key],
            sharded_state_dict,
        )

    def stored(self, version: str) -> dict[str, Spec]:
        """The top leaves of a version by key, on all ranks, as the first rank that sees it says."""

        def seen() -> bool:
            with suppress(ts.NotFound):
                self.ckpt.info(version=version)
                return True
            return False

        sees = self.gather(seen)
        if not any(sees):
            raise ts.NotFound(f"no tier has the version {version} any more")
        rank = 0 if self._query is None else self._query.team.rank
        mine = rank == sees.index(True)
        said = self.gather(lambda: self._table(version) if mine else None)[sees.index(True)]
        return {key: Spec(kind, dtype, size, tuple(shape)) for key, kind, dtype, size, shape in said}

    def _table(self, version: str) -> list[tuple[str, str, str, int, Shape]]:
        leaves = self.ckpt.leaves(version=version)
        specs = [(one.path[0], one.spec) for one in leaves if len(one.path) == 1]
        return [(str(key), spec.kind, spec.dtype, spec.itemsize, spec.shape) for key, spec in specs]

    def _restore(self, wanted: Sequence[_Wanted], stored: Mapping[str, Spec], version: str) -> None:
        parts: dict[str, list[tuple[torch.Tensor, Box]]] = {}
        for one in wanted:
            parts.setdefault(one.shard.key, []).append((one.into, one.box))
        state = {key: Shards(found, stored[key].shape, torch_dtype(stored[key].dtype)) for key, found in parts.items()}
        if (only := self._only(state)) is not None:
            self.ckpt.restore(into=state, version=version, only=only)
        for one in wanted:
            if one.into is not one.view:
                one.view.copy_(one.into)

    def _load(self, keys: set[str], version: str) -> dict[str, Any]:
        if (only := self._only(keys)) is None:
            return {}
        found = self.ckpt.load(version=version, only=only)
        return {key: from_plain(found[key]) for key in keys}

    def _only(self, keys: Iterable[str]) -> list[str] | None:
        """Globs of what this rank restores; of what another does if it restores nothing; None if no rank does."""
        mine = sorted(keys)
        others = [one for some in self.gather(lambda: mine[:1]) for one in some]
        return [_glob(key) for key in mine or others[:1]] or None


def _glob(key: str) -> str:
    """A glob that matches exactly this key."""
    text = format_key(key)
    return text if text.startswith('"') else f'"{text}"'


def _check(misfits: Sequence[str]) -> None:
    if misfits:
        raise ts.StateMismatch("the version does not fit this sharded state dict:\n  " + "\n  ".join(misfits))


def _write_common(path: Path, common: Any) -> None:
    part = path.with_name(f".{path.name}.part")
    torch.save(common, part)
    part.replace(path)


def wait_for_mark(mark: str, trainer: int) -> None:
    """Wait until a save is done, in the process that Megatron starts for it beside the one that trains.

    Args:
        mark: a file that is there until then.
        trainer: id of the process that trains; if it ends, so does the wait.
    """
    while os.path.exists(mark) and os.path.exists(f"/proc/{trainer}"):
        time.sleep(0.05)


def _make_default(tiers: TierCheckpoints) -> None:
    """Let Megatron find the strategies of folders that name this format: also reading ``common.pt`` asks for them."""
    try:
        from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
    except ImportError:  # later versions do not ask
        return
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, 1, tiers.save_strategy)
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, 1, tiers.load_strategy)


class TierSaveShardedStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """For ``dist_checkpointing.save``: see `TierCheckpoints`, which has one.

    A synchronous save returns when the version is durable, since Megatron then takes it for the newest. With
    ``async_sharded_save=True`` it returns when all is captured; the process that Megatron starts for a save only waits.
    """

    def __init__(self, tiers: TierCheckpoints) -> None:
        super().__init__(BACKEND, 1)
        self._tiers = tiers

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Save a version, and wait until it is durable."""
        self._tiers.finish(self._tiers.begin(sharded_state_dict, str(checkpoint_dir)))

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
        """Save a version. Returns when it is captured, with a request that waits until it is durable."""
        pending = self._tiers.begin(sharded_state_dict, str(checkpoint_dir))
        request = _async_request(async_strategy)
        return request(wait_for_mark, (pending.mark, os.getpid()), [lambda: self._tiers.finish(pending)])


def _async_request(strategy: str) -> Any:
    """The class of requests that a queue of asynchronous saves takes."""
    if strategy == "mcore":
        return AsyncRequest
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    return get_async_strategy(strategy, module="AsyncRequest")[1]


class TierLoadShardedStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """For ``dist_checkpointing.load``: see `TierCheckpoints`, which has one. Folders of Megatron's own load as ever."""

    def __init__(self, tiers: TierCheckpoints) -> None:
        super().__init__()
        self._tiers = tiers

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: objects are in the version, too."""
        return True

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any) -> Any:
        """Load a version, or a folder of Megatron's own."""
        if _is_native(checkpoint_dir):
            return super().load(sharded_state_dict, checkpoint_dir, *args)
        return self._tiers.load(sharded_state_dict, str(checkpoint_dir))

    def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> dict[str, Any]:
        """The global tensors of a checkpoint by key, without data."""
        if _is_native(checkpoint_dir):
            return dict(super().load_tensors_metadata(checkpoint_dir, metadata))
        specs = self._stored(checkpoint_dir)
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
            ).without_data()
            for key, spec in specs.items()
            if spec.kind == TensorProvider.kind and not OBJECT.search(key)
        }

    def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        """The global tensors and the objects of a checkpoint by key, without data."""
        if _is_native(checkpoint_dir):
            return dict(super().load_sharded_metadata(checkpoint_dir))
        objects = [
            ShardedObject.empty_from_unique_key(key) for key in self._stored(checkpoint_dir) if OBJECT.search(key)
        ]
        return {one.unique_key: one for one in objects} | self.load_tensors_metadata(checkpoint_dir)

    def _stored(self, folder: Any) -> dict[str, Spec]:
        with restoring(folder, self._tiers.ckpt.run) as reference:
            if reference is None:
                raise ts.NotFound(f"{folder} refers to no version of a run ({REFERENCE} is missing or torn)")
            return self._tiers.stored(reference.version)


def _is_native(folder: Any) -> bool:
    """Whether a folder is a checkpoint in Megatron's own format.

    Its ``metadata.json`` says so, which the last save into a folder writes: what an earlier one has left there, in
    either format, may still lie beside it.
    """
    config = maybe_load_config(str(folder))
    if config is not None:
        return bool(config.sharded_backend != BACKEND)
    return read_reference(folder) is None and Path(folder, ".metadata").exists()


class TierCheckpointManager:
    """For Megatron-Bridge: ``checkpoint.custom_manager_class="tierstate.integrations.megatron.TierCheckpointManager"``.

    Bridge's own manager gathers and sets the state, and writes its small files; its checkpoints are versions of a run.
    The policy and the run come from the environment, or from a subclass with other values of `policy` and `run`.

    Args:
        checkpoint_config: given by Bridge.

    Attributes:
        policy: ``TIERSTATE_POLICY``: the path of a policy file.
        run: ``TIERSTATE_RUN``; by default the name of the folder that Bridge saves to.
        tiers: what saves and loads.

    Raises:
        ValueError: there is no policy, or Bridge shall save in a format that is not ``torch_dist``.
        PolicyError, TierstateError, RankFailed: as `TierCheckpoints`.
    """

    policy: ts.Policy | str | os.PathLike[str] = ""
    run: str = ""

    def __init__(self, checkpoint_config: Any) -> None:
        from megatron.bridge.training import checkpointing

        policy = self.policy or os.environ.get("TIERSTATE_POLICY", "")
        if not policy:
            raise ValueError(
                "TierCheckpointManager needs the path of a policy file in the environment: TIERSTATE_POLICY"
            )
        if checkpoint_config.ckpt_format != "torch_dist":
            raise ValueError(
                f"checkpoint.ckpt_format is {checkpoint_config.ckpt_format!r}; tierstate takes 'torch_dist'"
            )
        folder = checkpoint_config.save or checkpoint_config.load or "megatron"
        run = self.run or os.environ.get("TIERSTATE_RUN", "") or Path(folder).name
        self._bridge, self._parallel = checkpointing, bool(checkpoint_config.fully_parallel_save)
        self._native = checkpointing.DefaultCheckpointManager(checkpoint_config)
        self.tiers = TierCheckpoints(policy, run)

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """Bridge's objects of its own, by name."""
        context: dict[str, Any] = self._native.checkpointing_context
        return context

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save a checkpoint. With ``async_save`` it returns when all is captured, and else when it is durable.

        Raises:
            TierstateError: the save failed, and Bridge's tracker still names the one before; or an earlier one did.
        """
        context = self.checkpointing_context
        if "save_strategy" not in context:
            context["save_strategy"] = self._save_strategy(ctx)
        self._native.save(ctx, callback_manager)

    def _save_strategy(self, ctx: Any) -> Any:
        if not self._parallel:
            return self.tiers.save_strategy
        groups = ctx.pg_collection or self._bridge.get_pg_collection(ctx.model)
        return FullyParallelSaveStrategyWrapper(self.tiers.save_strategy, groups.dp_cp)

    def load(self, ctx: Any) -> tuple[int, int]:
        """Load the checkpoint that Bridge's tracker names: a version, or a folder of Megatron's own.

        Returns:
            The iteration, and the number of floating point operations so far; zeros if there is none.
        """
        native = self._bridge.TorchDistLoadShardedStrategy
        self._bridge.TorchDistLoadShardedStrategy = lambda *_, **__: self.tiers.load_strategy
        try:
            iteration, operations = self._native.load(ctx)
            return iteration, operations
        finally:
            self._bridge.TorchDistLoadShardedStrategy = native

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Finish asynchronous saves that are durable; ``blocking``: all of them."""
        self._native.finalize_async_saves(state, blocking=blocking, terminate=terminate)
