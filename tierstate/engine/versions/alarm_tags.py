"""Tags for versions whose statistics are alarming (policy ``alarms: {action: tag}``), so that retention keeps them."""

from __future__ import annotations

from collections.abc import Collection

from tierstate.engine.events import Event
from tierstate.manifest.history.tags import TagTarget

from .tags import Tags


class AlarmTags:
    """Gives alarming versions the tag ``alarm-step-<step>`` as soon as a persistent tier has them.

    Args:
        tags: of the run.
        lasting: names of the persistent tiers.
    """

    def __init__(self, tags: Tags, lasting: Collection[str]) -> None:
        self._tags, self._lasting = tags, lasting
        self._waiting: set[int] = set()

    def event(self, event: Event) -> None:
        """Take an event."""
        if event.seq is None:
            return
        if event.kind == "alarm":
            self._waiting.add(event.seq)
        elif event.kind in ("committed", "cascaded", "brought") and self._is_due(event):
            self._waiting.discard(event.seq)
            self._tags.give(f"alarm-step-{event.step}", TagTarget(event.seq, event.version))

    def _is_due(self, event: Event) -> bool:
        return event.tier in self._lasting and event.seq in self._waiting and bool(event.version)
