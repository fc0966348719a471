"""Versions that another process drops, moves or sweeps while they are restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from support.checkpointer_worlds import alike, names, policy, scratch, wrapped

import tierstate as ts
from tierstate.engine.maintain.repack import _relaid
from tierstate.engine.packs.pack import PackWriter
from tierstate.engine.store import catalog
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.log import Log, commit_id
from tierstate.tiers.base import Range, Tier, Traits
from tierstate.tiers.memory.host import Memory


class Busy(Memory):
    """A tier of the site, where something happens at the first read of a pack."""

    meanwhile: Callable[[], None] | None = None
    leases: list[str]

    @property
    def traits(self) -> Traits:
        from dataclasses import replace

        return replace(super().traits, shared="site")

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        call, self.meanwhile = self.meanwhile, None if key.startswith("packs/") else self.meanwhile
        if key.startswith("packs/") and call is not None:
            self.leases = names(self, "leases/")
            call()
        super().read(key, ranges)


STATES = [{"w": torch.full((2_000,), float(step))} for step in range(3)]


@contextmanager
def saved() -> Iterator[tuple[Busy, ts.Policy]]:
    tier = Busy()
    with scratch(), wrapped(tier) as keys:
        spec = policy({"only": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            for step, state in enumerate(STATES):
                ckpt.save(state, step=step)
        yield tier, spec


def move(tier: Tier, seq: int) -> None:
    """What repacking and a sweep do to a version."""
    from dataclasses import replace

    log = Log(tier, "run")
    old: Record = log.read(seq)
    writer, moved = PackWriter(tier, "run", seq), {}
    for row in range(len(old.version.digests)):
        place = old.layout.place(row)
        assert place is not None
        data = tier.get(place.object)[place.offset : place.offset + place.stored].clone()
        moved[place.object, place.offset] = writer.add(
            data, old.version.digests[row].tobytes(), int(old.version.chunk_nbytes[row]), place.codec
        )
    layout = _relaid(old.layout, moved, writer.close())
    assert layout is not None
    log.commit(replace(old, layout=layout, commit={"id": commit_id()}), 1)
    log.forget(seq)
    tier.discard(old.layout.objects)


def drop(tier: Tier, seq: int) -> None:
    log = Log(tier, "run")
    packs = log.read(seq).layout.objects
    log.forget(seq)
    tier.discard(packs)


def test_a_version_that_is_moved_while_it_is_read_is_read_where_it_lies_then() -> None:
    for step in (0, 2, None):
        with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
            tier.meanwhile = lambda tier=tier, step=step: move(tier, 3 if step is None else step + 1)  # type: ignore[misc]
            assert alike(ckpt.load(step=step), STATES[2 if step is None else step])


def test_one_that_is_dropped_is_told_unless_any_newest_will_do() -> None:
    with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
        tier.meanwhile = lambda: drop(tier, 1)
        with pytest.raises(ts.NotFound, match="was dropped"):
            ckpt.load(step=0)
        tier.meanwhile = lambda: drop(tier, 3)
        assert alike(ckpt.load(), STATES[1])


def test_a_version_is_held_where_a_cascade_reads_it() -> None:
    """While it does, another process saves, and drops all versions but its own."""
    tier, slow = Busy(), Memory()
    with scratch(), wrapped(tier) as keys, wrapped(slow) as more:
        other = policy({"only": {**keys, "keep": {"last": 1}}})

        def saves() -> None:
            with ts.Checkpointer(other, "run") as ckpt:
                ckpt.save(STATES[1], step=1).wait()

        with ts.Checkpointer(policy({"only": keys, "slow": more}), "run") as ckpt:
            tier.meanwhile = saves
            ckpt.save(STATES[0], step=0).wait("slow")
            assert tier.meanwhile is None, "it was read from there"
            assert [key.startswith("leases/run/000000000001-read-") for key in tier.leases] == [True]
            assert Log(tier, "run").seqs() == [1, 2]
            assert names(tier, "leases/") == []
            assert Log(slow, "run").seqs() == [1]
            assert ckpt.verify(deep=True).ok


def test_a_long_restore_holds_what_it_reads_and_a_short_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
        for long in (False, True):
            monkeypatch.setattr(catalog, "LEASE_FROM", 1 if long else 1 << 30)
            tier.meanwhile = lambda: None
            ckpt.load(step=1)
            assert [key.startswith("leases/run/000000000002-read-") for key in tier.leases] == [True] * long
            assert names(tier, "leases/") == []
