"""Serves a DCP load: chooses the version, and reads the items of a rank's load plan from it."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from tierstate.engine.restore.restore import READ_WORKERS, RestoreSpec, check_scatter, find_version, read_into
from tierstate.engine.restore.scatter import Destination, ScatterTargets
from tierstate.engine.store.catalog import LOOK_FURTHER, VersionCopies
from tierstate.manifest.boxes import Box
from tierstate.manifest.errors import Damaged, StateMismatch, Unsafe
from tierstate.manifest.format.leaf import LOSSY, Leaf
from tierstate.manifest.history.tags import TaggedVersion
from tierstate.providers.base import Provider, memory_of
from tierstate.providers.registry import REGISTRY
from tierstate.providers.tensors.dtypes import torch_dtype
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.tree.ties import TiedLeaf

from .engine import DcpEngine
from .leaves import PickleAllowed
from .metadata import DcpView, UnreadLeaf, dcp_view, value_leaves

log = logging.getLogger("tierstate")


def choose_version(
    engine: DcpEngine, step: int | None, version: str | None, tag: TaggedVersion | None
) -> VersionCopies:
    """The requested version, by default the newest one that is complete in the tiers that answer.

    Raises:
        NotFound: there is no such version.
        WrongTier: a tier is not the one that is expected.
        Damaged: chunks of it are in no tier.
    """
    catalog = engine.catalog()
    wanted = RestoreSpec(step, version, tag=tag)
    entry = find_version(catalog, engine.run, wanted)
    if wanted.newest:
        catalog.check_tiers()
    passed: list[str] = []
    for place in catalog.newest_first(entry.version.head.seq) if wanted.newest else ():
        for one in place.entries:
            if not _lack(one):
                return one
            passed.append(f"version {one.version.head.seq}: {_lack(one)}")
            log.warning("%s is passed over", passed[-1])
    if lack := _lack(entry):
        raise Damaged(f"run {engine.run!r}: step {entry.version.head.step}: {'; '.join(passed) or lack}")
    return entry


def _lack(entry: VersionCopies) -> str:
    """A message about chunks of a version that no tier has; empty if none is missing."""
    rows = entry.absent(entry.version.rows_of(range(len(entry.version.leaves))))
    if not len(rows):
        return ""
    first = entry.version.leaves[int(entry.version.chunk_leaf[rows[0]])].name
    dropped = f"; {entry.thinned or LOOK_FURTHER}"
    return f"{len(rows)} chunks are in none of {', '.join(entry.tiers)}, the first of {first}{dropped}"


class TensorPart(TensorProvider):
    """A tensor into which a part of a leaf is loaded.

    Args:
        value: the tensor, of the box's shape and the leaf's dtype.
        box: the part, in the leaf's index space.
    """

    def __init__(self, value: torch.Tensor, box: Box) -> None:
        super().__init__(value)
        self._box = box

    @property
    def box(self) -> Box:
        return self._box


class VersionLoad:
    """One load of a version through DCP.

    Args:
        engine: the run in its tiers.
        entry: the version, with its copies in the tiers.
        allowed: whether a pickle may be loaded, by path.

    Attributes:
        view: the version by DCP's keys, with the metadata for DCP.
    """

    def __init__(self, engine: DcpEngine, entry: VersionCopies, allowed: PickleAllowed) -> None:
        self._engine, self._entry, self._allowed = engine, entry, allowed
        self._version = entry.version
        self.view: DcpView = dcp_view(entry.version, self._values(value_leaves(entry.version)))

    def _values(self, leaves: Sequence[int]) -> dict[int, Any]:
        """By leaf, its value read into new memory: of leaves that are not tensors, or have no tensor in the plan."""
        providers = {i: self._fresh(self._version.leaves[i]) for i in leaves}
        self._fill([self._destination(i, provider) for i, provider in providers.items()])
        return {i: provider.done() for i, provider in providers.items()}

    def _destination(self, leaf: int, provider: Provider, box: Box | None = None) -> Destination:
        """The destination of a part of a leaf, by default of the whole leaf."""
        spec = self._version.leaves[leaf].spec
        box = Box.whole(spec.shape) if box is None else box
        return Destination(leaf, box, provider, memory_of(provider, box.volume * spec.itemsize))

    def _fill(self, to: Sequence[Destination]) -> None:
        """Read and verify the chunks that the destinations need, each once; directly into their memory if possible.

        Raises:
            FormatError: the version's shards do not hold each element exactly once.
            Damaged: no tier has an intact copy of a chunk; the destinations may then hold any bytes.
        """
        targets = ScatterTargets(self._version, to)
        check_scatter(self._version, targets)
        if len(targets.rows):
            self._engine.arena.prepare(READ_WORKERS * self._engine.arena.slab_size)
            read_into(self._entry, targets, self._engine.arena)

    def _fresh(self, leaf: Leaf) -> Provider:
        cls = REGISTRY.by_kind(leaf.spec.kind)
        if cls.unsafe and not self._allowed(leaf.path):
            raise Unsafe(f"{leaf.name} {cls.unsafe}; allow it by a rule of the policy: `pickle: true`")
        if LOSSY in leaf.spec.attrs:
            raise Unsafe(f"{leaf.name} was saved with fewer bits; restore it by Checkpointer.restore(allow_lossy=True)")
        return cls.fresh(leaf.spec)

    def serve(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read the items of a rank's load plan, through its planner.

        Raises:
            StateMismatch: a destination has another dtype or shape than the saved tensor; nothing was read.
            Damaged: no tier has an intact copy of a chunk; the destinations may then hold any bytes.
            Unsafe: a value is a pickle that the policy does not allow, or was saved lossy.
        """
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        outs = [planner.resolve_tensor(item).detach() for item in tensors]
        self._check(tensors, outs)
        parts = [
            TensorPart(out, Box(tuple(i.storage_offsets), tuple(i.lengths)))
            for i, out in zip(tensors, outs, strict=True)
        ]
        self.fill([self._leaf(item) for item in tensors], parts)
        for item, out in zip(tensors, outs, strict=True):
            planner.commit_tensor(item, out)
        for item, value in self._objects([item for item in plan.items if item.type == LoadItemType.BYTE_IO]):
            data = io.BytesIO()  # of unknown length: the plan's item has length 0
            torch.save(value, data)
            data.seek(0)
            planner.load_bytes(item, data)

    def _leaf(self, item: ReadItem) -> int:
        found = self.view.tensors.get(item.storage_index.fqn)
        if found is None:
            raise StateMismatch(f"{item.storage_index.fqn!r:.200} is no tensor in the version")
        return found

    def _check(self, items: Sequence[ReadItem], outs: Sequence[torch.Tensor]) -> None:
        wrong = []
        for item, out in zip(items, outs, strict=True):
            spec = self._version.leaves[self._leaf(item)].spec
            if out.dtype != torch_dtype(spec.dtype):
                wrong.append(f"{item.dest_index.fqn}: has dtype {out.dtype} here, {spec.dtype} in the version")
            elif tuple(out.shape) != tuple(item.lengths):
                wrong.append(f"{item.dest_index.fqn}: has shape {tuple(out.shape)} where {tuple(item.lengths)} is read")
        if wrong:
            more = f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            said = "the state and the version differ; load into tensors of the saved dtype, and convert them then:\n  "
            raise StateMismatch(said + "\n  ".join(wrong[:20]) + more)

    def fill(self, leaves: Sequence[int], parts: Sequence[TensorPart]) -> None:
        """Read parts of tensors; part ``i`` is of leaf ``leaves[i]``. Raises: as `serve`."""
        tied = {leaf: self._tied(self.view.ties[leaf]) for leaf in sorted({*leaves} & self.view.ties.keys())}
        plain = [(leaf, part) for leaf, part in zip(leaves, parts, strict=True) if leaf not in tied]
        self._fill([self._destination(leaf, part, part.box) for leaf, part in plain])
        for _, part in plain:
            part.done()
        for leaf, part in zip(leaves, parts, strict=True):
            if leaf in tied:
                part.value.copy_(tied[leaf][part.box.slices()])

    def _tied(self, tie: TiedLeaf) -> torch.Tensor:
        """A tied tensor, read from the bytes of the leaf that holds it."""
        root = self._whole(tie.root)
        return root if tie.offset is None else tie.view(root)

    def _whole(self, leaf: int) -> torch.Tensor:
        """A whole tensor, read into new memory, however it is sharded."""
        provider = TensorProvider.fresh(self._version.leaves[leaf].spec)
        self._fill([self._destination(leaf, provider)])
        return provider.done()

    def _objects(self, items: Sequence[ReadItem]) -> list[tuple[ReadItem, Any]]:
        found = []
        for item in items:
            key = item.storage_index.fqn
            if key not in self.view.values:
                raise StateMismatch(f"{key!r:.200} is a tensor in the version, and no other value")
            found.append((item, self._now(self.view.values[key])))
        return found

    def _now(self, value: Any) -> Any:
        """A value with its unread leaves read."""
        if isinstance(value, UnreadLeaf):
            leaf, kind = value.leaf, self._version.leaves[value.leaf].spec.kind
            if leaf in self.view.ties:
                return self._tied(self.view.ties[leaf])
            return self._whole(leaf) if kind == TensorProvider.kind else self._values([leaf])[leaf]
        if isinstance(value, (list, tuple)) and _has_later(value):
            items = [self._now(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value


def _has_later(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return isinstance(value, UnreadLeaf) or any(map(_has_later, value))
    return False
