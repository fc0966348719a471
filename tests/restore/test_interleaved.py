"""Two processes on one run in any interleaving: one wins, the other gets an error, nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, policy, scratch, tensors, unreferenced
from support.given_tiers import handed
from support.storage_sites import tried

import tierstate as ts
from tierstate.engine.maintain.sweep import DAY
from tierstate.manifest.history.leases import pin_version
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.testing import ActorResults, Interleaved, Turns, random_bytes

pytestmark = pytest.mark.slow

STRETCHES = st.lists(st.integers(0, 12), max_size=25)
KINDS = st.sampled_from(["memory", "nvme"])
SIZES = (9000, 5000)
FEWER = settings(max_examples=max(10, settings().max_examples // 3))
Actor = Callable[[ts.Policy], Any]


class World:
    """One place, and what was ever saved there.

    Attributes:
        tier: a handle on the place that waits for nobody.
        truths: by number of the save, what the state was.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.truths: list[dict[str, Any]] = []

    def state(self, seed: int = 0) -> int:
        """A new state's number; it shares most chunks with others of its seed."""
        n = len(self.truths)
        state = tensors(*SIZES, seed=seed)
        state["b"][n] += 1
        self.truths.append(state)
        return n

    def saver(self, saves: int, *, wait: bool = True, seed: int = 0) -> Callable[[ts.Policy], list[int]]:
        """Saves new states; gives the numbers of those that are durable."""
        numbers = [self.state(seed) for _ in range(saves)]

        def act(spec: ts.Policy) -> list[int]:
            ckpt = ts.Checkpointer(spec, "run")
            done, under_way = [], []
            for n in numbers:
                save, _ = tried(lambda n=n: ckpt.save(self.truths[n], step=n, metadata={"n": n}))  # type: ignore[misc]
                if save is not None:
                    under_way.append((n, save))
                    if wait:
                        tried(save.wait)
            for n, save in under_way:
                if tried(save.wait)[1] is None:
                    done.append(n)
            tried(ckpt.close)
            return done

        return act

    def reader(self, loads: int) -> Callable[[ts.Policy], list[int]]:
        """Restores the newest version again and again; gives the numbers of what came back, exact."""

        def act(spec: ts.Policy) -> list[int]:
            found = []
            with ts.Checkpointer(spec, "run") as ckpt:
                for _ in range(loads):
                    state = ckpt.load()
                    assert ckpt.restored is not None
                    found.append(int(ckpt.restored.metadata["n"]))
                    assert alike(self.truths[found[-1]], state)
            return found

        return act

    def pruner(self, prunes: int, saves: int = 0) -> Callable[[ts.Policy], list[int]]:
        """Saves, and then prunes again and again; gives the numbers of what it saved."""
        save = self.saver(saves, seed=1)

        def act(spec: ts.Policy) -> list[int]:
            saved = save(spec)
            with ts.Checkpointer(spec, "run") as ckpt:
                for _ in range(prunes):
                    tried(ckpt.prune)
            return saved

        return act

    def check(self, spec: ts.Policy) -> set[int]:
        """Every version that is there restores; the numbers of all."""
        with ts.Checkpointer(spec, "run") as ckpt:
            versions = ckpt.versions()
            for version in versions:
                assert alike(self.truths[version.metadata["n"]], ckpt.load(version=version.id))
            assert ckpt.verify(deep=True).ok
            return {version.metadata["n"] for version in versions}


@contextmanager
def world(kind: str) -> Iterator[World]:
    with scratch() as place:
        yield World(Memory() if kind == "memory" else Nvme(path=place / "nvme"))


def play(it: World, stretches: list[int], actors: dict[str, tuple[Actor, dict[str, Any]]]) -> ActorResults:
    """Let the actors, each by a policy of its own, take turns."""
    turns = Turns(stretches)
    with handed(*(Interleaved(it.tier, turns, name) for name in actors)) as keys:
        specs = [policy({"only": {**k, **more}}) for k, (_, more) in zip(keys, actors.values(), strict=True)]
        acts = {
            name: (lambda a=act, s=spec: a(s)) for (name, (act, _)), spec in zip(actors.items(), specs, strict=True)
        }
        return turns.run(acts)


def results(said: ActorResults) -> dict[str, Any]:
    for error in said.errors.values():
        raise error
    return said.results


@contextmanager
def plain(it: World) -> Iterator[ts.Policy]:
    with handed(it.tier) as (keys,):
        yield policy({"only": keys})


@FEWER
@given(stretches=STRETCHES, kind=KINDS, wait=st.booleans())
def test_of_two_savers_to_one_run_one_wins_each_number_and_nothing_is_lost(
    stretches: list[int], kind: str, wait: bool
) -> None:
    with world(kind) as it, plain(it) as spec:
        one, two = it.saver(2, wait=wait), it.saver(2, wait=wait)
        said = results(play(it, stretches, {"one": (one, {}), "two": (two, {})}))
        won = {*said["one"], *said["two"]}
        assert won
        assert it.check(spec) == won
        assert unreferenced(it.tier, "run") == set()
        if not stretches:
            assert won == set(range(4))


