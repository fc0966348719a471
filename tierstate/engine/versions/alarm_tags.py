"""Tags for versions whose statistics are alarming (policy ``alarms: {action: tag}``), so that retention keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from tierstate.engine.events import Event
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.history.tags import TagTarget

from .tags import Tags


class AlarmTags:
    """Gives alarming versions the tag ``alarm-step-<step>`` as soon as a persistent tier has them.

    Args:
        tags: of the run.
        lasting: the run in each persistent tier.
    """

    def __init__(self, tags: Tags, lasting: Sequence[TierRun]) -> None:
        self._tags, self._lasting = tags, {tier_run.name: tier_run for tier_run in lasting}
        self._waiting: set[int] = set()

    def event(self, event: Event) -> None:
        """Take an event."""
        if event.seq is None:
            return
        if event.kind == "alarm":
            self._waiting.add(event.seq)
        elif event.kind in ("committed", "cascaded", "brought") and self._is_due(event):
            self._waiting.discard(event.seq)
            # Of many ranks, only those that create its record are told the version's id.
            version = event.version or self._lasting[event.tier].log.read(event.seq).version.id
            self._tags.give(f"alarm-step-{event.step}", TagTarget(event.seq, version))

    def _is_due(self, event: Event) -> bool:
        return event.tier in self._lasting and event.seq in self._waiting
