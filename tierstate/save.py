"""A save as the user holds it: what is captured, what is durable where."""

from __future__ import annotations

from collections.abc import Sequence

from tierstate.manifest.errors import TierstateError
from tierstate.tiers.ticket import Ticket


class Save:
    """One save under way, returned by `Checkpointer.save`."""

    def __init__(self, ticket: Ticket, durable: str) -> None:
        self._ticket, self._durable = ticket, durable

    @property
    def step(self) -> int:
        """The step that was given."""
        return self._ticket.head.step

    @property
    def seq(self) -> int:
        """The version's place in the run's line."""
        return self._ticket.head.seq

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers to which this save goes; the others were not due."""
        return tuple(self._ticket.tiers)

    @property
    def skipped(self) -> bool:
        """Whether nothing was saved, because the arena was full and the policy says ``on_full: skip``."""
        return self._ticket.skipped

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds from the call of ``save`` to the commit, for each tier that has the version by now."""
        return dict(self._ticket.seconds)

    def wait_captured(self, timeout: float | None = None) -> None:
        """Wait until the state may change again: every byte of it has been copied out.

        Raises:
            CaptureError: it could not be copied.
        """
        self._ticket.captured.result(timeout)

    def wait(self, tier: str | None = None, timeout: float | None = None) -> None:
        """Wait until the version is committed on a tier, by default the policy's ``durable`` one.

        Raises:
            NotFound: this save does not go to that tier; the message says why.
            TierUnavailable: it is not done after ``timeout`` seconds; it goes on all the same.
            TierstateError: what went wrong on that tier.
        """
        self._ticket.wait(tier or self._durable, timeout)

    def done(self, tier: str | None = None) -> bool:
        """Whether the version is committed on a tier by now; False also where it never goes there."""
        return self._ticket.done(tier or self._durable)

    def errors(self) -> dict[str, TierstateError | BaseException]:
        """What went wrong so far, by tier."""
        found = {name: self._ticket.failure(name) for name in self._ticket.tiers}
        return {name: error for name, error in found.items() if error is not None}

    def __repr__(self) -> str:
        states = ", ".join(f"{n}: {'done' if self.done(n) else 'under way'}" for n in self.tiers)
        return f"<Save step {self.step}: {states or 'skipped' if self.skipped else states}>"


def tell(error: BaseException | None, failures: Sequence[tuple[Ticket, str, BaseException]]) -> None:
    """Raise an error, or else the first of the failures, with a note of every failure; nothing where there is none."""
    error = error or next((reason for _, _, reason in failures), None)
    if error is not None:
        for ticket, tier, reason in failures:
            error.add_note(f"step {ticket.head.step} did not arrive at {tier}: {reason}")
        raise error
