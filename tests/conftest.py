"""Hypothesis profiles, and places for tiers."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from servers.fixtures import ceph, ceph_once, proxy, proxy_to, server, swift, swift_once
from worlds import meet_strangers, scratch

__all__ = ["ceph", "ceph_once", "proxy", "proxy_to", "server", "swift", "swift_once"]

# Examples do I/O, so a slow disk must not fail one; HYPOTHESIS_PROFILE=soak looks twenty times as long.
_IO = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
settings.register_profile("default", max_examples=50, deadline=None, suppress_health_check=_IO, print_blob=True)
# For a second run over the same code, as against the wheel: every test once more, with fewer examples each.
settings.register_profile("again", settings.get_profile("default"), max_examples=10)
settings.register_profile("soak", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As of whatever a shell starts in the background: the programs that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup() -> None:
    meet_strangers()


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory where there is one, so that syncing files costs nothing."""
    with scratch() as path:
        yield path
