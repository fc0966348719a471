"""`rekey` of sealed tiers: with the new key alone all is there as before, and at each moment until then."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from support.checkpointer_worlds import alike, policy, tensors
from support.secret_keys import STATE, key_file, objects, sealed, write

import tierstate as ts
from tierstate.engine.maintain import rekey
from tierstate.engine.maintain.rekey import rekey_tiers
from tierstate.manifest.history.removals import removals
from tierstate.tiers.base import Tier, layers
from tierstate.tiers.policy.policy import open_policy_tier


class World:
    """Two sealed tiers with three versions of two runs: one has a tag, one is forked, and one was removed."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.old, self.new = (key_file(place / "keys", name) for name in ("old", "new"))
        self.state = tensors(*STATE)
        with ts.Checkpointer(self.spec(self.old), "run") as ckpt:
            for step in (1, 2, 3, 4):
                ckpt.save(self.state, step=step).wait("far")
            ckpt.tag("best", step=2)
            ckpt.tag("gone", step=3)
            ckpt.untag("gone")
            ckpt.fork("fork", step=4)
            ckpt.remove(step=1)

    def spec(self, *keys: str) -> ts.Policy:
        tiers = {name: {"type": "nvme", "path": str(self.place / name)} for name in ("disk", "far")}
        return policy(tiers, seal={"file": list(keys)})

    def found(self, *keys: str) -> Any:
        """What these keys show of both runs in both tiers."""
        told: list[Any] = []
        for run in ("run", "fork"):
            with ts.Checkpointer(self.spec(*keys), run) as ckpt:
                told += [(one.step, one.id, one.tiers, one.tags) for one in ckpt.versions()]
                told.append({name: one.step for name, one in ckpt.tags().items()})
                assert all(alike(ckpt.load(step=one.step), self.state) for one in ckpt.versions())
        with ts.Checkpointer(self.spec(*keys), "run") as ckpt:
            assert [version.state for version in ckpt.doctor().versions] == ["whole"] * 3
        for tier in map(open_policy_tier, self.spec(*keys).tiers):
            told.append(sorted({(one.entry.step, one.known) for one in removals(tier, "run")}))
            tier.close()
        return told


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.slow
def test_all_is_there_with_the_new_key_alone(world: World) -> None:
    before, packs = world.found(world.old), [path.read_bytes() for path in objects(world.place, "packs")]
    first, second = rekey_tiers(world.spec(world.new, world.old))
    assert (first.tier, first.left, second.left) == ("disk", [], [])
    # Four records, one of the fork; two tags; the mark of the removed version; the marker.
    assert (first.sealed, second.sealed) == (8, 8)
    assert world.found(world.new) == before
    assert [path.read_bytes() for path in objects(world.place, "packs")] == packs
    assert [one.sealed for one in rekey_tiers(world.spec(world.new, world.old))] == [0, 0]
    with ts.Checkpointer(world.spec(world.new), "run") as ckpt:
        ckpt.save(world.state, step=9).wait()
        assert ckpt.prune().ok
        assert ckpt.verify(deep=True).ok
    with ts.Checkpointer(world.spec(world.old), "run") as ckpt, pytest.raises(ts.Unsafe, match="sealed with key"):
        ckpt.load()


class Killed(BaseException):
    """In place of the end of the process."""


def dying(monkeypatch: pytest.MonkeyPatch, changes: int) -> None:
    """The process ends before the tiers are changed once more than so often."""
    left = iter(range(changes))

    def mortal(call: Callable[..., None]) -> Callable[..., None]:
        def made(*args: Any) -> None:
            if next(left, None) is None:
                raise Killed
            call(*args)

        return made

    def opened(spec: Any) -> Tier:
        tier = open_policy_tier(spec)
        *_, medium = layers(tier)
        for name in ("put", "delete"):
            monkeypatch.setattr(medium, name, mortal(getattr(medium, name)))
        return tier

    monkeypatch.setattr(rekey, "open_policy_tier", opened)


@pytest.mark.slow
def test_whenever_it_is_interrupted_nothing_is_lost_and_it_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One version with a tag, and one that was removed: the process ends at each change of the tier."""
    old, new = (key_file(tmp_path / "keys", name) for name in ("old", "new"))
    first, both, last = (sealed(tmp_path, *keys) for keys in ([old], [new, old], [new]))
    with ts.Checkpointer(first, "run") as ckpt:
        for step in (1, 2):
            ckpt.save(tensors(*STATE), step=step).wait()
        ckpt.tag("best", step=2)
        ckpt.remove(step=1)
    shutil.copytree(tmp_path / "disk", tmp_path / "before")

    def found(spec: ts.Policy) -> Any:
        with closing(open_policy_tier(spec.tiers[0])) as tier, ts.Checkpointer(spec, "run") as ckpt:
            assert alike(ckpt.load(tag="best"), tensors(*STATE))
            return [one.step for one in ckpt.versions()], {one.entry.step for one in removals(tier, "run")}

    right, changes = found(first), 0
    while True:
        shutil.rmtree(tmp_path / "disk")
        shutil.copytree(tmp_path / "before", tmp_path / "disk")
        with monkeypatch.context() as patch, suppress(Killed):
            dying(patch, changes)
            rekey_tiers(both)
            break
        assert found(both) == right
        rekey_tiers(both)
        if (tmp_path / "disk" / "tier.json").exists():  # else `adopt` writes it
            assert found(last) == right
        changes += 1
    assert changes > 10


def test_a_marker_that_is_missing_is_told(world: World) -> None:
    (world.place / "disk" / "tier.json").unlink()
    first, second = rekey_tiers(world.spec(world.new, world.old))
    assert first.left == ["disk: tier.json is missing; `tierstate adopt` writes it"]
    assert second.left == []


def test_what_cannot_be_read_is_told_and_left_as_it_is(world: World) -> None:
    record, *_ = objects(world.place, "versions/run")
    damaged = record.read_bytes()[:-1] + b"?"
    write(record, damaged)
    first, second = rekey_tiers(world.spec(world.new, world.old))
    assert [f"versions/run/{record.name}" in why for why in first.left] == [True]
    assert second.left == []
    assert record.read_bytes() == damaged
    with ts.Checkpointer(world.spec(world.new), "run") as ckpt:
        assert len(ckpt.versions()) == 3
