"""Rendezvous: ranks meet over whatever others have left, and are told if they come to save different runs."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.thread_teams import keys_in, tcp

from tierstate.engine.ranks.team import rendezvous as rendezvous_module
from tierstate.engine.ranks.team.heartbeat import Timeouts
from tierstate.engine.ranks.team.rendezvous import rendezvous, this_host
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import RankFailed


@pytest.mark.parametrize("make", [dist.HashStore, tcp], ids=["threads", "tcp"])
def test_ranks_meet_again_and_again_over_what_others_left(make: Any) -> None:
    """One meeting after the other; the first of which one rank never came to, whose call lies there still."""
    store, sizes, patient = make(), [], Timeouts(timeout=60.0, silence=20.0)
    with pytest.raises(RankFailed, match="ranks 1, 2 did not come") as failed:
        rendezvous(store, "run", 0, 3, Timeouts(0.1, 5.0))
    assert failed.value.ranks == (1, 2)
    store.set("tierstate/run/old/here/1", b"elsewhere")

    def rank(number: int, found: list[Any]) -> None:
        mine, hosts = rendezvous(store, "run", number, 3, patient)
        team = Team(mine, number, 3, hosts, timeouts=patient)
        found[number] = team.gather("who", bytes([number])), team.hosts
        team.gather("done", b"")
        team.close()

    for _ in range(4):
        found: list[Any] = [None] * 3
        threads = [threading.Thread(target=rank, args=(number, found)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [([b"\0", b"\1", b"\2"], (0, 0, 0))] * 3
        sizes.append(keys_in(store))
    assert sizes[3] - sizes[2] <= 3, "what each team leaves are the few things that were gathered last"


def meet(store: Any, runs: list[str], *, late: int | None = None, absent: int | None = None) -> list[Any]:
    """What each rank finds that comes to save the run of this name.

    Args:
        late: a rank that comes half a second after the others.
        absent: a rank that never comes.
    """
    found: list[Any] = [None] * len(runs)

    def rank(number: int) -> None:
        time.sleep(0.5 * (number == late))
        try:
            found[number] = rendezvous(store, runs[number], number, len(runs), Timeouts(600.0, 20.0))[1]
        except BaseException as error:
            found[number] = error

    numbers = [number for number in range(len(runs)) if number != absent]
    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.fixture
def short_waits() -> Any:
    """It is long to wait for a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous_module, "LONG", 0.1)
        patch.setattr(rendezvous_module, "LOOK_EVERY", 0.05)
        yield


@pytest.mark.usefixtures("short_waits")
@pytest.mark.slow
@settings(max_examples=12)
@given(st.lists(st.sampled_from("ab"), min_size=2, max_size=4))
def test_ranks_that_save_runs_of_different_names_are_told_and_do_not_wait_for_each_other(runs: list[str]) -> None:
    """As where each rank has the time of day in the name. Who was called by rank 0 hears why rank 0 has failed."""
    others = [rank for rank, run in enumerate(runs) if run != runs[0]]
    found = meet(dist.HashStore(), runs)
    if not others:
        assert found == [[0] * len(runs)] * len(runs)
    for rank in others:
        assert f"rank 0 waits for the others to save run '{runs[0]}', and rank {rank} to save" in str(found[rank])
    if others:
        assert "right is one name for all ranks" in str(found[0])
        assert found[0].ranks[0] in others
        assert all(isinstance(one, RankFailed) for one in found)
        for rank in set(range(1, len(runs))) - set(others):
            assert str(found[rank]) == f"rank 0 has given up the wait for all ranks: {found[0]}"
            assert found[rank].ranks == found[0].ranks


@pytest.mark.parametrize("make", [dist.HashStore, tcp], ids=["threads", "tcp"])
def test_ranks_that_have_come_are_told_that_rank_0_waits_no_more(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for half an hour. Then all may come once more."""
    store, wait_for_all = make(), rendezvous_module._wait_for_all

    def is_over(wait: Any) -> bool:
        name = store.get("tierstate/run/call").decode()
        return wait._rank == 0 and bool(store.check([f"tierstate/run/{name}/here/1"]))

    with monkeypatch.context() as patch:
        patch.setattr("tierstate.engine.ranks.team.rendezvous._Wait.is_over", is_over)
        found = meet(store, ["run"] * 3, absent=2)
    assert str(found[0]) == "rank 2 did not come to save together"
    assert str(found[1]) == "rank 0 has given up the wait for all ranks: rank 2 did not come to save together"
    assert found[0].ranks == found[1].ranks == (2,)

    def interrupt(*args: Any) -> None:
        wait_for_all(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rendezvous_module, "_wait_for_all", interrupt)
        found = meet(store, ["run"] * 3)
    assert isinstance(found[0], KeyboardInterrupt)
    for rank in (1, 2):
        assert str(found[rank]) == "rank 0 has given up the wait for all ranks: KeyboardInterrupt: "
        assert found[rank].ranks == (0,)
    assert meet(store, ["run"] * 3) == [[0] * 3] * 3


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("late", [0, 1, 2])
def test_ranks_wait_for_one_that_is_late_whatever_others_have_left(late: int, caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    for rank in range(3):
        store.set(f"tierstate-waiting/{rank}", '[3, "another"]')
    before = keys_in(store)
    assert meet(store, ["run"] * 3, late=late) == [[0] * 3] * 3
    who = 1 if late == 0 else 0
    assert f"run run: rank {who} waits for rank {late} to save together" in caplog.text
    assert store.check([f"tierstate-waiting/{late}"])
    assert not store.check([f"tierstate-waiting/{who}"])
    assert keys_in(store) < before + 4


def test_a_host_has_a_name_that_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_host() == this_host() != ""
    monkeypatch.setenv("TIERSTATE_HOST", "node7")
    assert this_host() == "node7"
