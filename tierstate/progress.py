"""A progress bar for long work, where there is a terminal to show it on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
