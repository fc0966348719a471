"""A server of several processes, which end together with the process that started them."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

START_SECONDS = 60


class DidNotStart(RuntimeError):
    """A process ended early, or does not answer; the message has the end of what it said."""


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


class Daemons:
    """Named processes, each with a command and, where it has one, a port on which it answers.

    The kernel kills them when the thread that started them ends, so that nothing stays behind whatever happens to
    the tests: start them from the main thread.

    Args:
        folder: where configuration, logs and data go; ``<name>.out`` has what a process printed.

    Attributes:
        commands: what each is started with, in the order in which they are started.
        ports: where each answers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: dict[str, Sequence[str | Path]] = {}
        self.ports: dict[str, int] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def alive(self, name: str) -> bool:
        """Whether the process runs (or is stopped with SIGSTOP)."""
        return name in self._processes and self._processes[name].poll() is None

    def pid(self, name: str) -> int:
        """The process id of one that was started."""
        return self._processes[name].pid

    def start(self, *names: str) -> None:
        """Start these, or all, where they do not run yet, and wait until each answers.

        Raises:
            DidNotStart
        """
        wanted = [name for name in self.commands if (name in names or not names) and not self.alive(name)]
        for name in wanted:
            self._spawn(name)
        for name in wanted:
            self._wait(name)

    def _spawn(self, name: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            command = ["setpriv", "--pdeathsig", "KILL", *self.commands[name]]
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _wait(self, name: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while name in self.ports and not answers(self.ports[name]):
            if not self.alive(name) or time.monotonic() > deadline:
                said = (self.folder / f"{name}.out").read_text(errors="replace")[-4000:]
                raise DidNotStart(f"{type(self).__name__}: {name} does not answer: {said}")
            time.sleep(0.02)

    def kill(self, *names: str) -> None:
        """End these, or all, with SIGKILL, and wait until they are gone."""
        self._signal(signal.SIGKILL, names)
        for name in names or tuple(self._processes):
            self._processes[name].wait()

    def stop(self) -> None:
        """End all; what they were asked to keep is on disk."""
        self.kill()

    def restart(self, *names: str) -> None:
        """Kill these, or all, and start them again."""
        self.kill(*names)
        self.start(*names)

    def pause(self, *names: str) -> None:
        """Stop these, or all, with SIGSTOP: connections stay open and nobody answers."""
        self._signal(signal.SIGSTOP, names)

    def resume(self, *names: str) -> None:
        """Let these, or all, go on."""
        self._signal(signal.SIGCONT, names)

    def _signal(self, number: signal.Signals, names: Sequence[str]) -> None:
        for name in names or tuple(self._processes):
            if self.alive(name):
                self._processes[name].send_signal(number)
