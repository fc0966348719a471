"""Jobs on any meshes: global states, the shards of each rank on each mesh, and checks of the restored shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from support.equality import bits
from support.sharded_versions import mesh
from support.state_strategies import make

import tierstate as ts
from tierstate.manifest.boxes import Box
from tierstate.manifest.format.leaf import Spec
from tierstate.providers.base import Provider
from tierstate.providers.sharded.mesh import Cut, LocalBoxes, local_boxes, local_shape
from tierstate.providers.sharded.shards import ShardProvider, ShardsProvider, shard_provider
from tierstate.providers.tensors.dtypes import torch_name

Shape = tuple[int, ...]
KINDS = [
    torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint8, torch.int64,
]  # fmt: skip


class Placed:
    """A local tensor of any boxes of a global one, as a DTensor on this rank would be."""

    def __init__(self, local: torch.Tensor, placed: LocalBoxes) -> None:
        self.local, self.placed = local, placed

    def __state_provider__(self) -> Provider:
        spec = Spec("tensor", torch_name(self.local.dtype), self.local.dtype.itemsize, self.placed.shape)
        return shard_provider(self.placed, self.local, spec, holder=self, near=_near)


def _near(placed: Placed) -> tuple[torch.Tensor, torch.Tensor, LocalBoxes]:
    return placed.local, placed.local, placed.placed


class Boxes:
    """Boxes of a global tensor, each in a tensor of its own, as a ShardedTensor has them."""

    def __init__(self, dtype: torch.dtype, shape: Shape, parts: Sequence[tuple[Box, torch.Tensor]]) -> None:
        self.spec, self.parts = Spec("tensor", torch_name(dtype), dtype.itemsize, shape), parts

    def __state_provider__(self) -> Provider:
        parts = [ShardProvider(tensor, self.spec, box) for box, tensor in self.parts]
        return ShardsProvider(self.spec, parts, holder=self)


def words(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's bytes, with one more dimension."""
    return np.frombuffer(bits(tensor), np.uint8).reshape(*tensor.shape, tensor.element_size()).copy()


def of_words(cells: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of these bytes, in memory of its own."""
    flat = torch.from_numpy(cells.copy().reshape(-1))
    return flat.view(dtype).view(cells.shape[:-1])


def cut_out(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a tensor, in memory of its own."""
    return of_words(words(whole)[box.slices()], whole.dtype)


# How a tensor lies in one world


class OnMesh(NamedTuple):
    """As a mesh's placements say: for each dimension of the mesh its size, and what it cuts, into how many before."""

    sizes: Shape
    cuts: tuple[tuple[int, int] | None, ...]

    def held(self, rank: int, shape: Shape) -> tuple[LocalBoxes, Shape]:
        """The boxes of a rank, and the shape of its local tensor."""
        turns = [int(turn) for turn in np.unravel_index(rank, self.sizes)]
        cuts = tuple(
            Cut(cut[0], ways, turn, cut[1])
            for cut, ways, turn in zip(self.cuts, self.sizes, turns, strict=True)
            if cut is not None
        )
        return local_boxes(shape, cuts), shape if 0 in shape else local_shape(shape, cuts)


class InBoxes(NamedTuple):
    """Boxes that together are all of it, and the ranks that hold each."""

    boxes: tuple[tuple[Box, tuple[int, ...]], ...]


class OnRanks(NamedTuple):
    """The whole on some ranks, as in a stage of a pipeline; others know nothing of it."""

    ranks: tuple[int, ...]


Lies = OnMesh | InBoxes | OnRanks


@st.composite
def lying(draw: st.DrawFn, shape: Shape, size: int) -> Lies:
    """How a tensor may lie on so many ranks."""
    how = draw(st.sampled_from(["mesh", "mesh", "mesh", "boxes", "ranks"]))
    if how == "ranks":
        return OnRanks(tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))))
    if how == "boxes":
        boxes = list(dict.fromkeys(mesh(shape, [draw(st.sampled_from([1, 1, 2, 3])) for _ in shape])))
        ranks = st.sets(st.integers(0, size - 1), min_size=1, max_size=2).map(lambda found: tuple(sorted(found)))
        return InBoxes(tuple((box, draw(ranks)) for box in boxes if box.volume or 0 in shape))
    sizes, left = [], size
    for _ in range(2):
        sizes.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= sizes[-1]
    sizes.append(left)
    one: st.SearchStrategy[tuple[int, int] | None] = st.none()
    if shape:
        one = st.sampled_from([None, *((dim, split) for dim in range(len(shape)) for split in (1, 1, 2))])
    return OnMesh(tuple(sizes), tuple(draw(one) for _ in sizes))


