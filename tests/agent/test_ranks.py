"""Many ranks that save by agents: real processes, of one host and of several, which are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from support.agents import (
    FAIL_ONCE,
    held,
    of_hosts,
    policy,
    start_with,
    statuses,
    steps_in,
    wait_until,
    whole,
    whole_on_all_hosts,
)
from support.processes import Gang

from tierstate.agent.handing import HandingPipeline
from tierstate.agent.messages import Message
from tierstate.agent.session import TrainerSession
from tierstate.agent.shared_pipeline import SharedAgentPipeline
from tierstate.agent.teams import DoubtedFailures
from tierstate.manifest.errors import RankFailed

pytestmark = pytest.mark.slow


def test_ranks_of_a_host_save_by_one_agent(place: Path) -> None:
    with Gang(2, "support.agent_ranks:save", place, 1, 4) as gang:
        said = gang.wait()
    assert [agent["pid"] for agent in statuses()] == [int(text.split()[1]) for text in said][:1]
    wait_until(lambda: not statuses()[0]["sessions"], "the sessions end")
    whole(place, "fast", [1, 2, 3, 4])
    whole(place, "slow", [1, 2, 3, 4])


def test_what_all_ranks_have_captured_arrives_though_all_are_killed(place: Path) -> None:
    with Gang(2, "support.agent_ranks:wait_to_be_killed", place, 3, "5MiB/s") as gang:
        for rank in range(2):
            gang.hear(rank, "captured")
        for rank in range(2):
            gang.kill(rank)
        gang.codes()
    wait_until(lambda: steps_in(place, "slow") == [1, 2, 3], "all arrives")
    whole(place, "slow", [1, 2, 3])
    with Gang(3, "support.agent_ranks:restore", place, "5MiB/s") as gang:
        assert [text.splitlines()[-1] for text in gang.wait()] == ["restored 3 (agent) fast slow"] * 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_version_of_which_one_rank_had_not_all_captured_is_nowhere(place: Path, victim: int) -> None:
    with Gang(2, "support.agent_ranks:one_within_capture", place, victim) as gang:
        assert gang.hear(1 - victim, "told").split()[0] in ("RankFailed", "CommitUnknown"), gang.said(1 - victim)
        gang.codes()
    wait_until(lambda: not statuses()[0]["sessions"], "the sessions end")
    whole(place, "fast", [1])
    whole(place, "slow", [1])


def test_if_one_rank_has_another_agent_none_has_one(place: Path) -> None:
    differ = [{"AWS_PROFILE": "one"}, {"AWS_PROFILE": "other"}]
    with Gang(2, "support.agent_ranks:save_without", place, 1, 3, per_rank=differ) as gang:
        said = gang.wait()
    assert all("agent None" in text and "without agents" in text for text in said)
    whole(place, "slow", [1, 2, 3])


@pytest.mark.parametrize(
    "after", [0.3, pytest.param(0.0, marks=pytest.mark.soak), pytest.param(1.0, marks=pytest.mark.soak)]
)
def test_ranks_go_on_without_an_agent_that_was_killed(place: Path, after: float) -> None:
    with Gang(2, "support.agent_ranks:agents_die", place, 5, 0.3) as gang:
        pid = int(gang.hear(0, "ready"))
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        (place / "killed").touch()
        said = gang.wait()
    assert all("by None" in text for text in said)
    whole(place, "fast", [1, 2, 3, 4, 5])
    whole(place, "slow", [1, 2, 3, 4, 5])


@pytest.mark.parametrize(("every", "step", "there"), [(1, 1, [1, 2]), (5, 9, [1, 5, 10])])
def test_ranks_of_which_one_plans_a_save_before_it_knows_that_the_agent_was_killed(
    place: Path, every: int, step: int, there: list[int]
) -> None:
    """The other one, which knows it, must not wait for it to look for new agents before that save."""
    with Gang(2, "support.agent_ranks:lost_within_save", place, 1, step, "plans", env={"EVERY": str(every)}) as gang:
        os.kill(int(gang.hear(0, "within")), signal.SIGKILL)
        said = gang.wait()
    assert all("by None" in text for text in said)
    whole(place, "fast", there)
    whole(place, "slow", there)


def test_ranks_that_lose_their_agent_and_save_nothing_leave_no_thread(place: Path) -> None:
    with Gang(2, "support.agent_ranks:lost_before_all", place) as gang:
        os.kill(int(gang.hear(0, "ready")), signal.SIGKILL)
        assert [text.splitlines()[-1] for text in gang.wait()] == ["left", "left"]


def test_ranks_do_not_wait_for_one_that_cannot_say_what_it_has_after_a_loss(place: Path) -> None:
    with held(policy(place), place, "fast", "slow"), Gang(2, "support.agent_ranks:one_cannot_tell", place) as gang:
        os.kill(int(gang.hear(0, "ready")), signal.SIGKILL)
        said = gang.wait()
    why = "rank 1 cannot tell what it has of the saves that agents had: MemoryError: this rank has no memory"
    assert f"slow RankFailed {why}" in said[0].splitlines()
    assert "slow MemoryError this rank has no memory" in said[1].splitlines()
    whole(place, "slow", [2])


def test_what_an_earlier_job_left_arrives_though_the_agent_is_killed_before_the_first_save(place: Path) -> None:
    with Gang(2, "support.agent_ranks:wait_to_be_killed", place, 1, "1KiB/s") as gang:
        wait_until(lambda: steps_in(place, "fast") == [1], "the fast tier gets it")
        os.kill(statuses()[0]["pid"], signal.SIGKILL)
        for rank in range(2):
            gang.kill(rank)
        gang.codes()
    assert steps_in(place, "slow") == []
    with Gang(2, "support.agent_ranks:lost_within_save", place, 2, 2, "", env={"SLOW": "100KiB/s"}) as gang:
        os.kill(int(gang.hear(0, "within")), signal.SIGKILL)
        gang.wait()
    whole(place, "slow", [1, 2, 3])


@contextmanager
def second_save_failed(place: Path, function: str) -> Iterator[Gang]:
    """Two ranks that have saved three steps, one after the other; in one of them the second one has failed in the slow
    tier, once."""
    gate = place / "gate"
    start_with(policy(place), FAIL_ONCE.format(prefix=f"{place}/slow/packs/", gate=str(gate)))
    with Gang(2, f"support.agent_ranks:{function}", place, 3) as gang:
        for rank in range(2):
            gang.hear(rank, "1 arrived")
        gate.touch()
        gang.wait()
        assert not gate.exists()
        yield gang


def test_a_save_that_fails_in_one_rank_of_an_agent_and_is_brought_soon_has_failed_for_all(place: Path) -> None:
    """Only the first rank hears that it was brought, within the seconds for which it doubts the failure."""
    with second_save_failed(place, "tell_outcomes") as gang:
        for rank in range(2):
            assert "(ETIMEDOUT)" in gang.hear(rank, "2 failed")
            gang.hear(rank, "3 arrived")
    whole(place, "slow", [1, 2, 3])


def test_a_rank_that_cannot_take_what_its_agent_says_goes_on_without_agents(place: Path) -> None:
    with second_save_failed(place, "one_cannot_hear_of_a_failure") as gang:
        gang.hear(1, "unable")
        for rank in range(2):
            gang.hear(rank, "3 arrived")
    whole(place, "slow", [1, 2, 3])


class Lives:
    """A check of the other ranks, which says what the test says."""

    def __init__(self) -> None:
        self.alive: bool | None = None

    def look(self) -> bool | None:
        return self.alive


def failure(seq: int, tier: str = "slow") -> dict[str, object]:
    return {"kind": "failed", "seq": seq, "tier": tier, "error": {}}


@pytest.mark.parametrize("alive", [True, False])
def test_a_failure_counts_once_it_is_known_that_all_agents_lived_after_it(*, alive: bool) -> None:
    checks: list[Lives] = []
    team = SimpleNamespace(life_check=lambda: checks.append(Lives()) or checks[-1])
    doubted = DoubtedFailures(team)  # type: ignore[arg-type]
    assert doubted.look() == ([], True)
    assert not checks, "nobody is asked without need"
    doubted.add(failure(1))
    assert doubted.look() == ([], True)
    doubted.add(failure(2))  # after the first check began, which says nothing of it
    doubted.add(failure(2, "fast"))
    checks[0].alive = alive
    assert doubted.look() == ([failure(1)], alive)
    assert doubted.look() == ([], True)
    assert doubted.take(2, "fast") == [failure(2, "fast")]
    checks[1].alive = alive
    assert doubted.look() == ([failure(2)], alive)
    assert doubted.take(2, "slow") == []
    assert len(checks) == 2


@pytest.mark.parametrize("announced", [True, False])
def test_a_failure_counts_after_a_look_whether_another_rank_goes_on_without_agents(
    monkeypatch: pytest.MonkeyPatch, *, announced: bool
) -> None:
    """That made this rank's agent fail, if it was said before."""
    told: list[str] = []
    monkeypatch.setattr(HandingPipeline, "_settle", lambda _self, kind, name, *_: told.append(f"{kind} {name}"))
    pipeline = SharedAgentPipeline.__new__(SharedAgentPipeline)
    pipeline._changing, pipeline._doubtful, pipeline._losses = threading.RLock(), [], 0
    looks: list[list[str]] = []

    def announces(_topic: str) -> bool:
        looks.append(list(told))
        if len(looks) == 1:  # one that comes during a look waits for the next one
            pipeline._settle("failed", "later", SimpleNamespace(), {})  # type: ignore[arg-type]
        return announced and len(looks) == 2

    pipeline._team = SimpleNamespace(size=2, announced=announces)  # type: ignore[assignment]
    pipeline._settle("failed", "first", SimpleNamespace(), {})  # type: ignore[arg-type]
    given_up: list[str] = []
    over = SimpleNamespace(wait=lambda _seconds: len(looks) == 2)
    pipeline._watch_others(SimpleNamespace(over=over, give_up=given_up.append))  # type: ignore[arg-type]
    assert looks == [[], ["failed first"]]
    assert (told[1:], len(given_up)) == (([], 1) if announced else (["failed later"], 0))


