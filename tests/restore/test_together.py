"""Many ranks restore one version together, each chunk of it read as seldom as can be: threads as ranks."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, scratch, tensors
from support.thread_ranks import PATIENCE, Cluster, bytes_read

import tierstate as ts
from tierstate.engine.ranks.restore import restore as plans
from tierstate.engine.ranks.restore.exchange import PeerConnection
from tierstate.engine.ranks.team.heartbeat import Timeouts
from tierstate.manifest.errors import Damaged, FormatError, NotFound, RankFailed, StateMismatch, TierstateError
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import ShardRow, Version

STATE = tensors(40_000, 4_000, 12_000)
OTHER = tensors(40_000, 4_000, 12_000, seed=1)
ROWS = 10 + 1 + 3
"""Chunks of 4 KiB that either has."""


def blank():
    return {name: torch.zeros_like(value) for name, value in STATE.items()}


def restored(ckpt, _rank, **which):
    """The step that a rank got, after a look at all its bytes."""
    state = ckpt.restore(blank(), **which)
    assert ckpt.restored is not None
    assert alike(state, {1: STATE, 2: OTHER}[ckpt.restored.step])
    return ckpt.restored.step


def kinds(found):
    return [type(one) for one in found]


@st.composite
def presences(draw):
    """Hosts of ranks; which chunks each host's tier and the site's have, and which of them are damaged there."""
    hosts = draw(st.sampled_from([[0, 0], [0, 1], [0, 0, 1], [0, 1, 1]]))
    mostly = st.sampled_from([True, True, True, False])
    masks = st.one_of(st.just([True] * ROWS), st.just([False] * ROWS), st.lists(mostly, min_size=ROWS, max_size=ROWS))
    places = [*sorted(set(hosts)), *draw(st.sampled_from([[], [None]]))]
    there = {place: np.array(draw(masks)) for place in places}
    spoilt = {place: draw(st.sets(st.integers(0, ROWS - 1), max_size=2)) for place in places}
    return hosts, there, {place: sorted(rows & set(np.flatnonzero(there[place]))) for place, rows in spoilt.items()}


@pytest.mark.slow
@settings(max_examples=12)
@given(presences(), st.sampled_from(["raise", "older"]))
def test_what_is_whole_somewhere_gets_everywhere_and_else_all_go_back_together(world, on_damage):
    hosts, there, spoilt = world
    sound = np.logical_or.reduce([mask & ~np.isin(np.arange(ROWS), spoilt[at]) for at, mask in there.items()])
    listed = np.logical_or.reduce(list(there.values()))
    with scratch() as place:
        cluster = Cluster(place, hosts, {} if None in there else None)
        cluster.save(STATE, OTHER)
        for at, mask in there.items():
            cluster.spoil(at, 2, spoilt[at])
            cluster.keep(at, 2, mask)
        found = cluster.together(lambda ckpt, rank: restored(ckpt, rank, on_damage=on_damage))
    if sound.all():
        assert found == [2] * len(hosts)
    elif not listed.all() or on_damage == "older":
        assert found == [1] * len(hosts)
    else:
        assert kinds(found) == [Damaged] * len(hosts)


@pytest.mark.slow
@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=2, max_size=4), st.booleans())
@settings(max_examples=6)
def test_each_gets_what_it_wants(only, one_host):
    hosts = [0 if one_host else i // 2 for i in range(len(only))]
    with scratch() as place:
        cluster = Cluster(place, hosts)
        cluster.save(STATE)
        found = cluster.together(lambda ckpt, rank: ckpt.load(only=[only[rank]]))
    for name, got in zip(only, found, strict=True):
        assert alike(got, {name: STATE[name]})


@pytest.mark.slow
def test_a_rank_that_can_start_no_thread_fails_the_restore_on_all_at_once(place, monkeypatch):
    cluster = Cluster(place, [0, 1, 1])
    cluster.save(STATE)
    start, refused = threading.Thread.start, []

    def refuse(thread):
        if thread.name == "tierstate-exchange" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    all_know = threading.Barrier(3, timeout=20)

    def restore(ckpt, _rank):
        try:
            ckpt.restore(blank())
        except Exception as error:
            all_know.wait()  # no rank learns it from the end of another
            return type(error).__name__

    assert sorted(cluster.together(restore)) == ["RankFailed", "RankFailed", "RuntimeError"]


@pytest.mark.slow
@settings(max_examples=10)
@given(st.integers(0, 2), st.integers(1, 24), st.booleans(), st.sampled_from([KeyboardInterrupt, SystemExit]))
def test_a_rank_that_is_interrupted_is_named_to_the_others_and_all_can_restore_again(who, when, after, kind):
    """At any of its calls to the store, of which each all-gather takes some. No rank is closed meanwhile."""
    with scratch() as place:
        cluster = Cluster(place, [0, 0, 1])
        cluster.save(STATE)
        all_know = threading.Barrier(3, timeout=PATIENCE)

        def restore(ckpt, rank):
            line, number = ckpt._together.team._client, when if rank == who else None
            with interrupted(line, kind, number, after):
                first = attempt(lambda: restored(ckpt, rank))
            all_know.wait()
            return first, attempt(lambda: restored(ckpt, rank))

        found = cluster.together(restore, timeouts=Timeouts(PATIENCE, PATIENCE))
    assert [again for _, again in found] == [1] * 3
    mine = found.pop(who)[0]
    assert mine == 1 or type(mine) is kind
    for other in (first for first, _ in found if first != 1):
        assert isinstance(other, RankFailed)
        assert other.ranks == (who,)
        assert kind.__name__ in str(other)  # and not that it was waited for in vain


@contextmanager
def interrupted(line, kind, number, after):
    """The call of this thread to the store that has this number raises, before it or after it."""
    ask, calls, here = line._ask, itertools.count(1), threading.current_thread()

    def interrupting(*given):
        if threading.current_thread() is not here or next(calls) != number:
            return ask(*given)
        if after:
            ask(*given)
        raise kind

    line._ask = interrupting
    try:
        yield
    finally:
        line._ask = ask


def attempt(call):
    try:
        return call()
    except BaseException as error:
        return error


@pytest.mark.slow
def test_an_error_outside_of_an_agreement_is_told_too(place, monkeypatch):
    """As where memory for the plan of the exchange is lacking on one rank."""
    cluster = Cluster(place, [0, 0, 1])
    cluster.save(STATE)
    plan, all_know = plans.plan_exchange, threading.Barrier(3, timeout=PATIENCE)

    def failing(offers, hosts, nbytes, rank, **more):
        if rank == 1:
            raise MemoryError
        return plan(offers, hosts, nbytes, rank, **more)

    monkeypatch.setattr(plans, "plan_exchange", failing)

    def restore(ckpt, _rank):
        found = attempt(lambda: ckpt.restore(blank()))
        all_know.wait()
        return found

    found = cluster.together(restore, timeouts=Timeouts(PATIENCE, PATIENCE))
    assert kinds(found) == [RankFailed, MemoryError, RankFailed]
    assert [found[0].ranks, found[2].ranks] == [(1,), (1,)]


@pytest.mark.slow
def test_replicas_are_read_once_a_host(place):
    big = tensors(2 << 20)
    cluster = Cluster(place, [0, 0, 1, 1], chunk=65536, arena={"size": 1 << 20})
    cluster.save(big)

    def load(ckpt, _rank):
        assert alike(ckpt.load(), big)
        return bytes_read(ckpt, "local")

    read = cluster.together(load)
    for host in (read[:2], read[2:]):
        assert 2 << 20 <= sum(host) < 2.2 * (1 << 20)
        assert max(host) < 1.2 * (1 << 20)


@pytest.mark.slow
def test_a_replaced_host_fetches_what_it_lacks_while_others_read_at_home(place):
    big = tensors(2 << 20)
    cluster = Cluster(place, [0, 0, 1, 1], {}, chunk=65536, arena={"size": 1 << 20})
    cluster.save(big)
    shutil.rmtree(cluster.folder(1))

    def load(ckpt, _rank):
        assert alike(ckpt.load(), big)
        return bytes_read(ckpt, "local"), bytes_read(ckpt, "site")

    read = cluster.together(load)
    small = 1 << 17
    assert all(2 << 20 <= total < (2 << 20) + small for total in [read[0][0] + read[1][0], read[2][1] + read[3][1]])
    assert all(n < small for n in [read[0][1], read[1][1], read[2][0], read[3][0]])


@pytest.mark.slow
def test_what_the_site_gives_slowly_is_read_once_in_all(place):
    big = tensors(2 << 20)
    cluster = Cluster(place, [0, 1], {"bandwidth": "100MiB/s"}, chunk=65536, arena={"size": 1 << 20})
    cluster.save(big)
    for host in (0, 1):
        shutil.rmtree(cluster.folder(host))

    def load(ckpt, _rank):
        assert alike(ckpt.load(), big)
        return bytes_read(ckpt, "site")

    read = cluster.together(load)
    assert 2 << 20 <= sum(read) < (2 << 20) + (1 << 18)
    assert max(read) < (1 << 20) + (1 << 18)


def test_parts_of_hosts_are_one_version(place):
    """As each host has what its own ranks saved, and a restore elsewhere wants it all."""
    cluster = Cluster(place, [0, 1])
    cluster.save(STATE)
    first = np.arange(ROWS) < 6
    cluster.keep(0, 1, first)
    cluster.keep(1, 1, ~first)
    assert cluster.together(restored) == [1, 1]
    shutil.rmtree(cluster.folder(1))
    found = cluster.together(restored)
    assert kinds(found) == [Damaged, Damaged]
    assert all("rank 0 lacks 3 leaves, a the first; rank 1 lacks 3 leaves" in str(one) for one in found)


class Flipping:
    """The connections between the ranks turn a bit of some chunks on their way, as memory or a network may.

    Args:
        bits: by row, the bit.
        times: for how many sendings of each row.
    """

    def __init__(self, monkeypatch, bits, times):
        self.bits, self.left, self.turned = bits, dict.fromkeys(bits, times), 0
        send, lock = PeerConnection.send, threading.Lock()

        def flipping(line, row, data):
            with lock:
                turns = data is not None and self.left.get(row, 0) > 0
                if turns:
                    self.left[row] -= 1
                    self.turned += 1
            send(line, row, memoryview(flipped(bytes(data), self.bits[row] % (8 * len(data)))) if turns else data)

        monkeypatch.setattr(PeerConnection, "send", flipping)


def flipped(data, bit):
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def scattered():
    """A state in which no chunk has one place in memory."""
    return {name: torch.zeros(2 * len(value))[::2] for name, value in STATE.items()}


BITS = st.dictionaries(st.integers(0, ROWS - 1), st.integers(0, 8 * 4096 - 1), min_size=1, max_size=3)


@pytest.mark.slow
@given(BITS, st.integers(1, 3), st.sampled_from([blank, scattered]), st.sampled_from([[0, 1], [0, 1, 1]]))
@settings(max_examples=8)
def test_chunks_that_change_on_their_way_are_verified_where_they_arrive(bits, times, state, hosts):
    """What one rank passes on to the others, who pass it on to their host's, is what was saved or is sent again."""
    with scratch() as place, pytest.MonkeyPatch.context() as patch:
        cluster = Cluster(place, hosts)
        cluster.save(STATE)
        shutil.rmtree(cluster.folder(1))
        flipping = Flipping(patch, bits, times)
        found = cluster.together(lambda ckpt, _rank: alike(ckpt.restore(state()), STATE))
        assert flipping.turned
    assert found == [True] * len(hosts)


