"""Removals of a whole run that are killed with SIGKILL before each change of a file, one after the other.

    python removed.py STEP

Kills the removal at its first change, then STEP changes later, and so on until it gets through. After each kill each
tier has the newest versions that it had, whole, another run is as it was, and the next removal comes to its end.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from doctored import killed_at, outcome
from support.checkpointer_worlds import policy, scratch, tier
from support.equality import difference

import tierstate as ts

STEPS = {"fast": [1, 2, 3, 4, 5, 6], "slow": [1, 2, 4, 6]}


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3000,), float(step)), "frozen": torch.ones(3000)}


def remove(spec: ts.Policy) -> bool:
    """Remove the run; False if a removal before had nothing left to do."""
    with ts.Checkpointer(spec, "old") as ckpt:
        try:
            return ckpt.remove_run(force=True).ok
        except ts.NotFound:
            return False


def is_sound(spec: ts.Policy) -> bool:
    """Whether what is left of the run can be had, and the other run is as it was."""
    for run in ("old", "other"):
        with ts.Checkpointer(spec, run) as ckpt:
            versions = ckpt.versions()
            for name, steps in STEPS.items():
                there = [version.step for version in versions if name in version.tiers]
                assert there == (steps[len(steps) - len(there) :] if run == "old" else steps), there
            for version in versions:
                assert difference(state(version.step), ckpt.load(version=version.id)) == ""
            assert ckpt.verify(deep=True).ok
    return True


def is_gone(spec: ts.Policy, place: Path) -> bool:
    """Whether another removal leaves nothing of the run but notes, and doctor and rebuild bring nothing back."""
    remove(spec)
    with ts.Checkpointer(spec, "old") as ckpt:
        # A tag that one tier has taken back, and the other not yet, is the only thing that may be repaired.
        assert {repair.kind for repair in ckpt.doctor(apply=True).repairs} <= {"tag"}
        assert ckpt.rebuild("fast").versions == ckpt.versions() == []
        assert ckpt.tags() == {}
    left = {path.parent.parent.name for path in place.rglob("old/*") if path.is_file()}
    assert left <= {"removed", "tags", "index"}, left
    return is_sound(spec)


def main(step: int) -> None:
    with scratch() as place:
        now = place / "now"
        spec = policy(
            {"fast": tier("nvme", now / "fast"), "slow": tier("nvme", now / "slow", every=2)}, metrics={"events": True}
        )

        def made() -> bool:
            for run in ("old", "other"):
                with ts.Checkpointer(spec, run) as ckpt:
                    for number in STEPS["fast"]:
                        ckpt.save(state(number), step=number).wait("slow" if number in STEPS["slow"] else "fast")
                    ckpt.tag("best", 3)
            return True

        def begin(name: str) -> None:
            shutil.rmtree(now)
            shutil.copytree(place / name, now)

        # In processes of their own: a fork of this one must find no threads and no cached state.
        assert outcome(made)
        shutil.copytree(now, place / "whole")
        for number in itertools.count(0, step):
            begin("whole")
            if not killed_at(number, lambda: remove(spec)):
                break
            assert outcome(lambda: is_sound(spec)), f"after kill {number}"
            assert outcome(lambda: is_gone(spec, now)), f"after kill {number}"
        assert outcome(lambda: is_gone(spec, now))
        print(f"{number // step} kills")
        assert number


if __name__ == "__main__":
    main(int(sys.argv[1]))
