"""A cascade whose slow tier a test breaks and mends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.checkpointer_worlds import wrapped

from tierstate.engine.publish import backlog
from tierstate.tiers.backoff import Backoff
from tierstate.tiers.memory.host import Memory


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is down is tried again soon."""
    monkeypatch.setattr(backlog, "TIER_BACKOFF", Backoff(0.02, 0.1, 0.5))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is down is not tried again by itself while a test runs."""
    monkeypatch.setattr(backlog, "TIER_BACKOFF", Backoff(600.0, 600.0, 0.5))


@pytest.fixture
def slow() -> Iterator[dict[str, Any]]:
    """The keys of a tier that a test can break and mend."""
    with wrapped(Memory()) as keys:
        yield keys
