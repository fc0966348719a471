"""DeepSpeed: `use` lets an engine save its checkpoints, of any ZeRO stage, as versions of a run.

What DeepSpeed writes as files under a tag, on all ranks, is one version: it is there whole or not at all. In the
version each file is a dict under its name. In the folder lie markers: text files, since DeepSpeed looks for files
before it loads them.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.utils.tensor_fragment import fragment_address

import tierstate as ts
from tierstate.engine.ranks.restore.agreement import GroupQuery
from tierstate.engine.ranks.team.heartbeat import Timeouts
from tierstate.engine.ranks.team.team import Team
from tierstate.engine.restore.restore import RestoreSpec, find_whole_version
from tierstate.files.lazy_version import open_zero_version
from tierstate.files.readers.zero import MODEL, is_zero
from tierstate.tiers.posix.files import is_folder

from .deepspeed_universal import (
    export_universal,
    load_groups,
    load_unpartitioned,
    read_all,
    universal_loading,
    whole_weights,
    with_plain_scalers,
    with_scalers,
    write_universal,
)

__all__ = ["TierCheckpointEngine", "export_universal", "use"]

ts.register_provider(fragment_address)

log = logging.getLogger("tierstate")

_MARKER_BEGIN = "This checkpoint is a version of run "
_MARKER = _MARKER_BEGIN + "{run!r} in the tiers of tierstate; tierstate.integrations.deepspeed loads it"


class _Found(NamedTuple):
    """A checkpoint in the tiers.

    Attributes:
        seq, id, time: its version, and when that was saved.
        tag: DeepSpeed's name of it.
        latest: whether it counts where no tag is given (``save_latest``).
        ranks: how many ranks saved it.
        files: the names of its files.
        folder: the folder that it was saved to, as it was given.
    """

    seq: int
    id: str
    time: float
    tag: str
    latest: bool
    ranks: int
    files: list[str]
    folder: str


class TierCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Saves the files of a checkpoint as one version, and loads them from it. Made by `use`.

    All ranks make one, and call `commit` for the same tags.

    Args:
        policy: the tiers and the rules; a `Policy`, or the path of a policy file.
        run: the name of the run.
        step: gives the training step.
        allow_pickle: as that of `Checkpointer`: globs of leaves that may be pickles, such as
            ``mp_rank_00_model_states.sampler``.

    Attributes:
        checkpointer: saves and restores.
    """

    def __init__(
        self,
        policy: ts.Policy | str | os.PathLike[str],
        run: str,
        step: Callable[[], int],
        allow_pickle: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.name = "TierCheckpointEngine"
        policy = policy if isinstance(policy, ts.Policy) else ts.Policy.load(policy)
        team = _team(policy, run)
        self._query = None if team is None else GroupQuery(team, "deepspeed")
        self.checkpointer = ts.Checkpointer(policy, run, team, allow_pickle=allow_pickle)
        self._step, self._pickles = step, tuple(allow_pickle)
        self._files: dict[str, Any] = {}
        self._last: ts.Save | None = None
        self._found: _Found | None = None
        self._loaded: dict[str, Any] = {}

    # DeepSpeed calls these when it saves.

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint; what an earlier one left that failed is forgotten."""
        self._files = {}

    def save(self, state_dict: Any, path: str) -> None:
        """Take a file of the checkpoint. It is copied in `commit`."""
        self._files[_name(path)] = with_plain_scalers(state_dict)
        self._mark(path)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Save the files of all ranks as one version. Returns when they are captured; they become durable later.

        Raises:
            CaptureError: a value cannot be saved without a pickle, and that is not allowed; nothing was saved.
            TierstateError: an earlier save failed, and this one was not made.
            RankFailed: another rank failed.
        """
        files, self._files = self._files, {}
        self._last = None
        names = sorted(name for one in self._gather(lambda: list(files)) for name in one)
        about = {
            "tag": info.tag,
            "folder": os.path.normpath(info.save_dir),
            "latest": bool(info.save_latest),
            "ranks": dist.get_world_size(),
            "files": names,
        }

        def save() -> None:
            self._last = self.checkpointer.save(files, step=self._step(), metadata={"deepspeed": about})

        try:
            self._gather(save)  # a rank that goes on alone would wait for the others in DeepSpeed's barrier
        except BaseException:
            with suppress(ts.TierstateError):
                self.wait()  # it says the same again, here and not later
            raise
        return True

    def preserves_storage_sharing(self) -> bool:
        """False: only a tensor's own bytes are saved, never all of the buffer that it is a view of."""
        return False

    def wait(self) -> None:
        """Wait until the last checkpoint is durable.

        Raises:
            TierstateError: it could not be made so.
        """
        if self._last is not None and not self._last.skipped:
            self._last.wait()

    def cleanup(self) -> None:
        """Wait for all saves and close the tiers; also done at the end of the process.

        Raises:
            TierstateError: a save failed.
        """
        self.checkpointer.close()

    close = cleanup

    # And these when it loads.

    def load(self, path: str, map_location: Any = None) -> Any:
        """A file of the checkpoint that is being loaded: on the host, or on the device ``map_location``.

        Raises:
            NotFound: no checkpoint is being loaded, or it has no such file.
        """
        name, found = _name(path), self._found
        if found is None:
            raise ts.NotFound(f"{path}: only `load_checkpoint` of the engine that was given to `use` can load this")
        if name not in found.files:
            raise ts.NotFound(f"{path}: checkpoint {found.tag!r} of run {self.checkpointer.run!r} has no such file")
        if name not in self._loaded:
            self._loaded[name] = self._load_alone(found, name)
        state = self._loaded[name]
        if map_location is None or callable(map_location) or torch.device(map_location).type == "cpu":
            return state
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: one.to(map_location), state)

    def _load_alone(self, found: _Found, name: str) -> Any:
        """A file that only this rank asks for, from the tiers that it can reach by itself."""
        policy, run = self.checkpointer.policy, self.checkpointer.run
        with ts.Checkpointer(policy, run, allow_pickle=self._pickles, preemption=False) as alone:
            return with_scalers(alone.load(version=found.id, only=[name])[name])

    def load_weights(self) -> dict[str, Any]:
        """The module's state in the checkpoint that is being loaded, with whole parameters. All ranks call it together,
        and each reads it from the tiers that it can reach by itself.

        Raises:
            TierstateError: a rank could not read it.
        """
        found, state = self._found, dict[str, Any]()
        assert found is not None

        def read() -> None:
            with open_zero_version(self.checkpointer.policy, self.checkpointer.run, version=found.id) as version:
                state.update(read_all(version.state[MODEL]))

        self._gather(read)  # a rank that goes on alone would wait for the others in a collective of DeepSpeed
        return state

    @contextmanager
    def loading(self, folder: str, tag: str | None, files: Sequence[str], ranks: int | None) -> Iterator[str | None]:
        """While in here, `load` gives the files of a checkpoint. All ranks call it together.

        Args:
            folder: the folder that it was saved to, by the name that was given then.
            tag: None for the newest that was saved with ``save_latest``.
            files: what this rank will load: paths of which only the names count.
            ranks: how many ranks must have saved it; None for any number.

        Returns:
            Its tag; None if no tag was given and the run has no version yet.

        Raises:
            ValueError: ranks ask for different ones.
            NotFound: there is no such checkpoint.
            StateMismatch: another number of ranks saved it.
            TierstateError: as `Checkpointer.load`.
        """
        found, newest = self._find(os.path.normpath(folder), tag)
        if found is None:
            yield None
            return
        if tag is None:
            _tell_of_latest(folder, found.tag)
        if ranks not in (None, found.ranks):
            raise ts.StateMismatch(
                f"checkpoint {found.tag!r} of run {self.checkpointer.run!r} was saved by {found.ranks} ranks, and "
                f"there are {ranks} now: DeepSpeed loads partitions of ZeRO with the same number of ranks only"
            )
        try:
            # The newest is asked for as such: an even newer one may be in a tier that does not answer now.
            only = [_name(file) for file in files]
            loaded = self.checkpointer.load(version=None if newest else found.id, only=only)
            self._found, self._loaded = found, {name: with_scalers(state) for name, state in loaded.items()}
            for name in found.files:
                self._mark(os.path.join(folder, found.tag, name + ".pt"))
            yield found.tag
        finally:
            self._found, self._loaded = None, {}

    def resharded(self, folder: str, tag: str | None, files: Sequence[str], ranks: int | None) -> _Found | None:
        """The checkpoint, if it can be loaded by whole parameters only, since ZeRO has partitioned it for another
        number of ranks, or in another stage. All ranks call it together.

        Args: as those of `loading`.

        Raises:
            ValueError: ranks ask for different ones.
            NotFound: there is no such checkpoint.
            Damaged, Unreadable: no tag was given, and there may be a newer one, which cannot be read.
        """
        found, newest = self._find(os.path.normpath(folder), tag)
        if found is None or not found.id or not is_zero(found.files):
            return None
        # Together: with other stages of a pipeline some ranks find their files, and others do not.
        there = {_name(file) for file in files} <= set(found.files)
        if all(self._gather(lambda: there)) and ranks in (None, found.ranks):
            return None
        if newest:  # looked up as `loading` does, which refuses to go back to an older one
            self._find_newest()
        return found

    def changes_over(self, folder: str, tag: str | None, file_of: Callable[[str], str]) -> bool:
        """Whether DeepSpeed itself shall load, since a checkpoint of DeepSpeed's own is there, the one of the tag or of
        `latest`, and the run has none that was saved later: it has no version yet, or the job went on without tiers for
        a while. All ranks call it together.

        Args:
            file_of: gives the path of what this rank would load of a tag.

        Raises:
            NotFound: `latest` names one that never became durable, and in the folder are others of DeepSpeed's own.
            TierstateError: a tier cannot be asked whether it has versions.
        """
        named = _latest(folder) if tag is None else tag

        def look() -> list[Any]:
            file = None if named is None else file_of(named)
            native = None if file is None else _native_time(file)
            beside = [] if file is None or native or tag is not None else Path(folder).glob(f"*/{Path(file).name}")
            return [self._seen(), native, sorted(one.parent.name for one in beside if _native_time(str(one)))]

        said = self._gather(look)
        native, others = max(one[1] or 0.0 for one in said), sorted({name for one in said for name in one[2]})
        if seen := _by_number(one[0] for one in said):
            right = _right(seen, os.path.normpath(folder), tag)
            if not native or (right and right[0].time >= native):
                return False
            if tag is None:
                self._find_newest()
            return True
        if not (native or others) or self.checkpointer.resume({}) is not None:
            return False
        if not native:
            raise ts.NotFound(
                f"run {self.checkpointer.run!r} has no version yet: `latest` in {folder} names {named!r}, which never "
                f"became durable. Give load_checkpoint the tag of one of DeepSpeed's own: {', '.join(others)}"
            )
        return True

    @contextmanager
    def universal(self, folder: str, found: _Found) -> Iterator[Path]:
        """While in here, a folder in ``folder`` has the checkpoint as DeepSpeed's universal one, under its tag. All
        ranks call it together, and each writes a part.

        Raises:
            StateMismatch: the ranks do not share the folder, or as `export_universal`.
            TierstateError: the version cannot be read by each rank alone.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        place = Path(folder, self._gather(lambda: _new_folder(folder, found.tag) if rank == 0 else "")[0])
        try:
            self._gather(lambda: self._write_part(found, place / found.tag, rank, ranks))
            yield place
            self._gather(lambda: None)  # all have read it
        finally:
            if rank == 0:
                shutil.rmtree(place, ignore_errors=True)  # an error of the load says more than one of this

    def _write_part(self, found: _Found, folder: Path, rank: int, ranks: int) -> None:
        if not is_folder(folder):
            raise ts.StateMismatch(
                f"rank {rank} does not see {folder}, which rank 0 has made: for another number of ranks load from a "
                "folder that all hosts share, or export_universal to one"
            )
        with open_zero_version(self.checkpointer.policy, self.checkpointer.run, version=found.id) as version:
            write_universal(version.state, folder, rank, ranks)

    def _find(self, folder: str, tag: str | None) -> tuple[_Found | None, bool]:
        """The checkpoint, and whether it was not asked for by tag and no version that can be read is newer."""
        said = self._gather(lambda: [[folder, tag], self._seen()])
        asked = [one for one, _ in said]
        if (other := next((rank for rank, one in enumerate(asked) if one != asked[0]), None)) is not None:
            raise ValueError(
                "all ranks load the same checkpoint together, and they ask for different ones (folder and tag): "
                f"{tuple(asked[0])} on rank 0, {tuple(asked[other])} on rank {other}"
            )
        seen = _by_number(some for _, some in said)
        if right := _right(seen, folder, tag):
            return right[0], tag is None and not any(one.id for one in seen if one.seq > right[0].seq)
        if tag is None and not seen and self.checkpointer.resume({}) is None:
            return None, False  # every tier has been asked
        checkpoints = [os.path.join(one.folder, one.tag) for one in seen if one.files]
        there = ", ".join(checkpoints[:8]) or "none"
        what = "with save_latest" if tag is None else f"{tag!r}"
        raise ts.NotFound(
            f"run {self.checkpointer.run!r} has no checkpoint {what} that was saved to {folder!r}; it has: {there}"
        )

    def _seen(self) -> list[_Found]:
        """The versions of the run that this rank sees; those that cannot be read without an id, and those that
        something else saved without files."""
        none = {"tag": "", "latest": False, "ranks": 0, "files": [], "folder": ""}
        versions = self.checkpointer.versions()
        return [_Found(one.seq, one.id, one.time, **one.metadata.get("deepspeed", none)) for one in versions]

    def _find_newest(self) -> None:
        """Raises TierstateError if there may be a newer version than those that ranks see, which cannot be read."""
        catalog, run = self.checkpointer._catalog, self.checkpointer.run
        self._gather(lambda: find_whole_version(catalog(), run, RestoreSpec()).version.id)

    def _gather(self, answer: Callable[[], Any]) -> list[Any]:
        """What this returns on all ranks, by rank, as JSON values; if one raises, all do."""
        return [answer()] if self._query is None else self._query.ask_json("deepspeed", answer)

    def _mark(self, path: str) -> None:
        """Lay a marker at a path, if nothing is there."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            Path(path).write_text(_MARKER.format(run=self.checkpointer.run) + "\n")


