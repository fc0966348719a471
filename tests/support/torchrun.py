"""Jobs started by torchrun, with the output of each rank in a separate file; any rank can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from support.forked import TESTS, Forked, path_with_tests, script

PATIENCE = 120.0

LAUNCHER = """
import os
os.setsid()
from torch.distributed.run import main
main()
"""


class Torchrun:
    """One job of ``torchrun --standalone``.

    Args:
        size: how many ranks.
        function: ``module:name`` below the folder of tests.
        args: strings that each rank gets.
        forked: whether torchrun and the ranks are forked off a process that has imported torch already
            (`support.forked`), rather than started as a user starts them.
    """

    def __init__(self, size: int, function: str, *args: object, forked: bool = True) -> None:
        self.size = size
        self._logs = tempfile.TemporaryDirectory(prefix="tierstate-torchrun-")
        options = ["--standalone", "--nproc-per-node", size, "--redirects", 3, "--log-dir", self._logs.name]
        rank = script(function) if forked else [TESTS / "support/processes.py", function]
        words = list(map(str, [*options, *rank, *args]))
        env = os.environ | {"PYTHONPATH": path_with_tests(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._agent: subprocess.Popen[bytes] | Forked
        with (Path(self._logs.name) / "torchrun.log").open("wb") as log:
            if forked:
                self._agent = Forked("-c", LAUNCHER, *words, env=env, output=log.fileno())
            else:
                self._agent = subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *words],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def said(self, rank: int) -> list[str]:
        """The whole lines that a rank has printed so far, without its errors."""
        found = [path.read_text() for path in Path(self._logs.name).glob(f"*/attempt_0/{rank}/stdout.log")]
        return [line.rstrip("\n") for text in found for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def hear(self, rank: int, word: str) -> str:
        """Wait until a rank has printed a line that begins with this word; the rest of the line."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            ended = self._agent.poll() is not None
            for line in self.said(rank):
                if line.startswith(word):
                    return line.removeprefix(word).strip()
            if ended:
                break
            time.sleep(0.02)
        raise AssertionError(f"rank {rank} never said {word!r}:\n{self._all()}")

    def kill(self, number: int) -> None:
        """SIGKILL one of the ranks."""
        children = self._children()
        assert len(children) == self.size, f"torchrun has {len(children)} children, and not {self.size}"
        os.kill(children[number], signal.SIGKILL)

    def _children(self) -> list[int]:
        found = Path(f"/proc/{self._agent.pid}/task/{self._agent.pid}/children").read_text().split()
        return [int(pid) for pid in found]

    def code(self) -> int:
        """Wait until it has ended; torchrun's exit status."""
        return self._agent.wait(PATIENCE)

    def wait(self) -> None:
        """Wait until all have ended well."""
        assert self.code() == 0, self._all()

    def _all(self) -> str:
        logs = sorted(Path(self._logs.name).rglob("*.log"))
        return "\n".join(f"{log.relative_to(self._logs.name)}:\n{log.read_text()[-3000:]}" for log in logs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._agent.poll() is None:
            ranks = self._children()
            self._agent.kill()
            for pid in ranks:  # torchrun gives each a session of its own
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._agent.wait()
        self._logs.cleanup()