def test_an_agent_that_is_given_up_has_told_the_others_before_anything_fails() -> None:
    """Else they would take what fails then for a failure of this rank, and tell it their trainers."""
    session, said = TrainerSession.__new__(TrainerSession), list[str]()
    session.id, session._given_up, session._bye, session._doubted = "session", False, False, None
    team = SimpleNamespace(break_off=lambda: said.append("broken off"))
    session._member = SimpleNamespace(team=team)  # type: ignore[assignment]
    session._saves = {1: SimpleNamespace(lost=lambda _: said.append("failed"))}  # type: ignore[dict-item]
    session._slabs = SimpleNamespace(leave=lambda: None)  # type: ignore[assignment]
    session._link = SimpleNamespace(shut=lambda: None)  # type: ignore[assignment]
    session._outbox, session._received_all = SimpleQueue(), threading.Event()
    session._watch = session._send_all = lambda: None  # type: ignore[method-assign]
    session._take_all = lambda: session._on_leave(Message({}))  # type: ignore[method-assign]
    session._finish = lambda: said.append("finished")  # type: ignore[method-assign]
    session.serve()
    assert said == ["broken off", "failed", "finished"]


@pytest.mark.parametrize("topic", ["agent-there", "agent-store", "agent-joined", "agent-watched"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RankFailed("planted")])
def test_a_rank_that_is_interrupted_while_all_find_agents_leaves_its_own(
    monkeypatch: pytest.MonkeyPatch, topic: str, error: BaseException
) -> None:
    """Else the agent would go on with the session of a Checkpointer that nobody has."""
    left: list[bool] = []

    def by_all(_self: object, asked: str, _call: object) -> list[object]:
        if asked == topic:
            raise error
        return [None, None]

    monkeypatch.setattr(SharedAgentPipeline, "_by_all", by_all)
    monkeypatch.setattr(SharedAgentPipeline, "_leave_agent", lambda _: left.append(True))
    pipeline = SharedAgentPipeline.__new__(SharedAgentPipeline)
    pipeline._team = SimpleNamespace(leads=lambda _: True, coordinator=True)  # type: ignore[assignment]
    with pytest.raises(type(error)):
        pipeline._find_agents()
    assert left == [True]


