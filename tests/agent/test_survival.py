"""The agent is killed while it has what nobody else has: its parent starts it again, and everything arrives."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.agents import held, load, policy, same, state_of, statuses, steps_in, wait_until, without_agent
from support.leaks import open_files
from support.processes import Gang
from support.rank_jobs import check
from support.rank_jobs import state_of as rank_state

import tierstate as ts
from tierstate.agent import journal as journals
from tierstate.agent.journal import Journal, JournalLink, reopened
from tierstate.agent.messages import ConnectionLost, Message, encode_message, split_messages
from tierstate.agent.supervisor import HeldFiles, Holder

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]


@contextmanager
def trainer(*args: object) -> Iterator[int]:
    """A process that has captured what `support.agent_trainers.captured` says; its number. It is killed in the end."""
    command = [sys.executable, "-u", str(TESTS / "support/processes.py"), "support.agent_trainers:captured"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen([*command, *map(str, args)], stdout=said, stderr=said, env=environ) as process,
    ):

        def text() -> str:
            said.seek(0)
            return said.read()

        try:
            wait_until(lambda: "captured" in text() or process.poll() is not None, "all is captured")
            assert "captured" in text(), text()
            yield process.pid
        finally:
            process.kill()


def agent() -> int:
    """The process that publishes; it may just be starting."""
    wait_until(statuses, "an agent answers")
    return int(statuses()[0]["pid"])


def kill_both(trainer: int) -> None:
    pid = agent()
    os.kill(trainer, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def exact(place: Path, steps: list[int]) -> None:
    for tier in ("fast", "slow"):
        assert steps_in(place, tier) == steps
        assert all(same(load(place, tier, step), state_of(step)) for step in steps)


STEPS = [1, 2, 3, 4]


def test_what_was_captured_arrives_though_trainer_and_agent_are_killed_at_once(place: Path) -> None:
    with held(policy(place), place, "fast", "slow"), trainer(place, len(STEPS), "", "stay") as pid:
        assert steps_in(place, "fast") == []
        kill_both(pid)
    wait_until(lambda: steps_in(place, "slow") == STEPS, "all arrives")
    exact(place, STEPS)
    wait_until(lambda: not statuses()[0]["sessions"], "the session ends")


def test_though_the_agent_is_killed_again_and_again(place: Path) -> None:
    with trainer(place, len(STEPS), "1500KiB/s", "stay") as pid:
        kill_both(pid)
        for _ in range(2):
            time.sleep(1)
            os.kill(agent(), signal.SIGKILL)
    wait_until(lambda: steps_in(place, "slow") == STEPS, "all arrives")
    exact(place, STEPS)


def test_what_a_closed_trainer_has_left_arrives_though_it_lives(place: Path) -> None:
    with trainer(place, len(STEPS), "2MiB/s", "close"):
        os.kill(agent(), signal.SIGKILL)
        wait_until(lambda: steps_in(place, "slow") == STEPS, "all arrives")
    exact(place, STEPS)


def test_what_slower_tiers_lack_is_brought_though_all_is_durable(place: Path) -> None:
    with held(policy(place), place, "slow"), trainer(place, len(STEPS), "", "stay") as pid:
        wait_until(lambda: steps_in(place, "fast") == STEPS, "all is durable")
        kill_both(pid)
        assert steps_in(place, "slow") == []
    wait_until(lambda: steps_in(place, "slow") == STEPS, "all arrives")
    exact(place, STEPS)


def test_ranks_of_a_host_arrive_though_they_and_their_agent_are_killed(place: Path) -> None:
    with (
        held(policy(place), place, "fast", "slow"),
        Gang(2, "support.agent_ranks:wait_to_be_killed", place, 3, "") as gang,
    ):
        for rank in range(2):
            gang.hear(rank, "captured")
        pid = agent()
        for rank in range(2):
            gang.kill(rank)
        os.kill(pid, signal.SIGKILL)
        gang.codes()
        assert steps_in(place, "fast") == []
    wait_until(lambda: steps_in(place, "slow") == [1, 2, 3], "all arrives")
    for tier in ("fast", "slow"):
        with ts.Checkpointer(without_agent(place, tier), "run") as ckpt:
            assert not ckpt.verify(deep=True).problems
            for step in (1, 2, 3):
                state = rank_state(0, 0, 1)
                ckpt.restore(state, step=step, only=["rows", "same", "step", "frozen"])
                state["mine"].value.fill_(-1)
                assert check(state, 0, 1) == step


def overwrite(trainer: int, step: int) -> None:
    """What a trainer would do that had got a slab of this step back: it uses it again."""
    (link,) = [link for link in Path(f"/proc/{trainer}/fd").iterdir() if "tierstate-arena" in os.readlink(link)]
    with open(link, "r+b") as slabs:
        at = slabs.read().index(state_of(step)["w"].numpy().tobytes()[:64])
        slabs.seek(at)
        slabs.write(b"something else")


def test_slabs_that_hold_something_else_by_now_are_never_published(place: Path) -> None:
    with held(policy(place), place, "fast", "slow"), trainer(place, 3, "", "stay") as pid:
        running = agent()
        os.kill(running, signal.SIGSTOP)
        os.kill(pid, signal.SIGSTOP)
        overwrite(pid, 2)
        os.kill(pid, signal.SIGKILL)
        os.kill(running, signal.SIGKILL)
    wait_until(lambda: [one for one in statuses() if not one["found"] and not one["sessions"]], "all is done")
    exact(place, [1, 3])
    with ts.Checkpointer(without_agent(place, "fast"), "run") as ckpt:
        assert not ckpt.verify(deep=True).problems


WAITS = 'supervisor.Latch.wait = lambda _, seconds: print("waits", seconds, flush=True)'


def supervised(work: str, pause: str = WAITS) -> list[str]:
    """What is printed by a child that a `Supervisor` runs, each time. ``pause``: replaces the pauses between."""
    code = f"""
