"""Disks that hang, for real: every write waits in the kernel, uninterruptibly, until the disk is back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.checkpointer_worlds import alike, arena_of, engine_threads, opened, policy, tensors, unreferenced
from support.filesystems import MIB, Disk, ext4
from support.leaks import at_rest, nothing_left, temporary
from support.outcomes import until

import tierstate as ts
from tierstate.tiers.base import layers
from tierstate.tiers.wrappers.deadline import Deadline

LONG, SOON = 60.0, 0.5
"""The deadline, and what it is while the disk is frozen: a healthy one may be slow here."""


@pytest.fixture
def disk(place, root) -> Iterator[Disk]:
    with ext4(place / "disk", 128 * MIB) as made:
        yield made


@contextmanager
def frozen(disk: Disk) -> Iterator[None]:
    disk.freeze()
    try:
        yield
    finally:
        disk.thaw()


def set_deadline(ckpt: ts.Checkpointer, seconds: float) -> None:
    """Change the deadline of what is under way on the shared tier."""
    watch = shared_tier(ckpt)._watch
    with watch._changed:
        watch.seconds = seconds
        watch._changed.notify_all()


def shared_tier(ckpt: ts.Checkpointer) -> Deadline:
    (tier_run,) = [s for s in ckpt._tier_runs if s.name == "shared"]
    found = [getattr(tier, "_outer", tier) for tier in layers(tier_run.tier)]
    return next(tier for tier in found if isinstance(tier, Deadline))


def shared_notes(ckpt: ts.Checkpointer) -> str:
    """What the shared tier says of itself."""
    return "; ".join(shared_tier(ckpt).traits.notes)


def spec(disk: Disk, place, io: str, *, only: bool = False, kind: str = "lustre") -> ts.Policy:
    """A local tier and a shared one of any kind with files; or the shared one alone."""
    local = {} if only else {"local": {"type": "nvme", "path": str(place / "local")}}
    where = {"url": f"file://{disk.path}/ckpt"} if kind == "object" else {"path": str(disk.path / "ckpt"), "io": io}
    shared = {"type": kind, "deadline": LONG, **where}
    return policy({**local, "shared": shared}, chunk="1MiB", arena={"size": "8MiB"})


def test_saves_go_on_without_a_hung_tier_which_is_used_again_when_it_is_back(disk, place, io):
    states = {step: tensors(5 * MIB + 4, 3000, seed=step) for step in range(1, 6)}
    with nothing_left(disk.path):
        ckpt = ts.Checkpointer(spec(disk, place, io), "run")
        ckpt.save(states[1], step=1).wait("shared")
        with frozen(disk):
            set_deadline(ckpt, SOON)
            save = ckpt.save(states[2], step=2)
            save.wait("local")
            with pytest.raises(ts.TierUnavailable, match=r"shared: hangs since .* has not come back in 0.5 s"):
                save.wait("shared")
            save = ckpt.save(states[3], step=3)
            save.wait("local")
            with pytest.raises(ts.TierUnavailable, match="it is used again once that has come back"):
                save.wait("shared")
            until(lambda: at_rest(ckpt))
            assert alike(ckpt.load(), states[3]), "restored from the tier that answers"
        set_deadline(ckpt, LONG)
        until(lambda: not shared_notes(ckpt))
        for step in (4, 5):
            ckpt.save(states[step], step=step).wait("shared")
        assert arena_of(ckpt).kept == 0, "what was pinned is free again"
        ckpt.close()
    assert temporary(disk.path) == []
    alone = spec(disk, place, io, only=True)
    with ts.Checkpointer(alone, "run") as ckpt:
        found = [version.step for version in ckpt.versions()]
        assert {1, 4, 5} <= set(found)
        for step in found:
            assert alike(ckpt.load(step=step), states[step])
        assert ckpt.verify(deep=True).ok
    shared = opened(alone, "shared")
    assert unreferenced(shared, "run") == set()
    shared.close()


def test_a_state_larger_than_the_arena_is_held_up_once(disk, place, io):
    """The slabs that the hung tier holds leave the budget: the capture goes on with others."""
    ckpt = ts.Checkpointer(spec(disk, place, io, only=True), "run")
    first, second = (tensors(20 * MIB, seed=seed) for seed in (1, 2))
    ckpt.save(first, step=1).wait()
    with frozen(disk):
        set_deadline(ckpt, SOON)
        save = ckpt.save(second, step=2)
        save.wait_captured()
        with pytest.raises(ts.TierUnavailable, match="hangs since"):
            save.wait()
        until(lambda: at_rest(ckpt))
        assert arena_of(ckpt).kept <= arena_of(ckpt).slots
        with pytest.raises(ts.TierUnavailable):
            ckpt.save(second, step=3).wait()
        assert "hangs since" in shared_notes(ckpt)
    set_deadline(ckpt, LONG)
    until(lambda: not shared_notes(ckpt))
    until(lambda: not arena_of(ckpt).kept)
    ckpt.save(second, step=4).wait()
    assert alike(ckpt.load(), second)
    assert alike(ckpt.load(step=1), first)
    ckpt.close()
    assert temporary(disk.path) == []


def test_a_checkpointer_is_closed_while_a_tier_hangs(disk, place, io):
    ckpt = ts.Checkpointer(spec(disk, place, io), "run")
    ckpt.save(tensors(5 * MIB), step=1).wait("shared")
    with frozen(disk):
        set_deadline(ckpt, SOON)
        ckpt.save(tensors(5 * MIB, seed=2), step=2).wait("local")
        with pytest.raises(ts.TierUnavailable, match="hangs since"):
            ckpt.close()
    # What was given up comes back, clears up after itself, and ends its threads.
    until(lambda: not engine_threads())
    assert temporary(disk.path) == []
    with ts.Checkpointer(spec(disk, place, io, only=True), "run") as ckpt:
        assert ckpt.versions()[0].step == 1
        assert alike(ckpt.load(step=1), tensors(5 * MIB))


@pytest.mark.parametrize("kind", ["nvme", "object"])
def test_any_tier_of_files_that_hangs_is_told_and_costs_one_deadline(disk, place, kind):
    """Of many owed saves only the first one waits; stats say what hangs; what is owed is left to the next process."""
    ckpt = ts.Checkpointer(spec(disk, place, "auto", kind=kind), "run")
    ckpt.save(tensors(5 * MIB), step=1).wait("shared")
    with frozen(disk):
        set_deadline(ckpt, SOON)
        for step in range(2, 8):
            ckpt.save(tensors(3000, seed=step), step=step).wait("local")
        until(lambda: ckpt.stats().tiers["shared"].hung)
        with pytest.raises(ts.TierUnavailable, match="hangs since") as caught:
            ckpt.close()
        assert caught.value.__notes__[-1].startswith("still owed: shared: step 2, 3, 4, 5, 6, 7 (a faster tier has it,")
        assert len(shared_tier(ckpt)._watch._threads._threads) <= 3, "nothing more was asked of the disk"
    until(lambda: not engine_threads())
    with ts.Checkpointer(spec(disk, place, "auto", kind=kind), "run") as ckpt:
        ckpt.save(tensors(3000), step=8).wait("shared")
    with ts.Checkpointer(spec(disk, place, "auto", only=True, kind=kind), "run") as ckpt:
        assert [version.step for version in ckpt.versions()] == list(range(1, 9))
        assert alike(ckpt.load(step=4), tensors(3000, seed=4))


def test_a_run_begins_while_a_tier_hangs(disk, place, io):
    """The numbers of versions, and what is due, are asked for by the thread that trains; it waits once."""
    with ts.Checkpointer(spec(disk, place, io), "run") as ckpt:
        ckpt.save(tensors(5 * MIB), step=1).wait("shared")
    with frozen(disk):
        ckpt = ts.Checkpointer(spec(disk, place, io), "run")
        set_deadline(ckpt, SOON)
        for step in (2, 3):
            ckpt.save(tensors(5 * MIB, seed=step), step=step).wait("local")
        with pytest.raises(ts.TierUnavailable, match="hangs since"):
            ckpt.close()
    until(lambda: not engine_threads())
    with ts.Checkpointer(spec(disk, place, io), "run") as ckpt:
        assert [version.step for version in ckpt.versions()][-2:] == [2, 3]
        assert alike(ckpt.load(), tensors(5 * MIB, seed=3))
