"""Sockets of agents: whose they are, who may speak there, and when they go."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.agents import policy, state_of, statuses, wait_until

import tierstate as ts
from tierstate.agent import server
from tierstate.agent.launch import agent_name, greet, policy_text, socket_path
from tierstate.agent.messages import ConnectionLost, MessageSocket
from tierstate.agent.server import LOCK, LOG, Agent, Door, listen
from tierstate.cli import app
from tierstate.manifest import errors
from tierstate.manifest.errors import TierstateError
from tierstate.tiers.connections.distribution import runtime_folder, short_path


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
        wait_until(lambda: descriptors() <= before + 1, "refused connections are closed")


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


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", LOG, LOCK])
def test_what_keeps_an_agent_from_listening_is_told_in_a_sentence(place: Path, suffix: str) -> None:
    """And nothing is left there."""
    spec = policy(place)
    path = socket_path(agent_name(policy_text(spec), os.environ))
    path.with_suffix(suffix).mkdir()
    with pytest.raises(TierstateError, match=r"Is a directory.*remove what is in the way") as found:
        ts.Checkpointer(spec, "run")
    assert str(path) in str(found.value)
    assert "Traceback" not in str(found.value)
    path.with_suffix(suffix).rmdir()
    assert not path.exists()
    ts.Checkpointer(spec, "run").close()


def test_an_agent_that_does_not_answer_is_named_by_its_socket() -> None:
    path = runtime_folder() / "agent-mute"
    with closing(listening(path)), pytest.raises(ConnectionLost, match=f"^{path}: .*does not answer"):
        greet(path, {"kind": "status"}, seconds=0.2)


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


def test_a_socket_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        monkeypatch.chdir(tmp_path)
        listener.bind("agent")
        listener.listen()
        MessageSocket.connect(tmp_path / "agent").close()
        monkeypatch.setattr("tierstate.agent.messages.user_of", lambda _: os.geteuid() + 1)
        with pytest.raises(errors.TierstateError, match="a process of user"):
            MessageSocket.connect(tmp_path / "agent")