import os, signal, time
from tierstate.agent import supervisor
{pause}
def work(holder):
    print("runs", len(holder.found), flush=True)
    {work}
supervisor.Supervisor().run(work, lambda: None)
print("ends", flush=True)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    return ran.stdout.splitlines()


HOLDS = "holder.hold('one', supervisor.HeldFiles(*(os.open('/dev/null', os.O_RDONLY) for _ in range(3))))"


def test_a_child_that_is_killed_too_often_is_given_up() -> None:
    said = supervised(f"{HOLDS}; os.kill(os.getpid(), signal.SIGKILL)")
    waits = [f"waits {2**n - 1}" for n in range(7)]
    runs = ["runs 0", *["runs 1"] * 6]
    assert said == [line for pair in zip(runs, waits, strict=True) for line in pair] + ["ends"]


def test_sigterm_while_there_is_no_child_is_one_to_the_next_which_has_what_is_held() -> None:
    """A scheduler ends the job while the parent waits, as the child was killed where memory is short."""
    work = f"{HOLDS}; print(holder.stopping, flush=True); holder.stopping or os.kill(os.getpid(), signal.SIGKILL)"
    pause = """
wait = supervisor.Latch.wait
def terminated(latch, seconds):
    os.kill(os.getpid(), signal.SIGTERM)
    wait(latch, 60)
supervisor.Latch.wait = terminated
"""
    assert supervised(work, pause) == ["runs 0", "False", "runs 1", "True", "ends"]


def test_a_child_that_ends_or_holds_nothing_is_not_started_again() -> None:
    assert supervised(HOLDS) == ["runs 0", "ends"]
    assert supervised("os.kill(os.getpid(), signal.SIGKILL)") == ["runs 0", "ends"]
    assert supervised(f"{HOLDS}; holder.drop('one'); os._exit(3)") == ["runs 0", "ends"]


FAILS = """
import errno
fork, forks = os.fork, []
def fork_or_fail():
    forks.append(None)
    if 1 < len(forks) <= 1 + {times}:
        raise OSError(errno.EAGAIN, "no process is left")
    return fork()
os.fork = fork_or_fail
"""


@pytest.mark.parametrize("times", [1, 3, 99])
def test_a_fork_that_fails_is_tried_again_with_what_is_held(times: int) -> None:
    """Where processes or memory are short: the agent was killed, and its parent has what it had taken in."""
    fails = WAITS + FAILS.format(times=times)
    said = supervised(f"{HOLDS}; holder.found or os.kill(os.getpid(), signal.SIGKILL)", fails)
    waits = [f"waits {2**n - 1}" for n in range(min(times + 1, 7))]
    assert said == ["runs 0", *waits, *(["runs 1"] if times < 7 else []), "ends"]


def test_a_parent_that_has_no_descriptor_left_goes_on() -> None:
    """It takes in nothing more then, and ends as ever: the agent's process is not left alone."""
    few = """
import resource, socket
before = resource.getrlimit(resource.RLIMIT_NOFILE)
def attend(self, wire, attend=supervisor.Supervisor._attend):
    top = os.dup(wire.fileno())
    os.close(top)
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, before[1]))
    attend(self, wire)
    print("held", len(self._held), flush=True)
supervisor.Supervisor._attend = attend
"""
    assert supervised(HOLDS, few) == ["runs 0", "held 0", "ends"]


# The journal by itself


