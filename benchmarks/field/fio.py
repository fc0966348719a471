"""The limit of the disk once more, by fio."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.competitor import Competitor, Pending
from benchmarks.field.disk import DEPTH, LENGTH
from benchmarks.state import State


class Fio(Competitor):
    """fio's own seconds, without those it takes to start."""

    title = "O_DIRECT, fio"
    ways = (title,)
    scattered = False
    note = "io_uring from malloc in huge pages (glibc.malloc.hugetlb=1), end_fsync; its own clock"

    @classmethod
    def version(cls) -> str:
        program = shutil.which("fio")
        if program is None:
            return ""
        return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()

    def save(self, state: State, number: int) -> Pending:
        return Pending(seconds=run_fio("write", self.place(number), state.nbytes))

    def restore(self, state: State, number: int, way: str) -> float:
        return run_fio("read", self.place(number), self.place(number).stat().st_size)


def run_fio(way: str, path: Path, nbytes: int) -> float:
    """Seconds in which fio writes or reads a file of so many bytes, by its own clock."""
    size = nbytes // LENGTH * LENGTH
    command = (
        f"fio --name=bench --rw={way} --bs={LENGTH} --iodepth={DEPTH} --size={size} --ioengine=io_uring --direct=1 "
        f"--end_fsync=1 --fallocate=keep --invalidate=1 --output-format=json --filename"
    ).split()
    done = subprocess.run(
        [*command, str(path)],
        env=os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)["jobs"][0]["job_runtime"] / 1000 * nbytes / size
