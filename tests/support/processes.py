"""`Gang` runs the ranks of one job as real processes on this machine; each of them can be killed separately.

    with Gang(2, "support.rank_jobs:job", folder, extra="word") as gang:
        gang.wait()

Each process calls the function with the strings after it. `torch.distributed` finds what torchrun would have set in the
environment; the function begins the process group itself. What a rank prints can be waited for line by line. The ranks
are forked off a process that has imported torch already (`support.forked`), unless they are begun with another command.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.forked import Forked, path_with_tests, write_whole_lines
from support.ports import free_port

PATIENCE = 120.0


class Gang:
    """The ranks of one job.

    Args:
        size: how many.
        function: ``module:name`` below the folder of tests.
        args: strings that each gets.
        env: more of the environment, by name.
        per_rank: more of it, for each rank.
        inside: what each rank's command is begun with.
    """

    def __init__(
        self,
        size: int,
        function: str,
        *args: object,
        env: dict[str, str] | None = None,
        per_rank: list[dict[str, str]] | None = None,
        inside: list[list[str]] | None = None,
    ) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="tierstate-gang-")
        port = str(free_port())
        # Ranks that pass for several hosts need a secret from their launcher; those of one host make one themselves.
        apart = any("TIERSTATE_HOST" in one for one in per_rank or [])
        secret = {"TIERSTATE_JOB_SECRET": secrets.token_hex(32)} if apart else {}
        self.processes: list[subprocess.Popen[bytes] | Forked] = []
        for rank in range(size):
            found = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": path_with_tests(),
            }
            found |= secret | (env or {}) | (per_rank[rank] if per_rank else {})
            with self._log(rank).open("wb") as log:
                if inside is None:
                    self.processes.append(Forked(function, *args, env=found, output=log.fileno()))
                else:
                    command = [*inside[rank], sys.executable, "-u", "-W", "error", __file__, function, *map(str, args)]
                    self.processes.append(
                        subprocess.Popen(command, env=found, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                    )

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.log"

    def said(self, rank: int) -> str:
        """All that a rank has printed so far, errors included."""
        return self._log(rank).read_text(errors="replace")

    def hear(self, rank: int, word: str, seconds: float = PATIENCE) -> str:
        """Wait until a rank has printed a line that begins with this word; the rest of the line."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in self.said(rank).splitlines(keepends=True):
                if line.startswith(word) and line.endswith("\n"):
                    return line.removeprefix(word).strip()
            if self.processes[rank].poll() is not None and word not in self.said(rank):
                break
            time.sleep(0.01)
        raise AssertionError(f"rank {rank} never said {word!r}:\n{self.said(rank)[-6000:]}")

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a rank a signal."""
        self.processes[rank].send_signal(number)

    def codes(self, seconds: float = PATIENCE) -> list[int]:
        """Wait until all have ended; the exit status of each."""
        end = time.monotonic() + seconds
        try:
            return [process.wait(max(0.01, end - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError("still running:\n" + self._told()) from None

    def wait(self, seconds: float = PATIENCE) -> list[str]:
        """Wait until all have ended well; what each printed."""
        codes = self.codes(seconds)
        assert codes == [0] * self.size, f"exit status {codes}:\n{self._told()}"
        return [self.said(rank) for rank in range(self.size)]

    def _told(self) -> str:
        return "\n".join(f"rank {rank}:\n{self.said(rank)[-4000:]}" for rank in range(self.size))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._folder.cleanup()


def main() -> Any:
    """One rank."""
    from importlib import import_module

    write_whole_lines()
    module, _, name = sys.argv[1].partition(":")
    return getattr(import_module(module), name)(*sys.argv[2:])


if __name__ == "__main__":
    main()
