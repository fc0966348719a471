"""Which host is asked, without any network: a proxy notes the host of every request and refuses it."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import botocore.session
import pytest

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import TierstateError
from tierstate.tiers.base import Range
from tierstate.tiers.object.s3 import bucket
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.testing import random_bytes

SESSION = botocore.session.Session()
SUFFIXES = {one["partition"]: one["dnsSuffix"] for one in SESSION.get_data("endpoints")["partitions"]}
PLACES = [
    (partition, region, suffix)
    for partition, suffix in SUFFIXES.items()
    for region in SESSION.get_available_regions("s3", partition)[-2:]
]


class NotingProxy:
    """Notes the target of each request, and says that the server cannot be reached."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as reader:
                self.asked.append(reader.readline().decode().split()[1])
                while reader.readline() not in (b"\r\n", b""):
                    pass
                connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[NotingProxy]:
    for name in ("no_proxy", "NO_PROXY", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(bucket, "SINGLE", 4)
    one = NotingProxy()
    monkeypatch.setenv("https_proxy", one.url)
    yield one
    one.close()


def hosts(proxy: NotingProxy, url: str, **options: object) -> set[str]:
    """The hosts that are asked by every kind of request."""
    # The bucket itself: around it nothing is asked any more soon after a store has not answered.
    tier: Any = ObjectStore(url=url, options={"key": "k" * 8, "secret": "s" * 8, **options}, deadline=0.1)._inner
    tier.name, tier._ready = "s3", True
    calls = (
        lambda: list(tier.list("")),
        lambda: tier.size("a"),
        lambda: tier.read("a", [Range(0, empty_buffer(5))]),
        lambda: tier.put("a", random_bytes(3)),
        lambda: tier.upload("a"),
        lambda: tier.delete("a"),
    )
    for call in calls:
        before = len(proxy.asked)
        with pytest.raises((TierstateError, OSError)):
            call()
        assert len(proxy.asked) > before
    tier.close()
    return set(proxy.asked)


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "region", "suffix"), PLACES, ids=[place[1] for place in PLACES])
def test_without_an_endpoint_the_regional_one_is_asked(
    proxy: NotingProxy, partition: str, region: str, suffix: str
) -> None:
    """By requests for data as by all others: the old global host knows no region made since 2019."""
    assert hosts(proxy, "s3://bucket/ckpt", client_kwargs={"region_name": region}) == {
        f"bucket.s3.{region}.{suffix}:443"
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "options", "host"),
    [
        ("s3://bucket/c", {"config_kwargs": {"s3": {"addressing_style": "path"}}}, "s3.eu-north-1.amazonaws.com:443"),
        ("s3://dotted.bucket/c", {}, "s3.eu-north-1.amazonaws.com:443"),
        (
            "s3://bucket/c",
            {"config_kwargs": {"s3": {"use_dualstack_endpoint": True}}},
            "bucket.s3.dualstack.eu-north-1.amazonaws.com:443",
        ),
        (
            "s3://arn:aws:s3:eu-north-1:123456789012:accesspoint/mine/c",
            {},
            "mine-123456789012.s3-accesspoint.eu-north-1.amazonaws.com:443",
        ),
        (
            "s3://bucket/c",
            {"endpoint_url": "https://s3.example:9", "config_kwargs": {"s3": {"addressing_style": "virtual"}}},
            "bucket.s3.example:9",
        ),
        ("s3://bucket/c", {"endpoint_url": "https://s3.example:9"}, "s3.example:9"),
        ("s3://bucket/c", {"endpoint_url": "https://[fd00::7]:9"}, "[fd00::7]:9"),
    ],
)
def test_addresses_follow_the_rules_of_botocore(
    proxy: NotingProxy, url: str, options: dict[str, object], host: str
) -> None:
    assert hosts(proxy, url, client_kwargs={"region_name": "eu-north-1"}, **options) == {host}
