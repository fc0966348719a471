"""What servers do differently: ranges with the status 200, no listing of uploads; and ways to address a server."""

from __future__ import annotations

import re
import shutil
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import alike, tensors
from support.outcomes import tried, write
from support.servers.buckets import BUCKET, fresh_prefix, open_tier, two_tiers
from support.servers.faults import Fault
from support.servers.proxy import Proxy
from support.servers.rclone import HOST, Rclone

import tierstate as ts
from tierstate.manifest.errors import AlreadyExists, NotFound
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.testing import random_bytes

LONG = random_bytes((18 << 20) + 12_345, 2)


class Elsewhere:
    """A server under another endpoint."""

    def __init__(self, server: Rclone, host: str, **more: Any) -> None:
        options = server.options()
        self._options = {**options, **more, "endpoint_url": f"{server.scheme}://{host}:{server.port}"}

    def options(self) -> dict[str, Any]:
        """What s3fs wants to know."""
        return self._options


def check(at: Any) -> None:
    """Short and long objects go there and come back."""
    with closing(open_tier(at, fresh_prefix(), deadline="20s")) as tier:
        tier.put("small", LONG[:1000])
        write(tier, "long", LONG)
        assert tier.get("small").equal(LONG[:1000])
        assert tier.get("long").equal(LONG)
        assert list(tier.list("")) == ["long", "small"]


@pytest.fixture(params=["plain", "tls"])
def either(request: pytest.FixtureRequest, rclone: Rclone, rclone_tls: Rclone) -> Rclone:
    """rclone's server, with and without TLS."""
    return {"plain": rclone, "tls": rclone_tls}[request.param]


def test_an_endpoint_may_be_an_address_of_ipv6(either: Rclone) -> None:
    if not socket.has_ipv6:
        pytest.skip("needs IPv6")
    check(Elsewhere(either, "[::1]"))


def test_a_bucket_may_be_the_name_of_a_host(either: Rclone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Virtual addressing, by a resolver that knows these names."""
    resolve, asked = socket.getaddrinfo, set()

    def find(host: Any, *args: Any, **keys: Any) -> Any:
        asked.add(host)
        return resolve("127.0.0.1" if str(host).endswith(HOST) else host, *args, **keys)

    monkeypatch.setattr(socket, "getaddrinfo", find)
    server = Rclone(tmp_path, tls=either.scheme == "https")
    server.commands["rclone"] = [*server.commands["rclone"], "--force-path-style=false"]
    server.create()
    try:
        (tmp_path / "data/bucket").mkdir()
        check(Elsewhere(server, HOST, config_kwargs={"s3": {"addressing_style": "virtual"}}))
    finally:
        server.stop()
    assert f"bucket.{HOST}" in asked


@pytest.mark.parametrize("how", ["by option", "by its name", "not"])
def test_parts_of_one_length(rclone: Rclone, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Cloudflare R2 takes no others, but for the last. Its server is not here, only a name like its own."""
    resolve, name = socket.getaddrinfo, "account.eu.r2.cloudflarestorage.com"
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *args, **keys: resolve("127.0.0.1" if host == name else host, *args, **keys)
    )
    with Proxy(rclone) as proxy:
        options: dict[str, Any] = {"config_kwargs": {"s3": {"addressing_style": "path"}}, **proxy.options()}
        if how == "by its name":
            options["endpoint_url"] = proxy.endpoint.replace("127.0.0.1", name)
        elif how == "by option":
            options["fixed_upload_size"] = True
        with closing(ObjectStore(url=f"s3://{BUCKET}/{fresh_prefix()}", options=options)) as tier:
            with tier.writer("long") as writer:
                writer.append(LONG[:12_345])
                for at in range(12_345, len(LONG), 9 << 20):
                    writer.append(LONG[at : at + (9 << 20)], lambda: None)
                writer.append(LONG)
            assert tier.get("long").equal(torch.cat([LONG, LONG]))
            tier.put("whole", LONG.repeat(4))  # long enough for parts
            assert tier.get("whole").equal(LONG.repeat(4))
        for key in ("long", "whole"):
            found = sorted(
                (int(number[1]), one.request.length)
                for one in proxy.seen
                if (number := re.search(rf"/{key}\?.*partNumber=(\d+)", one.request.target))
            )
            lengths = [length for _, length in found]
            assert len(lengths) >= 2
            assert lengths[-1] <= lengths[0]
            assert (len(set(lengths[:-1])) == 1) == (how != "not" or key == "whole"), lengths


