"""Serves a DCP load: chooses the version, and reads the items of a rank's load plan from it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from tierstate.engine.capture.graph_steps import wait_for_captures
from tierstate.engine.restore.restore import RestoreSpec, check_scatter, find_whole_version, read_into, restarting
from tierstate.engine.restore.scatter import Destination, ScatterTargets
from tierstate.engine.store.catalog import VersionCopies
from tierstate.manifest.boxes import Box
from tierstate.manifest.errors import StateMismatch, Unsafe
from tierstate.manifest.format.leaf import LOSSY, STORAGE
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.tags import TaggedVersion
from tierstate.providers.base import Provider, memory_of
from tierstate.providers.registry import REGISTRY
from tierstate.providers.tensors.dtypes import torch_dtype
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.tree.rename import Rename
from tierstate.providers.tree.ties import TiedLeaf

from .engine import DcpEngine
from .leaves import PickleAllowed
from .metadata import DcpView, dcp_view, resolve, unread_leaves, value_leaves


def choose_version(
    engine: DcpEngine, step: int | None, version: str | None, tag: TaggedVersion | None
) -> VersionCopies:
    """The requested version, by default the newest one that is whole.

    Raises: as `find_whole_version`.
    """
    wanted = RestoreSpec(step, version, tag=tag)
    return restarting(lambda: find_whole_version(engine.catalog(), engine.run, wanted), newest=wanted.newest)


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


Wants = Callable[[], Sequence[Destination]]
"""Says what a rank wants to read; called once."""


def read_alone(engine: DcpEngine, entry: VersionCopies) -> Callable[[Wants], None]:
    """What reads chunks of a version from the tiers of this process: each once, directly into its place if possible.

    It raises:
        FormatError: the version's shards do not hold each element exactly once.
        Damaged: no tier has an intact copy of a chunk; the destinations may then hold any bytes.
    """

    def read(wants: Wants) -> None:
        targets = targets_of(entry.version, wants())
        if len(targets.rows):
            read_into(entry, targets, engine.arena)

    return read


def targets_of(version: Version, to: Sequence[Destination]) -> ScatterTargets:
    """Where the chunks of these destinations go. Raises FormatError: the version's shards do not cover them."""
    targets = ScatterTargets(version, to)
    check_scatter(version, targets)
    return targets


class WholeLeaves:
    """Leaves that are read whole, into new memory, each once.

    Args:
        fresh: makes the provider that receives a leaf, by its index.
        ties: by index of a tied leaf, where it is in the bytes of another one, which is read in its place.
    """

    def __init__(self, fresh: Callable[[int], Provider], ties: Mapping[int, TiedLeaf]) -> None:
        self._fresh, self._ties = fresh, ties
        self._made: dict[int, Provider] = {}
        self._read: dict[int, Any] = {}

    def want(self, leaf: int) -> None:
        """Read this leaf."""
        root = self._ties[leaf].root if leaf in self._ties else leaf
        if root not in self._made:
            self._made[root] = self._fresh(root)

    def destinations(self) -> list[Destination]:
        """Where the wanted leaves go."""
        return [_destination(leaf, made, Box.whole(made.spec.shape)) for leaf, made in self._made.items()]

    def value(self, leaf: int) -> Any:
        """The value of a leaf that was wanted, once it is read."""
        tie = self._ties.get(leaf)
        root = leaf if tie is None else tie.root
        if root not in self._read:
            self._read[root] = self._made[root].done()
        return self._read[root] if tie is None or tie.offset is None else tie.view(self._read[root])


def _destination(leaf: int, provider: Provider, box: Box) -> Destination:
    return Destination(leaf, box, provider, memory_of(provider, box.volume * provider.spec.itemsize))


class VersionLoad:
    """One load of a version through DCP.

    Args:
        version: the version.
        allowed: whether a pickle may be loaded, by path.
        read: reads and verifies the chunks that are wanted. It is called once here, for the plain values, and once for
            each `serve`.
        rename: how its leaves are renamed first.

    Attributes:
        view: the version by DCP's keys, with the metadata for DCP.
    """

    def __init__(
        self,
        version: Version,
        allowed: PickleAllowed,
        read: Callable[[Wants], None],
        rename: Rename | None = None,
    ) -> None:
        self._version, self._allowed, self._read = version, allowed, read
        leaves, values = value_leaves(version), WholeLeaves(self._fresh, {})

        def wants() -> list[Destination]:
            for leaf in leaves:
                values.want(leaf)
            return values.destinations()

        read(wants)
        self.view: DcpView = dcp_view(version, {leaf: values.value(leaf) for leaf in leaves}, rename)

    def _fresh(self, index: int) -> Provider:
        leaf = self._version.leaves[index]
        cls = TensorProvider if leaf.spec.kind == STORAGE else REGISTRY.by_kind(leaf.spec.kind)
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
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        outs: list[torch.Tensor] = []

        def parts() -> Iterator[tuple[int, TensorPart]]:
            outs.extend(planner.resolve_tensor(item).detach() for item in tensors)
            self._check(tensors, outs)
            for item, out in zip(tensors, outs, strict=True):
                yield self._leaf(item), TensorPart(out, Box(tuple(item.storage_offsets), tuple(item.lengths)))

        whole = self._load(parts, [item.storage_index.fqn for item in objects])
        for item, out in zip(tensors, outs, strict=True):
            planner.commit_tensor(item, out)
        for item in objects:
            data = io.BytesIO()  # of unknown length: the plan's item has length 0
            torch.save(resolve(self.view.values[item.storage_index.fqn], whole.value), data)
            data.seek(0)
            planner.load_bytes(item, data)

    def fill(self, leaves: Sequence[int], parts: Sequence[TensorPart]) -> None:
        """Read parts of tensors; part ``i`` is of leaf ``leaves[i]``. Raises: as `serve`."""
        self._load(lambda: zip(leaves, parts, strict=True), [])

    def _load(self, parts: Callable[[], Iterable[tuple[int, TensorPart]]], keys: Sequence[str]) -> WholeLeaves:
        """Read parts of tensors, with their leaves, and the values of some keys; all in one read.

        What is wrong is found in that read, so that ranks which read together learn of it.
        """
        wait_for_captures()
        whole, into = WholeLeaves(self._fresh, self.view.ties), list[tuple[int, TensorPart]]()

        def wants() -> list[Destination]:
            into.extend(parts())
            for leaf in {leaf for leaf, _ in into} & self.view.ties.keys():
                whole.want(leaf)
            for leaf in (leaf for key in keys for leaf in unread_leaves(self._value(key))):
                whole.want(leaf)
            plain = [_destination(leaf, part, part.box) for leaf, part in into if leaf not in self.view.ties]
            return plain + whole.destinations()

        self._read(wants)
        for leaf, part in into:
            if leaf in self.view.ties:
                part.value.copy_(whole.value(leaf)[part.box.slices()])
            else:
                part.done()
        return whole

    def _value(self, key: str) -> Any:
        if key not in self.view.values:
            raise StateMismatch(f"{key!r:.200} is a tensor in the version, and no other value")
        return self.view.values[key]

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