def test_a_chunk_that_never_arrives_as_it_was_saved_is_told(place, monkeypatch):
    cluster = Cluster(place, [0, 1])
    cluster.save(STATE)
    shutil.rmtree(cluster.folder(1))
    Flipping(monkeypatch, {3: 77}, 1 << 30)
    found = cluster.together(lambda ckpt, _rank: ckpt.restore(blank()))
    assert kinds(found) == [RankFailed, Damaged]


@pytest.mark.slow
@pytest.mark.parametrize("which", [{"step": 2}, {"tag": "best"}, {"version": ...}])
def test_a_named_version_that_one_lacks_is_no_other(place, which):
    cluster = Cluster(place, [0, 1])
    cluster.save(STATE, OTHER)
    with ts.Checkpointer(cluster.policy(0), "run") as ckpt:
        ckpt.tag("best", step=2)  # of which the other host never hears
        which = {"version": ckpt.info(step=2).id[:12]} if "version" in which else which
    assert cluster.together(lambda c, rank: restored(c, rank, **which)) == [2, 2]
    cluster.log(1).forget(2)
    assert cluster.together(lambda c, rank: restored(c, rank, **which)) == [2, 2]
    cluster.keep(0, 2, np.arange(ROWS) != 11)
    found = cluster.together(lambda c, rank: restored(c, rank, **which))
    assert kinds(found) == [Damaged, Damaged]
    assert all("not whole for ranks 0, 1" in str(one) and "rank 1 lacks 1 leaves, c" in str(one) for one in found)
    assert cluster.together(lambda c, rank: restored(c, rank, on_damage="older", **which)) == [1, 1]


