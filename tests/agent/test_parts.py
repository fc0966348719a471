"""The parts of an agent by themselves: its memory as a tier, its messages, its slabs, what is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.agents import load, policy, same, state_of, statuses, steps_in, wait_until, without_agent

import tierstate as ts
from tierstate.agent import handover, server
from tierstate.agent.handover import AgentLink, HandOver
from tierstate.agent.launch import agent_name, greet, policy_text, socket_path, start_agent
from tierstate.agent.memory_tier import AgentMemory, HandedMemory, serve_memory
from tierstate.agent.messages import ConnectionLost, MessageSocket, decode_error, encode_error
from tierstate.agent.pipeline import AgentPipeline
from tierstate.agent.received import encode_keep
from tierstate.agent.server import LOG, Agent, Door, cpu_numbers, listen
from tierstate.agent.shared_slabs import SharedSlabs
from tierstate.agent.store import VersionsInMemory
from tierstate.cli import app
from tierstate.cluster.advice import advise_agent
from tierstate.dcp import TierReader, TierWriter
from tierstate.engine.capture.plan import CapturePlan, CaptureSource
from tierstate.engine.packs.slab_layout import SlabChunks
from tierstate.engine.publish.save_state import SaveState
from tierstate.manifest import errors
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import as_buffer, empty_buffer
from tierstate.manifest.errors import FormatError, PolicyError, TierstateError
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.version import Head
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.connections.distribution import runtime_folder, short_path
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.host import Host
from tierstate.tiers.memory.pages import PAGE
from tierstate.tiers.policy.models import KeepKeys
from tierstate.tiers.testing import TierContract

TESTS = Path(__file__).resolve().parents[1]


def pair() -> tuple[MessageSocket, MessageSocket]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return MessageSocket(one), MessageSocket(other)


@contextmanager
def agent_memory() -> Iterator[AgentMemory]:
    """Reads and writes the memory of an agent, which is empty."""
    memory, threads = VersionsInMemory(64 << 20, 1 << 16), []

    def connect() -> MessageSocket:
        here, there = pair()

        def serve() -> None:
            try:
                serve_memory(memory.tier, memory.slabs, there)
            except ConnectionLost:
                there.close()

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()
        return here

    tier = AgentMemory(connect)
    yield tier
    tier.close()
    for thread in threads:
        thread.join(10)


class TestMemory(TierContract):
    """What an agent keeps, read and written over sockets, is a tier as any other."""

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        with agent_memory() as tier:
            yield tier


class TestHandedMemory(TierContract):
    """A trainer's host tier is a tier as any other, wherever its objects are."""

    @pytest.fixture(params=["without an agent", "with one"])
    def tier(self, request: pytest.FixtureRequest) -> Iterator[Tier]:
        with agent_memory() as agent:
            tier = HandedMemory(Host())
            tier.agent = agent if request.param == "with one" else None
            yield tier
            tier.close()


def test_an_agent_that_refuses_to_be_read_is_away() -> None:
    """So that a restore goes on with the next tier: one of another version may listen by now."""

    def connect() -> MessageSocket:
        raise errors.TierstateError("this agent is of tierstate 2")

    with closing(AgentMemory(connect)) as tier:
        tier.name = "(agent)"
        with pytest.raises(errors.TierUnavailable, match=r"^\(agent\): this agent is of tierstate 2"):
            tier.read("a/b", [Range(0, empty_buffer(1))])


def test_what_a_trainer_has_itself_is_read_until_the_agent_has_something_newer() -> None:
    with agent_memory() as agent:
        tier, data = HandedMemory(Host()), as_buffer(b"data")
        tier.superseded()  # nothing without an agent
        tier.put("a/own", data)
        tier.superseded()
        tier.agent = agent
        tier.put("a/agents", data)
        assert list(tier.list("a/")) == ["a/agents", "a/own"]
        assert list(tier.inner.list("")) == ["a/own"]
        assert list(agent.list("")) == ["a/agents"]
        with pytest.raises(errors.AlreadyExists):
            tier.put("a/own", data)
        assert bytes(tier.get("a/own").numpy()) == bytes(tier.get("a/agents").numpy()) == b"data"
        tier.superseded()
        assert list(tier.list("")) == ["a/agents"]
        tier.discard(["a/agents"])
        assert list(agent.list("")) == []
        tier.agent = None
        assert list(tier.list("")) == []
        tier.close()


