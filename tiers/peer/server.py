"""The server process of peer memory (the *keeper*): one per host. It serves the host's objects and outlives the jobs.

    python -m tierstate.tiers.peer.server --path /dev/shm/... --address 10.0.0.1 --port 0 --idle 3600 [--capacity N]

The command returns as soon as the keeper listens; the keeper goes on as a daemon (with ``--foreground`` it stays, for a
service manager). It ends when nobody has used the memory for ``idle`` seconds, or on a `RequestKind.STOP` request, and
then frees the memory. If it is killed, or another one takes its place (`RequestKind.HAND_OVER`), the memory stays for
the next keeper. Where a job has an agent, the keeper is a thread of it (`tierstate.tiers.peer.threads`).

It serves processes that know the secret in the memory's folder, which each job writes there; when the secret changes,
connections of the job before are closed. Who does not know it can take nothing from the others: not the keeper's file
descriptors, threads or time (`tierstate.tiers.connections.listener`). A keeper imports neither torch nor NumPy.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import resource
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tierstate.manifest.errors import FormatError, TierstateError
from tierstate.tiers.address import own_address
from tierstate.tiers.connections.channel import Channel
from tierstate.tiers.connections.listener import Limits, Listener
from tierstate.tiers.connections.secret import JobSecret, SecretError
from tierstate.tiers.posix.files import BufferedFile

from .client_session import SILENCE, ClientSession
from .launch import KeeperSettings
from .local import (
    KEEPER_LOCK,
    START_LOCK,
    USE_LOCK,
    LocalMemory,
    lock_file,
    make_folder,
    remove_memory,
    removed_memories,
    wait_until,
)
from .members import CARD, Member, SecretFile, read_member, write_membership
from .protocol import Connection, ProtocolError, checked_capacity, checked_idle

log = logging.getLogger("tierstate")


LOG = "log"
"""Log file of the keeper, in the memory's folder: its standard output and error; usually empty."""


MOST = 1024
"""Connections of the job at the same time, at most, if the limit of file descriptors allows them."""


OWN_FILES = 64
"""File descriptors for the keeper itself: its listening socket, lock files, log, folders that are listed."""


FILES_EACH = 3
"""File descriptors that serving one connection takes: its socket, an object, and a lock file."""


THREADS = 8
"""Threads that are started before the first connection, so that a keeper serves when no more can be started."""


PAUSE = 0.1
"""Seconds until the next attempt, after the listening socket has failed."""


