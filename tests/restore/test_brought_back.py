"""Brought back: a number that gets a record again after it was dropped, while savers remember the one before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import alike, opened, policy, scratch, tier
from support.outcomes import Background

import tierstate as ts
from tierstate.engine.publish.tier_write import TierWrite

LAST8, LAST2 = {"last": 8, "tags": True}, {"last": 2}


def state(step: int, like: int | None = None) -> dict[str, torch.Tensor]:
    """A leaf of a step's own, and one that may be as at another."""
    return {"w": torch.full((20_000,), float(step if like is None else like)), "x": torch.full((20_000,), -float(step))}


def save(ckpt: ts.Checkpointer, step: int, like: int | None = None) -> None:
    handle = ckpt.save(state(step, like), step=step)
    for name in handle.tiers:
        handle.wait(name)


def two(place: Path, fast: Any = None, slow: Any = None) -> ts.Policy:
    kept = {name: {} if keep is None else {"keep": keep} for name, keep in (("a", fast), ("b", slow))}
    return policy({"a": tier("nvme", place / "a", **kept["a"]), "b": tier("lustre", place / "b", **kept["b"])})


@pytest.mark.slow
def test_a_version_that_was_copied_back_keeps_its_packs() -> None:
    """An index says that the number's chunks lie in packs that went with the record before."""
    with scratch() as place:
        with ts.Checkpointer(two(place), "run") as ckpt:
            for step in range(1, 11):
                save(ckpt, step)
        with ts.Checkpointer(two(place, LAST8), "run") as ckpt:
            assert ckpt.prune().tiers[0].drop == (1, 2)
            for step in range(11, 15):
                save(ckpt, step)
            save(ckpt, 15, like=5)
        with ts.Checkpointer(two(place, LAST8), "run") as ckpt:
            assert 5 not in ckpt._tier_runs[0].log.seqs()
            ckpt.tag("good", step=5)
            assert ckpt.copy(step=5, to="a").tiers == ("a",)
        with ts.Checkpointer(two(place, LAST8, LAST2), "run") as ckpt:
            for step in range(16, 30):
                save(ckpt, step)
            assert ckpt.verify(deep=True).ok, "before a restore mends it"
            assert alike(ckpt.load(tag="good"), state(5))


@pytest.mark.slow
def test_a_version_that_was_rebuilt_keeps_its_packs() -> None:
    with scratch() as place:

        def spec(keep: Any) -> ts.Policy:
            return policy({"a": tier("nvme", place / "a", **({"keep": keep} if keep else {}))})

        with ts.Checkpointer(spec(None), "run") as ckpt:
            for step in range(1, 11):
                save(ckpt, step)
        with ts.Checkpointer(spec(LAST8), "run") as ckpt:
            ckpt.tag("good", step=5)
            ckpt.prune()
            save(ckpt, 11, like=5)
            where = opened(spec(None), "a")
            where.delete("versions/run/000000000005")
            assert [v.rebuilt for v in ckpt.rebuild("a").versions] == [True]
        with ts.Checkpointer(spec(LAST8), "run") as ckpt:
            for step in range(12, 24):
                save(ckpt, step)
            assert ckpt.verify(deep=True).ok, "before a restore mends it"
            assert alike(ckpt.load(tag="good"), state(5))


def test_a_copy_of_an_older_version_holds_the_newest_whose_packs_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saver goes on between the copy's last pack and its record, and would drop what that names."""
    with scratch() as place:
        spec = two(place, {"last": 1, "tags": True})
        real, done = TierWrite._sizes, []

        with ts.Checkpointer(spec, "run") as ckpt, ts.Checkpointer(spec, "run") as other:
            for step in (1, 2, 3):
                save(ckpt, step, like=step % 2)
            ckpt.tag("good", step=1)

            def sizes(self: TierWrite) -> dict[str, int]:
                found = real(self)
                if self.tier_run.name == "a" and self.tier_run is not ckpt._tier_runs[0] and not done:
                    done.append(1)
                    assert Background(lambda: save(ckpt, 4)).outcome() is None
                return found

            monkeypatch.setattr(TierWrite, "_sizes", sizes)
            assert other.copy(step=1, to="a").tiers == ("a",)
            assert done
            save(ckpt, 5)
            ckpt._tier_runs[0].retire()  # as the save does, though perhaps not yet
            assert ckpt._tier_runs[0].log.seqs() == [1, 5]
            assert ckpt.verify(deep=True).ok
            shutil.rmtree(place / "b")
            assert alike(ckpt.load(tag="good"), state(1, like=1))
