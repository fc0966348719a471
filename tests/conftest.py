"""Hypothesis profiles, markers that follow from fixtures, what was skipped and why, and places for tiers."""

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from support import fake_cuda, pauses
from support.checkpointer_worlds import meet_strangers, scratch
from support.servers.fixtures import (
    ceph,
    ceph_once,
    proxy,
    proxy_to,
    rclone,
    rclone_once,
    rclone_tls,
    rclone_tls_once,
    server,
    swift,
    swift_once,
)

from tierstate.engine.store import identity
from tierstate.manifest.history import log
from tierstate.tiers.policy.machine import look_at_machine

__all__ = [
    "ceph", "ceph_once", "proxy", "proxy_to", "rclone", "rclone_once", "rclone_tls", "rclone_tls_once", "server",
    "swift", "swift_once",
]  # fmt: skip

# Where `benchmarks` is, also if only the wheel is installed; last, so that nothing else is found there.
sys.path.append(str(Path(__file__).parent.parent))

if fake_cuda.VARIABLE in os.environ:
    fake_cuda.install()


def pytest_configure(config: pytest.Config) -> None:
    if pauses.VARIABLE in os.environ:
        config.pluginmanager.register(pauses.Pauses())


# Examples do I/O, so a slow disk must not fail one; HYPOTHESIS_PROFILE=soak looks twenty times as long.
_IO = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
settings.register_profile("default", max_examples=50, deadline=None, suppress_health_check=_IO, print_blob=True)
# After each edit: every property, with few examples.
QUICK_EXAMPLES = 5
settings.register_profile("quick", settings.get_profile("default"), max_examples=QUICK_EXAMPLES)
# What CI runs, in half an hour on two cores. The same examples each time, so that what it says is about the change that
# it runs for: new ones are looked for by all other profiles.
CI_SHARE = 0.2
settings.register_profile(
    "ci", settings.get_profile("default"), max_examples=int(50 * CI_SHARE), derandomize=True, database=None
)
# For mutation testing (tests/mutants): a failure is enough, the smallest one is not looked for.
settings.register_profile(
    "mutants", settings.get_profile("default"), phases=[Phase.explicit, Phase.generate], database=None
)
settings.register_profile("soak", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As of whatever a shell starts in the background: the programs that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


SERVERS = {
    "ceph_once": "ceph",
    "swift_once": "swift",
    "cephfs_once": "cephfs",
    "rclone_once": "rclone",
    "rclone_tls_once": "rclone",
    "azurite": "azurite",
}
"""Fixtures that start a real server; the tests of one server are run by one worker, which starts it once."""

NEEDS_ROOT = "needs root: run the tests as root"


def _take_fewer_examples(item: pytest.Item, profile: str) -> None:
    """In quick runs and in CI, also where a test says a number of its own, which would otherwise win over the
    profile."""
    test = getattr(item, "obj", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is None:
        return
    most = QUICK_EXAMPLES
    if profile == "ci":
        most = settings().max_examples if own.max_examples <= 50 else int(own.max_examples * CI_SHARE)
    if own.max_examples > most:
        fewer = settings(own, max_examples=most)
        getattr(test, "__func__", test)._hypothesis_internal_use_settings = fewer


def _server_of(item: pytest.Item, fixtures: set[str]) -> str | None:
    call = getattr(item, "callspec", None)
    if call is not None and call.params.get("server") in SERVERS.values():
        return str(call.params["server"])
    return next((name for fixture, name in SERVERS.items() if fixture in fixtures), None)


def pytest_itemcollected(item: pytest.Item) -> None:
    """What a test's fixtures say about it becomes markers, by which tests are chosen and given to workers.

    Here and not in `pytest_collection_modifyitems`: pytest-xdist reads the groups there, before a conftest is called.
    """
    fixtures = set(getattr(item, "fixturenames", ()))
    if server := _server_of(item, fixtures):
        item.add_marker("server")
        item.add_marker(pytest.mark.xdist_group(server))
    if "root" in fixtures:
        item.add_marker("root")
    if (profile := settings.get_current_profile_name()) in ("quick", "ci"):
        _take_fewer_examples(item, profile)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if getattr(config, "workerinput", None):
        # The last tests of a run should be short ones, so that no worker is left alone with a long one.
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Python's garbage collector leaves alone what stays until the end: the modules and thousands of tests.

    It went through them again whenever a test collects, which is in half a second.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip(NEEDS_ROOT)
    meet_strangers()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line about all that was skipped, and how to have it."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if reasons:
        told = "; ".join(f"{reason} ({count})" for reason, count in sorted(reasons.items()))
        terminalreporter.write_line(f"Skipped: {told}")


@pytest.fixture(scope="session")
def root() -> None:
    """Asked for by what needs root: the tests are marked so, and are skipped without (`pytest_runtest_setup`)."""


@pytest.fixture(autouse=True)
def numbers_from_one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are numbered 1, 2, 3, so that a test can name the one it means; marked `clock_numbers`, by the clock."""
    if request.node.get_closest_marker("clock_numbers") is None:
        monkeypatch.setattr(log, "clock_seq", lambda: 0)


@pytest.fixture
def patient_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first record of a process names all tiers, also where a busy machine reads a marker late."""
    monkeypatch.setattr(identity, "OTHERS_WAIT", 60.0)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory where there is one, so that syncing files costs nothing."""
    with scratch() as path:
        yield path


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on a file system that is not memory, below ``/var/tmp``, which systems do not empty at their start."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        if look_at_machine([folder], {}, devices=0).places[0].folder.medium == "memory":
            pytest.skip("/var/tmp is in memory")
        yield Path(folder)
