"""The agent's process: takes in what the trainers of a user and a policy capture on this host, and publishes it.

    python -m tierstate.agent.server SOCKET < POLICY

The agent is a child of a small process that starts it again if it is killed (`tierstate.agent.supervisor`). The command
returns as soon as the agent listens; the agent goes on as a daemon. It ends when no trainer is connected,
nothing is left to publish, nobody has used it for the policy's ``agent: idle``, and no peer memory is served any more:
the keeper of a host's peer memory is a part of the agent. Its log is beside the socket.
"""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tierstate.manifest.errors import TierstateError, TierUnavailable
from tierstate.tiers.connections.distribution import short_path, user_of
from tierstate.tiers.libc import libc

from .supervisor import HeldFiles, Holder, Supervisor
from .version import agent_version

if TYPE_CHECKING:
    from tierstate.tiers.memory.host import InMemoryTier

    from .session import TrainerSession

LOG, LOCK = ".log", ".lock"


DYING = 5.0
"""Seconds that a trainer may take to die that was killed together with its agent."""


LOOK_EVERY = 0.2
"""Seconds between two looks whether the agent may end, and until the next try to accept a connection."""


TOUCH_EVERY = 3600.0
"""Seconds after which the socket and the log look as if they were new. What cleans ``/tmp`` (systemd-tmpfiles) removes
what nobody has used for some days, and a trainer that is connected does not use the socket's name."""


log = logging.getLogger("tierstate")


_IOPRIO_SET, _IDLE_CLASS = 251, 3 << 13
"""Number of the system call on x86-64, and the class of I/O that waits for all others."""


class Limits(Protocol):
    """How much of the host an agent may use; part of the policy's ``agent``."""

    @property
    def nice(self) -> int: ...

    @property
    def ionice(self) -> str: ...

    @property
    def cpus(self) -> str | None: ...


def limit_this_process(limits: Limits) -> None:
    """Lower the priority of this process, and bind it to CPUs, as the policy says."""
    if limits.nice:
        os.nice(limits.nice)
    if limits.ionice == "idle" and libc().syscall(_IOPRIO_SET, 1, 0, _IDLE_CLASS) != 0:
        log.warning("the priority of transfers could not be lowered (ionice: idle)")
    if limits.cpus:
        os.sched_setaffinity(0, cpu_numbers(limits.cpus))


def cpu_numbers(text: str) -> set[int]:
    """The CPUs that a text names, as in ``0-3,8``."""
    parts = (part.partition("-") for part in text.split(","))
    return {n for first, _, last in parts for n in range(int(first), int(last or first) + 1)}


