"""Values that differ between ranks: an error on every rank says how to save them, and then they are saved that way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import policy, tier
from support.thread_ranks import as_ranks

import tierstate as ts
from tierstate.engine.capture.plan import CapturePlan
from tierstate.engine.publish.save_state import SaveState
from tierstate.engine.ranks.save.save import SharedPipeline
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.format.version import Head


def return_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """`save` returns when the save has ended on every tier, as where the training thread gets no turn for long."""
    submit = SharedPipeline.submit

    def late(pipeline: SharedPipeline, plan: CapturePlan, head: Head) -> SaveState:
        save_state = submit(pipeline, plan, head)
        for outcome in save_state.tiers.values():
            outcome.exception()
        return save_state

    monkeypatch.setattr(SharedPipeline, "submit", late)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("late", [False, True])
def test_a_value_that_differs_fails_the_save_with_its_name_and_as_per_rank_it_is_saved(
    place: Path, size: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        return_late(monkeypatch)
    spec = policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place)})

    def rank(team: Team) -> list[str]:
        said = []
        with ts.Checkpointer(spec, "run", team) as ckpt:
            seed = {"seed": 7 if team.rank < size - 1 else 8}
            save = ckpt.save({"w": torch.ones(9), "loader": seed}, step=0)
            for name, kind in {"nvme": ts.StateMismatch, "lustre": ts.TierstateError}.items():
                with pytest.raises(kind) as caught:
                    save.wait(name)
                said.append(str(caught.value))
            own = ts.PerRank(seed)
            ckpt.save({"w": torch.ones(9), "loader": own}, step=1).wait("lustre")
            seed["seed"] = 0
            ckpt.restore({"w": torch.zeros(9), "loader": own})
            assert own.value == {"seed": 7 if team.rank < size - 1 else 8}
            assert [v.step for v in ckpt.versions()] == [1]
        return said

    found = as_ranks([0] * size, rank)
    assert all(isinstance(said, list) and len(said) == 2 for said in found), found
    for text in {text for said in found for text in said}:
        assert "loader.seed" in text
        assert str(size - 1) in text
        assert "PerRank" in text
    with ts.Checkpointer(spec, "run") as alone:
        assert alone.verify(deep=True).ok
        assert alone.load()["loader"] == {r: {"seed": 7 if r < size - 1 else 8} for r in range(size)}