@given(st.lists(st.binary(max_size=3000), max_size=8), st.dictionaries(st.text(max_size=9), st.integers(), max_size=5))
def test_messages_arrive_as_they_were_sent(blobs: list[bytes], head: dict[str, int]) -> None:
    one, other = pair()
    one.send(head, blobs)
    found = other.receive()
    assert found.head == head
    assert [bytes(blob) for blob in found.blobs] == blobs
    one.close()
    other.close()


@given(st.binary(max_size=400) | st.builds(lambda n, d: struct.pack("<I", n) + d, st.integers(0, 99), st.binary()))
def test_whatever_comes_is_a_message_or_the_end_of_the_connection(data: bytes) -> None:
    wire, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    other = MessageSocket(there)
    wire.sendall(data)
    wire.close()
    with suppress(ConnectionLost):
        while True:
            assert isinstance(other.receive().head, dict)
    other.close()


def test_a_message_whose_descriptors_do_not_fit_into_this_process_is_not_taken() -> None:
    """The kernel leaves out those for which there is no number: a restore goes on with the next tier then."""
    one, other = pair()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(one), closing(other), tempfile.TemporaryFile() as file:
        one.send({"kind": "answer"}, (), [file.fileno()])
        os.close(lowest := os.dup(file.fileno()))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
            with pytest.raises(ConnectionLost, match="no file descriptor left"):
                other.receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_message_of_impossible_length_takes_no_memory() -> None:
    wire, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    other = MessageSocket(there)
    wire.sendall(struct.pack("<IQQ", 2, 10, 1 << 60))
    with pytest.raises(ConnectionLost, match="bytes"):
        other.receive()
    wire.close()
    other.close()