class Tensor(NamedTuple):
    """A leaf: the global tensor's type and shape, what else lies under its path, and from which save on it is there."""

    dtype: torch.dtype
    shape: Shape
    tied: bool
    since: int

    def at(self, number: int) -> torch.Tensor:
        """Its content of that number."""
        return make(self.dtype, self.shape, number)


class Part(NamedTuple):
    """Some time of a job in one world: its hosts, how its tensors lie, and what it saves.

    Attributes:
        lies: of each tensor.
        saves: for each save, the numbers of the contents of its tensors.
        step, only: what it restores at first: by step where a number says how many before the newest; and a glob.
    """

    hosts: tuple[int, ...]
    lies: tuple[Lies, ...]
    saves: tuple[tuple[int, ...], ...]
    back: int | None = None
    only: tuple[str, ...] | None = None

    @property
    def size(self) -> int:
        return len(self.hosts)


@dataclass
class Job:
    """A line of worlds that save and restore one state."""

    tensors: list[Tensor]
    parts: list[Part]
    truth: dict[int, Truth] = field(default_factory=dict)


class Truth(NamedTuple):
    """What a save was of."""

    step: int
    contents: tuple[int, ...]
    size: int
    first: bool


@st.composite
def jobs(draw: st.DrawFn, most: int = 6, parts: int = 3) -> Job:
    """Jobs of so many ranks at most, in so many worlds."""
    sides = st.sampled_from([4, 3, 7, 1, 16, 0, 33])
    shapes = st.lists(sides, max_size=3).map(tuple).filter(lambda shape: math.prod(shape) <= 4096)
    rarely = st.sampled_from([0, 0, 0, 1])
    tensors = draw(
        st.lists(
            st.builds(Tensor, st.sampled_from(KINDS), shapes, tied=rarely.map(bool), since=rarely),
            min_size=1,
            max_size=4,
        )
    )
    found, last = [], tuple(range(len(tensors)))
    count = draw(st.integers(2, parts))
    for number in range(count):
        size = draw(st.sampled_from([n for n in (2, 3, 4, 1, 6, 5) if n <= most]))
        hosts = sorted(draw(st.lists(st.integers(0, min(2, size - 1)), min_size=size, max_size=size)))
        lies = tuple(draw(lying(tensor.shape, size)) for tensor in tensors)
        saves = []
        for _ in range(draw(st.integers(1, 2)) if number < count - 1 else draw(st.integers(0, 1))):
            last = tuple(seed + 10 * draw(st.sampled_from([0, 1])) for seed in last)
            saves.append(last)
        only = draw(st.sampled_from([None, None, ("n",), ("t0", "n"), ("t[0-9]*", "n")]))
        back = draw(st.sampled_from([None, None, 0, 1]))
        found.append(Part(tuple(hosts), lies, tuple(saves), back, only))
    return Job(tensors, found)


def _value(lies: Lies, rank: int, tensor: Tensor, whole: torch.Tensor) -> Any:
    """What a rank's state has of a tensor; None for nothing."""
    if isinstance(lies, OnRanks):
        return of_words(words(whole), whole.dtype) if rank in lies.ranks else None
    if isinstance(lies, InBoxes):
        own = [(box, cut_out(whole, box)) for box, ranks in lies.boxes if rank in ranks]
        if len(own) == 1:
            return ts.Shard(own[0][1], own[0][0].offset, tensor.shape)
        return Boxes(tensor.dtype, tensor.shape, own)
    placed, shape = lies.held(rank, tensor.shape)
    cells = np.zeros((*shape, tensor.dtype.itemsize), np.uint8)
    whole_cells = words(whole)
    for piece in placed.pieces:
        into = tuple(slice(at, at + n) for at, n in zip(piece.at, piece.box.shape, strict=True))
        cells[into] = whole_cells[piece.box.slices()]
    return Placed(of_words(cells, tensor.dtype), placed)


