"""Progress bars and status lines for long work, shown on standard error where that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from tierstate.manifest.printable import escape_controls
from tierstate.tiers.units import rough_duration, rough_size

if TYPE_CHECKING:
    from rich.console import Console


Progress = Callable[[int], None]
"""Takes the bytes read, or the objects deleted, since its last call."""


class _NoProgress:
    """Progress that is not shown."""

    def __call__(self, _done: object) -> None:
        pass

    def __repr__(self) -> str:
        return "no_progress"  # as `help` shows it, where it is a default


no_progress = _NoProgress()


TOLD_EVERY = 0.25
"""Seconds between two texts of a `Pace`."""


class Pace:
    """Says how far a piece of work is, how fast it goes and how long it will take, in texts.

    Args:
        what: is being done.
        tell: takes each text.
        total: how much is to be done.
        unit: what is counted; bytes where it is empty.
    """

    def __init__(self, what: str, tell: Callable[[str], object], total: int, unit: str = "") -> None:
        self._what, self._tell, self._total, self._unit = what, tell, total, unit
        self._start = time.monotonic()
        self._done, self._next = 0, 0.0

    def __call__(self, done: int) -> None:
        """Add what was done since the last call."""
        self._done += done
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + TOLD_EVERY
        rate = self._done / max(1e-3, now - self._start)
        left = max(0, self._total - self._done)
        ends = f", {rough_duration(left / rate)} left" if rate else ""
        self._tell(f"{self._what}: {self._text(self._done)} of {self._text(self._total)}, {self._text(rate)}/s{ends}")

    def _text(self, amount: float) -> str:
        return f"{amount:.0f} {self._unit}" if self._unit else rough_size(amount)


def _on_terminal() -> bool:
    """Whether standard error is a terminal. A daemon may have none (None), a program may have closed it, or put an
    object of its own there that has no `isatty`: then nothing is shown, and the work goes on."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError, OSError):
        return False


class _Terminal:
    """Standard error as a terminal that may go away, as with its window, and does not end the work by that."""

    def __init__(self) -> None:
        self._stream = sys.stderr  # before rich puts its own object there

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _console() -> Console:
    """A console of rich on standard error."""
    from rich.console import Console

    return Console(file=cast(TextIO, _Terminal()))


BAR_DELAY = 1.0
"""Seconds that `close` waits for saves before it shows bars."""


@contextmanager
def byte_progress(
    what: str, *, shown: bool = True, total: Callable[[], int | None] = lambda: None
) -> Iterator[Callable[[int], None]]:
    """Gives a function that adds the bytes read since its last call to a display on standard error, if a terminal.

    Args:
        what: is being done.
        shown: whether to show anything.
        total: returns how many bytes there will be at most, if that is known; then there is a bar, and the time left.
    """
    if not shown or not _on_terminal():
        yield lambda _nbytes: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    known = total()
    shape = SpinnerColumn() if known is None else BarColumn()
    columns: list[ProgressColumn] = [shape, TextColumn(what), DownloadColumn(binary_units=True), TransferSpeedColumn()]
    columns += [] if known is None else [TimeRemainingColumn()]
    with Progress(*columns, console=_console(), transient=True) as progress:
        task = progress.add_task(what, total=known)
        yield lambda nbytes: progress.advance(task, nbytes)


@contextmanager
def status_line(*, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Gives a function that takes a text and shows it as the current step on standard error, if that is a terminal."""
    if not shown or not _on_terminal():
        yield lambda _what: None
        return
    from rich.text import Text

    with _console().status("") as status:
        yield lambda what: status.update(Text(escape_controls(what)))


@contextmanager
def drain_progress() -> Iterator[Callable[[Mapping[str, int]], None] | None]:
    """Gives a function that takes, by tier, the bytes still to be written. After a second it shows them as bars on
    standard error, one for each tier. Gives None if that is not a terminal. Used by `Checkpointer.close`."""
    if not _on_terminal():
        yield None
        return
    with ExitStack() as shown:
        yield DrainBars(shown).show


class DrainBars:
    """One progress bar per tier, for the bytes still to be written.

    Args:
        shown: the exit stack that closes the display.
    """

    def __init__(self, shown: ExitStack) -> None:
        self._shown, self._start = shown, time.monotonic()
        self._update: Callable[[str, int], None] | None = None

    def show(self, left: Mapping[str, int]) -> None:
        """Update the bars: ``left`` is the number of bytes still to be written, by tier."""
        if self._update is None and any(left.values()) and time.monotonic() - self._start >= BAR_DELAY:
            self._update = self._open()
        for name, nbytes in left.items():
            if self._update is not None:
                self._update(name, nbytes)

    def _open(self) -> Callable[[str, int], None]:
        from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

        columns = TextColumn("saving to {task.description}"), BarColumn(), DownloadColumn(binary_units=True)
        bars = Progress(*columns, TimeRemainingColumn(), console=_console(), transient=True)
        self._shown.enter_context(bars)
        tasks: dict[str, tuple[TaskID, int]] = {}

        def update(name: str, nbytes: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=nbytes, visible=nbytes > 0), nbytes
            task, total = tasks[name]
            bars.update(task, completed=max(0, total - nbytes))

        return update