class SessionThreads:
    """Threads that serve connections. Some are always there; more are started as needed, and end when not needed.

    If no thread can be started (``ulimit -u``), connections wait for one that is free.

    Args:
        serve: serves one connection until it ends; raises nothing.
    """

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self._serve = serve
        self._queue: SimpleQueue[Connection | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._free = self._waiting = 0
        self._ended = False
        for _ in range(THREADS):
            self._start()

    @property
    def crowded(self) -> bool:
        """Whether connections wait for a thread."""
        return self._waiting > self._free

    def submit(self, line: Connection) -> None:
        """Let a thread serve a connection."""
        with self._lock:
            self._waiting += 1
        if self.crowded:
            self._start()
        self._queue.put(line)

    def end(self) -> None:
        """End each thread, when it serves no connection."""
        with self._lock:
            self._ended = True
            free = self._free
        for _ in range(free):
            self._queue.put(None)

    def _start(self) -> None:
        with self._lock:
            self._free += 1
        try:
            threading.Thread(target=self._run, daemon=True, name="tierstate-keeper").start()
        except RuntimeError as error:
            with self._lock:
                self._free -= 1
            log.info("no thread can be started, so connections wait for each other: %s", error)

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            with self._lock:
                self._free -= 1
                self._waiting -= 1
            self._serve(line)
            with self._lock:
                if self._ended or self._free >= THREADS:
                    return
                self._free += 1


class PeerServer:
    """Serves one host's memory to clients that know the secret in its folder.

    Args:
        root: the folder of the memory.
        listener: the listening socket.
        secret: the secret in the folder.
        alive: the lock that says that this keeper lives.
        settings: of the keeper.
        in_agent: whether it is part of an agent, and so no other keeper takes its place.
    """

    def __init__(
        self,
        root: Path,
        listener: Listener,
        secret: SecretFile,
        alive: BufferedFile,
        settings: KeeperSettings,
        *,
        in_agent: bool = False,
    ) -> None:
        self.root, self.idle, self.in_agent = root, settings.idle, in_agent
        self.kept = LocalMemory(root, settings.capacity)
        self.used = self._begun = time.monotonic()
        self.stopping = threading.Event()
        self._keeps = False
        self._listener, self._secret, self._alive = listener, secret, alive
        self._most = most_connections()
        self._lines: set[Connection] = set()
        self._lock = threading.Lock()

    def status(self) -> dict[str, Any]:
        """What `RequestKind.STATUS` responds."""
        return {
            "pid": os.getpid(),
            "path": str(self.root),
            "capacity": self.kept.capacity,
            "used": self.kept.used(),
            "objects": self.kept.count(),
            "connections": len(self._lines),
            "seconds": time.monotonic() - self._begun,
            "in_agent": self.in_agent,
        }

    @property
    def crowded(self) -> bool:
        """Whether connections that ask nothing are closed soon: others wait for their threads, or the keeper ends."""
        return self._threads.crowded or self.stopping.is_set()

    def run(self) -> None:
        """Serve until the idle time is over or `stop` is called; then free the memory, unless `stop` says other."""
        # Started here and not before: threads do not survive the fork by which a keeper becomes a daemon.
        self._threads = SessionThreads(self._serve)
        self._sweep()
        swept = time.monotonic()
        while not self._may_end():
            self._await()
            if time.monotonic() - swept > SILENCE:
                self._sweep()
                swept = time.monotonic()
        self._listener.close()
        self._threads.end()
        self._alive.close()
        self._end_sessions()

    def _end_sessions(self) -> None:
        """Close all connections; if the memory stays, let them first finish the objects that they write."""
        wait_until(lambda: not self._lines, SILENCE if self._keeps else 0.0)
        with self._lock:
            for line in self._lines:
                with suppress(OSError):
                    line.channel.wire.shutdown(socket.SHUT_RDWR)

    def _sweep(self) -> None:
        try:
            self.kept.sweep()
        except TierstateError as error:  # such as no room for the lock file: a later sweep may succeed
            log.warning("what dead writers left could not be removed: %s", error)

    def _await(self) -> None:
        try:
            for channel in self._listener.poll(min(1.0, self.idle / 4)):
                self._admit(channel)
        except OSError as error:
            if not self.stopping.is_set():  # `stop` shuts the socket down
                log.warning("connections cannot be accepted now: %s", error)
                time.sleep(PAUSE)
        self._end_old_sessions()

    def stop(self, *, keep: bool = False) -> None:
        """Make `run` end. ``keep``: leave the memory to the next keeper."""
        self._keeps = keep
        self.stopping.set()
        self._listener.stop()

    def _admit(self, channel: Channel) -> None:
        line = Connection(channel)
        with self._lock:
            if len(self._lines) >= self._most:
                log.info("%d connections are open, as many as may be: another one was closed", self._most)
                line.close()
                return
            self._lines.add(line)
        self._threads.submit(line)

    def _end_old_sessions(self) -> None:
        """Close the connections of a job whose secret another job has replaced."""
        secret = current_secret(self._secret)
        with self._lock:
            for line in self._lines:
                if line.channel.secret != secret:
                    with suppress(OSError):
                        line.channel.wire.shutdown(socket.SHUT_RDWR)

    def _serve(self, line: Connection) -> None:
        """Serve one connection until it ends."""
        try:
            with line, closing(ClientSession(self, line)) as desk:
                desk.serve()
        except (OSError, ProtocolError) as error:
            log.info("a connection was given up: %s", error)
        except Exception as error:  # one connection must not take a thread away from the others
            log.warning("a connection was given up: %s: %s", type(error).__name__, error)
        finally:
            with self._lock:
                self._lines.discard(line)
            self.used = time.monotonic()

    def _may_end(self) -> bool:
        """Whether the keeper ends now; if so, the memory is already freed."""
        if self.stopping.is_set():
            return self._keeps or self._give_back(fcntl.LOCK_EX)
        if not self.root.exists():  # `tierstate peer reap` has freed it
            return True
        if self._lines or time.monotonic() - self.used < self.idle:
            return False
        try:
            return self._give_back(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.used = time.monotonic()  # a process of this host uses the memory
            return False

    def _give_back(self, how: int) -> bool:
        # On a stop request the memory is freed even if processes of this host use it; when idle, only if none does.
        with suppress(FileNotFoundError, TierstateError), ExitStack() as held:
            held.enter_context(closing(lock_file(self.root / START_LOCK, how)))
            if how & fcntl.LOCK_NB:
                held.enter_context(closing(lock_file(self.root / USE_LOCK, how)))
            card = read_member(self.root)
            if card is not None and card.port == self._listener.port:
                remove_memory(
                    self.root
                )  # with another port the memory belongs to a new keeper, which replaced this one as it did not answer
        return True


def most_connections() -> int:
    """Connections that may be open at once, by the limit of file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(THREADS, min(MOST, (files - OWN_FILES - strangers_limit().total) // FILES_EACH))


def strangers_limit() -> Limits:
    """The room for connections that have not proven themselves: an eighth of the file descriptors, at most."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    total = 64 if soft == resource.RLIM_INFINITY else max(8, min(64, soft // 8))
    return Limits(total, total // 2)


def current_secret(file: SecretFile) -> JobSecret | None:
    """The secret in the folder; None if there is none that is safe, and then nobody is let in."""
    try:
        return file.read()
    except (SecretError, OSError) as error:
        log.warning("nobody is let in: %s", error)
        return None


def hold_keeper_lock(root: Path) -> BufferedFile:
    """Take the lock of the keeper that lives, also from one that does not answer any more."""
    while True:
        try:
            return lock_file(root / KEEPER_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with suppress(FileNotFoundError):
                os.unlink(root / KEEPER_LOCK)


def make_listener(root: Path, address: str, wanted: int, before: Member | None, identity: str) -> Listener:
    """The listening socket; with port 0 at the port of the keeper before, if that is free, or at any."""
    secret, service = SecretFile(root), f"peer/{identity}"
    for port in [before.port, 0] if before is not None and not wanted else [wanted]:
        try:
            return Listener(
                address,
                port,
                lambda: current_secret(secret),
                service,
                seconds=SILENCE,
                limits=strangers_limit(),
            )
        except OSError:
            if port == wanted:
                raise
    raise AssertionError("the last of them has succeeded or raised")


def start_server(root: Path, settings: KeeperSettings, *, in_agent: bool = False) -> PeerServer:
    """Make a keeper that listens, and write its member file (`CARD`)."""
    checked_idle(settings.idle)
    checked_capacity(settings.capacity)
    make_folder(root, "peer")
    try:
        before = read_member(root)
    except FormatError:
        before = None
    for left in removed_memories(root):
        shutil.rmtree(left, ignore_errors=True)  # of a keeper that was killed while it freed its memory
    identity = before.id if before else uuid.uuid4().hex
    with ExitStack() as undo:
        listener = make_listener(root, settings.address, settings.port, before, identity)
        undo.callback(listener.close)
        alive = undo.enter_context(closing(hold_keeper_lock(root)))
        write_membership(root, CARD, Member(identity, settings.address, listener.port))
        undo.pop_all()
    return PeerServer(root, listener, SecretFile(root), alive, settings, in_agent=in_agent)


def arguments() -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m tierstate.tiers.peer.server")
    parser.add_argument("--path", type=Path, required=True, help="folder of the memory")
    parser.add_argument("--address", default=None, help="where to listen; by default as jobs find it")
    parser.add_argument("--port", type=int, default=0, help="0: any")
    parser.add_argument("--idle", type=float, default=3600.0, help="seconds without use after which it ends")
    parser.add_argument("--capacity", type=int, default=None, help="bytes that the memory may have")
    parser.add_argument("--foreground", action="store_true", help="stay, and log to standard error")
    found = parser.parse_args()
    found.address = found.address or own_address()
    return found


def main() -> None:
    """Start a keeper and detach it as a daemon. Errors before that are printed to standard error; exit status 1."""
    args = arguments()
    try:
        settings = KeeperSettings(args.address, args.port, args.idle, args.capacity)
        keeper = start_server(args.path, settings)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), file=sys.stderr)
        sys.exit(1)
    if not args.foreground:
        _detach(keeper.root)
    keeper.run()


def _detach(root: Path) -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    told = os.open(root / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    for descriptor in (1, 2):
        os.dup2(told, descriptor)


if __name__ == "__main__":
    main()
