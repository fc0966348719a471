"""Who saves what several ranks hold: whatever fails at one save, the next one is answered."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
from support.thread_teams import together

from tierstate.engine.ranks.save import ownership
from tierstate.engine.ranks.save.ownership import OwnershipPlanner
from tierstate.engine.ranks.team.team import Team


@pytest.mark.parametrize("failure", [MemoryError, SystemExit])
def test_after_a_save_at_which_an_answer_could_not_be_taken_the_next_one_is_answered(
    failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the thread ended, that save and every later one would wait for ever."""

    failed = threading.Event()

    def loads(text: bytes) -> object:
        if threading.current_thread().name == "tierstate-sharing":
            failed.set()
            raise failure
        return json.loads(text)

    monkeypatch.setattr(ownership, "json", SimpleNamespace(dumps=json.dumps, loads=loads))

    def rank(team: Team) -> list[bool]:
        planner = OwnershipPlanner(team)
        try:
            planner.ask(1, [], [])
            if team.rank == 0:
                planner.forget(1)
                planner.ask(2, [], [])  # only this rank's structure has changed, which the answer says as JSON
            else:
                planner.steady(2)
                assert failed.wait(30)
            planner.forget(2)
            found: list[bool] = planner.ask(3, [], []).tolist()
            return found
        finally:
            planner.close()

    assert together(2, rank) == [[], []]
