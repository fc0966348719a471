"""Many ranks restore one version together: real processes, which also die."""

from __future__ import annotations

import json
import shutil
import signal
import time

import pytest
from support.processes import Gang
from support.thread_ranks import Cluster, save_for_gang

pytestmark = pytest.mark.slow

SIZE = 8 << 20


def gang(place, hosts, site=None, size=SIZE, how="restore"):
    args = [json.dumps(hosts), json.dumps(site), size, how]
    env = [{"TIERSTATE_HOST": f"host-{host}"} for host in hosts]
    return Gang(len(hosts), "support.thread_ranks:restore_in_gang", place, *args, per_rank=env)


def cluster(place, hosts, site=None, size=SIZE):
    found = Cluster(place, hosts, site, chunk="256KiB", arena={"size": "4MiB"})
    save_for_gang(found, size)
    return found


def told(running, rank, word="restored"):
    return json.loads(running.hear(rank, word))


def test_a_host_that_lost_everything_gets_it_from_the_other(place):
    made = cluster(place, [0, 1])
    shutil.rmtree(made.folder(1))
    with gang(place, [0, 1]) as running:
        running.wait()
        found = [told(running, rank) for rank in (0, 1)]
    assert all(right for right, _, _ in found)
    assert found[1][2]["local"] < SIZE * 0.05


@pytest.fixture
def slow(place):
    """A gang of two whose restore takes seconds, and is under way."""
    made = cluster(place, [0, 1], {})
    for host in (0, 1):
        shutil.rmtree(made.folder(host))
    with gang(place, [0, 1], {"bandwidth": "1MiB/s"}) as running:
        for rank in (0, 1):
            running.hear(rank, "begin")
        time.sleep(0.5)
        yield running


def test_a_rank_that_is_killed_while_all_restore_is_named_to_the_others(slow):
    slow.kill(1)
    kind, ranks, text = told(slow, 0, "failed")
    assert (kind, ranks) == ("RankFailed", [1]), text
    assert slow.processes[0].wait(60) == 0


@pytest.mark.soak
def test_a_rank_that_stands_still_while_all_restore_is_named_to_the_others(slow):
    slow.kill(1, signal.SIGSTOP)
    kind, ranks, text = told(slow, 0, "failed")
    assert (kind, ranks) == ("RankFailed", [1]), text
    assert slow.processes[0].wait(60) == 0


@pytest.mark.soak
def test_a_store_that_dies_ends_the_restore_everywhere(slow):
    slow.kill(0)
    kind, _, text = told(slow, 1, "failed")
    assert kind == "RankFailed", text


@pytest.mark.soak
@pytest.mark.parametrize("hosts", [[0, 0], [0, 0, 0, 0], [0, 0, 1, 1]])
def test_ranks_of_a_host_read_each_chunk_once(place, hosts):
    cluster(place, hosts)
    with gang(place, hosts, how="load") as running:
        running.wait()
        found = [told(running, rank) for rank in range(len(hosts))]
    assert all(right for right, _, _ in found)
    read = [there["local"] for _, _, there in found]
    assert SIZE * len(set(hosts)) <= sum(read) < SIZE * len(set(hosts)) * 1.05
    assert max(read) < SIZE * 1.1 * len(set(hosts)) / len(hosts)