@pytest.mark.parametrize(
    ("one", "other"),
    [({"step": 1}, {"step": 2}), ({}, {"step": 2}), ({"tag": "x"}, {"step": 1}), ({"on_damage": "older"}, {})],
)
def test_ranks_that_ask_for_different_versions_are_told_so(place, one, other):
    cluster = Cluster(place, [0, 0])
    cluster.save(STATE, OTHER)
    found = cluster.together(lambda ckpt, rank: ckpt.load(**(other if rank else one)))
    assert kinds(found) == [ValueError, ValueError]
    assert str(found[0]) == str(found[1])
    assert "on rank 0" in str(found[0])
    assert "on rank 1" in str(found[0])


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "kind"), [({"device": "meta"}, ValueError), ({"step": True}, ValueError), ({"only": "a"}, TypeError)]
)
def test_what_is_wrong_with_one_ranks_call_is_told_to_all_and_the_next_is_in_step(place, who, wrong, kind):
    cluster = Cluster(place, [0, 0])
    cluster.save(STATE)

    def load(ckpt, rank):
        with pytest.raises(kind if rank == who else RankFailed) as failed:
            ckpt.load(**(wrong if rank == who else {}))
        assert kind.__name__ in str(failed.value) or rank == who
        assert alike(ckpt.load(), STATE)

    assert cluster.together(load) == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_a_tag_is_of_one_version_where_hosts_have_others_of_its_number(place, host):
    cluster = Cluster(place, [0, 1])
    for one, state in enumerate([STATE, OTHER]):
        with ts.Checkpointer(cluster.policy(one), "run") as ckpt:
            ckpt.save(state, step=one + 1).wait()
            if one == host:
                ckpt.tag("best")
    assert cluster.together(lambda ckpt, rank: restored(ckpt, rank, tag="best")) == [host + 1] * 2


