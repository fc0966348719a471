"""A check of a training loop: killed and resumed, does it go on exactly as if it had never stopped?

`resumes_exactly` runs the loop in processes of its own, once as a whole and once killed by SIGKILL at some steps, and
compares each loss bit for bit. The loop says what it does with `record`, which does nothing in other runs.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tierstate.manifest.chunk import empty_buffer, to_bytes
from tierstate.providers.base import Provider
from tierstate.providers.registry import REGISTRY
from tierstate.providers.tree.walk import StateWalk
from tierstate.providers.values.stateful import Rng

LOG = "TIERSTATE_RESUME_LOG"
"""Environment variable: where `record` writes; without it, it does nothing."""


KILL = "TIERSTATE_RESUME_KILL"
"""Environment variable: the step at which `record` of a loss kills the process."""


LOSS = "loss"


_SHOWN = 60


_LISTED = 12


_PIECE = 16 << 20


class NotExact(AssertionError):
    """A resumed run is not the run that was not interrupted. The message says where they part, and in what."""


@dataclass(frozen=True)
class ExactResume:
    """The result of `resumes_exactly`.

    Attributes:
        steps: how many losses were compared.
        resumed_at: for each kill, the first step that was made after it.
    """

    steps: int
    resumed_at: tuple[int, ...]


def record(step: int, /, **values: Any) -> None:
    """Say what a loop has at a point of a step: under any names, ``loss`` among them once per step.

    Call it at the beginning of a step with all that goes on from step to step (``model=model, optimizer=optimizer,
    scheduler=scheduler, loader=loader``), and at its end with ``loss=loss, batch=batch``. Values are what a state can
    be; only digests of them are written. The process's random generators are always among them. Takes as long as a
    copy of the values, and nothing where no check runs.
    """
    if (log := os.environ.get(LOG)) is None:
        return
    state = {**values, "generators": Rng().state_dict()}
    line = json.dumps({"step": step, "loss": LOSS in values, "leaves": _digests(state)})
    rank = os.environ.get("RANK", "0")
    with open(f"{log}.{rank}", "a") as file:
        file.write(line + "\n")
    if LOSS in values and rank == "0" and os.environ.get(KILL) == str(step):
        os.kill(os.getpid(), signal.SIGKILL)


def _digests(state: Any) -> dict[str, tuple[str, str]]:
    """By name of a leaf its digest, and what it is where that is short."""
    found = {}
    for at in StateWalk(REGISTRY, lambda _path: True, lenient=True).take(state).walk():
        if at.provider is not None:
            found[at.name] = (_digest(at.provider), _shown(at.value))
    return found


def _digest(provider: Provider) -> str:
    spec = provider.spec
    digest = hashlib.blake2b(repr((spec.kind, spec.dtype, spec.shape)).encode(), digest_size=16)
    for part in provider.parts:
        for _, nbytes, fill in part.chunks(_PIECE):
            out = empty_buffer(nbytes)
            if (event := fill(out)) is not None:
                event.synchronize()
            digest.update(to_bytes(out))
    return digest.hexdigest()


def _shown(value: Any) -> str:
    """The value as text if that is short; for tensors if they have one element."""
    if getattr(value, "numel", lambda: 0)() == 1:
        value = value.item()
    text = repr(value) if isinstance(value, int | float | str | bool | None) else ""
    return text if len(text) <= _SHOWN else ""


def resumes_exactly(
    train: str | Sequence[str] | Callable[[str], object],
    *,
    kill_at: Sequence[int],
    folder: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> ExactResume:
    """Check that a training loop which is killed and started again makes the same losses, bit for bit.

    The loop is run as a whole, and once more, in another folder, killed by SIGKILL right after it recorded the loss of
    each step of ``kill_at``, and started again each time. Each run is a process of its own.

    Args:
        train: the loop: ``"module:function"`` or ``"file.py:function"``, or such a function itself, which is called
            with the folder; or a command, in which ``{folder}`` is replaced. It saves into the folder, resumes from
            there, calls `record`, and ends by itself. With several ranks (torchrun) rank 0 is killed; each rank's
            losses are compared.
        kill_at: steps, rising; each must come after something was saved.
        folder: where the runs' folders are made; by default a temporary one, which is deleted.
        env: further environment variables.
        timeout: seconds that one process may take.

    Raises:
        NotExact: a loss differs, or a step is missing; the message says at which step, and which recorded leaves and
            generators differed first.
        ValueError: a run recorded no losses, or nothing had been saved when it was killed.
        RuntimeError: a process failed; with the end of its output.
        TimeoutError: a process took too long.
    """
    if not kill_at or list(kill_at) != sorted(set(kill_at)):
        raise ValueError(f"kill_at={list(kill_at)}: right are one or more steps, rising")
    place = Path(tempfile.mkdtemp(prefix="tierstate-resume-") if folder is None else folder)
    try:
        whole = _Run(train, place / "whole", env, timeout)
        reference = whole.start(None)
        killed = _Run(train, place / "killed", env, timeout)
        pieces = [killed.start(step) for step in (*kill_at, None)]
        return _compared(reference, pieces, kill_at)
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)


class _Point(NamedTuple):
    """What one call of `record` wrote.

    Attributes:
        number: which call of this step it is, in this process.
        leaves: name -> digest, and what it is where that is short.
    """

    step: int
    number: int
    has_loss: bool
    leaves: Mapping[str, Sequence[str]]

    @property
    def loss(self) -> Sequence[str]:
        """The digest of the loss, and the loss."""
        return self.leaves[LOSS]


_Ranks = dict[str, list[_Point]]
"""What each rank recorded in one process, in order."""


class _Run:
    """One folder, and the processes that train in it one after the other."""

    def __init__(
        self,
        train: str | Sequence[str] | Callable[[str], object],
        folder: Path,
        env: Mapping[str, str] | None,
        timeout: float,
    ) -> None:
        folder.mkdir(parents=True)
        self._folder, self._timeout, self._started = folder, timeout, 0
        self._env = {**os.environ, **(env or {})}
        state = folder / "state"
        state.mkdir()
        self._command = _command(train, str(state))

    def start(self, kill: int | None) -> _Ranks:
        """Run the loop until this step, or to its end; what it recorded."""
        self._started += 1
        log = self._folder / f"log-{self._started}"
        env = self._env | {LOG: str(log)} | ({} if kill is None else {KILL: str(kill)})
        with (self._folder / f"output-{self._started}").open("w+b") as output:
            process = subprocess.Popen(
                self._command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{self._command}: not at its end after {self._timeout:g} s") from None
            finally:
                _kill_group(process)
            output.seek(0)
            text = output.read().decode(errors="replace")[-4000:]
        points = _read(log)
        last = max((point.step for rank in points.values() for point in rank if point.has_loss), default=None)
        reached = kill is not None and last is not None and last >= kill
        if status and not reached:
            raise RuntimeError(f"{self._command}: ended with status {status}:\n{text}")
        if last is None:
            raise ValueError(f"{self._command}: recorded no loss (tierstate.testing.record(step, loss=loss)):\n{text}")
        if kill is not None and not reached:
            raise ValueError(
                f"{self._command}: ended at step {last}, before it was to be killed at step {kill}:\n{text}"
            )
        return points


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what a process started and left behind: workers of loaders, other ranks."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _command(train: str | Sequence[str] | Callable[[str], object], folder: str) -> list[str]:
    if callable(train):
        if "<" in train.__qualname__:
            raise ValueError(
                f"{train.__qualname__}: a lambda, or a function within another one, cannot be called by another process"
            )
        train = f"{inspect.getfile(train)}:{train.__qualname__}"
    if isinstance(train, str):
        if ":" not in train:
            raise ValueError(f"{train!r}: right are 'module:function', 'file.py:function', and a list for a command")
        return [sys.executable, "-m", "tierstate.testing", train, folder]
    return [part.replace("{folder}", folder) for part in train]


def _read(log: Path) -> _Ranks:
    found: _Ranks = {}
    for file in sorted(log.parent.glob(f"{log.name}.*")):
        numbers: dict[int, int] = defaultdict(int)
        points = found[file.suffix[1:]] = []
        for line in file.read_text().splitlines():
            said = json.loads(line)
            points.append(_Point(said["step"], numbers[said["step"]], said["loss"], said["leaves"]))
            numbers[said["step"]] += 1
    return found


def _compared(reference: _Ranks, pieces: Sequence[_Ranks], kill_at: Sequence[int]) -> ExactResume:
    for points in reference.values():
        if len({point.step for point in points if point.has_loss}) != sum(point.has_loss for point in points):
            raise ValueError("the uninterrupted run recorded several losses of one step")
    steps, resumed_at = 0, []
    noise = {rank: _noise(reference.get(rank, []), points) for rank, points in pieces[0].items()}
    for number, piece in enumerate(pieces):
        when = f"after the kill at step {kill_at[number - 1]}" if number else ""
        for rank, points in piece.items():
            if (whole := reference.get(rank)) is None:
                raise ValueError(f"rank {rank} recorded nothing in the uninterrupted run")
            if number and points[0].step <= whole[0].step:
                raise ValueError(
                    f"{when} the loop began again at step {points[0].step}: nothing was durable by then, or it was not "
                    "restored. Kill later, wait for a save, or call resume at the beginning"
                )
            told = when if len(piece) == 1 else f"{when} rank {rank}".strip()
            steps += _compare(whole, points, told, noise.get(rank, set()) if number else set())
            _check_end(whole, points, kill_at[number] if number < len(kill_at) else None, when)
        if number:
            resumed_at.append(min(points[0].step for points in piece.values()))
    return ExactResume(steps, tuple(resumed_at))


def _noise(whole: Sequence[_Point], points: Sequence[_Point]) -> set[str]:
    """Names that differ between two fresh runs: generators that the loop neither seeds nor uses, for example."""
    pairs = zip(whole, points, strict=False)
    return {name for one, other in pairs for name in _differing(one, other)}


def _compare(whole: Sequence[_Point], points: Sequence[_Point], when: str, noise: set[str]) -> int:
    """Compare the losses of one process with those of the uninterrupted run; how many there are.

    Args:
        noise: names that explain nothing.
    """
    there = {(point.step, point.number): point for point in whole}
    losses = {point.step: point for point in whole if point.has_loss}
    compared = 0
    for point in points:
        if not point.has_loss:
            continue
        other = losses.get(point.step)
        if other is None or other.loss[0] != point.loss[0]:
            raise NotExact(_told(point, other, _first_difference(there, points, point, noise), when))
        compared += 1
    return compared


def _check_end(whole: Sequence[_Point], points: Sequence[_Point], kill: int | None, when: str) -> None:
    made = [point.step for point in points if point.has_loss]
    right = [point.step for point in whole if point.has_loss and made[0] <= point.step <= (kill or point.step)]
    if kill is None and made != right:
        lacking = sorted(set(right) - set(made))
        raise NotExact(f"{when} the loop made steps {made[0]} to {made[-1]}; steps {lacking[:_LISTED]} are missing")


class _Difference(NamedTuple):
    """The first point at which something differs, and the names of what does."""

    point: _Point
    names: list[str]


def _first_difference(
    there: Mapping[tuple[int, int], _Point], points: Sequence[_Point], until: _Point, noise: set[str]
) -> _Difference | None:
    for point in points:
        other = there.get((point.step, point.number))
        names = [] if other is None else [name for name in _differing(point, other) if name not in noise]
        if names and other is not None:
            shown = [_line(name, point.leaves.get(name), other.leaves.get(name)) for name in names]
            return _Difference(point, shown)
        if point is until:
            break
    return None


def _differing(point: _Point, other: _Point) -> list[str]:
    names = [*other.leaves, *(name for name in point.leaves if name not in other.leaves)]
    return [n for n in names if point.leaves.get(n, [""])[0] != other.leaves.get(n, [""])[0]]


def _line(name: str, here: Sequence[str] | None, there: Sequence[str] | None) -> str:
    if here is None or there is None:
        return f"{name}: {'not' if here is None else 'only'} in the resumed run"
    return f"{name}: {here[1]}, uninterrupted {there[1]}" if here[1] and there[1] else name


def _told(point: _Point, other: _Point | None, first: _Difference | None, when: str) -> str:
    expected = "is no step of the uninterrupted run" if other is None else f"uninterrupted {other.loss[1] or 'another'}"
    lines = [f"{when or 'before any kill'} the loss of step {point.step} is {point.loss[1] or 'another'}, {expected}"]
    if not when:
        lines.append("so two fresh runs of the loop differ already: seed its generators, and use deterministic kernels")
    if first is not None:
        lines.append(f"what differs first, at point {first.point.number} of step {first.point.step}:")
        lines += [f"  {name}" for name in first.names[:_LISTED]]
        lines += [f"  and {len(first.names) - _LISTED} more"] if len(first.names) > _LISTED else []
        if any(name.startswith("generators.") for name in first.names):
            lines.append(
                "generators: put ts.Rng() into the state; and what draws between a restore and the next step makes "
                "other numbers, as a new iterator of a DataLoader does: iterate over ts.Loader(loader)"
            )
    return "\n".join(lines)


def _main(train: str, folder: str) -> None:
    """Call the loop."""
    where, _, name = train.rpartition(":")
    if where.endswith(".py"):
        sys.path.insert(0, str(Path(where).resolve().parent))
        found: Any = runpy.run_path(where)[name]
    else:
        sys.path.insert(0, os.getcwd())
        found = getattr(importlib.import_module(where), name)
    found(folder)


if __name__ == "__main__":
    _main(*sys.argv[1:])
