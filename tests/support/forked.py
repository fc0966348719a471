"""Processes that are forked off one that has imported torch: they begin after 0.1 s of CPU, and not after 3 to 6.

    process = Forked("support.rank_jobs:job", folder, env=os.environ, output=log.fileno())  # has pid, poll, wait, kill
    subprocess.run([*command(train.__file__), folder])  # the same, as a command

Such a process has a pid, memory, descriptors, arguments and an environment of its own, its generators of random numbers
are seeded anew, and it ends as an interpreter does. It is not what a user starts: a test of imports, of options of the
interpreter, or of what is read from the environment before torch is there needs `subprocess`.
"""

from __future__ import annotations

import atexit
import importlib
import io
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def path_with_tests() -> str:
    """The ``PYTHONPATH`` of a process that imports from the folder of tests."""
    return os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])


IMPORTED = ("torch._dynamo", "tierstate.checkpointer", "tierstate.tiers.posix.directory")
"""What is there in each process; the first is what an optimizer imports, in 3 s."""

FRAMEWORKS = {"support.lightning_": "lightning.pytorch", "support.hugging_face_": "transformers.trainer"}
"""What else is there for targets whose names begin so, once the first of them has been asked for."""

_LONGEST = 1 << 20

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@cache
def _server() -> str:
    """Start the process that all others are forked off; where it listens. It ends with this process."""
    # No `TemporaryDirectory`: on newer versions of Python a child that is forked off this process would remove it.
    folder, ours = tempfile.mkdtemp(prefix="tierstate-forks-"), os.getpid()
    place = f"{folder}/socket"
    env = os.environ | {"PYTHONPATH": path_with_tests(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", "-W", "error", __file__, "--serve", place]
    server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"

    def end() -> None:
        if os.getpid() == ours:
            server.communicate()
            shutil.rmtree(folder)

    atexit.register(end)
    return place


def command(target: str) -> list[str]:
    """The beginning of a command that runs a target as `Forked` does; the arguments come next.

    Its process passes signals on and ends as the other one ends; if it is killed itself, that one is killed at once.
    """
    return [sys.executable, "-S", "-E", *script(target)]


def script(target: str) -> list[str]:
    """A script of Python that does so, and its first arguments."""
    return [__file__, _server(), target]


class Forked:
    """A process, with the methods of `subprocess.Popen` that it needs.

    Args:
        target: ``module:function``, which is called with the arguments, or a file, which is run as a script, or
            ``-c``: the first argument is the script.
        args: strings; also `sys.argv`.
        env: all of its environment.
        output: descriptor of its standard output and standard error.
        error: that of its standard error, if it is another one.
    """

    def __init__(
        self, target: str, *args: object, env: Mapping[str, str], output: int, error: int | None = None
    ) -> None:
        fds = [output, output if error is None else error]
        self._connection = _asked(_server(), [target, *map(str, args)], dict(env), fds)
        self.pid = int(self._connection.recv(_LONGEST))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(_LONGEST))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and its status has not come yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _asked(place: str, args: list[str], env: dict[str, str], fds: list[int]) -> socket.socket:
    """A connection to the server, over which come the pid of a new process and then its status."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(place)
    asked = {"args": args, "env": env, "folder": os.getcwd()}
    socket.send_fds(connection, [json.dumps(asked).encode()], fds)
    return connection


class _Server:
    """Forks off processes, says when they have ended, and kills those that nobody asks for any more."""

    def __init__(self, place: str) -> None:
        for name in IMPORTED:
            importlib.import_module(name)
        self._reseed = importlib.import_module("torch").seed
        self._events = selectors.DefaultSelector()
        self._pids: set[int] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(place)
        self._listener.listen(100)
        self._events.register(self._listener, selectors.EVENT_READ, self._fork)
        self._events.register(0, selectors.EVENT_READ, self._end)
        print("ready", flush=True)

    def run(self) -> list[str]:
        """Serve; in a new process, return its target and arguments."""
        while True:
            for key, _ in self._events.select():
                if (asked := key.data()) is not None:
                    return list(asked)

    def _fork(self) -> list[str] | None:
        connection, _ = self._listener.accept()
        message, fds, _, _ = socket.recv_fds(connection, _LONGEST, 2)
        if not message:  # it was killed before it had asked
            connection.close()
            return None
        asked = json.loads(message)
        for prefix, module in FRAMEWORKS.items():
            if asked["args"][0].startswith(prefix):
                with suppress(Exception):  # the process itself says what is wrong
                    importlib.import_module(module)
        if (pid := os.fork()) == 0:
            self._become(asked, fds)
            connection.close()
            return list(asked["args"])
        for fd in fds:
            os.close(fd)
        self._pids.add(pid)
        with suppress(OSError):  # it was killed since it has asked: `_dropped` sees that
            connection.send(str(pid).encode())
        ended = os.pidfd_open(pid)
        self._events.register(ended, selectors.EVENT_READ, partial(self._ended, pid, ended, connection))
        self._events.register(connection, selectors.EVENT_READ, partial(self._dropped, pid, connection))
        return None

    def _become(self, asked: dict[str, Any], fds: list[int]) -> None:
        """Take on what a new process has; the server's descriptors are none of its business."""
        for key in [*self._events.get_map().values()]:
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif key.fd != 0:
                os.close(key.fd)
        self._events.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, fd in enumerate(fds, 1):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["folder"])
        sys.argv[:] = asked["args"]
        self._reseed()

    def _ended(self, pid: int, ended: int, connection: socket.socket) -> None:
        self._events.unregister(ended)
        os.close(ended)
        self._pids.remove(pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if connection.fileno() >= 0:
            self._events.unregister(connection)
            with suppress(OSError):  # nobody asks any more
                connection.send(str(status).encode())
            connection.close()

    def _dropped(self, pid: int, connection: socket.socket) -> None:
        if connection.fileno() < 0:  # it has ended at the same moment
            return
        self._events.unregister(connection)
        connection.close()
        os.kill(pid, signal.SIGKILL)

    def _end(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        self._listener.close()
        sys.exit()


def write_whole_lines() -> None:
    """Let what is printed arrive line by line; unbuffered, a message of another thread could come between its words."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def _run(target: str, *args: str) -> None:
    write_whole_lines()
    module, _, function = target.rpartition(":")
    if target == "-c":
        code = sys.argv.pop(1)
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif function.endswith(".py"):
        runpy.run_path(target, run_name="__main__")
    else:
        getattr(importlib.import_module(module), function)(*args)


def _pass_on(place: str, args: list[str]) -> None:
    """Be the process that the server has forked for this one, as far as its parent can tell."""
    connection = _asked(place, args, dict(os.environ), [1, 2])
    pid = int(connection.recv(_LONGEST))
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _frame: os.kill(pid, number))
    status = int(connection.recv(_LONGEST))
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _run(*_Server(sys.argv[2]).run())
    else:
        _pass_on(sys.argv[1], sys.argv[2:])