def use(
    engine: Any, policy: ts.Policy | str | os.PathLike[str], run: str, *, allow_pickle: Sequence[str] = ()
) -> TierCheckpointEngine:
    """Let a DeepSpeed engine save to the tiers of a policy: after ``deepspeed.initialize``, on all ranks.

    ``engine.save_checkpoint`` then saves a version and returns when it is captured, and ``engine.load_checkpoint``
    loads from versions, without a tag from the newest that is durable.

    Args:
        engine: as ``deepspeed.initialize`` returns it.
        policy, run, allow_pickle: as those of `Checkpointer`.

    Returns:
        What saves: `TierCheckpointEngine.wait` waits until the last checkpoint is durable, ``close`` for all.

    Raises:
        ValueError: the engine keeps its optimizer on NVMe, which DeepSpeed copies to the folder by itself; or it saves
            to tiers already.
        PolicyError, TierstateError, RankFailed: as `Checkpointer`.
    """
    if engine.zero_nvme_offload_optimizer():
        raise ValueError(
            "DeepSpeed copies an optimizer that is offloaded to NVMe into the checkpoint's folder by itself, so it "
            "would be no part of the version; offload to the CPU instead (offload_optimizer: {device: cpu})"
        )
    if isinstance(engine.checkpoint_engine, TierCheckpointEngine):
        other = engine.checkpoint_engine.checkpointer.run
        raise ValueError(f"this engine saves to run {other!r} already: call use once for each engine")
    tiers = TierCheckpointEngine(policy, run, lambda: int(engine.global_steps), allow_pickle)
    native, engine.checkpoint_engine = engine.checkpoint_engine, tiers
    engine.save_16bit_model = partial(_natively, engine, native, engine.save_16bit_model)  # a file for other programs
    load = engine.load_checkpoint

    def load_checkpoint(*args: Any, **options: Any) -> Any:
        """`DeepSpeedEngine.load_checkpoint`, from versions."""
        if engine.load_universal_checkpoint():
            return _natively(engine, native, load, *args, **options)
        bound = inspect.signature(load).bind(*args, **options)
        bound.apply_defaults()
        asked = bound.arguments
        tag = None if asked["tag"] is None else str(asked["tag"])
        if tiers.changes_over(asked["load_dir"], tag, partial(engine._get_ckpt_name, asked["load_dir"])):
            log.info("DeepSpeed loads its own checkpoint from %s: run %s has no later one", asked["load_dir"], run)
            return _natively(engine, native, load, *args, **options)
        wanted = _wanted(engine, asked)
        if (other := tiers.resharded(asked["load_dir"], tag, *wanted)) is not None:
            return _load_universal(engine, tiers, partial(_natively, engine, native, load), asked, other)
        with tiers.loading(asked["load_dir"], tag, *wanted) as found, whole_weights(tiers.load_weights):
            return (None, None) if found is None else load(**asked | {"tag": found})

    engine.load_checkpoint = load_checkpoint
    return tiers


