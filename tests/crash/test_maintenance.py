"""A crash at every step of maintenance: what stays is whole, and doing it again leads to the same end."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import given, settings
from support.checkpointer_worlds import alike, policy, scratch, tensors
from support.crash_checks import CHANCES, RUN, Past, State, opened
from support.power_cut import Disk

import tierstate as ts
from tierstate.engine.maintain import prune as prune_module
from tierstate.engine.maintain.repack import repack
from tierstate.manifest.format.record import Record
from tierstate.manifest.history import leases
from tierstate.manifest.history.log import Log
from tierstate.tiers.base import Tier
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.testing import Recording

pytestmark = pytest.mark.slow

Keys = Mapping[str, Mapping[str, Any]]

EVERYTHING: Keys = {"fast": {}, "slow": {}}
KEPT: Keys = {"fast": {"keep": {"last": 2}}, "slow": {"keep": {"last": 1, "every": 3}}}
ORPHAN = "packs/run/000000000003-0-0-dead"
FORK, LATER = "other", 100
"""A run that is forked, and the step that is saved in it then."""


@contextmanager
def another_process() -> Iterator[None]:
    """What is recorded in the block was done by a process that is dead when its tiers are found."""
    dead = {**leases.this_process(), "pid": os.getpid(), "start": "0"}
    with mock.patch.object(leases, "this_process", return_value=dead):
        yield


@contextmanager
def eager() -> Iterator[None]:
    """Repacking is worth while for little."""
    with mock.patch.object(prune_module, "repack", partial(repack, win=1000)):
        yield


def change(state: State, step: int) -> None:
    """What changes from one step to the next: of one leaf all, of one some chunks, of one nothing."""
    state["c"] += 1.0
    state["b"][:: 1500 if step % 2 else 3000] += 1.0


def filled(steps: int = 6) -> tuple[dict[str, dict[str, bytes]], dict[int, State]]:
    """What lies in both tiers after so many saves of which nothing was dropped, and what was saved."""
    recording, state, truth = Recording(), tensors(9000, 12_000, 100), {}
    with (
        ExitStack() as stack,
        ts.Checkpointer(policy(opened(stack, recording, EVERYTHING)), RUN) as ckpt,
    ):
        for step in range(steps):
            change(state, step)
            truth[step] = {name: tensor.clone() for name, tensor in state.items()}
            ckpt.save(state, step=step).wait("slow")
    return {name: recording.tier(name).objects for name in EVERYTHING}, truth


class End(NamedTuple):
    """What maintenance led to.

    Attributes:
        steps: those of the run, in each tier.
        forked: those of the run that was forked from it.
        tags: the step of each.
        left: packs that no record names, and leases of readers and repackers.
    """

    steps: dict[str, list[int]]
    forked: dict[str, list[int]]
    tags: dict[str, int]
    left: dict[str, set[str]]


def steps_of(ckpt: ts.Checkpointer, keys: Keys) -> dict[str, list[int]]:
    """The steps in each tier."""
    return {name: [v.step for v in ckpt.versions() if name in v.tiers] for name in keys}


def end_of(recording: Recording, keys: Keys) -> End:
    """What there is in the end."""
    with ExitStack() as stack:
        tiers = policy(opened(stack, recording, keys))
        ckpt, fork = (stack.enter_context(ts.Checkpointer(tiers, run)) for run in (RUN, FORK))
        tags = {tag: v.step for v in ckpt.versions() for tag in v.tags}
        return End(
            steps_of(ckpt, keys),
            steps_of(fork, keys),
            tags,
            {name: left(recording.tier(name)) for name in keys},
        )


def left(tier: Tier) -> set[str]:
    """What lies in a tier and is of no use."""
    logs = [Log(tier, run) for run in (RUN, FORK)]
    named = {key for log in logs for seq in log.seqs() for key in log.read(seq).layout.objects}
    return {
        key
        for key in tier.list("")
        if (key.startswith("packs/") and key not in named) or (key.startswith("leases/") and "-fork-" not in key)
    }


Work = Callable[[ts.Checkpointer], object]


def prune(ckpt: ts.Checkpointer) -> None:
    report = ckpt.prune(grace=0)
    assert report.ok, [tier.problems for tier in report.tiers]


def prunes(ckpt: ts.Checkpointer) -> None:
    """Packs that were emptied go with the next prune, and pins that are not needed let their versions go."""
    for _ in range(3):
        prune(ckpt)


def tag(ckpt: ts.Checkpointer) -> None:
    ckpt.tag("good", step=1)
    ckpt.tag("good", step=2)


def fork(ckpt: ts.Checkpointer) -> None:
    ckpt.fork(FORK, step=2)


def fork_and_prune(ckpt: ts.Checkpointer) -> None:
    fork(ckpt)
    prune(ckpt)


def worked(recording: Recording, keys: Keys, *works: Work) -> Recording:
    """The recording, after work in a process that has died since."""
    with eager(), another_process(), ExitStack() as stack:
        ckpt = stack.enter_context(ts.Checkpointer(policy(opened(stack, recording, keys)), RUN))
        for work in works:
            work(ckpt)
    return recording


def go_on(recording: Recording, run: str) -> None:
    """A process of the run saves; what a slower tier lacked of what the run was forked from comes there too."""
    with (
        ExitStack() as stack,
        ts.Checkpointer(policy(opened(stack, recording, EVERYTHING)), run) as ckpt,
    ):
        ckpt.save(tensors(9000, seed=8), step=LATER).wait("slow")


def check_fork(recording: Recording, keys: Keys, truth: State) -> None:
    """The other run, where it is, gives what was forked, from each tier alone."""
    for name, found in end_of(recording, keys).forked.items():
        assert found in ([], [2], [2, LATER])
        if found:
            with ExitStack() as stack:
                tiers = policy(opened(stack, recording, {name: {}}))
                ckpt = stack.enter_context(ts.Checkpointer(tiers, FORK))
                assert alike(truth, ckpt.load(step=2))
                assert ckpt.verify(deep=True).ok


@pytest.mark.parametrize("work", [prune, tag, fork, pytest.param(fork_and_prune, marks=pytest.mark.soak)])
def test_maintenance_cut_off_at_every_step(work: Work) -> None:
    objects, truth = filled()
    for found in objects.values():
        found[ORPHAN] = b"of a saver that was killed"
    complete = worked(Recording(objects), KEPT, work)
    if any(key.startswith(f"versions/{FORK}/") for key in complete.tier("fast").objects):
        go_on(complete, FORK)
    aim = end_of(worked(complete, KEPT, prunes), KEPT)
    assert not any(aim.left.values())
    told = [(name, s) for name, steps in aim.steps.items() for s in steps if s != 2 or not aim.forked["fast"]]
    crashes = list(worked(Recording(objects), KEPT, work).crashes())
    assert len(crashes) > 3
    for crash in crashes:
        found = crash.recording()
        with ExitStack() as stack:
            Past(truth, told).check(opened(stack, found, KEPT))
        check_fork(found, KEPT, truth[2])
        worked(found, KEPT, work)
        if aim.forked["fast"]:
            go_on(found, FORK)
        assert end_of(worked(found, KEPT, prunes), KEPT) == aim
        check_fork(found, KEPT, truth[2])
        with ExitStack() as stack:
            Past(truth, told).check_all(opened(stack, found, KEPT), tensors(9000, 12_000, 100, seed=9))


# Thinning

RULES = [{"match": "b", "keep": {"last": 1}}]
THINNED: Keys = {"fast": {"keep": {"last": 3}}, "slow": {"keep": {"last": 4}}}


def leaves_of(recording: Recording) -> dict[str, dict[int, set[str]]]:
    """Which leaves each version has, in each tier."""
    found: dict[str, dict[int, set[str]]] = {}
    for name in THINNED:
        log = Log(recording.tier(name), RUN)
        records = {seq: log.read(seq) for seq in log.seqs()}
        found[name] = {seq: whole_leaves(record) for seq, record in records.items()}
    return found


def whole_leaves(record: Record) -> set[str]:
    """Names of the leaves of which a record has every chunk."""
    version, present = record.version, record.layout.present
    return {leaf.name for i, leaf in enumerate(version.leaves) if present[version.chunk_leaf == i].all()}


def thin(recording: Recording) -> Recording:
    """Let retention drop versions, and leaves of others."""
    with eager(), another_process(), ExitStack() as stack:
        tiers = policy(opened(stack, recording, THINNED), rules=RULES)
        with ts.Checkpointer(tiers, RUN) as ckpt:
            prunes(ckpt)
    return recording


def check_thinned(
    recording: Recording,
    truth: Mapping[int, State],
    least: Mapping[str, Mapping[int, set[str]]],
) -> None:
    """Each tier alone has what it was to keep at least, and all that it says it has, bit for bit."""
    leaves = leaves_of(recording)
    for name, wanted in least.items():
        for seq, names in wanted.items():
            assert names <= leaves[name][seq]
        with ExitStack() as stack:
            tiers = policy(opened(stack, recording, {name: {}}))
            ckpt = stack.enter_context(ts.Checkpointer(tiers, RUN))
            assert ckpt.verify(deep=True).ok
            for version in ckpt.versions():
                names = leaves[name][version.seq] & set("abc")
                found = ckpt.load(version=version.id, only=sorted(names))
                assert alike({leaf: truth[version.step][leaf] for leaf in sorted(names)}, found)


@pytest.mark.soak
def test_thinning_cut_off_at_every_step() -> None:
    objects, truth = filled()
    recording = thin(Recording(objects))
    aim = leaves_of(recording)
    assert {len(names) for names in aim["fast"].values()} == {3, 4}, "the container, and two leaves or three"
    for crash in recording.crashes():
        found = crash.recording()
        check_thinned(found, truth, aim)
        assert leaves_of(thin(found)) == aim
        assert not any(left(found.tier(name)) for name in THINNED)
        check_thinned(found, truth, aim)
        with ExitStack() as stack:
            step = Past(truth).go_on(opened(stack, found, EVERYTHING), tensors(9000, 12_000, 100, seed=9))
        assert step == max(truth) + 1


# Power


DIRECTORIES = {"fast": "nvme", "slow": "lustre"}


def folders(place: Path, keys: Keys) -> dict[str, dict[str, Any]]:
    """Both tiers as directories."""
    common = {"io": "buffered"}
    return {
        name: {"type": kind, "path": str(place / name), **common, **keys[name]} for name, kind in DIRECTORIES.items()
    }


def prune_folders(place: Path) -> None:
    """Prune until nothing changes any more."""
    with eager(), ts.Checkpointer(policy(folders(place, KEPT)), RUN) as ckpt:
        prunes(ckpt)


@cache
def pruned_disk() -> tuple[Disk, int, dict[int, State], set[tuple[str, int]]]:
    """A disk on which a run was saved and pruned; when the pruning began; the states; and what was kept in the end."""
    truth: dict[int, State] = {}
    with scratch() as place, another_process():
        disk, state = Disk(place), tensors(9000, 12_000, 100)
        with disk.watched():
            with ts.Checkpointer(policy(folders(place, EVERYTHING)), RUN) as ckpt:
                for step in range(6):
                    change(state, step)
                    truth[step] = {name: tensor.clone() for name, tensor in state.items()}
                    ckpt.save(state, step=step)
            begun = disk.now
            prune_folders(place)
        with ts.Checkpointer(policy(folders(place, KEPT)), RUN) as ckpt:
            kept = {(name, step) for name, steps in steps_of(ckpt, KEPT).items() for step in steps}
    return disk, begun, truth, kept


@given(chance=CHANCES)
@settings(max_examples=max(10, settings().max_examples // 5))
def test_a_prune_that_loses_power_anywhere(chance: random.Random) -> None:
    """What was not synced is lost, in any combination; what was to stay is there, and pruning again ends the same."""
    disk, begun, truth, kept = pruned_disk()
    with scratch() as place:
        disk.cut(chance.randint(begun, disk.now), chance.choice).build(place)
        Past(truth, kept).check(folders(place, KEPT))
        prune_folders(place)
        with ts.Checkpointer(policy(folders(place, KEPT)), RUN) as ckpt:
            assert {(name, step) for name, steps in steps_of(ckpt, KEPT).items() for step in steps} == kept
        for name in DIRECTORIES:
            assert left(Nvme(path=place / name)) == set()
        Past(truth, kept).check_all(folders(place, KEPT), tensors(9000, 12_000, 100, seed=9))


def test_repacking_is_cut_off_too() -> None:
    """Guards the guard: what is pruned here has packs that are worth repacking."""
    objects, _ = filled()
    recording = worked(Recording(objects), KEPT, prune)
    created = [str(event.subject) for event in recording.events if event.what == "end"]
    assert any("create" in what and "versions/run/" in what and what[-2] == "." for what in created)
    assert any("create" in what and "packs/run/" in what for what in created)
