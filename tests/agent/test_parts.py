"""The other parts of an agent by themselves: slabs, threads, limits, commands, and the ends of trainers and agents."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.agents import held, load, pair, policy, same, state_of, statuses, steps_in, wait_until, without_agent

import tierstate as ts
from tierstate.agent import handover
from tierstate.agent.handover import AgentLink, HandOver
from tierstate.agent.launch import agent_name, policy_text, socket_path, start_agent
from tierstate.agent.messages import SEND_TIMEOUT, ConnectionLost
from tierstate.agent.pipeline import AgentPipeline
from tierstate.agent.received import encode_keep
from tierstate.agent.server import Agent, cpu_numbers
from tierstate.agent.shared_slabs import SharedSlabs
from tierstate.cli import app
from tierstate.cluster.advice import advise_agent
from tierstate.dcp import TierReader, TierWriter
from tierstate.engine.capture.plan import CapturePlan, CaptureSource
from tierstate.engine.packs.slab_layout import SlabChunks
from tierstate.engine.publish.save_state import SaveState
from tierstate.manifest import errors
from tierstate.manifest.boxes import Box
from tierstate.manifest.errors import FormatError, PolicyError
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.version import Head
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.pages import PAGE
from tierstate.tiers.policy.models import KeepKeys

TESTS = Path(__file__).resolve().parents[1]


def test_slabs_go_back_once_the_last_lease_ends_and_are_freed_when_the_trainer_is_gone() -> None:
    arena = Arena(1 << 20, 1 << 16, shared=True)
    assert arena.shared is not None
    back: list[int] = []
    slabs = SharedSlabs(os.dup(arena.shared.descriptor), 1 << 16, back.append, lambda _: None)
    mine = [arena.acquire() for _ in range(3)]
    for number, slab in enumerate(mine):
        slab.buffer.fill_(number + 1)
        assert slab.offset is not None
    first, second = slabs.take(mine[0].offset or 0), slabs.take(mine[1].offset or 0)
    assert first.buffer[5] == 1
    first.lease()
    first.release()
    assert not back
    first.release()
    assert back == [mine[0].offset]
    with pytest.raises(FormatError, match="twice"):
        slabs.take(mine[1].offset or 0)
    with pytest.raises(FormatError, match="does not have"):
        slabs.take(1 << 40)
    slabs.abandon()
    assert mine[2].buffer[5] == 0  # never handed over: its memory is given back
    assert second.buffer[5] == 2
    second.release()
    assert mine[1].buffer[5] == 0
    for slab in mine:
        slab.release()
    arena.close()


def test_a_file_that_can_shrink_is_refused() -> None:
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 16)
    with pytest.raises(FormatError, match="sealed"):
        SharedSlabs(descriptor, 1 << 16, lambda _: None, lambda _: None)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    SharedSlabs(descriptor, 1 << 16, lambda _: None, lambda _: None).abandon()


def test_policies_that_differ_have_agents_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "tiers: {a: {path: '${PLACE}'}}"
    names = {
        agent_name(text, {"PLACE": "/a"}),
        agent_name(text, {"PLACE": "/b"}),
        agent_name(text + " ", {"PLACE": "/a"}),
        agent_name(text, {"PLACE": "/a", "AWS_ACCESS_KEY_ID": "x"}),
    }
    assert len(names) == 4
    assert agent_name(text, {"PLACE": "/a", "OTHER": "1"}) in names
    monkeypatch.chdir(tmp_path)  # to which paths may be relative
    assert agent_name(text, {"PLACE": "/a"}) not in names


def test_shared_memory_without_huge_pages_is_told() -> None:
    assert advise_agent("off", huge_pages=False) == advise_agent("auto", huge_pages=True) == []
    assert "shmem_enabled" in advise_agent("auto", huge_pages=False)[0]


def test_cpus() -> None:
    assert cpu_numbers("0-2,5,7-7") == {0, 1, 2, 5, 7}
    with pytest.raises(PolicyError, match=r"agent\.cpus"):
        ts.Policy.parse("version: 1\nagent: {cpus: all}\ntiers: {a: {type: nvme, path: a}}")


@pytest.mark.slow
def test_limits_of_the_host(place: Path) -> None:
    agent = "mode: required, memory: 64MiB, idle: 10min, nice: 5, ionice: idle, cpus: '0'"
    with ts.Checkpointer(policy(place, agent=agent), "run") as ckpt:
        ckpt.save(state_of(1), step=1)
        pid = statuses()[0]["pid"]
        assert os.sched_getaffinity(pid) == {0}
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)


@pytest.mark.slow
def test_commands(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = place / "policy.yaml"
    file.write_text(policy(place).dump())

    def run(*words: str) -> str:
        app(words, standalone_mode=False)
        return capsys.readouterr().out

    assert "no agent" in run("agent", "status")
    unused = place / "unused.yaml"
    unused.write_text(without_agent(place, "fast").dump())
    with pytest.raises(ValueError, match="trainers use no agent"):
        run("agent", "start", "-p", str(unused))
    assert statuses() == [], "nobody would find it"
    run("agent", "start", "-p", str(file))
    with ts.Checkpointer(str(file), "run") as ckpt:
        ckpt.save(state_of(1), step=1).wait("slow")
        assert "fast, slow" in run("agent", "status")
        assert '"run": "run"' in run("agent", "status", "--json")
    pid = statuses()[0]["pid"]
    assert "ends" in run("agent", "stop", "--wait")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it ends")
    assert "slow" in run("ls", "-p", str(file), "-r", "run")
    assert statuses() == [], "a command that only looks starts no agent"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_dcp_by_an_agent(place: Path) -> None:
    file = place / "policy.yaml"
    file.write_text(policy(place).dump())
    state = {"w": torch.randn(1 << 16), "n": torch.tensor(3)}
    dcp.save(dict(state), storage_writer=TierWriter(str(file), run="run", step=4), no_dist=True)
    assert statuses()[0]["pid"] != os.getpid()
    found = {"w": torch.zeros(1 << 16), "n": torch.tensor(0)}
    dcp.load(found, storage_reader=TierReader(str(file), run="run"), no_dist=True)
    assert torch.equal(found["w"], state["w"])
    ts.dcp.close()
    wait_until(lambda: steps_in(place, "slow") == [4], "the slow tier has it")


@pytest.mark.slow
def test_a_preempted_trainer_ends_after_the_capture_and_the_agent_goes_on(place: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import tierstate as ts\n"
        "from support.agents import policy, state_of\n"
        "ckpt = ts.Checkpointer(policy(Path(sys.argv[2])), 'run', preemption={'grace': '60s'})\n"
        "ckpt.save(state_of(1, 4), step=1)\n"
        "print('saved', flush=True)\n"
        "time.sleep(100)\n"
    )
    command = [sys.executable, "-c", code, str(TESTS), str(place)]
    with (
        held(policy(place), place, "slow"),
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer,
    ):
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "saved\n"
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(60) == -signal.SIGTERM
        assert steps_in(place, "slow") == []
    wait_until(lambda: steps_in(place, "slow") == [1], "the agent goes on")
    assert same(load(place, "slow", 1), state_of(1, 4))


@pytest.mark.slow
def test_the_agent_ends_well_at_sigterm(place: Path) -> None:
    with ts.Checkpointer(policy(place, slow="2MiB/s"), "run") as ckpt:
        save = ckpt.save(state_of(1), step=1)
        pid = statuses()[0]["pid"]
        os.kill(pid, signal.SIGTERM)  # as a scheduler does with all processes of a job
        save.wait("slow")
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it ends when all is published")
        ckpt.save(state_of(2), step=2).wait("slow")
    assert steps_in(place, "slow") == [1, 2]


@given(
    st.builds(
        KeepKeys,
        last=st.none() | st.integers(1, 9),
        every=st.none() | st.integers(1, 9),
        within=st.none() | st.sampled_from(["2d", "1h", "90s"]),
        tags=st.none() | st.booleans(),
        all=st.just(True),
    )
)
def test_what_a_tier_keeps_comes_to_the_agent_as_it_is(keep: KeepKeys) -> None:
    assert KeepKeys.model_validate(json.loads(json.dumps(encode_keep(keep)))) == keep


def test_a_slab_that_comes_while_a_save_is_taken_back_is_no_loss() -> None:
    for _ in range(50):
        arena = Arena(16 * PAGE, PAGE, shared=True)
        here, there = pair()
        link = AgentLink(here, arena, lambda _: None, lambda: None, 0)
        head = Head("run", 1, 1, 0.0, "", PAGE, "xxh3-128")
        handed = HandOver(link, SaveState(head, 0, ["t"], {}), None)  # type: ignore[arg-type]
        link._end(ConnectionLost("planted"))

        def feed(handed: HandOver = handed, arena: Arena = arena) -> None:
            for _ in range(8):
                empty = np.zeros(0, "i8")
                handed.feed(SlabChunks(arena.acquire(), empty, empty, empty, np.zeros((0, 2), "u8")))

        capture = threading.Thread(target=feed)
        capture.start()
        told: list[object] = []
        assert handed.is_whole
        handed.take_back([Told(told)])  # type: ignore[list-item]
        capture.join()
        assert not any(isinstance(one, BaseException) for one in told)
        assert len(told) == 8
        here.close()
        there.close()
        arena.close()


class Told:
    """A job that notes what it is fed with."""

    def __init__(self, into: list[object]) -> None:
        self._into = into

    def feed(self, item: object) -> None:
        self._into.append(item)
        if isinstance(item, SlabChunks):
            item.slab.release()


def refuse(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """No thread of these names can be started any more."""
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if thread.name.startswith(names):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)


def test_the_loss_of_an_agent_needs_no_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair()
    lost = threading.Event()
    link = AgentLink(here, Arena(2 * PAGE, PAGE, shared=True), lambda _: None, lost.set, os.getpid())
    link.start()
    refuse(monkeypatch, "")
    there.close()
    assert lost.wait(60)
    link.leave()


@pytest.mark.parametrize("name", ["tierstate-agent-events", "tierstate-agent-watch"])
def test_a_link_without_threads_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    here, there = pair()
    link = AgentLink(here, Arena(2 * PAGE, PAGE, shared=True), lambda _: None, lambda: None, os.getpid())
    refuse(monkeypatch, name)
    with pytest.raises(errors.TierUnavailable, match="can't start new thread"):
        link.start()
    assert link.over.is_set()
    assert there.receive().kind == "leave"
    with pytest.raises(ConnectionLost):
        there.receive()
    there.close()


def test_an_agent_that_serves_others_refuses_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "tierstate-agent")
    wire, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    Agent.__new__(Agent)._welcome(wire)
    with other:
        assert other.recv(1) == b""


def test_an_agent_that_cannot_see_a_trainer_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers with PID namespaces of their own the kernel says 0 for the number of the other's process."""
    monkeypatch.setattr("tierstate.agent.messages.process_of", lambda _wire: 0)
    here, there = pair()
    with closing(there), closing(here), pytest.raises(errors.TierUnavailable, match=r"another PID namespace.*hostPID"):
        here.watch_peer()


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_a_trainer_goes_on_without_an_agent(place: Path, monkeypatch: pytest.MonkeyPatch, *, there: bool) -> None:
    """That cannot be started, or whose connection cannot be watched."""
    spec = policy(place, agent="mode: auto, idle: 10min")
    if there:
        start_agent(spec, socket_path(agent_name(policy_text(spec), os.environ)))
    refuse(monkeypatch, "tierstate-agent-watch" if there else "tierstate-agent-start")
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step=step).wait(timeout=60)
        assert isinstance(ckpt._pipeline, AgentPipeline)
        assert ckpt._pipeline.agent is None
    assert same(load(place, "slow", 2), state_of(2))


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_a_stop_of_the_trainer_is_no_silence_of_its_agent(monkeypatch: pytest.MonkeyPatch, *, hangs: bool) -> None:
    """The trainer is stopped for an hour. Its agent answers again, or has hung meanwhile."""
    monkeypatch.setattr(handover, "PING_EVERY", 0.02)
    monkeypatch.setattr(handover, "SILENCE", 0.5 if hangs else 60.0)
    asleep, clock = [0.0], time.monotonic
    monkeypatch.setattr(handover, "time", SimpleNamespace(monotonic=lambda: clock() + asleep[0]))
    here, there = pair()
    link = AgentLink(here, Arena(2 * PAGE, PAGE, shared=True), lambda _: None, lambda: None, os.getpid())

    def answer() -> None:
        with suppress(ConnectionLost):
            while there.receive().kind == "ping":
                if not (hangs and asleep[0]):
                    there.send({"kind": "pong"})

    answering = threading.Thread(target=answer, daemon=True)
    answering.start()
    wait = link.over.wait

    def stopped(seconds: float | None = None) -> bool:
        monkeypatch.setattr(link.over, "wait", wait)
        over = wait(seconds)
        asleep[0] = 3600.0
        return over

    monkeypatch.setattr(link.over, "wait", stopped)
    link.start()
    assert wait(60 if hangs else 1) == hangs
    link.leave()
    answering.join()
    there.close()


