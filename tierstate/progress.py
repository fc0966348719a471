"""A progress bar for long work, where there is a terminal to show it on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

Progress = Callable[[int], None]
"""Takes the bytes read since its last call."""


def nobody(_nbytes: int) -> None:
    """Progress that nobody is told of."""


PATIENT = 1.0
"""Seconds of draining before there is a bar."""


@contextmanager
def reading(what: str, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A function that takes the bytes read since its last call; they show on standard error, if that is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda _nbytes: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    columns = SpinnerColumn(), TextColumn(what), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda nbytes: progress.advance(task, nbytes)


@contextmanager
def doing(*, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """A function that takes what is being done now; the last of it shows on standard error, if that is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda _what: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


@contextmanager
def draining() -> Iterator[Callable[[Mapping[str, int]], None] | None]:
    """A function that takes the bytes that each tier is yet to get; after a second they show on standard error, a line
    for each tier. None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with ExitStack() as shown:
        yield Drain(shown).show


class Drain:
    """Bars of what each tier is yet to get.

    Args:
        shown: what the display is to be closed with.
    """

    def __init__(self, shown: ExitStack) -> None:
        self._shown, self._start = shown, time.monotonic()
        self._update: Callable[[str, int], None] | None = None

    def show(self, left: Mapping[str, int]) -> None:
        """Show what is left by now."""
        if self._update is None and any(left.values()) and time.monotonic() - self._start >= PATIENT:
            self._update = self._open()
        for name, nbytes in left.items():
            if self._update is not None:
                self._update(name, nbytes)

    def _open(self) -> Callable[[str, int], None]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

        columns = TextColumn("saving to {task.description}"), BarColumn(), DownloadColumn(binary_units=True)
        bars = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self._shown.enter_context(bars)
        tasks: dict[str, tuple[TaskID, int]] = {}

        def update(name: str, nbytes: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=nbytes, visible=nbytes > 0), nbytes
            task, total = tasks[name]
            bars.update(task, completed=max(0, total - nbytes))

        return update