@pytest.mark.parametrize("which", [{"step": 7}, {"version": "ffff"}, {"tag": "none"}])
def test_what_no_rank_has_is_not_found(place, which):
    cluster = Cluster(place, [0, 1])
    cluster.save(STATE)
    assert kinds(cluster.together(lambda c, rank: c.load(**which))) == [NotFound, NotFound]


def test_a_run_without_versions(place):
    assert kinds(Cluster(place, [0, 1]).together(lambda ckpt, rank: ckpt.load())) == [NotFound, NotFound]


def test_a_state_that_does_not_fit_on_one_rank_touches_none(place):
    cluster = Cluster(place, [0, 0])
    cluster.save(STATE)
    states = [blank(), blank() | {"a": torch.zeros(3)}]
    found = cluster.together(lambda ckpt, rank: ckpt.restore(states[rank]))
    assert kinds(found) == [RankFailed, StateMismatch]
    assert found[0].ranks == (1,)
    assert "StateMismatch" in str(found[0])
    assert not any(value.any() for state in states for value in state.values())


def test_leaves_that_no_rank_has_are_a_mismatch_for_all(place):
    cluster = Cluster(place, [0, 0])
    cluster.save(STATE)
    less = [{"a": torch.zeros(10_000)}, {"b": torch.zeros(1_000)}]
    found = cluster.together(lambda ckpt, rank: ckpt.restore(less[rank]))
    assert kinds(found) == [StateMismatch, StateMismatch]


