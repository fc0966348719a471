"""Chunks that only some ranks can read: damaged, or in a tier that does not answer, for them alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, opened, policy, scratch, tensors
from support.thread_ranks import Cluster

import tierstate as ts
from tierstate.manifest.errors import AccessDenied, Damaged, NotFound, TierUnavailable, Unreadable
from tierstate.manifest.history.log import Log
from tierstate.tiers.base import Range
from tierstate.tiers.posix.directory import Directory
from tierstate.tiers.registry import register_tier
from tierstate.tiers.wrappers.base import Wrapping

STATE, NEWER = tensors(40_000, 4_000, 12_000), tensors(40_000, 4_000, 12_000, seed=1)
ROWS = 10 + 1 + 3
"""Chunks of 4 KiB that either has."""

RECORD = -1
"""In place of a chunk: the version's record."""

Health: TypeAlias = Literal["damaged", "away", "denied", "unlisted"]
World: TypeAlias = Sequence[dict[int, Health]]
"""By rank, the chunks of the newer version that it cannot read, and why."""


class Ailing(Wrapping):
    """A folder that all ranks see, in which some ranks cannot read some chunks.

    Args:
        path: the folder.
        rank: who reads.

    Attributes:
        ill: by rank, pack and offset, what it meets there.
    """

    ill: ClassVar[dict[int, dict[tuple[str, int], Health]]] = {}

    def __init__(self, *, path: str, rank: int) -> None:
        super().__init__(Directory(Path(path)))
        self._rank = rank

    def list(self, prefix: str) -> Iterator[str]:
        if prefix.startswith("versions/") and "unlisted" in self.ill.get(self._rank, {}).values():
            raise TierUnavailable("no answer")
        return super().list(prefix)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        """Meet the first ailment that does not answer; flip a byte for the others."""
        found = [(at, what) for (pack, at), what in self.ill.get(self._rank, {}).items() if pack == key]
        met = [(one, at, what) for one in ranges for at, what in found if 0 <= at - one.offset < one.out.numel()]
        for _, _, what in met:
            if what in ("away", "unlisted"):
                raise TierUnavailable("no answer", key=key)
            if what == "denied":
                raise AccessDenied("not allowed", key=key)
        super().read(key, ranges)
        for one, at, _ in met:
            one.out[at - one.offset] ^= 1


class Ailed(Cluster):
    """A cluster of ranks on a host each, whose one tier is an `Ailing` folder."""

    def policy(self, host: int) -> ts.Policy:
        """That of one rank."""
        return policy({"shared": {"type": "ailing", "path": str(self.place / "shared"), "rank": host}})

    def fall_ill(self, world: World) -> None:
        """Save two versions, and let ranks meet that from now on."""
        Ailing.ill.clear()
        with ts.Checkpointer(self.policy(0), "run") as ckpt:
            for step, state in enumerate((STATE, NEWER), 1):
                ckpt.save(state, step)
        log = Log(opened(self.policy(0), "shared"), "run")
        layout = log.read(2).layout
        for rank, rows in enumerate(world):
            places = {row: layout.place(row) for row in rows if row != RECORD}
            ill = {(at.object, at.offset): rows[row] for row, at in places.items() if at is not None}
            Ailing.ill[rank] = ill | ({(log.key(2), 0): rows[RECORD]} if RECORD in rows else {})