class Agent:
    """The agent of one policy.

    Args:
        text: the policy.
        door: where it listens.
        holder: the parent of this process.

    Attributes:
        policy, memory, stores, holder: as `SessionOwner` has them.
    """

    def __init__(self, text: str, door: Door, holder: Holder) -> None:
        # Imported after the fork, which is then quick; and they are most of the time that a start takes.
        from tierstate.tiers.memory.pages import PAGE
        from tierstate.tiers.peer.host import HostMemory
        from tierstate.tiers.peer.threads import KeeperThreads
        from tierstate.tiers.policy.policy import Policy

        from .store import VersionsInMemory, memory_limit
        from .teams import TeamStores

        self.policy = Policy.parse(text, "<policy of the agent>")
        limit_this_process(self.policy.agent)
        slab_size = -(-self.policy.chunk // PAGE) * PAGE
        self.memory = VersionsInMemory(memory_limit(self.policy.agent.memory), slab_size)
        self.stores = TeamStores()
        self._keepers = HostMemory.keepers = KeeperThreads()
        self.holder = holder
        self._door, self._path, self._listener = door, door.path, door.listener
        self._begun = self._used = time.monotonic()
        self._lock = threading.Lock()
        self._sessions: list[TrainerSession] = []
        self._replays = 0
        self._full = False
        self._stopping, self._retired = holder.stopping, holder.retired

    def stop(self) -> None:
        """End when everything that was handed over is published; trainers go on by themselves."""
        self._stopping = True

    def run(self) -> None:
        """Serve until the agent is not needed any more."""
        # A scheduler that ends a job sends this to all its processes; what they have captured still has to arrive.
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.stop())
        for name, files in self.holder.found.items():
            self._replays += 1
            threading.Thread(target=self._replay, args=(name, files), daemon=True, name="tierstate-agent").start()
        ready = select.poll()
        ready.register(self._listener, select.POLLIN)
        touched = time.monotonic()
        while not self._may_end():
            if self._retired:
                time.sleep(LOOK_EVERY)
            elif ready.poll(1000 * LOOK_EVERY):
                self._accept()
            if self._stopping:
                self._end_sessions()
            if time.monotonic() - touched > TOUCH_EVERY:
                self._touch()
                touched = time.monotonic()
        self._keepers.hand_over()

    def _accept(self) -> None:
        try:
            wire, _ = self._listener.accept()
        except OSError as error:
            # No file descriptor is left, say. The connection waits on, so that `poll` would return at once for ever.
            if not self._full:
                log.warning("no connection can be accepted for now: %s", error)
            self._full = True
            time.sleep(LOOK_EVERY)
            return
        self._full = False
        self._welcome(wire)

    def _touch(self) -> None:
        for path in (self._path, self._path.with_suffix(LOG)):
            with suppress(OSError):
                os.utime(path)

    def _end_sessions(self) -> None:
        """Let go of trainers of which everything is published."""
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.end_if_done()

    def progressed(self) -> None:
        """Something was done for a trainer."""
        self._used = time.monotonic()

    def sessions_of(self, run: str) -> list[TrainerSession]:
        """Those of a run."""
        with self._lock:
            return [session for session in self._sessions if session.run == run]

    def may_give_up(self) -> bool:
        """Whether nothing has arrived for so long that the rest is left to the next process."""
        return time.monotonic() - self._used > self.policy.agent.idle

    def _may_end(self) -> bool:
        with self._lock:
            busy = bool(self._sessions) or self._replays > 0
        if busy:
            return False
        return self._stopping or self._retired or (self.may_give_up() and not self._keepers.busy)

    def _welcome(self, wire: socket.socket) -> None:
        try:
            threading.Thread(target=self._greet, args=(wire,), daemon=True, name="tierstate-agent").start()
        except RuntimeError as error:  # `ulimit -u`: those that are served already need this process
            log.warning("a connection was refused: %s", error)
            wire.close()

    def _greet(self, wire: socket.socket) -> None:
        from .messages import ConnectionLost, Message, MessageSocket

        if user_of(wire) != os.geteuid():
            log.warning("a process of user %d was refused", user_of(wire))
            wire.close()
            return
        link = MessageSocket(wire)
        hello = Message({})
        try:
            link.limit(10.0)
            hello = link.receive()
            link.limit(0.0)
            self._note_use(hello)
            self._serve(link, hello)
        except ConnectionLost as error:
            log.info("a connection has ended: %s", error)
        except Exception:
            log.exception("a connection was given up")
        finally:
            for descriptor in hello.descriptors:
                os.close(descriptor)
            link.close()
            self._note_use(hello)

    def _note_use(self, hello: Any) -> None:
        if hello.kind != "status":  # who looks again and again must not keep it alive
            self.progressed()

    def _serve(self, link: Any, hello: Any) -> None:
        from .messages import encode_error

        said = str(hello.head.get("version"))
        if hello.kind == "retire":
            self._retire(said)
            link.send({"kind": "retired", "pid": os.getpid()})
        elif hello.kind == "stop":  # also after an upgrade, by the new version's command
            self.stop()
            link.send({"kind": "stopping", "status": self._status()})
        elif said != agent_version():
            error = TierstateError(f"this agent is of tierstate {agent_version()}, and the trainer of {said}")
            link.send({"kind": "refused", "error": encode_error(error), "version": agent_version()})
        elif hello.kind == "status":
            link.send({"kind": "status", "status": self._status()})
        elif hello.kind == "read":
            self._serve_memory(link, hello)
        elif hello.kind == "save":
            self._session(link, hello)
        elif hello.kind == "team":
            self._serve_store(link, int(hello.head["hosts"]))

    def _serve_memory(self, link: Any, hello: Any) -> None:
        """Let a trainer read the agent's memory, or a tier of its session."""
        from .memory_tier import serve_memory
        from .messages import encode_error

        name, session = str(hello.head["tier"]), hello.head.get("session")
        tier = self.memory.tier if session is None else self._tier_of(session, name)
        if tier is None:
            error = TierUnavailable("the agent has this tier no more, as its trainer has ended", tier=name)
            link.send({"kind": "refused", "error": encode_error(error)})
            return
        link.send({"kind": "ready"})
        serve_memory(tier, self.memory.slabs, link)

    def _tier_of(self, session: str, name: str) -> InMemoryTier | None:
        with self._lock:
            found = [one.in_memory.get(name) for one in self._sessions if one.id == session]
        return found[0] if found else None

    def _serve_store(self, link: Any, hosts: int) -> None:
        """Make the store of a team. It stays as long as this connection, and as long as the sessions that use it."""
        with self.stores.made(hosts) as place:
            link.send({"kind": "store", "place": place})
            link.receive()

    def _session(self, link: Any, hello: Any) -> None:
        from .messages import encode_error
        from .session import TrainerSession

        try:
            if self._stopping:
                raise TierstateError("this agent ends as soon as it has published what it has")
            session = TrainerSession(self, link, hello)
        except Exception as error:
            log.exception("a trainer was refused")
            link.send({"kind": "refused", "error": encode_error(error)})
            return
        self._serve_session(session)

    def _serve_session(self, session: TrainerSession) -> None:
        with self._lock:
            self._sessions.append(session)
        try:
            session.serve()
        finally:
            with self._lock:
                self._sessions.remove(session)

    def _replay(self, name: str, files: HeldFiles) -> None:
        """Publish what a trainer had handed over to the process before this one, unless it lives and does it itself."""
        from .journal import JournalLink, reopened
        from .session import TrainerSession

        try:
            link = JournalLink(files)
            with closing(reopened(self.holder, name, files, link)) as journal:
                ending = select.poll()
                ending.register(files.trainer, select.POLLIN)
                if link.has_closed or ending.poll(1000 * DYING):
                    with self._store_of(link.hello.head.get("team")):
                        self._serve_session(TrainerSession(self, link, link.hello, journal))
        except Exception:
            log.exception("what a trainer had handed over is lost with the process before")
            self.holder.drop(name)
        finally:
            with self._lock:
                self._replays -= 1

    @contextmanager
    def _store_of(self, team: Any) -> Iterator[None]:
        """The store of a team whose agent was killed, for its sessions.

        Raises:
            TierstateError: it had ranks on other hosts, which have lost it.
        """
        from .teams import TeamGreeting

        if team is None:
            yield
            return
        place = TeamGreeting.decode(team).place
        if place.port:
            raise TierstateError("the ranks had agents on several hosts, which cannot go on without this one")
        with self.stores.remade(place):
            yield

    def _retire(self, version: str) -> None:
        """Another agent takes the place of this one, which ends when it has published what it has."""
        log.warning("an agent of tierstate %s takes the place of this one", version)
        self._retired = True
        self.holder.retire()
        self._listener.close()
        self._door.remove()

    def _status(self) -> dict[str, Any]:
        with self._lock:
            sessions = list(self._sessions)
        return {
            "pid": os.getpid(),
            "version": agent_version(),
            "socket": str(self._path),
            "seconds": time.monotonic() - self._begun,
            "idle": time.monotonic() - self._used,
            "memory": self.memory.tier.used,
            "capacity": self.memory.capacity,
            "tiers": [tier.name for tier in self.policy.tiers],
            "sessions": [session.status() for session in sessions],  # not in the lock, which their queues take
            "found": self._replays,
            "peer": self._keepers.status(),
        }