def test_after_a_loss_ranks_find_agents_again(place: Path) -> None:
    with Gang(2, "support.agent_ranks:agents_come_back", place, 2) as gang:
        for number in (1, 2):
            pids = {int(gang.hear(rank, f"agent-{number}")) for rank in range(2)}
            assert len(pids) == 1
            os.kill(pids.pop(), signal.SIGKILL)
        last = int(gang.wait()[0].split()[-1])
    wait_until(lambda: not statuses()[0]["sessions"], "the session ends")
    whole(place, "fast", list(range(1, last + 1)))
    whole(place, "slow", list(range(1, last + 1)))


def test_ranks_of_two_hosts_are_committed_by_their_agents_though_all_are_killed(place: Path) -> None:
    with Gang(3, "support.agent_ranks:wait_to_be_killed", place, 3, "", per_rank=of_hosts("a", "b", "b")) as gang:
        for rank in range(3):
            gang.hear(rank, "captured")
        assert len(statuses()) == 2
        for rank in range(3):
            gang.kill(rank)
        gang.codes()
    wait_until(lambda: not any(agent["sessions"] for agent in statuses()), "the sessions end")
    whole_on_all_hosts(place, [1, 2, 3])
    with Gang(2, "support.agent_ranks:restore", place, "", per_rank=of_hosts("b", "a")) as gang:
        assert all("restored 3 (agent)" in text for text in gang.wait())


@pytest.mark.parametrize("victim", [0, 2])
def test_ranks_of_two_hosts_go_on_without_agents_if_one_is_killed(place: Path, victim: int) -> None:
    with Gang(3, "support.agent_ranks:agents_die", place, 5, 0.3, per_rank=of_hosts("a", "b", "b")) as gang:
        pids = [int(gang.hear(rank, "ready")) for rank in range(3)]
        assert pids[0] != pids[1] == pids[2]
        time.sleep(0.5)
        os.kill(pids[victim], signal.SIGKILL)
        (place / "killed").touch()
        said = gang.wait()
    assert all("by None" in text for text in said)
    whole_on_all_hosts(place, [1, 2, 3, 4, 5])