def test_a_server_that_refuses_conditions(rclone: Rclone, place: Path) -> None:
    """As Alibaba Cloud's OSS does. The tier looks before it creates, and says so."""
    with Proxy(rclone) as proxy:
        proxy.add(Fault("status", header="if-none-match", status=501, code="NotImplemented", count=None))
        check(proxy)
        with closing(open_tier(proxy, fresh_prefix())) as tier:
            tier.put("a", LONG[:5])
            write(tier, "b", LONG)
            assert tier.traits.conditional_create is False
            assert any("refuses requests that say 'If-None-Match'" in note for note in tier.traits.notes)
            for create in (lambda: tier.put("a", LONG[:7]), lambda: write(tier, "b", LONG[:7])):
                with pytest.raises(AlreadyExists):
                    create()
            assert tier.get("a").equal(LONG[:5])
            refused = [one for one in proxy.seen if one.status == 501]
            write(tier, "c", LONG)
            assert [one for one in proxy.seen if one.status == 501] == refused, "it is not asked again"
        with closing(open_tier(proxy, fresh_prefix())) as tier:  # its first create asks what time it is
            assert isinstance(tried(lambda: tier.age("none")), NotFound)
        prefix, state = fresh_prefix(), tensors(1 << 20)
        with ts.Checkpointer(two_tiers(place, proxy, prefix), "run") as ckpt:
            ckpt.save(state, step=1).wait("s3")
        shutil.rmtree(place / "nvme")
        with ts.Checkpointer(two_tiers(place, proxy, prefix), "run") as ckpt:
            assert alike(state, ckpt.load(step=1))


def test_a_bucket_that_keeps_all_is_told_once(rclone: Rclone) -> None:
    """As one whose objects are locked: scratch objects stay, each under a name of its own."""
    with Proxy(rclone) as proxy, closing(open_tier(proxy, fresh_prefix())) as tier:
        proxy.add(Fault("status", "DELETE", status=403, code="AccessDenied", count=None))
        tier.put("a", LONG[:5])
        assert sum("scratch objects cannot be deleted" in note for note in tier.traits.notes) == 1


def test_what_a_server_cannot_is_told_at_once(rclone: Rclone) -> None:
    """It lists no uploads; that is a note, and takes no time."""
    with Proxy(rclone) as proxy, closing(open_tier(proxy, fresh_prefix())) as tier:
        tier.put("a", LONG[:5])
        assert tier.traits.conditional_create is False
        assert any("uploads of dead writers were not looked for" in note for note in tier.traits.notes)
        assert sum(one.request.target.startswith("/bucket?uploads") for one in proxy.seen) == 1


def test_ranges_come_with_any_status(rclone: Rclone) -> None:
    with Proxy(rclone) as proxy, closing(open_tier(proxy, fresh_prefix())) as tier:
        tier.put("a", LONG[: 1 << 20])
        assert tier.get("a").equal(LONG[: 1 << 20])


def test_saves_go_there_and_come_back(either: Rclone, place: Path) -> None:
    """The bucket alone is enough."""
    prefix, truth = fresh_prefix(), [tensors(1 << 20, seed=seed) for seed in range(2)]
    with ts.Checkpointer(two_tiers(place, either, prefix), "run") as ckpt:
        for step, state in enumerate(truth):
            ckpt.save(state, step=step).wait("s3")
    shutil.rmtree(place / "nvme")
    with ts.Checkpointer(two_tiers(place, either, prefix), "run") as ckpt:
        assert all(alike(state, ckpt.load(step=step)) for step, state in enumerate(truth))
        assert ckpt.verify(deep=True).ok
