"""Preemption: a signal such as SIGTERM says that this process will be ended soon; saves under way are finished first.

A scheduler (Slurm, Kubernetes, a cloud's spot instances) sends a signal, waits, and then kills. `Preemption` handles
the signals of a policy's ``preemption``: the newest version is committed on the nearest persistent tier, then on as
many others as the grace allows. What is still missing is logged, and then the previous handler is called.

A signal handler may interrupt the main thread anywhere, also while it holds locks. So ours only notes the signal, and
wakes a thread that was started before.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol, TypeAlias

from tierstate.manifest.arguments import short_repr
from tierstate.manifest.errors import PolicyError
from tierstate.tiers.policy.errors import validate_keys
from tierstate.tiers.policy.models import PreemptionKeys
from tierstate.tiers.policy.yaml import PolicyErrors

log = logging.getLogger("tierstate")


RAISE_INTERVAL = 0.25
"""Seconds until a signal whose handler has not run is raised again."""


LOOK_INTERVAL = 0.02
"""Seconds between two looks at the saves under way, once a signal has come."""


class Hurried(Protocol):
    """What is done with the saves under way: the part of `SavePipeline` that is needed here.

    Attributes:
        ending: the program knows that it will be ended: all further saves go to the nearest persistent tier.
    """

    ending: bool

    def hurry(self, end: float) -> None:
        """The process ends at this time of `time.monotonic`: commit the newest version on a persistent tier first."""

    def bring_newest(self) -> None:
        """Copy the newest version to a persistent tier, together with all ranks."""

    def unfinished(self) -> str:
        """The saves under way, for messages; empty if there are none."""

    def left_behind(self) -> str:
        """What becomes of the versions that some tier still lacks; empty if there are none."""


class Preemption:
    """Watches for the signals that announce the end of this process, for one `Checkpointer`.

    A program that reads `preempted` has the whole grace for a last save, and ends by itself: the previous handler is
    called when the Checkpointer is closed, if it is a function. For any other program the previous handler is called,
    or the default action taken, as soon as the saves under way are finished.

    Args:
        keys: the signals, and the grace.
        saves: the saves under way.
        is_saving: returns whether a call of `save` has not returned yet, which may not be known to ``saves`` so far.

    Attributes:
        over: nothing more is done for a signal: the previous handler may be called.
        polled: whether the program has read `preempted`.
        heard: whether the handler has run since then.

    Raises:
        PolicyError: signals cannot be handled here; the message says why.
    """

    def __init__(self, keys: PreemptionKeys, saves: Hurried, is_saving: Callable[[], bool] = lambda: False) -> None:
        self._grace, self._saves, self._is_saving = keys.grace, saves, is_saving
        self._numbers = [signal.Signals[name] for name in keys.signals]
        self._signal: signal.Signals | None = None
        self._began: float | None = None
        self.over = self.polled = self.heard = self._closing = self._raised = False
        self._wake = threading.Lock()  # not a `Latch`, whose waits wake up again and again
        self._wake.acquire()
        self._thread = threading.Thread(target=self._run, name="tierstate-preemption", daemon=True)
        _watch(self._numbers, self)
        try:
            self._thread.start()
        except BaseException:  # `ulimit -u`: a handler that wakes nobody would have the signal do nothing
            _forget(self._numbers, self)
            raise

    def preempted(self) -> bool:
        """Whether a signal has come. A program that asks is expected to end by itself."""
        self.polled = True
        self._saves.ending = self._signal is not None
        return self._saves.ending

    @property
    def left(self) -> float | None:
        """Seconds of the grace that are left; None if this process is not preempted."""
        return None if self._began is None else max(0.0, self._began + self._grace - time.monotonic())

    def note(self, number: int) -> None:
        """A signal has come: called by its handler, at any moment of the main thread, so it takes no lock."""
        if self._signal is None:
            self._signal, self._began = signal.Signals(number), self._began or time.monotonic()
            self._wake_up()

    def _wake_up(self) -> None:
        with suppress(RuntimeError):  # a signal, and a `close` in another thread: it is awake already
            self._wake.release()

    def _is_signalled(self) -> bool:
        """Wait for a signal, or for the end of the Checkpointer. Returns whether it was a signal."""
        self._wake.acquire()
        return self._signal is not None

    def _run(self) -> None:
        if self._is_signalled():
            self._finish("another rank is preempted" if self._signal is None else self._signal.name)
            self.over = True
            if not self._closing and self._signal is not None:
                self._raised = True
                self._raise_again(self._signal)

    def _raise_again(self, number: signal.Signals) -> None:
        """Raise the signal once more in the main thread, whose handler calls the previous one.

        Again and again until it has run: a signal that comes just before the thread goes to sleep does not end that
        sleep, and Python runs the handler after it.
        """
        while not self.heard and not self._closing and _handlers[number].is_set():
            signal.pthread_kill(_main_thread(), number)
            time.sleep(RAISE_INTERVAL)

    def _finish(self, why: str) -> None:
        """Wait until the saves are finished, or the grace is over."""
        try:
            end, saving = time.monotonic() + (self.left or 0.0), self._is_saving()
            self._saves.hurry(end)
            log.warning("%s: %g s for what is under way: %s", why, self._grace, self._saves.unfinished() or "nothing")
            while not self._closing and self.left and (self.polled or saving or self._saves.unfinished()):
                time.sleep(LOOK_INTERVAL)
                if saving and not (saving := self._is_saving()):
                    self._saves.hurry(end)  # which knows that save by now
            if not self._closing:  # otherwise `close` says it
                told = "; ".join(filter(None, [self._saves.unfinished(), self._saves.left_behind()]))
                log.warning("%s: %s", why, f"not finished: {told}" if told else "all saves are finished")
        except Exception:
            # Whatever went wrong with the saves: the previous handler has to be called.
            log.exception("%s: the saves under way could not be waited for", why)

    def close_begins(self) -> None:
        """`Checkpointer.close` finishes the saves from now on."""
        self._closing = True
        if self.left is not None:  # the program may have made a save since the signal came
            self._saves.hurry(time.monotonic() + self.left)

    def close_ends(self) -> None:
        """The Checkpointer is closed: give the signals back, and if one has come, raise it for the previous handler."""
        self.over = True
        if self._signal is None:
            self._wake_up()  # which ends the thread
        was = _forget(self._numbers, self)
        ends_itself = self._signal is not None and self.polled and was.get(self._signal) is signal.SIG_DFL
        if self._signal is not None and not (self._raised or ends_itself):
            signal.pthread_kill(_main_thread(), self._signal)


class _Handler:
    """Our handler of one signal: tells every `Preemption` that watches for it.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        self._number, self._pid = number, os.getpid()
        self.watching: tuple[Preemption, ...] = ()  # replaced and never changed: it may be read at any moment
        self.previous = signal.signal(number, self)

    def is_set(self) -> bool:
        """Whether no other handler has taken its place."""
        return signal.getsignal(self._number) == self

    def __call__(self, number: int, frame: FrameType | None) -> None:
        watching = self.watching if os.getpid() == self._pid else ()  # a forked child has no saves of its own
        under_way = [one for one in watching if not one.over]
        for one in watching:
            one.heard = one.heard or one.over
        for one in under_way:
            one.note(number)
        if not under_way:
            self._call_previous(frame, any(one.polled for one in watching))

    def _call_previous(self, frame: FrameType | None, polled: bool) -> None:
        if callable(self.previous):
            self.previous(self._number, frame)
        elif self.previous is signal.SIG_DFL and not polled:
            signal.signal(self._number, signal.SIG_DFL)
            os.kill(os.getpid(), self._number)


