"""The keeper: one process per host that lends its memory to the others, and outlives the jobs that fill it.

    python -m tierstate.tiers.peer_server --path /dev/shm/... --address 10.0.0.1 --port 0 --idle 3600 [--capacity N]

It returns as soon as the keeper listens, which goes on by itself. It ends when nobody has used the memory for ``idle``
seconds, or when asked to stop, and then gives the memory back; when it is killed, the memory stays for the next one.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import sys
import threading
import time
import uuid
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from tierstate.manifest.errors import FormatError, TierstateError

from .peer_desk import Desk
from .peer_greeting import admit
from .peer_members import CARD, Member, read_card, remember
from .peer_memory import DOOR, START, Kept, leaving, lock, make_folder, remove
from .peer_wire import Foreign, Line

log = logging.getLogger("tierstate")

LOG = "log"
"""What a keeper has to say; nothing, as a rule."""

MOST = 1024
"""Connections at a time; more are closed at once."""

GREETING = 10.0
"""Seconds in which a client must prove that it knows the token."""

SILENCE = 30.0
"""Seconds in which a message must come as a whole, and after which a connection that asks nothing is closed."""


class Keeper:
    """Serves one host's memory to whoever knows its token.

    Args:
        root: the folder of the memory.
        listening: a socket that listens.
        token: the secret.
        idle: seconds without any user after which it ends.
        capacity: bytes that the memory may have.
    """

    def __init__(self, root: Path, listening: socket.socket, token: bytes, idle: float, capacity: int | None) -> None:
        self.root, self.idle = root, idle
        self.kept = Kept(root, capacity)
        self.kept.name = "peer"
        self.begun = self.used = time.monotonic()
        self.stopping = threading.Event()
        self._listening, self._token, self._port = listening, token, listening.getsockname()[1]
        self._lines: set[Line] = set()
        self._lock = threading.Lock()

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._lines)

    def run(self) -> None:
        """Serve until it is over; then the memory is given back."""
        tick = min(1.0, self.idle / 4)
        self._listening.settimeout(tick)
        self._sweep()
        swept = time.monotonic()
        while not self._may_end():
            self._await()
            if time.monotonic() - swept > SILENCE:
                self._sweep()
                swept = time.monotonic()
        self._listening.close()

    def _sweep(self) -> None:
        try:
            self.kept.sweep()
        except TierstateError as error:  # no room even for that, say: a later one may have more luck
            log.warning("what dead writers left could not be removed: %s", error)

    def _await(self) -> None:
        try:
            wire, _ = self._listening.accept()
        except TimeoutError:
            return
        except OSError:
            if not self.stopping.is_set():  # which shuts the socket
                raise
            return
        self._welcome(wire)

    def stop(self) -> None:
        """Have `run` end."""
        self.stopping.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)

    def _welcome(self, wire: socket.socket) -> None:
        line = Line(wire, GREETING)
        with self._lock:
            if len(self._lines) >= MOST:
                line.close()
                return
            self._lines.add(line)
        threading.Thread(target=self._serve, args=(line,), daemon=True, name="tierstate-keeper").start()

    def _serve(self, line: Line) -> None:
        """One connection, to its end."""
        try:
            with line:
                if admit(line, self._token):
                    line.seconds = SILENCE
                    with closing(Desk(self, line)) as desk:
                        desk.serve()
        except (OSError, Foreign) as error:
            log.info("a connection was given up: %s", error)
        finally:
            with self._lock:
                self._lines.discard(line)
            self.used = time.monotonic()

    def _may_end(self) -> bool:
        """Whether nobody needs it any more; if so, the memory is gone by now."""
        if self.stopping.is_set():
            return self._give_back(fcntl.LOCK_EX)
        if self._lines or time.monotonic() - self.used < self.idle:
            return False
        try:
            return self._give_back(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.used = time.monotonic()  # some process of this host has it open
            return False

    def _give_back(self, how: int) -> bool:
        # When told to stop, it does not ask who uses the memory: whoever said so may.
        with suppress(FileNotFoundError, TierstateError), ExitStack() as held:
            held.enter_context(closing(lock(self.root / START, how)))
            if how & fcntl.LOCK_NB:
                held.enter_context(closing(lock(self.root / DOOR, how)))
            card = read_card(self.root)
            if card is not None and card.port == self._port:
                remove(self.root)  # it is another keeper's by now, otherwise: one that did not answer was replaced
        return True


def listen(address: str, port: int, before: Member | None) -> socket.socket:
    """A socket that listens at this address alone: where the keeper before listened, if any port will do."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for number in [before.port, 0] if before is not None and not port else [port]:
        wire = socket.socket(family, socket.SOCK_STREAM)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            wire.bind((address, number))
            wire.listen(MOST)
        except OSError:
            wire.close()
            if number == port:
                raise
        else:
            return wire
    raise AssertionError("the last of them has succeeded or raised")


def begin(args: argparse.Namespace) -> Keeper:
    """A keeper that listens, and has said so on its card."""
    root: Path = args.path
    make_folder(root, "peer")
    try:
        before = read_card(root)
    except FormatError:
        before = None
    for left in leaving(root):
        shutil.rmtree(left, ignore_errors=True)  # of one that was killed while it gave its memory back
    wire = listen(args.address, args.port, before)
    identity, token = (before.id, before.token) if before else (uuid.uuid4().hex, secrets.token_hex(32))
    remember(root, CARD, Member(identity, args.address, wire.getsockname()[1], token))
    return Keeper(root, wire, bytes.fromhex(token), args.idle, args.capacity)


def arguments() -> argparse.Namespace:
    """What it was told."""
    parser = argparse.ArgumentParser(prog="python -m tierstate.tiers.peer_server")
    parser.add_argument("--path", type=Path, required=True, help="folder of the memory")
    parser.add_argument("--address", required=True, help="where to listen")
    parser.add_argument("--port", type=int, default=0, help="0: any")
    parser.add_argument("--idle", type=float, default=3600.0, help="seconds without use after which it ends")
    parser.add_argument("--capacity", type=int, default=None, help="bytes that the memory may have")
    return parser.parse_args()


def main() -> None:
    """Make a keeper, and let it go on by itself."""
    args = arguments()
    try:
        keeper = begin(args)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), file=sys.stderr)
        sys.exit(1)
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    told = os.open(keeper.root / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    for descriptor in (1, 2):
        os.dup2(told, descriptor)
    keeper.run()


if __name__ == "__main__":
    main()