@pytest.mark.parametrize(
    "error",
    [
        errors.TierFull("no room", tier="a", key="k"),
        errors.Damaged("bytes"),
        errors.WrongTier("another", tier="b"),
        errors.CommitUnknown("?"),
    ],
)
def test_errors_come_as_what_they_are(error: errors.TierstateError) -> None:
    error.add_note("a note")
    found = decode_error(encode_error(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert found.__notes__ == ["a note"]
    assert getattr(found, "tier", None) == getattr(error, "tier", None)


def test_other_errors_are_told_by_name() -> None:
    assert str(decode_error(encode_error(ZeroDivisionError("x")))) == "ZeroDivisionError: x"
    assert type(decode_error({"class": "os", "text": "x"})) is errors.TierstateError


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
    agent = "mode: required, memory: 64MiB, idle: 60s, nice: 5, ionice: idle, cpus: '0'"
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
def test_sealed_versions_in_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_KEY", "ab" * 32)
    text = policy(place).dump().replace("version: 1\n", "version: 1\nseal: {key: '${CHECKPOINT_KEY}'}\n")
    with ts.Checkpointer(ts.Policy.parse(text), "run") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step=step).wait("slow")
        assert same(ckpt.load(), state_of(2))
        assert ckpt.restored is not None
        assert ckpt.restored.tiers[0] == "(agent)"


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
        "ckpt = ts.Checkpointer(policy(Path(sys.argv[2]), slow='512KiB/s'), 'run', preemption={'grace': '60s'})\n"
        "ckpt.save(state_of(1, 4), step=1)\n"
        "print('saved', flush=True)\n"
        "time.sleep(100)\n"
    )
    command = [sys.executable, "-c", code, str(TESTS), str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "saved\n"
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(30) == -signal.SIGTERM
    assert steps_in(place, "slow") == [], "that tier takes eight seconds"
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


@pytest.mark.root
@pytest.mark.slow
def test_a_process_of_another_user_is_refused(place: Path, agents: Path) -> None:
    with ts.Checkpointer(policy(place), "run") as ckpt:
        path = next(p for p in (agents / "tierstate").glob("agent-*") if not p.suffix)
        os.chmod(agents, 0o711)
        code = (
            "import os, socket, sys; os.chdir(sys.argv[1]); os.setuid(65534); w = socket.socket(socket.AF_UNIX)\n"
            "try:\n    w.connect(sys.argv[2])\nexcept OSError as error:\n    print(type(error).__name__)\n"
        )
        said = subprocess.run(
            [sys.executable, "-c", code, str(path.parent), path.name], capture_output=True, text=True, check=True
        )
        assert said.stdout.strip() == "PermissionError"
        ckpt.save(state_of(1), step=1).wait("slow")


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


@pytest.mark.slow
def test_refused_greetings_leave_no_descriptors(place: Path) -> None:
    with ts.Checkpointer(policy(place), "run") as ckpt:
        path, pid = ckpt._pipeline._path, statuses()[0]["pid"]  # type: ignore[attr-defined]

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{pid}/fd"))

        def greeted() -> None:
            for hello in ({"kind": "save", "run": "x", "slab_size": 1}, {"kind": "status"}, {"kind": "nothing"}):
                with suppress(TierstateError):
                    greet(path, hello, (0,))[0].close()

        greeted()
        before = descriptors()
        for _ in range(10):
            greeted()
        wait_until(lambda: descriptors() <= before + 1, "refused connections are closed", seconds=20)


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


# Where the system starts no more threads


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
    assert lost.wait(10)
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


# Sockets of agents


def listening(path: Path, backlog: int = 64) -> socket.socket:
    """In place of an agent that hangs: whoever connects gets no answer."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_path(path) as short:
        listener.bind(short)
    listener.listen(backlog)
    return listener


@pytest.mark.slow
def test_a_look_at_an_agent_that_hangs_leaves_it_its_socket(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it nobody would find the agent any more, and a second one would be started."""
    wait = MessageSocket.limit
    monkeypatch.setattr(MessageSocket, "limit", lambda link, seconds: wait(link, min(seconds, 0.2)))
    monkeypatch.setattr("tierstate.agent.messages.SEND_TIMEOUT", 1)
    hung, killed = (runtime_folder() / f"agent-{name}" for name in ("hung", "killed"))
    with closing(listening(hung, 1)):
        for answer in ("does not answer", "hangs"):
            listening(killed).close()
            assert app(["agent", "status"], standalone_mode=False) == 1
            assert answer in capsys.readouterr().out
            assert hung.exists()
            assert not killed.exists()
        assert listen(hung) is None
    hung.unlink()


@pytest.mark.parametrize("killed", [False, True])
def test_a_stop_does_not_wait_for_an_agent_that_is_killed(monkeypatch: pytest.MonkeyPatch, *, killed: bool) -> None:
    """While it publishes what is left: its socket stays then. The other one ends and removes it."""
    path, looks = runtime_folder() / "agent-stopped", list[float]()
    listener = listening(path)

    def serve() -> None:
        for kind in ("stop", "status", "status"):
            link = MessageSocket(listener.accept()[0])
            assert link.receive().kind == kind
            link.send({"kind": kind, "status": {}})
            link.close()
        listener.close()
        if not killed:
            path.unlink(missing_ok=True)

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        assert len(looks) < 1000, "it waits for ever"
        thread.join(0.001)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    monkeypatch.setattr("tierstate.cli.agent.time", SimpleNamespace(sleep=sleep))
    app(["agent", "stop", "--wait"], standalone_mode=False)
    thread.join()
    assert not path.exists()


def bare(monkeypatch: pytest.MonkeyPatch, path: Path, listener: object, looks: int) -> Agent:
    """An agent without tiers, which ends after so many looks whether it may."""
    agent, ends = Agent.__new__(Agent), iter([*[False] * looks, True])
    parts = {
        "_path": path, "_listener": listener, "_keepers": SimpleNamespace(hand_over=lambda: None), "_full": False,
        "holder": SimpleNamespace(found={}, retire=lambda: None), "_retired": False, "_stopping": False,
        "_may_end": lambda: next(ends),
    }  # fmt: skip
    for name, part in parts.items():
        monkeypatch.setattr(agent, name, part, raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return agent


def test_what_cleans_temporary_files_sees_that_an_agent_uses_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    path = runtime_folder() / "agent-old"
    path.with_suffix(LOG).touch()
    with closing(listening(path)) as listener:
        for file in (path, path.with_suffix(LOG)):
            os.utime(file, (0.0, 0.0))
        monkeypatch.setattr("tierstate.agent.server.TOUCH_EVERY", -1.0)
        bare(monkeypatch, path, listener, 2).run()
    for file in (path, path.with_suffix(LOG)):
        assert time.time() - os.stat(file).st_mtime < 60
    path.unlink()


def test_an_agent_without_descriptors_waits_before_it_accepts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that waits makes `poll` return at once: the agent took all of a core until a file was closed."""
    path, done = runtime_folder() / "agent-full", list[str]()

    def accept() -> None:
        done.append("accept")
        raise OSError(errno.EMFILE, "no descriptor is left")

    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: done.append("wait")))
    with closing(listening(path)) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trainer:
        with short_path(path) as short:
            trainer.connect(short)
        bare(monkeypatch, path, SimpleNamespace(accept=accept, fileno=listener.fileno), 5).run()
    assert done == ["accept", "wait"] * 5
    path.unlink()


@given(st.lists(st.sampled_from(["cleaned", "bound", "removed"]), max_size=8), st.booleans())
def test_an_agent_removes_its_own_socket_alone(events: list[str], retires: bool) -> None:
    """The folder is cleaned, or another agent ends, and one more binds the path: it must still be found there."""
    path = runtime_folder() / "agent-twice"
    with pytest.MonkeyPatch.context() as monkeypatch, ExitStack() as listeners:

        def bind() -> Door:
            door = listen(path)
            assert door is not None
            listeners.callback(os.close, door.file)
            listeners.enter_context(door.listener)
            return door

        def remove(door: Door) -> None:
            agent = bare(monkeypatch, path, door.listener, 0)
            monkeypatch.setattr(agent, "_door", door, raising=False)
            agent._retire("2") if retires else door.remove()

        first, there = bind(), "first"
        for event in events:
            if event == "cleaned":
                path.unlink(missing_ok=True)
                there = ""
            elif event == "bound" and not there:
                bind()
                there = "another"
            elif event == "removed":
                remove(first)
                there = "" if there == "first" else there
            assert path.exists() == bool(there)
        path.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_a_trainer_goes_on_without_an_agent(place: Path, monkeypatch: pytest.MonkeyPatch, *, there: bool) -> None:
    """That cannot be started, or whose connection cannot be watched."""
    spec = policy(place, agent="mode: auto, idle: 60s")
    if there:
        start_agent(spec, socket_path(agent_name(policy_text(spec), os.environ)))
    refuse(monkeypatch, "tierstate-agent-watch" if there else "tierstate-agent-start")
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step=step).wait(timeout=20)
        assert isinstance(ckpt._pipeline, AgentPipeline)
        assert ckpt._pipeline.agent is None
    assert same(load(place, "slow", 2), state_of(2))


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_a_stop_of_the_trainer_is_no_silence_of_its_agent(monkeypatch: pytest.MonkeyPatch, *, hangs: bool) -> None:
    """The trainer is stopped for an hour. Its agent answers again, or has hung meanwhile."""
    monkeypatch.setattr(handover, "PING_EVERY", 0.02)
    monkeypatch.setattr(handover, "SILENCE", 0.5)
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
    assert wait(1.5) == hangs
    link.leave()
    answering.join()
    there.close()


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
    assert link.over.wait(10)
    fed: list[object] = []

    class Job:
        def feed(self, item: object) -> None:
            fed.append(item)

    handover.take_back([Job()])  # type: ignore[list-item]
    assert [type(item) for item in fed] == [FormatError]
    link.close()
    arena.close()


def test_a_socket_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        monkeypatch.chdir(tmp_path)
        listener.bind("agent")
        listener.listen()
        MessageSocket.connect(tmp_path / "agent").close()
        monkeypatch.setattr("tierstate.agent.messages.user_of", lambda _: os.geteuid() + 1)
        with pytest.raises(errors.TierstateError, match="a process of user"):
            MessageSocket.connect(tmp_path / "agent")
