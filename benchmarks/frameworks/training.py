"""What every framework trains here, and the clock that is read in its training loop."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tierstate as ts
from benchmarks.files import sync_tree
from benchmarks.state import fingerprint, tensors

WIDTH = 2048
EVERY, STEPS = 25, 74
"""A save every so many steps, of so many: two saves, the first to warm up, and time until the last is durable."""

LAYER_BYTES = 3 * 4 * WIDTH * (WIDTH + 1)
"""Of a layer's weight and bias, each with two moments of AdamW, in float32."""


class Net(nn.Module):
    """Equal linear layers, whose weights all change in every step.

    Args:
        nbytes: of the training state, at least.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(-(-nbytes // LAYER_BYTES))))

    def forward(self, x: Tensor) -> Tensor:
        """The loss of a batch, ``(batch, WIDTH)``."""
        return self.layers(x).square().mean()


def batch() -> Tensor:
    """One batch."""
    return torch.randn(1, WIDTH)


def policy(place: Path) -> ts.Policy:
    """One directory, as a user's first policy may be. The arena holds one state."""
    path = f"{place}/tier"
    return ts.Policy.parse(
        f'version: 1\narena: {{size: 1GiB}}\ntiers: {{nvme: {{type: nvme, path: "{path}", keep: {{last: 2}}}}}}\n'
    )


class Saved(NamedTuple):
    """What one save took, in seconds.

    Attributes:
        call: until the framework's call returned.
        later: by so much was the training later when the save was durable: the call, and the steps that were slower.
        durable: from the call until all was synced.
    """

    call: float
    later: float
    durable: float


class Clock:
    """Takes the times of steps and saves.

    Args:
        state: gives a fingerprint of the state.

    Attributes:
        fingerprint: of the state at the last save.
    """

    def __init__(self, state: Callable[[], str]) -> None:
        self._state, self.fingerprint = state, ""
        self._ends: list[float] = []
        self._saves: list[tuple[float, float, list[float]]] = []
        self._waiting: threading.Thread | None = None

    def step(self) -> None:
        """A step has ended."""
        self._ends.append(time.perf_counter())

    @contextmanager
    def saving(self, durable: Callable[[], object]) -> Iterator[None]:
        """Around the framework's call. ``durable`` waits, in a thread, until what it has saved is synced."""
        self.finish()
        done: list[float] = []

        def wait() -> None:
            durable()
            done.append(time.perf_counter())

        self.fingerprint = self._state()
        began = time.perf_counter()
        yield
        self._saves.append((began, time.perf_counter(), done))
        self._waiting = threading.Thread(target=wait)
        self._waiting.start()

    def finish(self) -> None:
        """Wait until the last save is durable."""
        if self._waiting is not None:
            self._waiting.join()

    def last(self) -> Saved:
        """The last save.

        Raises:
            ValueError: the training ended before it was durable.
        """
        self.finish()
        spans = [(start, done[0]) for start, _, done in self._saves]
        gaps = list(zip(self._ends, self._ends[1:], strict=False))
        quiet = statistics.median(b - a for a, b in gaps if all(b < start or a > end for start, end in spans))
        (began, durable), returned = spans[-1], self._saves[-1][1]
        during = [end for end in self._ends if began <= end <= durable]
        after = [end for end in self._ends if end > durable][:1]
        if not after:
            raise ValueError(f"{STEPS} steps are too few: the last save was not durable when they were over")
        return Saved(returned - began, after[0] - began - (len(during) + 1) * quiet, durable - began)


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Adds the seconds of the block."""
    start = time.perf_counter()
    yield
    into.append(time.perf_counter() - start)


def clocked(clock: Clock, save: Callable[..., Any], durable: Callable[[], object]) -> Callable[..., Any]:
    """A framework's function that saves, with the clock around it."""

    def call(*args: Any, **options: Any) -> Any:
        with clock.saving(durable):
            return save(*args, **options)

    return call


class Job:
    """One framework's training, with its own checkpoints or ours.

    Args:
        place: the folder of the checkpoints.
        ours: whether tierstate is switched on.
        nbytes: of the state.
    """

    title = ""
    package = ""

    def __init__(self, place: Path, ours: bool, nbytes: int) -> None:
        self.place, self.ours, self.nbytes, self.clock = place, ours, nbytes, Clock(self.state)
        self.net = Net(nbytes)
        self.optimizer: Any = None

    def train(self) -> None:
        """Train `STEPS` steps, and save after every `EVERY`."""
        raise NotImplementedError

    def resume(self) -> float:
        """Resume from the newest checkpoint; seconds from the framework's call until the training can begin."""
        raise NotImplementedError

    def adamw(self) -> Any:
        """The optimizer."""
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        return self.optimizer

    def sync(self) -> None:
        """Make durable what lies in the folder: none of the frameworks syncs its files."""
        sync_tree(self.place)

    def state(self) -> str:
        """A fingerprint of all weights and moments."""
        moments = [[m["exp_avg"], m["exp_avg_sq"]] for m in self.optimizer.state.values()]
        return fingerprint(list(tensors([list(self.net.parameters()), moments])))
