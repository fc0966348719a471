"""Real servers, and clients of them, killed with SIGKILL in the middle of things."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpointer_worlds import alike
from support.forked import Forked
from support.outcomes import Background, is_there, write
from support.saver_process import state
from support.servers.buckets import Server, fresh_prefix, open_tier, two_tiers, uploads
from support.servers.ceph import Ceph
from support.servers.faults import Fault, Kind
from support.servers.proxy import Proxy

import tierstate as ts
from tierstate.manifest.errors import TierUnavailable
from tierstate.tiers.base import Tier
from tierstate.tiers.testing import random_bytes

SAVER = Path(__file__).resolve().parents[1] / "support/saver_process.py"
MIB = 1 << 20
SMALL, LONG = random_bytes(2 * MIB, 1), random_bytes(40 * MIB + 12_345, 2)
COMPLETE = r"\?(?!.*partNumber).*uploadId="

WRITES: dict[str, Callable[[Tier], None]] = {
    "put": lambda tier: tier.put("new", SMALL),
    "write": lambda tier: write(tier, "new", LONG),
}
SOAK = pytest.mark.soak
MOMENTS: list[Any] = [
    pytest.param("put", "pass_up", "PUT", "new", id="a-put", marks=SOAK),
    pytest.param("put", "lost", "PUT", "new", id="after-a-put"),
    pytest.param("write", "pass_up", "PUT", "partNumber=2", id="a-part"),
    pytest.param("write", "lost", "PUT", "partNumber=2", id="after-a-part", marks=SOAK),
    pytest.param("write", "pass_up", "POST", COMPLETE, id="a-completion", marks=SOAK),
    pytest.param("write", "lost", "POST", COMPLETE, id="after-a-completion"),
]


class Death:
    """The death of a server at a request; `over` is set once it is dead."""

    def __init__(self, server: Server) -> None:
        self._server, self.over = server, threading.Event()

    def __call__(self) -> None:
        self._server.kill(*self._server.front)
        self.over.set()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "kind", "method", "target"), MOMENTS)
def test_a_server_that_dies_in_a_write_leaves_all_or_nothing(
    server: Server, name: str, kind: Kind, method: str, target: str
) -> None:
    """It is started again at once; what was there before is still there, and writing goes on."""
    prefix, data = fresh_prefix(), {"put": SMALL, "write": LONG}[name]
    with Proxy(server) as proxy:
        tier, observer = open_tier(proxy, prefix), open_tier(server, prefix)
        tier.put("before", SMALL)
        death = Death(server)
        fault = proxy.add(Fault(kind, method, f"{prefix}.*{target}", at=MIB, action=death))
        doing = Background(lambda: WRITES[name](tier))
        assert death.over.wait(60)
        server.start()
        failure = doing.outcome()
        assert fault.hits == 1
        assert failure is None or isinstance(failure, TierUnavailable)
        there = is_there(observer, "new", data)
        assert there or failure is not None
        assert is_there(observer, "before", SMALL)
        key = "after" if there else "new"
        write(tier, key, LONG)
        assert is_there(observer, key, LONG)
        tier.close()
        observer.close()


@pytest.mark.timeout(600)
def test_a_server_that_dies_in_a_read_is_asked_again(server: Server) -> None:
    prefix = fresh_prefix()
    with Proxy(server) as proxy:
        tier = open_tier(proxy, prefix)
        write(tier, "a", LONG)
        death = Death(server)
        fault = proxy.add(Fault("pass_down", "GET", f"{prefix}/a", at=MIB, action=death))
        found: list[Any] = []
        doing = Background(lambda: found.append(tier.get("a")))
        assert death.over.wait(60)
        server.start()
        failure = doing.outcome()
        assert fault.hits == 1
        assert (failure is None) != isinstance(failure, TierUnavailable)
        assert (found or [tier.get("a")])[0].equal(LONG)
        tier.close()


# Saves


def steps(*short: str) -> list[Any]:
    """Moments of a save; those that are not named here are for long runs."""
    found = [
        ("part", "PUT", "packs/.*partNumber=2"),
        ("completion", "POST", "packs/.*" + COMPLETE),
        ("record", "PUT", "versions/"),
    ]
    return [pytest.param(*what, id=name, marks=() if name in short else SOAK) for name, *what in found]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["pass_up", pytest.param("lost", marks=SOAK)])
@pytest.mark.parametrize(("method", "target"), steps("part"))
def test_a_save_while_the_gateway_dies(
    ceph: Ceph, proxy: Proxy, place: Path, kind: Kind, method: str, target: str
) -> None:
    """Nothing that is durable anywhere is lost; the save arrives, or the next one does; the bucket alone is enough."""
    prefix, truth = fresh_prefix(), [state(40, seed) for seed in range(3)]
    with ts.Checkpointer(two_tiers(place, proxy, prefix), "run") as ckpt:
        ckpt.save(truth[0], step=0).wait("s3")
        death = Death(ceph)
        fault = proxy.add(Fault(kind, method, f"{prefix}/{target}", at=1000, action=death))
        save = ckpt.save(truth[1], step=1)
        save.wait("nvme")
        assert death.over.wait(60)
        ceph.start()
        doing = Background(lambda: save.wait("s3"))
        failure = doing.outcome()
        assert fault.hits == 1
        assert failure is None or isinstance(failure, (TierUnavailable, ts.CommitUnknown))
        ckpt.save(truth[2], step=2).wait("s3")
    durable = [0, 2] if failure is not None else [0, 1, 2]
    shutil.rmtree(place / "nvme")
    with ts.Checkpointer(two_tiers(place, ceph, prefix), "run") as ckpt:
        found = [version.step for version in ckpt.versions()]
        assert set(durable) <= set(found) <= {0, 1, 2}
        assert found == sorted(set(found))
        for step in found:
            assert alike(truth[step], ckpt.load(step=step))
        assert ckpt.verify(deep=True).ok


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("method", "target"), steps("record"))
def test_a_client_that_dies_in_a_save_leaves_nothing_visible(
    server: Server, proxy_to: Callable[[Server], Proxy], place: Path, method: str, target: str
) -> None:
    """A later client saves and restores as if it had never been there."""
    prefix, proxy = fresh_prefix(), proxy_to(server)
    spec = two_tiers(place, proxy, prefix)
    with (place / "said").open("w+") as out:
        process = Forked(str(SAVER), spec, "0", "40", "0", env=os.environ, output=out.fileno())
        proxy.add(Fault("reset_up", method, f"{prefix}/{target}", at=100, action=process.kill))
        status = process.wait()
        said = (place / "said").read_text()
    assert status == -9, said
    assert "durable s3" not in said
    assert len(uploads(server, prefix)) == ("packs" in target)
    tier = open_tier(server, prefix)
    assert list(tier.list("versions/")) == []
    # A pack is there whole or not at all; without a record nobody reads it.
    assert len(list(tier.list("packs/"))) == ("versions" in target)
    tier.close()
    truth = state(40, 1)
    with ts.Checkpointer(spec, "run") as ckpt:
        if "durable nvme" in said:
            assert alike(state(40, 0), ckpt.load())
        before = [version.step for version in ckpt.versions()]
        ckpt.save(truth, step=1).wait("s3")
    shutil.rmtree(place / "nvme")
    with ts.Checkpointer(two_tiers(place, server, prefix), "run") as ckpt:
        # What the dead one had brought to the nearer tier was owed to the store, and has been brought.
        assert [version.step for version in ckpt.versions()] == [*before, 1]
        assert all(alike(state(40, step), ckpt.load(step=step)) for step in before)
        assert alike(truth, ckpt.load())