@pytest.mark.slow
def test_an_agent_that_hangs_while_it_is_sent_a_long_message_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of the message is taken, and each part of it would be tried for `SEND_TIMEOUT` seconds."""
    monkeypatch.setattr(handover, "PING_EVERY", 0.02)
    monkeypatch.setattr(handover, "SILENCE", 0.5)
    here, there = pair()
    link = AgentLink(here, Arena(2 * PAGE, PAGE, shared=True), lambda _: None, lambda: None, os.getpid())
    link.start()
    began = time.monotonic()
    with closing(there):
        assert not link.send({"kind": "begin"}, bytes(8 << 20))
        assert time.monotonic() - began < 0.8 * SEND_TIMEOUT
        link.leave()


def test_what_comes_of_slabs_after_the_end_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """The agent gives slabs back while its trainer closes, or gives it up."""
    arena = Arena(4 * PAGE, PAGE, shared=True)
    here, there = pair()
    link = AgentLink(here, arena, lambda _: None, lambda: None, os.getpid())
    slab = arena.acquire()
    link.lend(slab)
    for kind in ("kept", "back"):
        there.send({"kind": kind, "offset": slab.offset})
    link._end(ConnectionLost("the agent does not answer"))
    link.start()
    link._join()
    assert "cannot be used" not in caplog.text
    assert slab.leases == 1
    link.release_orphans()
    there.close()
    arena.close()


def test_slabs_that_were_given_back_are_not_published_again() -> None:
    """The agent gives a slab back, the trainer uses it for something else, and then the agent is lost."""
    arena = Arena(1 << 20, 1 << 16, shared=True)
    here, there = pair()
    link = AgentLink(here, arena, lambda _: None, lambda: None, os.getpid())
    head = Head("run", 1, 1, 0.0)
    leaf = Leaf(("w",), Spec("tensor", "uint8", (16,)))
    plan = CapturePlan.of([leaf], [CaptureSource(0, Box((0,), (16,)), 16, lambda _: iter(()))])
    handover = HandOver(link, SaveState(head, 16, ["t"], {}), plan)
    slab = arena.acquire()
    column = np.zeros(1, "i8")
    handover.feed(SlabChunks(slab, column, column, column + 16, np.zeros((1, 2), "<u8")))
    message = there.receive()
    link.start()
    there.send({"kind": "back", "offset": message.head["offset"]})
    wait_until(lambda: slab.leases == 0, "it is back")
    there.close()
    assert link.over.wait(60)
    fed: list[object] = []

    class Job:
        def feed(self, item: object) -> None:
            fed.append(item)

    handover.take_back([Job()])  # type: ignore[list-item]
    assert [type(item) for item in fed] == [FormatError]
    link.close()
    arena.close()