def _wanted(engine: Any, asked: Mapping[str, Any]) -> tuple[list[str], int | None]:
    """The files that this rank will load, and the number of ranks that must have saved them.

    Args:
        asked: the arguments of ``load_checkpoint``.
    """
    folder = asked["load_dir"], str(asked["tag"])
    files = [engine._get_ckpt_name(*folder)]
    partitions = engine.zero_optimization() and asked["load_optimizer_states"] and not asked["load_module_only"]
    if partitions:
        files.append(engine._get_zero_ckpt_name(*folder))
    return files, dist.get_world_size() if partitions or engine.zero_optimization_partition_weights() else None


def _load_universal(
    engine: Any, tiers: TierCheckpointEngine, load: Callable[..., Any], asked: Mapping[str, Any], found: _Found
) -> tuple[str, Any]:
    """``load_checkpoint`` of what another number of ranks has saved: DeepSpeed loads it as a universal checkpoint.

    Raises:
        StateMismatch: there is a ``custom_load_fn``; or as `TierCheckpointEngine.universal`.
    """
    if asked["custom_load_fn"] is not None:
        raise ts.StateMismatch(
            f"checkpoint {found.tag!r} was saved by {found.ranks} ranks, or in another stage of ZeRO: DeepSpeed loads "
            "it by the names of parameters, without custom_load_fn; leave it away, or load with as many ranks"
        )
    if asked["tag"] is None:
        _tell_of_latest(asked["load_dir"], found.tag)
    with tiers.universal(asked["load_dir"], found) as place, universal_loading(engine), whole_weights(dict):
        _, client = load(**{**asked, "load_dir": str(place), "tag": found.tag})
        load_unpartitioned(engine, place / found.tag, strict=asked["load_module_strict"])
        if asked["load_optimizer_states"] and not asked["load_module_only"]:
            load_groups(engine, place / found.tag)
    return engine._get_ckpt_name(asked["load_dir"], found.tag), client


