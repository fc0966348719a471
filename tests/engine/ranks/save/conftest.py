"""Relays that pass on among few ranks, and parts that are long whatever their length, for the tests of commits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierstate.engine.ranks.save import commit, relay


@pytest.fixture(scope="module")
def relays_among_few() -> Iterator[None]:
    """Three leaders are enough for one to pass on to another what it gets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "FANOUT", 1)
        patch.setattr(relay, "PATIENCE", 30.0)
        patch.setattr(commit, "PARTS_IN_STORE", 0)  # more can go wrong
        yield
