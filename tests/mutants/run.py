"""Mutation testing: single changes of the code that a good test suite must notice, each applied and tested by itself.

    python tests/mutants/run.py [--only GLOB ...] [--jobs N] [--check] [--no-baseline] [--results FILE]

The changes are the tables ``[[mutant]]`` of the ``*.toml`` files beside this one: ``name``, ``what`` (what
goes wrong by it), ``file``, ``old`` (text that stands in the file exactly once), ``new``, and ``tests``
(arguments of pytest: the fewest that should fail). Each change is made in a copy of the checkout, its tests
are run, and it is taken back. A change is *killed* when a test fails, hangs or crashes, and has *survived* when all
pass: then a test is missing. Before that, all named tests must pass without any change.

Exit status: 0 all were killed; 1 some survived; 2 a change does not apply, or its tests do not run.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
TIMEOUT = 180.0
"""Seconds for the tests of one change; what takes longer hangs, and counts as killed."""

OUTCOMES = {0: "survived", 1: "killed"}
"""By pytest's exit status; any other one above 0 says that the tests did not run."""


class Mutant(NamedTuple):
    """One change, as the lists have it; ``source`` is the list."""

    source: str
    name: str
    what: str
    file: str
    old: str
    new: str
    tests: list[str]

    def apply(self, root: Path) -> str:
        """The file's text with the change.

        Raises:
            ValueError: the text to be changed does not stand there exactly once.
        """
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.source}: {self.name}: `old` stands {text.count(self.old)} times in {self.file}")
        if self.old == self.new:
            raise ValueError(f"{self.source}: {self.name}: `old` and `new` are the same")
        return text.replace(self.old, self.new)


def read_mutants(only: Sequence[str] = ()) -> list[Mutant]:
    """All changes of all lists, or those whose name or list matches a glob.

    Raises:
        ValueError: two have the same name.
    """
    found = []
    for path in sorted(HERE.glob("*.toml")):
        found += [Mutant(path.stem, **table) for table in tomllib.loads(path.read_text())["mutant"]]
    for name, count in Counter(m.name for m in found).items():
        if count > 1:
            raise ValueError(f"{count} changes are called {name!r}")
    return [m for m in found if not only or any(fnmatch.fnmatch(n, o) for o in only for n in (m.name, m.source))]


def check(mutants: Sequence[Mutant], root: Path = CHECKOUT) -> list[str]:
    """What is wrong with the lists: changes that do not apply, or name no test that is there."""
    wrong = []
    for mutant in mutants:
        try:
            compile(mutant.apply(root), mutant.file, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            wrong.append(f"{mutant.source}: {mutant.name}: {error}")
        files = [t.split("::")[0] for t in mutant.tests if t.startswith("tests/")]
        wrong += [f"{mutant.source}: {mutant.name}: there is no {f}" for f in files if not (root / f).exists()]
        if not files:
            wrong.append(f"{mutant.source}: {mutant.name}: names no tests")
    return wrong


def copy_checkout(place: Path) -> Path:
    """The files that git tracks or would, as they are now."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        source, target = CHECKOUT / name, place / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return place


def run_tests(root: Path, tests: Sequence[str], timeout: float = TIMEOUT) -> tuple[int | None, str]:
    """pytest's exit status, or None where it took too long; and its last lines."""
    env = os.environ | {"PYTHONPATH": str(root), "HYPOTHESIS_PROFILE": "mutants"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    with subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as job:
        timer = threading.Timer(timeout, lambda: os.killpg(job.pid, 9))
        timer.start()
        assert job.stdout is not None
        output = job.stdout.read()
        status = job.wait()
        late = timer.finished.is_set()
        timer.cancel()
    return (None if status < 0 and late else status), output[-2000:]


class Runner:
    """Runs changes in copies of the checkout, one for each job."""

    def __init__(self, jobs: int, place: Path) -> None:
        self._roots: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            self._roots.put(copy_checkout(place / str(number)))
        self._pool = ThreadPoolExecutor(jobs)
        self._lock, self._time = threading.Lock(), int(time.time())

    def _try(self, mutant: Mutant) -> dict[str, Any]:
        root, began = self._roots.get(), time.monotonic()
        path = root / mutant.file
        text = path.read_text()
        try:
            self._write(path, mutant.apply(root))
            status, output = run_tests(root, mutant.tests)
        finally:
            self._write(path, text)
            self._roots.put(root)
        # No status: they hang; a negative one: the interpreter has crashed.
        outcome = "killed" if status is None or status < 0 else OUTCOMES.get(status, "error")
        seconds = round(time.monotonic() - began, 1)
        return {"list": mutant.source, "name": mutant.name, "outcome": outcome, "seconds": seconds, "output": output}

    def _write(self, path: Path, text: str) -> None:
        """Write a file with a time of its own, so that no compiled code of an earlier text counts as its own."""
        path.write_text(text)
        with self._lock:
            self._time += 2
            os.utime(path, (self._time, self._time))

    def run(self, mutants: Sequence[Mutant]) -> Iterator[dict[str, Any]]:
        """The outcome of each, in order."""
        yield from self._pool.map(self._try, mutants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="names of changes or of lists")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--check", action="store_true", help="only see whether each change applies")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a change first")
    parser.add_argument("--results", type=Path, help="write the outcomes as JSON")
    args = parser.parse_args()
    mutants = read_mutants(args.only)
    wrong = check(mutants)
    if wrong or args.check:
        print(*wrong, f"{len(mutants)} changes, {len(wrong)} faults in their lists", sep="\n")
        return 2 if wrong else 0
    with tempfile.TemporaryDirectory(prefix="tierstate-mutants-") as folder:
        runner = Runner(args.jobs, Path(folder))
        if not args.no_baseline and not passes_unchanged(mutants, Path(folder) / "0", args.jobs):
            return 2
        return report(runner.run(mutants), len(mutants), args.results)


def passes_unchanged(mutants: Sequence[Mutant], root: Path, jobs: int) -> bool:
    """Whether all named tests pass without a change."""
    tests = sorted({test for mutant in mutants for test in mutant.tests if test.startswith("tests/")})
    command = ["-n", str(jobs), "--dist", "loadgroup", *tests]
    status, output = run_tests(root, command, timeout=TIMEOUT * 12)
    if status:
        print("the tests do not pass without a change:", output, sep="\n")
    return status == 0


def report(results: Iterator[dict[str, Any]], count: int, path: Path | None) -> int:
    """Print each outcome as it comes, then the survivors."""
    found = []
    for result in results:
        found.append(result)
        print(f"{len(found):4}/{count} {result['outcome']:8} {result['seconds']:6.1f} s  {result['name']}", flush=True)
        if path is not None:
            path.write_text(json.dumps(found, indent=1))
    totals = Counter(result["outcome"] for result in found)
    for result in found:
        if result["outcome"] != "killed":
            print(f"\n{result['outcome']}: {result['list']}: {result['name']}\n{result['output'][-600:]}")
    print(", ".join(f"{totals[outcome]} {outcome}" for outcome in ("killed", "survived", "error")))
    return 2 if totals["error"] else 1 if totals["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
