"""The thread that captures: what fails for lack of memory leaves no slab and no thread, and later saves arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpointer_worlds import alike, policy, tensors, tier
from support.leaks import at_rest, nothing_left

import tierstate as ts
from tierstate.engine.capture.chunk_statistics import StatisticsWorker
from tierstate.engine.publish.save_state import SaveState


@pytest.mark.parametrize(
    ("where", "name"),
    [(StatisticsWorker, "take"), (StatisticsWorker, "end"), (SaveState, "capture_ended")],
)
def test_a_save_for_which_memory_lacks_leaves_no_slab_and_no_thread(
    where: type[Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, state = getattr(where, name), tensors(10_000, 30_000, 50)

    def fail(*_arguments: Any) -> None:
        monkeypatch.setattr(where, name, right)
        raise MemoryError

    with (
        nothing_left(tmp_path),
        ts.Checkpointer(policy({"only": tier("nvme", tmp_path)}, statistics=True), run="r") as ckpt,
    ):
        monkeypatch.setattr(where, name, fail)
        with pytest.raises(ts.CaptureError, match="MemoryError"):
            ckpt.save(state, step=1).wait()
        ckpt.save(state, step=2).wait()
        assert alike(ckpt.load(), state)
        assert at_rest(ckpt)