def state_of(job: Job, part: Part, rank: int, contents: Sequence[int], step: int, *, late: bool) -> dict[str, Any]:
    """What a rank holds.

    Args:
        contents: of the tensors.
        late: whether tensors that come with a later save are there.
    """
    state: dict[str, Any] = {"n": step, "words": {"of": "x" * (step % 3), "all": [1.5, None, b"\0"]}}
    for i, (tensor, lies) in enumerate(zip(job.tensors, part.lies, strict=True)):
        if tensor.since and not late:
            continue
        value = _value(lies, rank, tensor, tensor.at(contents[i]))
        if value is not None:
            state[f"t{i}"] = value
            if tensor.tied:
                state[f"tied{i}"] = value
    state["own"] = ts.PerRank({"r": rank, "at": step}, missing="keep")
    return state


def held_bits(value: Any) -> list[bytes]:
    """The bits of what a rank holds of a tensor."""
    if isinstance(value, Placed):
        return [bits(value.local)]
    if isinstance(value, ts.Shard):
        return [bits(value.tensor)]
    if isinstance(value, Boxes):
        return [bits(tensor) for _, tensor in value.parts]
    return [bits(value)]


def globals_of(job: Job, contents: Sequence[int], *, late: bool) -> dict[str, torch.Tensor]:
    """The global tensors."""
    found = {}
    for i, tensor in enumerate(job.tensors):
        if not tensor.since or late:
            found[f"t{i}"] = tensor.at(contents[i])
            if tensor.tied:
                found[f"tied{i}"] = found[f"t{i}"]
    return found


def check_filled(job: Job, part: Part, rank: int, got: Mapping[str, Any], truth: Truth, only: Any = None) -> None:
    """That a template holds what was saved, and nothing else was touched."""
    before = state_of(job, part, rank, [97] * len(job.tensors), 1000, late=not truth.first)
    after = state_of(job, part, rank, truth.contents, truth.step, late=not truth.first)
    assert list(got) == list(after)
    for name, value in got.items():
        memory = f"t{name[4:]}" if name.startswith("tied") else name
        taken = only is None or wanted(name, only) or (memory in got and wanted(memory, only))
        right = after[name] if taken else before[name]
        if name == "own":
            known = {"r": rank, "at": truth.step if taken and rank < truth.size else 1000}
            assert value.value == known, (name, value, known)
        elif name.startswith("t"):
            assert held_bits(value) == held_bits(right), (name, rank, taken)
        else:
            assert value == right, (name, value, right)


def check_loaded(job: Job, got: Mapping[str, Any], truth: Truth, only: Any = None) -> None:
    """That a state without a template is all of it."""
    whole = globals_of(job, truth.contents, late=not truth.first)
    other = {"n", "words", "own"} | set(whole)
    assert set(got) == {name for name in other if only is None or wanted(name, only)}
    for name in set(got) & set(whole):
        value = whole[name]
        assert (got[name].dtype, tuple(got[name].shape)) == (value.dtype, tuple(value.shape))
        assert bits(got[name]) == bits(value), name
        if name.startswith("tied") and value.numel() and f"t{name[4:]}" in got:
            assert got[name].data_ptr() == got[f"t{name[4:]}"].data_ptr()
    if "own" in got:
        assert got["own"] == {rank: {"r": rank, "at": truth.step} for rank in range(truth.size)}
    assert got.get("n", truth.step) == truth.step


def wanted(name: str, only: Sequence[str]) -> bool:
    """Whether one of the globs that jobs use means a name."""
    return any(name == glob or (glob == "t[0-9]*" and name.startswith("t") and name[1].isdigit()) for glob in only)