def _by_number(seen: Iterable[Iterable[Sequence[Any]]]) -> list[_Found]:
    """What all ranks see, the newest first."""
    found = {one.seq: one for one in sorted(_Found(*one) for some in seen for one in some)}  # one with an id wins
    return [one for _, one in sorted(found.items(), reverse=True)]


def _right(seen: Sequence[_Found], folder: str, tag: str | None) -> list[_Found]:
    """The checkpoints of a folder with this tag, or those that count where no tag is given."""
    there = [one for one in seen if one.files and one.folder == folder]
    return [one for one in there if (one.latest if tag is None else one.tag == tag)]


def _latest(folder: str) -> str | None:
    """The tag that DeepSpeed's file ``latest`` in a folder names; None if there is none."""
    try:
        return Path(folder, "latest").read_text().strip()
    except OSError:
        return None


def _tell_of_latest(folder: str, tag: str) -> None:
    """Warn, on one rank, where ``latest`` names another checkpoint than the one that is loaded: a user may have changed
    the file to go back, and a job that was killed has written it before that checkpoint was durable.
    """
    named = _latest(folder) if dist.get_rank() == 0 else None
    if named is not None and named != tag:
        log.warning(
            "%s names %r, and %r is loaded, the newest checkpoint that is durable: give load_checkpoint a tag for "
            "another one", os.path.join(folder, "latest"), named, tag,
        )  # fmt: skip


