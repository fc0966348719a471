"""The verbs about peer memory."""

from pathlib import Path

import pytest
from support.cli_calls import Call
from support.peer_hosts import SECRET, Hosts

import tierstate as ts
from tierstate.tiers.peer.local import LocalMemory
from tierstate.tiers.peer.tier import Peer
from tierstate.tiers.testing import random_bytes

POLICY = """
tiers:
  nvme: {{type: nvme, path: {place}/nvme}}
  peer: {{type: peer, path: {place}/host0, capacity: 1MiB, copies: 1, domain: "${{RACK:-r1}}", exchange: 500MiB/s}}
"""


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, place: Path, call: Call) -> None:
    monkeypatch.setenv("TIERSTATE_ADDRESS", "127.0.0.1")
    ts.register_tier("peer", Peer)
    with Hosts(place, 2) as hosts:
        hosts.tiers[0].put("a", random_bytes(1000))
        policy = place / "policy.yaml"
        policy.write_text(POLICY.format(place=place))
        said = call("peer", "status", "--policy", policy)
        assert said.status == 0, said.err
        assert "2 hosts in 2 failure domains, 1 copies with others" in said.out
        assert said.out.count("runs, pid") == 2
        status = call("peer", "status", "--policy", policy, "--json")
        assert [host["objects"] for host in status.json[0]["hosts"]] == [1, 1]
        secret = SECRET.child("peer memory").reveal().hex()
        assert secret not in said.out + status.out
        assert call("peer", "stop", "--policy", policy).out == "peer: stopped\n"
        assert not (place / "host0").exists()
        assert call("peer", "stop", "--policy", policy).out == "peer: there was nothing\n"
        assert call("peer", "stop", "--policy", policy, "--tier", "nvme").status == 2

        hosts.die(1)
        (place / "mine").mkdir(mode=0o755)
        reaped = call("peer", "reap", place / "none", place / "mine")
        assert reaped.status == 1
        assert reaped.out == f"{place}/none: nothing is there\n"
        assert "not a folder of this user's alone" in reaped.err
        (place / "mine").rmdir()
        (hosts.place / "host1").rename(place / "host0")
        assert "does not answer" in call("peer", "status", "--policy", policy).out
        assert call("peer", "stop", "--policy", policy).status == 0
        assert not (place / "host0").exists()


def test_reaping(place: Path, call: Call) -> None:
    LocalMemory(place / "memory").put("a", bytes(10))
    said = call("peer", "reap", place / "memory")
    assert (said.status, said.out) == (0, f"{place}/memory: freed\n")
    assert list(place.iterdir()) == []
