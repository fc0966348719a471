"""Errors of the command line: its exit status, its own options in place of Python's arguments, and JSON for machines.

Messages of the library name an argument as Python writes it. `in_options` writes the option instead. With ``--json``
every line on standard error is one JSON object: warnings ``{"warning": ...}``, and at the end ``{"error": {...}}``.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import typer

from tierstate.manifest.errors import TierstateError
from tierstate.manifest.printable import escape_json, escape_lines

FAILED = 2
"""Exit status of a command that failed."""


INTERRUPTED = 130
"""Exit status of a command that was interrupted, as shells have it."""


OPTIONS = {
    "--skip-values (skip_values=True)": "--skip-values",
    "--force (force=True)": "--force",
    "on_damage='older'": "--older",
    "allow_lossy=True": "--allow-lossy",
    "partial=True": "--partial",
    "force=True": "--force",
    "only=...": "--only",
    "`only`": "--only",
    "into_run=": "--into-run",
    "into=": "--into",
    "(to=)": "(--to)",
    "rename=ts.unwrapped": "--rename unwrapped",
}
"""Each argument as the library's messages write it, and the option that stands for it."""


_USAGE: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The base of all usage errors, which typer does not export."""


def in_options(text: str) -> str:
    """A message with options of the command line in place of Python's arguments."""
    for argument, option in OPTIONS.items():
        text = text.replace(argument, option)
    return text


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for JSON; told from its words, since it may not be possible to parse it."""
    return "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)


def prepare_streams(*, as_json: bool) -> None:
    """Let no stream of the process end a command: one that is closed (``>&-``) takes everything, and in one whose
    encoding is not UTF-8 (as its locale is) characters that it has not are escaped, in JSON as JSON has it."""
    codecs.register_error("tierstate-json", _as_json_escapes)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # as where it has been opened on something else meanwhile
                stream.reconfigure(errors="tierstate-json" if as_json else "backslashreplace")


def _as_json_escapes(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def run(call: Callable[[], Any], *, as_json: bool) -> int:
    """Run a command; prints its error, if it fails, and returns the exit status."""
    try:
        with _warnings_as_json() if as_json else _unchanged():
            return int(call() or 0)
    except typer.Abort:
        return _fail("Aborted", "interrupted", as_json, INTERRUPTED)
    except _USAGE as error:
        return _usage(error, as_json)
    except BrokenPipeError:  # as with `| head`; what is still buffered must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (TierstateError, ValueError, OSError, ImportError) as error:
        return _fail(type(error).__name__, str(error), as_json, FAILED, _more(error))
    except RecursionError as error:  # as attributes of leaves may be made up to do
        return _fail(type(error).__name__, "what was read is nested too deeply to be shown", as_json, FAILED)
    except Exception as error:  # a defect of ours: a machine gets JSON also then
        if not as_json:
            raise
        trace = {"traceback": traceback.format_exc()}
        return _fail(type(error).__name__, str(error), as_json, FAILED, trace)


def _usage(error: Any, as_json: bool) -> int:
    status = int(error.exit_code)
    if not as_json:
        error.show()
        return status
    usage = {"usage": error.ctx.get_usage()} if getattr(error, "ctx", None) is not None else {}
    return _fail("UsageError", error.format_message() or "say a command", as_json, status, usage)


def _more(error: BaseException) -> dict[str, Any]:
    """Fields of an error beside its message: the tier and key that it is about, and notes."""
    found = {name: str(value) for name in ("tier", "key", "filename") if (value := getattr(error, name, None))}
    notes = [in_options(note) for note in getattr(error, "__notes__", ())]
    return found | ({"notes": notes} if notes else {})


def _fail(kind: str, message: str, as_json: bool, status: int, more: dict[str, Any] | None = None) -> int:
    message, more = in_options(message), more or {}
    if as_json:
        told = {"error": {"type": kind, "message": message, "status": status, **more}}
        print(escape_json(json.dumps(told, ensure_ascii=False)), file=sys.stderr)
    else:
        notes = "".join(f"\n{note}" for note in more.get("notes", ()))
        print(escape_lines(f"tierstate: {message}{notes}"), file=sys.stderr)
    return status


class _JsonLines(logging.Handler):
    """Prints the library's warnings as a JSON object a line."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(in_options(record.getMessage()), as_json=True)


@contextmanager
def _warnings_as_json() -> Iterator[None]:
    logger, handler = logging.getLogger("tierstate"), _JsonLines(logging.WARNING)
    logger.addHandler(handler)
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


def warn(message: str, *, as_json: bool) -> None:
    """Print a warning on standard error."""
    line = escape_json(json.dumps({"warning": message}, ensure_ascii=False)) if as_json else escape_lines(message)
    print(line, file=sys.stderr)