class Told:
    """A `Holder` whose parent keeps no files, only the names."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def hold(self, name: str, files: HeldFiles) -> None:
        self.held[name] = os.dup(files.journal)

    def drop(self, name: str) -> None:
        os.close(self.held.pop(name))


def begun(told: Any) -> Journal:
    other = os.open(os.devnull, os.O_RDONLY)
    try:
        return Journal.begun(told, Message({"kind": "save", "run": "run", "pid": 7}), other, other)
    finally:
        os.close(other)


def found_in(told: Told) -> JournalLink:
    (journal,) = told.held.values()
    return JournalLink(HeldFiles(-1, journal, -1))


def messages_of(link: JournalLink) -> list[tuple[Any, list[bytes]]]:
    found = []
    while True:
        try:
            message = link.receive()
        except ConnectionLost:
            return found
        found.append((message.head, [bytes(blob) for blob in message.blobs]))


NOTES = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.none() | st.integers(1, 4), st.lists(st.binary(max_size=50), max_size=3)),
        st.tuples(st.just("durable"), st.integers(1, 4)),
    ),
    max_size=30,
)


@given(notes=NOTES, slack=st.sampled_from([0, 200, 1 << 20]))
def test_a_journal_has_what_is_not_durable_in_its_order(notes: list[Any], slack: int) -> None:
    told, expected, gone = Told(), list[Any](), set[int]()
    before, journals.SLACK = journals.SLACK, slack
    made = begun(told)
    try:
        for number, (what, seq, *rest) in enumerate(notes):
            if what == "durable":
                made.durable(seq)
                gone.add(seq)
                expected = [one for one in expected if one[0]["seq"] != seq]
            elif seq not in gone:  # a version that is durable is not handed over again
                head = {"kind": "slab", "seq": seq, "number": number}
                made.note(seq, head, rest[0])
                expected.append((head, rest[0]))
        link = found_in(told)
        assert link.hello.head["run"] == "run"
        assert link.peer == 7
        # Of different versions the order may change where it was written anew; of one version never.
        found = messages_of(link)
        for seq in (None, 1, 2, 3, 4):
            assert [one for one in found if one[0]["seq"] == seq] == [one for one in expected if one[0]["seq"] == seq]
    finally:
        journals.SLACK = before
        made.close()
    assert not told.held


@pytest.mark.parametrize("call", ["write", "memfd_create"])
def test_a_journal_that_cannot_be_written_keeps_what_is_needed(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Where memory or descriptors are short. The thread that has committed a version must go on with the next one."""
    told, usual = Told(), getattr(os, call)
    monkeypatch.setattr(journals, "SLACK", -(1 << 30))
    made = begun(told)

    def fail(first: Any, second: Any) -> None:
        if call == "write":
            usual(first, second[:5])
        raise OSError(errno.ENOSPC, "no room")

    for seq in (1, 2):
        made.note(seq, {"kind": "slab", "seq": seq}, [b"abc"])
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        made.durable(1)
    made.note(3, {"kind": "slab", "seq": 3}, [])
    found = messages_of(found_in(told))
    assert [(head["seq"], blobs) for head, blobs in found if head["seq"] != 1] == [(2, [b"abc"]), (3, [])]
    made.close()


@pytest.mark.parametrize("fails", ["dup", "memfd_create", "write"])
def test_a_journal_that_cannot_be_begun_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """The file of slabs above all, which is all the memory of a trainer."""
    other, usual, calls = os.open(os.devnull, os.O_RDONLY), getattr(os, fails), []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if fails == "dup" and len(calls) == 1:
            return usual(*args)
        raise OSError(errno.EMFILE, "no descriptor is left")

    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, fails, fail)
        with pytest.raises(OSError, match="no descriptor is left"):
            Journal.begun(Told(), Message({"kind": "save", "run": "run", "pid": 7}), other, other)  # type: ignore[arg-type]
    assert not open_files() - before
    os.close(other)


@given(data=st.data())
def test_a_journal_that_ends_within_a_message_has_those_before_it(data: st.DataObject) -> None:
    whole = [({"kind": "slab", "seq": n}, [bytes([n]) * n]) for n in range(5)]
    text = b"".join(encode_message(head, blobs) for head, blobs in whole)
    cut = data.draw(st.integers(0, len(text)))
    found, length = split_messages(bytearray(text[:cut]))
    assert [(m.head, [bytes(b) for b in m.blobs]) for m in found] == whole[: len(found)]
    assert length == sum(len(encode_message(*one)) for one in whole[: len(found)])
    assert length <= cut < length + len(encode_message(*whole[len(found)])) if cut < len(text) else len(found) == 5


@given(st.binary(max_size=300))
def test_bytes_that_are_no_journal_are_refused(data: bytes) -> None:
    found, length = split_messages(bytearray(data))
    assert 0 <= length <= len(data)
    assert len(found) <= len(data) // 12


def test_what_becomes_durable_after_a_restart_is_noted(tmp_path: Path) -> None:
    told = Told()
    made = begun(told)
    made.note(1, {"kind": "slab", "seq": 1}, [])
    made.note(2, {"kind": "slab", "seq": 2}, [b"x" * 100])
    (name, kept) = next(iter(told.held.items()))
    os.ftruncate(kept, os.fstat(kept).st_size - 50)  # killed while it wrote
    other = os.open(os.devnull, os.O_RDONLY)
    files = HeldFiles(other, os.dup(kept), os.dup(other))
    again = reopened(told, name, files, JournalLink(files))  # type: ignore[arg-type]
    again.note(3, {"kind": "slab", "seq": 3}, [])  # is in the journal, from which it is read
    again.durable(1)
    assert found_in(told).durable == {1}
    assert messages_of(found_in(told)) == []
    again.close()
    made._files.close()


def test_a_parent_that_is_gone_is_no_reason_to_end() -> None:
    import socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs:
        holder = Holder(theirs, {}, retired=False)
        holder.drop("any")
        holder.retire()
