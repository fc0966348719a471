"""Repairs that are killed with SIGKILL before each change of a file, one after the other.

    python doctored.py SEED STEP

Damages a run, kills the doctor in a process of its own at its first change, then STEP changes later, and so on until it
gets through. After each kill nothing is lost that could be had before, and the next repair comes to the same end.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.checkpointer_worlds import scratch
from support.damaged_runs import Blow, Shape, World, damage, make_world

import tierstate as ts

KINDS = ["raw", "fast", "delta"]


def repaired(world: World) -> dict[tuple[str, str], bool]:
    """Repair all runs; which versions there are then."""
    for run in world.runs():
        with ts.Checkpointer(world.spec, run) as ckpt:
            report = ckpt.doctor(apply=True)
            assert all(repair.done for repair in report.repairs), report.repairs
    for run in world.runs():
        with ts.Checkpointer(world.spec, run) as ckpt:
            assert ckpt.doctor().repairs == []
    return {key: world.restorable(*key) for key in world.truth}


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Whether a process that does this work was killed before its change of a file with this number."""
    child = os.fork()
    if child == 0:
        count, link, unlink = itertools.count(), os.link, os.unlink

        def counted(call: Callable[..., None]) -> Callable[..., None]:
            def change(*arguments: object, **keys: object) -> None:
                if next(count) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                call(*arguments, **keys)

            return change

        os.link, os.unlink = counted(link), counted(unlink)
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, status
    return os.WIFSIGNALED(status)


def main(seed: int, step: int) -> None:
    """One damaged run."""
    chance = random.Random(seed)
    with scratch() as place:
        tiers = tuple((chance.choice(KINDS), "native", 1) for _ in range(2))
        world = make_world(Shape(tiers, (15, 9), fork=bool(seed % 2)), place / "now")
        for kind in ("delete", "flip", "truncate"):
            damage(world, Blow(chance.randrange(2), "versions", chance.randrange(9), kind, chance.random()))
            damage(world, Blow(chance.randrange(2), "packs", chance.randrange(9), kind, chance.random()))
        shutil.copytree(place / "now", place / "damaged")

        def begin(name: str = "damaged") -> None:
            shutil.rmtree(place / "now")
            shutil.copytree(place / name, place / "now")

        # In processes of their own: a fork of this one must find no threads and no cached state.
        had = {key: outcome(lambda key=key: begin() or world.restorable(*key)) for key in world.truth}
        begin()
        expected = {key: outcome(lambda key=key: begin() or repaired(world)[key]) for key in world.truth}
        kills = 0
        for number in itertools.count(seed % step, step):
            begin()
            if not killed_at(number, lambda: repaired(world)):
                break
            kills += 1
            shutil.copytree(place / "now", place / "killed", dirs_exist_ok=False)
            for key in [key for key, there in had.items() if there]:
                assert outcome(lambda key=key: world.restorable(*key)), f"{key} is lost by kill {number}"
            begin("killed")  # a restore repairs what it meets
            shutil.rmtree(place / "killed")
            assert outcome(lambda: repaired(world) == expected), f"another end after kill {number}"
        print(f"{kills} kills, {sum(expected.values())} of {len(expected)} versions")
        assert kills


def outcome(work: Callable[[], object]) -> bool:
    """Whether some work, done in a forked process, is true."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 3)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 3)
    return status == 0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
