"""Many ranks over sealed and encrypted tiers: parts are authentic, and what is not is refused by all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.secret_keys import key_file, write
from support.thread_ranks import Cluster

import tierstate as ts
from tierstate.engine.ranks.save import commit
from tierstate.engine.ranks.save.relay import VersionRelay

SIZE = 4


def shard(rank: int, step: int) -> dict[str, Any]:
    rows = torch.arange(1000 * SIZE, dtype=torch.float32).reshape(SIZE, 1000)[rank : rank + 1] + step
    return {"w": ts.Shard(rows.clone(), (rank, 0), (SIZE, 1000)), "own": ts.PerRank(torch.full((3,), float(rank)))}


def save(ckpt: ts.Checkpointer, rank: int) -> None:
    for step in (1, 2):
        made = ckpt.save(shard(rank, step), step=step)
        made.wait("local")
        made.wait("site")


def load(**asked: Any) -> Callable[[ts.Checkpointer, int], float]:
    def run(ckpt: ts.Checkpointer, rank: int) -> float:
        state = shard(rank, 0)
        ckpt.restore(into=state, **asked)
        assert torch.equal(state["own"].value, torch.full((3,), float(rank)))
        return float(state["w"].tensor[0, 0]) - 1000 * rank

    return run


def cluster(place: Path, encrypt: bool) -> Cluster:
    key = key_file(place / "keys")
    site = {"encrypt": {"file": key}} if encrypt else {}
    return Cluster(place, [0, 0, 1, 1], site, seal={"file": key})


@pytest.mark.slow
@pytest.mark.parametrize("encrypt", [False, True])
def test_ranks_save_and_restore_together(encrypt: bool, tmp_path: Path) -> None:
    ranks = cluster(tmp_path, encrypt)
    assert ranks.together(save) == [None] * SIZE
    assert ranks.together(load()) == [2.0] * SIZE
    assert ranks.together(load(step=1)) == [1.0] * SIZE


@pytest.mark.slow
@pytest.mark.parametrize("encrypt", [False, True])
def test_a_record_that_is_not_authentic_is_refused_by_all_ranks(encrypt: bool, tmp_path: Path) -> None:
    ranks = cluster(tmp_path, encrypt)
    ranks.together(save)
    newest = sorted(path for path in tmp_path.rglob("versions/run/*") if path.is_file())
    for path in [path for path in newest if path.name == newest[-1].name]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        write(path, bytes(data))
    for found in ranks.together(load()):
        assert isinstance(found, ts.Unsafe), found
    assert ranks.together(load(on_damage="older")) == [1.0] * SIZE


def test_a_part_that_is_not_authentic_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a rank is changed in the tier between its vote and the commit, its checksum made right."""
    ranks = cluster(tmp_path, False)
    monkeypatch.setattr(commit, "PARTS_IN_STORE", 0)
    monkeypatch.setattr(VersionRelay, "offer", lambda one, part: None)  # the part goes through the tier
    right = commit.Vote

    def vote(kind: str, said: Any = None, **more: Any) -> Any:
        if said is not None and "key" in said:
            path = tmp_path / "lustre" / said["key"]
            data = bytearray(path.read_bytes())
            assert data[:4] == b"\x89TSS"
            data[-40] ^= 1
            write(path, bytes(data))
            said = said | {"sum": commit.checksum(bytes(data[64:])).hex()}
        return right(kind, said, **more)

    monkeypatch.setattr(commit, "Vote", vote)
    for found in ranks.together(save):
        assert isinstance(found, ts.TierstateError), found
    monkeypatch.undo()
    assert not [*(tmp_path / "lustre").glob("versions/run/*")]


@pytest.mark.parametrize("encrypt", [False, True])
def test_long_parts_are_in_the_tier_only_where_it_encrypts_them(
    encrypt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections of ranks are authenticated, and not encrypted."""
    ranks, written = cluster(tmp_path, encrypt), list[str]()
    monkeypatch.setattr(commit, "PARTS_IN_STORE", 0)
    through_tier = commit.GroupCommit._through_tier

    def through(one: commit.GroupCommit, *about: Any) -> Any:
        written.append(one._name)
        return through_tier(one, *about)

    monkeypatch.setattr(commit.GroupCommit, "_through_tier", through)
    assert ranks.together(save) == [None] * SIZE
    assert written == ["site"] * (2 * (SIZE - 1) if encrypt else 0)
    assert ranks.together(load()) == [2.0] * SIZE
