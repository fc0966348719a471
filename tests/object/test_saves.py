"""Whole saves to a folder and a bucket, and restores from the bucket alone, over connections that break."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, scratch, tensors
from support.outcomes import tried, until
from support.servers.buckets import At, Server, fresh_prefix, parts, two_tiers, uploads
from support.servers.ceph import Ceph
from support.servers.faults import Fault, Kind
from support.servers.proxy import Proxy

import tierstate as ts

BROKEN: list[Kind] = ["status", "reset_up", "reset_down", "cut_down", "lost"]
"""What may happen to any request, and is over when it is sent again."""

State = dict[str, torch.Tensor]


def kinds(*short: Kind, long: Sequence[Kind]) -> list[Any]:
    """What may happen, most of it in long runs only."""
    return [*short, *(pytest.param(kind, marks=pytest.mark.soak) for kind in long)]


def states(count: int, nbytes: int) -> list[State]:
    """Versions of a state: a part that stays as it was, and one that is new each time."""
    same = tensors(nbytes // 2, 1000, seed=99)
    return [{**same, "new": tensors(nbytes // 2, seed=seed)["a"]} for seed in range(count)]


def save(place: Path, at: At, prefix: str, truth: list[State], broken: Callable[[], object] = lambda: None) -> None:
    """Save every version, and wait until the bucket has it; ``broken`` is called after the first one."""
    with ts.Checkpointer(two_tiers(place, at, prefix), "run") as ckpt:
        for step, state in enumerate(truth):
            ckpt.save(state, step=step).wait("s3")
            if not step:
                broken()


def check_bucket(place: Path, at: At, prefix: str, truth: list[State]) -> None:
    """The bucket alone gives every version back, fresh and in place."""
    shutil.rmtree(place / "nvme")
    with ts.Checkpointer(two_tiers(place, at, prefix), "run") as ckpt:
        assert [version.step for version in ckpt.versions()] == list(range(len(truth)))
        for step, was in enumerate(truth):
            assert alike(was, ckpt.load(step=step))
        into = {name: torch.zeros_like(value) for name, value in truth[-1].items()}
        ckpt.restore(into=into)
        assert alike(truth[-1], into)


def first_time(kind: Kind, prefix: str, at: int) -> Fault:
    """Each different request meets it once."""
    return Fault(kind, target=prefix, count=None, fresh=True, at=at)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", kinds("status", "cut_down", "lost", long=["reset_up", "reset_down"]))
def test_each_request_fails_the_first_time(ceph: Ceph, proxy: Proxy, place: Path, kind: Kind) -> None:
    """Every save arrives all the same, is committed once, and the bucket alone is enough."""
    prefix, truth = fresh_prefix(), states(3, 1 << 20)
    fault = first_time(kind, prefix, 500)
    save(place, proxy, prefix, truth, lambda: proxy.add(fault))
    assert fault.hits >= 4, "two packs and two records at least"
    proxy.mend()
    check_bucket(place, ceph, prefix, truth)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", kinds("reset_down", long=["reset_up"]))
def test_each_request_of_a_restore_fails_the_first_time(ceph: Ceph, proxy: Proxy, place: Path, kind: Kind) -> None:
    prefix, truth = fresh_prefix(), states(2, 1 << 20)
    save(place, ceph, prefix, truth)
    fault = proxy.add(first_time(kind, prefix, 500))
    check_bucket(place, proxy, prefix, truth)
    assert fault.hits >= 4, "two packs and two records at least"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", kinds("status", "lost", long=["reset_up"]))
def test_a_server_that_is_busy_when_it_is_met(ceph: Ceph, proxy: Proxy, place: Path, kind: Kind) -> None:
    """What a server does is found out before the first write, when requests break as well."""
    prefix, truth = fresh_prefix(), states(1, 1 << 20)
    fault = proxy.add(first_time(kind, prefix, 0))
    save(place, proxy, prefix, truth)
    assert fault.hits >= 4
    proxy.mend()
    check_bucket(place, ceph, prefix, truth)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", BROKEN)
def test_each_request_of_long_packs_fails_the_first_time(server: Server, place: Path, kind: Kind) -> None:
    prefix, truth = fresh_prefix(), states(3, 80 << 20)
    with Proxy(server) as proxy:
        fault = first_time(kind, prefix, 100_000)
        save(place, proxy, prefix, truth, lambda: proxy.add(fault))
        assert fault.hits >= 8
        proxy.mend()
    check_bucket(place, server, prefix, truth)
    # Nobody was told the name of an upload whose beginning got no answer; it is swept by its age.
    assert not [part for upload in uploads(server, prefix) for part in parts(server, upload)]


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Any fault for some of the requests, for good."""
    kind: Kind = draw(st.sampled_from([*BROKEN, "short", "flip_up", "flip_down"]))
    every, skip, at = draw(st.integers(2, 9)), draw(st.integers(0, 20)), draw(st.integers(0, 300_000))
    method = draw(st.sampled_from(["", "PUT", "GET", "POST"]))
    return Fault(kind, method, skip=skip, every=every, at=at, count=draw(st.integers(1, 20)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nbytes", [1 << 20, 40 << 20])
@settings(max_examples=25)
@given(which=st.lists(faults(), min_size=1, max_size=4))
def test_whatever_happens_nothing_wrong_comes_back(server: Server, nbytes: int, which: list[Fault]) -> None:
    """What the bucket was told to have can be restored from it alone, or is known to be damaged; the last save, over a
    connection that works again, is there."""
    prefix, truth = fresh_prefix(), states(4, nbytes)
    with scratch() as place, Proxy(server) as proxy:
        for fault in which:
            fault.target = prefix
            proxy.add(fault)
        flipped = any(fault.kind == "flip_up" for fault in which)
        told = []
        with ts.Checkpointer(two_tiers(place, proxy, prefix), "run") as ckpt:
            for step in range(3):
                arrived = ckpt.save(truth[step], step=step)
                if tried(lambda arrived=arrived: arrived.wait("s3")) is None:
                    told.append(step)
            proxy.mend()
            ckpt.save(truth[3], step=3).wait("s3")
        shutil.rmtree(place / "nvme")
        with ts.Checkpointer(two_tiers(place, server, prefix), "run") as ckpt:
            found = [version.step for version in ckpt.versions()]
            assert {*told, 3} <= set(found)
            for step in found:
                restores(ckpt, step, truth[step], damage=flipped)
        for fault in which:
            fault.hits = 0
            proxy.add(fault)
        with ts.Checkpointer(two_tiers(place, proxy, prefix), "run") as ckpt:
            for step in found:
                restores(ckpt, step, truth[step], damage=True)


def restores(ckpt: ts.Checkpointer, step: int, truth: State, *, damage: bool) -> None:
    """A version comes back as it was; where there may be damage, an error instead."""
    got: list[State] = []
    failure = tried(lambda: got.append(ckpt.load(step=step)))
    assert failure is None or damage
    assert failure is not None or alike(truth, got[0])


# Bytes that change on the way


def test_bytes_that_always_change_on_the_way_down_are_never_believed(ceph: Ceph, proxy: Proxy, place: Path) -> None:
    prefix, truth = fresh_prefix(), states(1, 1 << 20)
    save(place, proxy, prefix, truth)
    shutil.rmtree(place / "nvme")
    fault = proxy.add(Fault("flip_down", "GET", f"{prefix}/packs/", count=None, at=70_000))
    with ts.Checkpointer(two_tiers(place, proxy, prefix), "run") as ckpt:
        with pytest.raises(ts.Damaged):
            ckpt.load()
        assert fault.hits
        proxy.mend()
        proxy.add(Fault("flip_down", "GET", f"{prefix}/versions/", count=None, at=300))
        with pytest.raises(ts.TierstateError):
            ckpt.load()
        proxy.mend()
        assert alike(truth[0], ckpt.load())


@pytest.mark.parametrize("kind", kinds("flip_down", "cut_down", long=["short"]))
def test_what_one_tier_sends_wrong_comes_from_the_next(ceph: Ceph, proxy: Proxy, place: Path, kind: Kind) -> None:
    """The bucket is the nearer tier, and every read of its packs goes wrong."""
    prefix, truth = fresh_prefix(), states(1, 1 << 20)
    with ts.Checkpointer(two_tiers(place, proxy, prefix, first="s3", deadline="5s"), "run") as ckpt:
        saved = ckpt.save(truth[0], step=0)
        saved.wait("s3")
        saved.wait("nvme")
        fault = proxy.add(Fault(kind, "GET", f"{prefix}/packs/", count=None, at=70_000))
        assert alike(truth[0], ckpt.load())
        assert fault.hits


@pytest.mark.parametrize("target", ["packs/", "versions/"])
def test_a_byte_that_changes_once_on_the_way_up_is_found(ceph: Ceph, proxy: Proxy, place: Path, target: str) -> None:
    """By the server, and then it is sent again; or when it is read, and then the restore says so."""
    prefix, truth = fresh_prefix(), states(2, 1 << 20)
    fault = proxy.add(Fault("flip_up", "PUT", f"{prefix}/{target}", at=200))
    with ts.Checkpointer(two_tiers(place, proxy, prefix), "run") as ckpt:
        first = ckpt.save(truth[0], step=0)
        failure = tried(lambda: first.wait("s3"))
        ckpt.save(truth[1], step=1).wait("s3")
    assert fault.hits == 1
    shutil.rmtree(place / "nvme")
    with ts.Checkpointer(two_tiers(place, ceph, prefix), "run") as ckpt:
        if failure is None:
            restores(ckpt, 0, truth[0], damage=True)
        restores(ckpt, 1, truth[1], damage=True)


@pytest.mark.parametrize("kind", kinds("lost", long=["reset_down"]))
def test_a_commit_whose_answer_is_lost_is_committed_once(server: Server, place: Path, kind: Kind) -> None:
    """The record that is read back has the nonce of this commit, so the save has arrived."""
    prefix, truth = fresh_prefix(), states(2, 100_000)
    with Proxy(server) as proxy, ts.Checkpointer(two_tiers(place, proxy, prefix), "run") as ckpt:
        fault = proxy.add(Fault(kind, "PUT", f"{prefix}/versions/", count=2, at=0))
        for step, state in enumerate(truth):
            ckpt.save(state, step=step).wait("s3")
        assert fault.hits == 2
        creates = [s for s in proxy.seen if s.request.method == "PUT" and f"{prefix}/versions/" in s.request.path]
        assert all("if-none-match" in s.request.headers for s in creates)
    check_bucket(place, server, prefix, truth)


def test_a_commit_that_cannot_be_read_back_is_unknown(ceph: Ceph, proxy: Proxy, place: Path) -> None:
    """Nothing is deleted then: what took effect after all is there, and the next save goes on after it."""
    prefix, truth = fresh_prefix(), states(2, 100_000)
    with ts.Checkpointer(two_tiers(place, proxy, prefix, deadline="5s"), "run") as ckpt:
        away = Fault("reset_up", target=f"{prefix}.*versions", count=None)
        lost = proxy.add(Fault("lost", "PUT", f"{prefix}/versions/", action=lambda: proxy.add(away)))
        first = ckpt.save(truth[0], step=0)
        with pytest.raises(ts.CommitUnknown):
            first.wait("s3")
        assert lost.hits == 1
        assert away.hits
        proxy.mend()
        ckpt.save(truth[1], step=1).wait("nvme")
        # While the breaker is open, a save is refused; then it is brought.
        until(lambda: [version.step for version in ckpt.versions() if "s3" in version.tiers] == [0, 1])
    check_bucket(place, ceph, prefix, truth)