@pytest.fixture(autouse=True, scope="module")
def _ailing() -> Iterator[None]:
    register_tier("ailing", Ailing)
    yield
    Ailing.ill.clear()


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A few chunks that cannot be read, each by some ranks, or by all."""
    ranks = draw(st.integers(2, 3))
    world: list[dict[int, Health]] = [{} for _ in range(ranks)]
    for row in draw(st.sets(st.integers(RECORD, ROWS - 1), min_size=1, max_size=3)):
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            world[rank][row] = draw(st.sampled_from(["damaged", "damaged", "away", "denied"]))
    return world


def read_by_none(world: World) -> list[list[Health | None]]:
    """Of each chunk that no rank can read, what each rank meets."""
    # Without a record a rank can read no chunk.
    every = [[rows.get(RECORD, rows.get(row)) for rows in world] for row in range(ROWS)]
    return [row for row in every if all(row)]


def may_lack_answers(world: World) -> bool:
    """Whether it may be that no rank reads a chunk, since neighbours are read together: a rank that gets no answer for
    one chunk may get none for others."""
    wider = []
    for rows in world:
        silent = any(what != "damaged" for what in rows.values())
        wider.append({row: "away" for row in range(ROWS)} | rows if silent else rows)
    return wider != list(world) and bool(read_by_none(wider))


def expected(world: World, on_damage: str) -> Any:
    """The step that every rank gets, or the class of its error."""
    everywhere = read_by_none(world)
    if not everywhere:
        return 2
    if all(any(what != "damaged" for what in row) for row in everywhere):
        return Unreadable
    return 1 if on_damage == "older" else Damaged


def restored(ckpt: ts.Checkpointer, on_damage: Any, *, load: bool) -> Any:
    """The step that a rank got, after a look at all its bytes; or the class of its error."""
    try:
        blank = {name: torch.zeros_like(value) for name, value in STATE.items()}
        state = ckpt.load(on_damage=on_damage) if load else ckpt.restore(blank, on_damage=on_damage)
    except (Damaged, Unreadable) as error:
        return Unreadable if isinstance(error, Unreadable) else Damaged
    assert ckpt.restored is not None
    assert alike(state, {1: STATE, 2: NEWER}[ckpt.restored.step])
    return ckpt.restored.step


def outcomes(world: World, on_damage: str, *, load: bool) -> list[Any]:
    """What each rank got."""
    with scratch() as place:
        cluster = Ailed(place, range(len(world)))
        cluster.fall_ill(world)
        return cluster.together(lambda ckpt, rank: restored(ckpt, on_damage, load=load))


@pytest.mark.slow
@settings(max_examples=20)
@example(world=[{0: "damaged", 9: "damaged"}, {10: "away"}], on_damage="raise", load=False)
@given(world=worlds(), on_damage=st.sampled_from(["raise", "older"]), load=st.booleans())
def test_ranks_agree_on_what_only_some_cannot_read(world: World, on_damage: str, load: bool) -> None:
    found, wanted = outcomes(world, on_damage, load=load), expected(world, on_damage)
    assert found in [[one] * len(world) for one in (wanted, *([Unreadable] if may_lack_answers(world) else []))]


@pytest.mark.slow
@pytest.mark.parametrize("on_damage", ["raise", "older"])
@pytest.mark.parametrize(
    "world",
    [
        # What a rank loses first says nothing of what all lose.
        [{0: "damaged", 9: "away"}, {9: "away"}],
        [{0: "damaged", 9: "away"}, {9: "damaged"}],
        [{0: "damaged"}, {9: "away"}],
        [{0: "away", 9: "damaged"}, {9: "damaged"}],
        [{9: "damaged"}, {9: "damaged", 0: "denied"}],
        [{0: "away", 13: "damaged"}, {0: "denied", 13: "damaged"}],
        # Who cannot read the record says nothing of the chunks.
        [{RECORD: "away"}, {}],
        [{RECORD: "away"}, {9: "damaged"}],
        [{RECORD: "damaged"}, {9: "away"}],
        [{RECORD: "damaged"}, {9: "damaged"}],
        [{RECORD: "away"}, {RECORD: "damaged"}],
        # Nor who cannot list the versions.
        [{RECORD: "unlisted"}, {}],
        [{RECORD: "unlisted"}, {9: "damaged"}],
        [{RECORD: "unlisted"}, {RECORD: "damaged"}],
    ],
    ids=str,
)
def test_versions_are_called_damaged_for_damage_alone(world: World, on_damage: str) -> None:
    assert outcomes(world, on_damage, load=False) == [expected(world, on_damage)] * len(world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "wanted"),
    [
        ([{RECORD: "unlisted"}, {RECORD: "unlisted"}], Unreadable),
        ([{RECORD: "away"}, {RECORD: "damaged"}], Unreadable),
        ([{RECORD: "damaged"}, {RECORD: "damaged"}], NotFound),
        ([{RECORD: "unlisted"}, {}], 2),
    ],
    ids=str,
)
def test_a_step_that_no_rank_finds_may_be_where_one_cannot_look(world: World, wanted: Any) -> None:
    def load(ckpt: ts.Checkpointer, rank: int) -> Any:
        try:
            ckpt.load(step=2)
        except ts.TierError as error:
            return type(error)
        assert ckpt.restored is not None
        return ckpt.restored.step

    with scratch() as place:
        cluster = Ailed(place, range(len(world)))
        cluster.fall_ill(world)
        assert cluster.together(load) == [wanted] * len(world)