class Door(NamedTuple):
    """Where an agent listens.

    Attributes:
        path: of the socket.
        listener: the listening socket.
        file: the socket at the path, opened to be known again: as long as it is open, no other file has its number.
    """

    path: Path
    listener: socket.socket
    file: int

    def remove(self) -> None:
        """Remove the socket from its path, unless it was removed already and another agent has bound the path since.

        That happens where the folder is cleaned while an agent runs, as at the end of a user's last session.
        """
        with suppress(OSError), _locked(self.path):
            if os.path.samestat(os.fstat(self.file), os.lstat(self.path)):
                os.unlink(self.path)


def listen(path: Path) -> Door | None:
    """Listen at a path; None if an agent listens there already."""
    with _locked(path):
        if not _removed(path):
            return None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(path) as short:
            listener.bind(short)
        os.chmod(path, 0o600)
        listener.listen(64)
        return Door(path, listener, os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))


def remove_leftover(path: Path) -> bool:
    """Remove the socket of an agent that was killed. Returns False if an agent has it, though it may not answer now."""
    with _locked(path):
        return _removed(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path.with_suffix(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _removed(path: Path) -> bool:
    if _is_open(path):
        return False
    with suppress(FileNotFoundError):
        os.unlink(path)
    return True


def _is_open(path: Path) -> bool:
    """Whether a process has the socket: an agent, or the parent that is about to start it again."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, short_path(path) as short:
        probe.setblocking(False)  # where too many wait to be served already, this is refused at once
        try:
            probe.connect(short)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def allow_all_files() -> None:
    """Let this process open as many files as it may: it serves many processes, and peer memory many hosts."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Start an agent. Returns, with status 0, when it listens; errors before that are printed, with status 1."""
    path, text = Path(sys.argv[1]), sys.stdin.read()
    try:
        door = listen(path)
        if door is None:
            return
        output = _open_log(door)
    except OSError as error:
        print(
            f"{path}: {error}; an agent needs its socket, a lock and a log there: "
            "remove what is in the way, or set XDG_RUNTIME_DIR to another folder",
            file=sys.stderr,
        )
        sys.exit(1)
    told, tell = os.pipe()
    if os.fork():
        door.listener.close()
        os.close(tell)
        _wait_for(told)
        return
    os.close(told)
    _become_daemon(output)
    allow_all_files()
    starter = os.fdopen(tell, "wb", 0)
    Supervisor().run(lambda holder: _run_agent(text, door, holder, starter), starter.close)


def _run_agent(text: str, door: Door, holder: Holder, starter: RawIOBase) -> None:
    """What the agent's process does.

    Args:
        starter: whom to tell that it listens; closed where it was told by the process before.
    """
    try:
        agent = Agent(text, door, holder)
    except BaseException as error:
        if not starter.closed:
            starter.write(f"{type(error).__name__}: {error}".encode()[:4000])
            door.remove()
        raise
    if not starter.closed:
        starter.write(b"+")
        starter.close()
    agent.run()
    door.remove()


def _wait_for(told: int) -> None:
    with os.fdopen(told, "rb") as pipe:
        said = pipe.read()
    if said != b"+":
        print(said.decode(errors="replace") or "it ended at once", file=sys.stderr)
        sys.exit(1)


def _open_log(door: Door) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(door.path.with_suffix(LOG), flags, 0o600)
    except OSError:
        door.remove()
        raise


def _become_daemon(output: int) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


if __name__ == "__main__":
    main()