_handlers: dict[signal.Signals, _Handler] = {}
"""Our handlers in this process, by signal."""


PreemptionWish: TypeAlias = PreemptionKeys | Mapping[str, Any] | bool | None
"""What a program asks for: keys as in the policy; True for the defaults; False for nothing; None for the policy's."""


def keys_of(given: PreemptionWish, policy: PreemptionKeys | None) -> PreemptionKeys | None:
    """The keys that count; None for no handlers.

    Raises:
        PolicyError: the keys are not valid.
        TypeError: it is none of these.
    """
    if given is None:
        return policy
    if isinstance(given, bool):
        return (policy or PreemptionKeys()) if given else None
    if isinstance(given, PreemptionKeys):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"preemption {short_repr(given)}: give True, False, or keys as of a policy, {{'grace': '30s'}}")
    findings = PolicyErrors("preemption=")
    keys = validate_keys(PreemptionKeys, dict(given), (), findings)
    findings.raise_any()
    return keys


def _watch(numbers: Sequence[signal.Signals], one: Preemption) -> None:
    """Let our handlers tell of these signals.

    Raises:
        PolicyError: a handler cannot be set, or the one before could not be called afterwards.
    """
    if numbers and threading.current_thread() is not threading.main_thread():
        raise PolicyError(
            "preemption: signals are handled by the main thread only; make the Checkpointer there, or leave "
            "'preemption' out"
        )
    for number in numbers:
        if signal.getsignal(number) is None:
            raise PolicyError(
                f"preemption: {number.name} has a handler that is not Python's, which could not be called afterwards; "
                "leave it out of 'signals'"
            )
    for number in numbers:
        handler = _handlers.get(number)
        if handler is None or not handler.is_set():  # or another one was set since
            handler = _handlers[number] = _Handler(number)
        handler.watching = (*handler.watching, one)


def _forget(numbers: Sequence[signal.Signals], one: Preemption) -> dict[signal.Signals, Any]:
    """Undo `_watch`. Returns the previous handlers of signals that are not watched for any more, which are set again.

    In another thread than the main one handlers cannot be set: ours stays, and calls the previous one.
    """
    found: dict[signal.Signals, Any] = {}
    if threading.current_thread() is not threading.main_thread():
        return found
    for number in numbers:
        handler = _handlers[number]
        handler.watching = tuple(other for other in handler.watching if other is not one)
        if not handler.watching and handler.is_set():
            found[number] = handler.previous
            signal.signal(number, handler.previous)
            del _handlers[number]
    return found


def _main_thread() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident
