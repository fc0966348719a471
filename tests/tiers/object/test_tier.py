"""The object tier: over files, and over fsspec's memory."""

import pickle
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    NotFound,
    PolicyError,
    TierError,
    TierFull,
    TierUnavailable,
)
from tierstate.tiers.base import Tier
from tierstate.tiers.object.bucket import EXTRA_ROUNDS, StartBarrier, probe_conditional_create
from tierstate.tiers.object.filesystem import MemoryClient
from tierstate.tiers.object.s3.options import read_options
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.testing import TierContract


class TestFilesContract(TierContract):
    examples = 5

    def make(self, tmp_path: Path) -> Tier:
        return ObjectStore(url=f"file://{tmp_path}/ckpt")


class TestMemoryUrlContract(TierContract):
    def make(self, tmp_path: Path) -> Tier:
        return ObjectStore(url=f"memory://{uuid.uuid4().hex}/ckpt")

    def reopen(self, tier: Tier) -> Tier:
        return ObjectStore(url=f"memory://{tier.traits.failure_domain.removeprefix('memory:')}/ckpt")


# URLs and options


@pytest.mark.parametrize("url", ["bucket/ckpt", "s3://", "", "s3:///"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match=r"(does not say where|is no URL); write protocol, bucket and path"):
        ObjectStore(url=url)


def test_a_protocol_that_is_not_known() -> None:
    with pytest.raises(ValueError, match=r"protocol that is not known here; did you mean .s3://"):
        ObjectStore(url="s33://bucket/ckpt")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("sftp://host/ckpt", "while it is still being written.* mount it"),
        ("ftp://me:hunter2@host/ckpt", "while it is still being written.* mount it"),
        ("webhdfs://host/ckpt", "while it is still being written.* mount it"),
        ("https://s3.site.org/bucket/ckpt", "is a web server.* write 's3://bucket/ckpt', and its address as"),
    ],
)
def test_protocols_that_cannot_keep_what_a_tier_promises(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        ObjectStore(url=url)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(PolicyError, match=rf"tiers\.a\.url: .*{why}"):
        Policy.parse(f"{{version: 1, tiers: {{a: {{type: object, url: '{url}'}}}}}}")


@pytest.mark.parametrize(
    "url",
    [
        "simplecache::s3://bucket/c",
        "filecache://bucket/c",
        "blockcache::memory://c",
        "s3://bucket/c::simplecache",
        "tierstate://policy.yaml/run",
        "reference://x",
        "zip://a.zip::file:///tmp/x",
        "dir::file:///tmp/x",
    ],
)
def test_urls_that_lead_through_another_file_system(url: str) -> None:
    with pytest.raises(ValueError, match=r"leads through another file system .*write the URL of the store itself"):
        ObjectStore(url=url)
    document = f"{{version: 1, tiers: {{a: {{type: object, url: '{url}'}}, b: {{type: nvme, path: /nowhere}}}}}}"
    with pytest.raises(PolicyError, match=r"tiers\.a\.url: .*leads through another"):
        Policy.parse(document)


def test_no_pickle_of_a_cache_of_fsspec_is_opened(tmp_path: Path) -> None:
    import fsspec

    (tmp_path / "cache").write_bytes(pickle.dumps(_Mark(str(tmp_path / "run"))))
    options = {"cache_storage": str(tmp_path), "target_protocol": "memory"}
    with pytest.raises(ValueError, match="leads through another file system"):
        ObjectStore(url="filecache://bucket/ckpt", options=options)
    assert not (tmp_path / "run").exists()
    assert "filecache" in fsspec.available_protocols()


class _Mark:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tierstate.tiers.object.s3.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setitem(sys.modules, "botocore.awsrequest", None)
    with pytest.raises(ImportError, match="s3:// needs the package botocore: pip install botocore"):
        ObjectStore(url="s3://bucket/ckpt")
    with pytest.raises(ImportError, match="gs:// needs the package gcsfs: pip install gcsfs"):
        ObjectStore(url="gs://bucket/ckpt")


def test_files_take_no_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a file:// URL takes none"):
        ObjectStore(url=f"file://{tmp_path}", options={"auto_mkdir": True})


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_needed() -> None:
    heavy = ("fsspec", "s3fs", "botocore")
    code = f"import sys, tierstate.tiers.object.tier; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_name_is_in_messages(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}", "memory://named/ckpt"):
        tier = ObjectStore(url=url)
        tier.name = "archive"
        with pytest.raises(NotFound, match=r"^archive: a: ") as found:
            tier.size("a")
        assert (found.value.tier, found.value.key) == ("archive", "a")


def test_user_options_stand_over_ours() -> None:
    options = {"key": "k", "config_kwargs": {"s3": {"addressing_style": "path"}, "read_timeout": 7}}
    config = read_options(options, deadline=3).config
    assert config["s3"] == {"payload_signing_enabled": False, "addressing_style": "path"}
    assert (config["read_timeout"], config["connect_timeout"]) == (7, 3)
    assert config["retries"]["total_max_attempts"] == 1
    assert options["config_kwargs"]["s3"] == {"addressing_style": "path"}


def test_how_often_is_not_for_the_client_to_say() -> None:
    with pytest.raises(ValueError, match="'retries' is not taken; the tier's 'deadline'"):
        ObjectStore(url="s3://b/ckpt", options={"config_kwargs": {"retries": {"mode": "legacy"}}})


@pytest.mark.parametrize("key", ["checksum", "orphan_age"])
def test_keys_of_s3_are_refused_elsewhere(key: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {key: "md5" if key == "checksum" else 7}
    for url in (f"file://{tmp_path}", "memory://b/ckpt"):
        with pytest.raises(ValueError, match=f"{key}: only s3:// URLs take it"):
            ObjectStore(url=url, **keys)


def test_values_that_are_none() -> None:
    wrong: Any = "crc64"
    with pytest.raises(ValueError, match="'crc64' is none of auto, crc32, md5, none"):
        ObjectStore(url="s3://b/ckpt", checksum=wrong)
    with pytest.raises(ValueError, match="not more than nothing"):
        ObjectStore(url="s3://b/ckpt", deadline=0)


def test_capacity_of_a_bucket() -> None:
    url = f"memory://{uuid.uuid4().hex}/ckpt"
    ObjectStore(url=url).put("a", empty_buffer(60))
    tier = ObjectStore(url=url, capacity=100)
    with pytest.raises(TierFull, match="60B of the capacity of 100B are in use"):
        tier.put("b", empty_buffer(41))
    for _ in range(2):
        with pytest.raises(AlreadyExists):
            tier.put("a", empty_buffer(30))
    tier.put("b", empty_buffer(40))
    tier.delete("a")
    tier.delete("a")
    tier.put("c", empty_buffer(60))
    with pytest.raises(TierFull):
        tier.put("d", empty_buffer(1))


def test_what_a_store_lists_twice_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """rclone's server does so with names for which several writers have raced."""
    tier = ObjectStore(url=f"memory://{uuid.uuid4().hex}/ckpt")
    for key in ("a/1", "a/2"):
        tier.put(key, empty_buffer(1))
    names = MemoryClient.names
    monkeypatch.setattr(MemoryClient, "names", lambda self, prefix: names(self, prefix) * 2)
    assert list(tier.list("a/")) == ["a/1", "a/2"]


def test_traits() -> None:
    traits = ObjectStore(url="memory://b/ckpt").traits
    assert (traits.persistent, traits.shared, traits.conditional_create) == (False, "process", True)
    traits = ObjectStore(url="s3://b/ckpt", options={"endpoint_url": "http://me:pass@host:1"}, capacity=5).traits
    assert (traits.persistent, traits.shared, traits.conditional_create) == (True, "site", None)
    assert (traits.failure_domain, traits.capacity) == ("s3:host:1:b", 5)
    assert ObjectStore.persistent is True


# The probe of conditional creates


class Creates:
    """A store of names whose creates let ``winners`` of each name through, and fail the others.

    Args:
        lost: of how many rounds the winners' answers get lost.
    """

    def __init__(self, winners: int, error: type[TierError] = AlreadyExists, lost: int = 0) -> None:
        self.left, self.lock, self.error, self.lost = winners, threading.Lock(), error, lost
        self.winners, self.names, self.rounds = winners, set[str](), 0

    def create(self, name: str, racer: int, start: StartBarrier) -> None:
        start()
        with self.lock:
            self.left -= 1
            if self.left < 0:
                raise self.error("no")
            self.names.add(name)
            if self.rounds < self.lost:
                raise TierUnavailable("the answer was lost")

    def delete(self, name: str) -> None:
        self.names.discard(name)
        self.left, self.rounds = self.winners, self.rounds + 1


@pytest.mark.parametrize(("winners", "verdict"), [(1, True), (2, False), (8, False)])
def test_races_are_judged_by_their_winners(winners: int, verdict: bool) -> None:
    store = Creates(winners)
    assert probe_conditional_create(store.create, store.delete, 3) is verdict
    assert store.rounds == (3 if verdict else 1)
    assert not store.names


@pytest.mark.parametrize("error", [AccessDenied, TierUnavailable])
def test_a_race_that_nobody_wins_is_an_error(error: type[TierError]) -> None:
    """No other round follows: each of them may take a whole deadline."""
    store = Creates(0, error)
    with pytest.raises(error):
        probe_conditional_create(store.create, store.delete, 3)
    assert store.rounds == 0


@pytest.mark.parametrize(("winners", "verdict"), [(1, True), (2, False)])
def test_rounds_in_which_answers_are_lost_say_nothing(winners: int, verdict: bool) -> None:
    store = Creates(winners, lost=2)
    assert probe_conditional_create(store.create, store.delete, 3) is verdict
    assert store.rounds == (5 if verdict else 3)


@pytest.mark.parametrize("store", [Creates(1, lost=1000), Creates(0)], ids=["lost", "taken"])
def test_rounds_that_say_nothing_are_not_run_for_ever(store: Creates) -> None:
    with pytest.raises(TierUnavailable):
        probe_conditional_create(store.create, store.delete, 3)
    assert store.rounds == 3 + EXTRA_ROUNDS