def test_damage_at_one_rank_is_told_to_all_and_the_state_is_said_to_be_touched(place):
    cluster = Cluster(place, [0, 1])
    cluster.save(STATE)
    cluster.keep(0, 1, np.arange(ROWS) < 10)
    cluster.spoil(1, 1, [11])
    states = [blank(), blank()]
    found = cluster.together(lambda c, rank: c.restore(states[rank], only=["c"] if rank else ["a"]))
    assert kinds(found) == [RankFailed, Damaged]
    assert found[0].ranks == (1,)
    assert all("do not train on from it" in "".join(one.__notes__) for one in found)


def test_a_record_that_no_rank_can_read_is_not_passed_over_in_silence(place):
    cluster = Cluster(place, [0, 1])
    cluster.save(STATE, OTHER)
    for host in (0, 1):
        record = cluster.folder(host) / "nvme" / cluster.log(host).key(2)
        record.write_bytes(record.read_bytes()[:-1] + bytes([record.read_bytes()[-1] ^ 1]))
    assert kinds(cluster.together(lambda ckpt, rank: ckpt.load())) == [Damaged, Damaged]
    assert cluster.together(lambda c, rank: restored(c, rank, on_damage="older")) == [1, 1]


def test_a_record_that_one_rank_cannot_read_is_read_by_the_others(place):
    cluster = Cluster(place, [0, 1])
    cluster.save(STATE, OTHER)
    record = cluster.folder(1) / "nvme" / cluster.log(1).key(2)
    record.write_bytes(b"no record")
    assert cluster.together(restored) == [2, 2]


def test_each_stage_of_a_pipeline_gets_its_own_leaves(place):
    layers = {"first": {"w": torch.arange(5000.0)}, "second": {"w": torch.arange(3000.0) + 7}}
    cluster = Cluster(place, [0, 1])
    cluster.save({"model": layers, "step": 3})
    stages = [{"model": {name: {"w": torch.zeros_like(layers[name]["w"])}}, "step": 0} for name in ("first", "second")]
    cluster.together(lambda ckpt, rank: ckpt.restore(stages[rank]))
    for stage, name in zip(stages, ("first", "second"), strict=True):
        assert stage["step"] == 3
        assert alike(stage["model"][name], layers[name])
    found = cluster.together(lambda ckpt, rank: ckpt.restore(stages[0]))
    assert kinds(found) == [StateMismatch, StateMismatch]
    assert all("model.second.w" in str(one) for one in found)


def absurd(cluster, host, seq):
    """Let a host's record say that a leaf is of a dtype that there is not."""
    log = cluster.log(host)
    record = log.read(seq)
    leaves = [
        leaf._replace(spec=replace(leaf.spec, dtype="complex1024")) if leaf.name == "b" else leaf
        for leaf in record.version.leaves
    ]
    rows = zip(record.version.shard_leaf, record.version.shard_rank, record.version.boxes, strict=True)
    version = Version.build(
        record.version.head, leaves, [ShardRow(int(a), int(b), box) for a, b, box in rows], record.version.digests
    )
    log.forget(seq, log.generations()[seq])
    log.commit(Record(version, record.layout, {"id": "forged"}))


@pytest.mark.slow
def test_of_a_version_that_cannot_be_all_go_back_together(place):
    cluster = Cluster(place, [0, 0, 1])
    cluster.save(STATE, OTHER)
    for host in (0, 1):
        absurd(cluster, host, 2)
    assert cluster.together(lambda ckpt, rank: ckpt.load(on_damage="older") and ckpt.restored.step) == [1, 1, 1]
    found = cluster.together(lambda ckpt, _rank: ckpt.load())
    assert kinds(found) == [FormatError] * 3
    assert all("dtype 'complex1024' is not known" in str(error) for error in found)


def read_in_child(ckpt, rank):
    """What becomes of the reads of a forked child of rank 1, while all ranks restore."""
    pid = os.fork() if rank == 1 else None
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # it hangs
        try:
            seen = [version.step for version in ckpt.versions()]
            ckpt.load()
        except TierstateError as error:
            os._exit(7 if seen == [1] and "this one is none of them" in str(error) else 2)
        finally:
            os._exit(1)
    code = None if pid is None else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return restored(ckpt, rank), code


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_of_a_rank_is_refused_and_disturbs_nobody(place):
    cluster = Cluster(place, [0, 0], {})
    cluster.save(STATE)
    assert cluster.together(read_in_child) == [(1, None), (1, 7)]