def _native_time(file: str) -> float | None:
    """When DeepSpeed has written a file of its own; None for a marker, or if there is no file."""
    begin = _MARKER_BEGIN.encode()
    try:
        with open(file, "rb") as opened:
            return None if opened.read(len(begin)) == begin else os.fstat(opened.fileno()).st_mtime
    except OSError:
        return None


def _new_folder(folder: str, tag: str) -> str:
    """Make a folder for a checkpoint in one of its own; returns the name of this."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    made = tempfile.mkdtemp(prefix=".universal-", dir=folder)
    Path(made, tag).mkdir(parents=True)
    return Path(made).name


def _natively(engine: Any, native: CheckpointEngine, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a method of the engine with DeepSpeed's own checkpoint engine."""
    tiers, engine.checkpoint_engine = engine.checkpoint_engine, native
    try:
        return call(*args, **options)
    finally:
        engine.checkpoint_engine = tiers


def _team(policy: ts.Policy, run: str) -> Team | None:
    """The ranks of the job; None for one rank."""
    if dist.get_world_size() == 1:
        return None
    timeouts = Timeouts(policy.ranks.timeout, policy.ranks.silence)
    return Team.of(dist.group.WORLD, run, timeouts=timeouts, trust=policy.ranks.trust)


def _name(path: str) -> str:
    """The name of a file in a version: without a suffix, so that it can stand in a glob as it is."""
    return Path(path).name.removesuffix(".pt")
