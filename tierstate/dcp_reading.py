"""A load through DCP: the version that is read, and the read items of a rank served from it."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from tierstate.manifest.box import Box
from tierstate.manifest.errors import Damaged, StateMismatch, Unsafe
from tierstate.manifest.leaf import LOSSY, Leaf, Path
from tierstate.providers.base import Provider, memory_of
from tierstate.providers.dtypes import torch_dtype
from tierstate.providers.registry import REGISTRY
from tierstate.providers.retie import Tie
from tierstate.providers.tensors import TensorProvider
from tierstate.tiers.catalog import Entry
from tierstate.tiers.landing import Destination, Landing

from .dcp_engine import Engine
from .dcp_metadata import Later, Sight, plain_values, see
from .filling import WORKERS, bring, check_landing
from .finding import Wanted, find
from .tagging import Tagged

log = logging.getLogger("tierstate")

Allowed = Callable[[Path], bool]


def chosen(engine: Engine, step: int | None, version: str | None, tag: Tagged | None) -> Entry:
    """The version that is meant, by default the newest of which the tiers that can be reached have everything.

    Raises:
        NotFound: there is none.
        Damaged: it is not whole.
    """
    catalog = engine.catalog()
    wanted = Wanted(step, version, tag=tag)
    entry = find(catalog, engine.run, wanted)
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


def _lack(entry: Entry) -> str:
    """What of a version no tier has; empty where nothing is missing."""
    rows = entry.absent(entry.version.rows_of(range(len(entry.version.leaves))))
    if not len(rows):
        return ""
    first = entry.version.leaves[int(entry.version.chunk_leaf[rows[0]])].name
    dropped = f"; {entry.thinned}" if entry.thinned else ""
    return f"{len(rows)} chunks are in none of {', '.join(entry.tiers)}, the first of {first}{dropped}"


class Part(TensorProvider):
    """A tensor that takes a part of a leaf.

    Args:
        value: of the box's shape and the leaf's dtype.
        box: in the leaf's index space.
    """

    def __init__(self, value: torch.Tensor, box: Box) -> None:
        super().__init__(value)
        self._box = box

    @property
    def box(self) -> Box:
        return self._box


class Load:
    """One version, as DCP reads it.

    Args:
        engine: the run in its tiers.
        entry: the version.
        allowed: where pickles may be loaded.
    """

    def __init__(self, engine: Engine, entry: Entry, allowed: Allowed) -> None:
        self._engine, self._entry, self._allowed = engine, entry, allowed
        self._version = entry.version
        self.sight: Sight = see(entry.version, self._values(plain_values(entry.version)))

    def _values(self, leaves: Sequence[int]) -> dict[int, Any]:
        """Leaves that are no tensors, or tensors that nobody gives a place for."""
        providers = {i: self._fresh(self._version.leaves[i]) for i in leaves}
        self._fill([self._destination(i, provider) for i, provider in providers.items()])
        return {i: provider.done() for i, provider in providers.items()}

    def _destination(self, leaf: int, provider: Provider, box: Box | None = None) -> Destination:
        """What takes a part of a leaf, by default the whole."""
        spec = self._version.leaves[leaf].spec
        box = Box.whole(spec.shape) if box is None else box
        return Destination(leaf, box, provider, memory_of(provider, box.volume * spec.itemsize))

    def _fill(self, to: Sequence[Destination]) -> None:
        """Read what these want, each chunk once, and verified; straight into their memory wherever it can be.

        Raises:
            FormatError: the version does not hold all of it, each element once.
            Damaged: a chunk is whole in no tier; by then they may hold anything.
        """
        landing = Landing(self._version, to)
        check_landing(self._version, landing)
        if len(landing.rows):
            self._engine.arena.prepare(WORKERS * self._engine.arena.slab_size)
            bring(self._entry, landing, self._engine.arena)

    def _fresh(self, leaf: Leaf) -> Provider:
        cls = REGISTRY.by_kind(leaf.spec.kind)
        if cls.unsafe and not self._allowed(leaf.path):
            raise Unsafe(f"{leaf.name} {cls.unsafe}; allow it by a rule of the policy: `pickle: true`")
        if LOSSY in leaf.spec.attrs:
            raise Unsafe(f"{leaf.name} was saved with fewer bits; restore it by Checkpointer.restore(allow_lossy=True)")
        return cls.fresh(leaf.spec)

    def serve(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Give the planner what a rank's plan asks for.

        Raises:
            StateMismatch: destinations are of another dtype or shape than what was saved; nothing was read.
            Damaged: a chunk is whole in no tier; destinations may hold anything.
            Unsafe: a value is a pickle, or lossy, and that was not allowed.
        """
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        outs = [planner.resolve_tensor(item).detach() for item in tensors]
        self._check(tensors, outs)
        parts = [
            Part(out, Box(tuple(i.storage_offsets), tuple(i.lengths))) for i, out in zip(tensors, outs, strict=True)
        ]
        self.fill([self._leaf(item) for item in tensors], parts)
        for item, out in zip(tensors, outs, strict=True):
            planner.commit_tensor(item, out)
        for item, value in self._objects([item for item in plan.items if item.type == LoadItemType.BYTE_IO]):
            data = io.BytesIO()  # whose length no plan knows: that of the item is 0
            torch.save(value, data)
            data.seek(0)
            planner.load_bytes(item, data)

    def _leaf(self, item: ReadItem) -> int:
        found = self.sight.tensors.get(item.storage_index.fqn)
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

    def fill(self, leaves: Sequence[int], parts: Sequence[Part]) -> None:
        """Fill parts of tensors, each of one of these leaves. Raises: as `serve`."""
        tied = {leaf: self._tied(self.sight.ties[leaf]) for leaf in sorted({*leaves} & self.sight.ties.keys())}
        plain = [(leaf, part) for leaf, part in zip(leaves, parts, strict=True) if leaf not in tied]
        self._fill([self._destination(leaf, part, part.box) for leaf, part in plain])
        for _, part in plain:
            part.done()
        for leaf, part in zip(leaves, parts, strict=True):
            if leaf in tied:
                part.value.copy_(tied[leaf][part.box.slices()])

    def _tied(self, tie: Tie) -> torch.Tensor:
        """A tensor that lies in another leaf's bytes."""
        root = self._whole(tie.root)
        return root if tie.offset is None else tie.view(root)

    def _whole(self, leaf: int) -> torch.Tensor:
        """All of a tensor, whatever shards it lies in."""
        provider = TensorProvider.fresh(self._version.leaves[leaf].spec)
        self._fill([self._destination(leaf, provider)])
        return provider.done()

    def _objects(self, items: Sequence[ReadItem]) -> list[tuple[ReadItem, Any]]:
        found = []
        for item in items:
            key = item.storage_index.fqn
            if key not in self.sight.values:
                raise StateMismatch(f"{key!r:.200} is a tensor in the version, and no other value")
            found.append((item, self._now(self.sight.values[key])))
        return found

    def _now(self, value: Any) -> Any:
        """A value with all that was left for later."""
        if isinstance(value, Later):
            leaf, kind = value.leaf, self._version.leaves[value.leaf].spec.kind
            if leaf in self.sight.ties:
                return self._tied(self.sight.ties[leaf])
            return self._whole(leaf) if kind == TensorProvider.kind else self._values([leaf])[leaf]
        if isinstance(value, (list, tuple)) and _has_later(value):
            items = [self._now(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value


def _has_later(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return isinstance(value, Later) or any(map(_has_later, value))
    return False