@FEWER
@given(stretches=STRETCHES, kind=KINDS, keep=st.integers(1, 2))
def test_a_reader_beside_a_saver_that_drops_versions_gets_a_whole_one(
    stretches: list[int], kind: str, keep: int
) -> None:
    with world(kind) as it, plain(it) as spec:
        it.saver(1)(spec)
        actors = {"saver": (it.saver(3), {"keep": {"last": keep}}), "reader": (it.reader(2), {})}
        said = results(play(it, stretches, actors))
        assert said["saver"] == [1, 2, 3]
        assert said["reader"] == sorted(said["reader"])
        assert it.check(spec) == set(range(4)[-keep:])


@FEWER
@given(stretches=STRETCHES, kind=KINDS, wait=st.booleans())
def test_a_saver_beside_one_that_drops_what_it_builds_on(stretches: list[int], kind: str, wait: bool) -> None:
    with world(kind) as it, plain(it) as spec:
        it.saver(1)(spec)
        actors = {
            "keeps": (it.saver(3, wait=wait), {}),
            "drops": (it.saver(2, wait=wait, seed=1), {"keep": {"last": 1}}),
        }
        said = results(play(it, stretches, actors))
        there = it.check(spec)
        assert there
        assert there <= {0, *said["keeps"], *said["drops"]}


@FEWER
@given(stretches=STRETCHES, kind=KINDS)
def test_a_saver_beside_two_that_prune(stretches: list[int], kind: str) -> None:
    with world(kind) as it, plain(it) as spec:
        it.saver(2)(spec)
        keep = {"keep": {"last": 1}}
        actors = {"saver": (it.saver(3), {}), "one": (it.pruner(2), keep), "two": (it.pruner(1), keep)}
        said = results(play(it, stretches, actors))
        assert said["saver"] == [2, 3, 4]
        assert 4 in it.check(spec)


@FEWER
@given(stretches=STRETCHES, kind=KINDS)
def test_a_fork_beside_one_that_drops_what_it_begins_with(stretches: list[int], kind: str) -> None:
    with world(kind) as it, plain(it) as spec:
        it.saver(2)(spec)

        def fork(own: ts.Policy) -> int | None:
            with ts.Checkpointer(own, "run") as ckpt:
                info, _ = tried(lambda: ckpt.fork("other", step=0))
            return None if info is None else int(info.metadata["n"])

        said = results(play(it, stretches, {"fork": (fork, {}), "drops": (it.pruner(2, 1), {"keep": {"last": 1}})}))
        it.check(spec)
        with ts.Checkpointer(spec, "other") as ckpt:
            if said["fork"] is not None:
                assert alike(it.truths[said["fork"]], ckpt.load())
            assert ckpt.verify(deep=True).ok


@FEWER
@given(stretches=STRETCHES)
def test_a_fork_where_a_dead_one_left_its_pin_beside_prunes_that_take_that_away(stretches: list[int]) -> None:
    with world("nvme") as it, plain(it) as spec:
        it.saver(1)(spec)
        assert isinstance(it.tier, Nvme)
        left = Path(it.tier.path) / pin_version(it.tier, "run", 1, "other")
        os.utime(left, (left.stat().st_mtime - 2 * DAY,) * 2)

        def fork(own: ts.Policy) -> int | None:
            with ts.Checkpointer(own, "run") as ckpt:
                info, _ = tried(lambda: ckpt.fork("other", step=0))
            return None if info is None else int(info.metadata["n"])

        keep = {"keep": {"last": 1}}
        said = results(play(it, stretches, {"fork": (fork, {}), "prunes": (it.pruner(1), keep)}))
        with handed(it.tier) as keys:
            it.pruner(2, 1)(policy({"only": {**keys[0], **keep}}))
        assert said["fork"] is not None, "it is the newest version, so that nobody drops it meanwhile"
        with ts.Checkpointer(spec, "other") as ckpt:
            assert alike(it.truths[said["fork"]], ckpt.load())


@FEWER
@given(stretches=STRETCHES)
def test_the_same_turns_give_the_same_history(stretches: list[int]) -> None:
    def played() -> list[tuple[str, str]]:
        tier, turns = Memory(), Turns(stretches)

        def act(name: str) -> Callable[[], None]:
            mine = Interleaved(tier, turns, name)

            def go() -> None:
                for i in range(3):
                    mine.put(f"{name}/{i}", random_bytes(4))

            return go

        turns.run({name: act(name) for name in ("one", "two", "three")})
        return turns.history

    assert played() == played()
