"""What a team does with its versions beside saving: names, forks, copies, checks, pruning; by one rank, or by all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import policy, tier, unreferenced
from support.thread_ranks import Cluster, as_ranks

import tierstate as ts
from tierstate.engine.ranks.team.team import Team

pytestmark = pytest.mark.slow


def cluster(place: Path, **site: Any) -> Cluster:
    return Cluster(place, [0, 0, 1], site)


def state(rank: int, step: int) -> dict[str, Any]:
    return {
        "w": torch.full((3000,), float(step)),
        "part": ts.Shard(torch.full((2000,), rank + 10.0 * step), (2000 * rank,), (6000,)),
    }


def check(found: dict[str, Any], step: int) -> None:
    assert torch.equal(found["w"], torch.full((3000,), float(step)))
    assert torch.equal(found["part"], torch.arange(3.0).repeat_interleave(2000) + 10 * step)


def saved(ckpt: ts.Checkpointer, rank: int, steps: int = 3) -> None:
    for step in range(steps):
        save = ckpt.save(state(rank, step), step=step)
        for name in save.tiers:
            save.wait(name)


def in_turn(where: Cluster, does: Callable[[ts.Checkpointer, int], Any], who: list[int]) -> list[Any]:
    """What each of some ranks gave, after all have saved."""

    def rank(team: Team) -> Any:
        with ts.Checkpointer(where.policy(where.hosts[team.rank]), "run", team) as ckpt:
            saved(ckpt, team.rank)
            team.gather("saved", b"")
            found = does(ckpt, team.rank) if team.rank in who else None
            team.gather("done", b"")
            return found

    found = as_ranks(where.hosts, rank)
    assert not [one for one in found if isinstance(one, BaseException)], found
    return [found[r] for r in who]


@pytest.mark.parametrize("who", [[0], [2], [0, 1, 2]])
def test_any_rank_and_all_of_them_may_give_a_name(place: Path, who: list[int]) -> None:
    where = cluster(place)
    in_turn(where, lambda ckpt, rank: ckpt.tag("best", 1), who)

    def load(ckpt: ts.Checkpointer, rank: int) -> Any:
        return ckpt.load(tag="best")

    for got in where.together(load):
        check(got, 1)


@pytest.mark.parametrize("who", [[0], [2]])
def test_one_rank_forks_and_all_go_on_in_the_fork(place: Path, who: list[int]) -> None:
    where = cluster(place)
    (info,) = in_turn(where, lambda ckpt, rank: ckpt.fork("other", step=1), who)
    assert info.step == 1

    def rank(team: Team) -> list[int]:
        with ts.Checkpointer(where.policy(where.hosts[team.rank]), "other", team) as ckpt:
            check(ckpt.load(), 1)
            ckpt.save(state(team.rank, 5), step=5).wait("site")
            check(ckpt.load(), 5)
            return [v.seq for v in ckpt.versions()]

    found = as_ranks(where.hosts, rank)
    assert found[0] == found[1] == found[2] == [1, 2], found
    for run in ("run", "other"):
        with ts.Checkpointer(where.policy(0), run) as alone:
            assert alone.verify(deep=True).ok


def test_all_ranks_may_look_and_prune_at_once(place: Path) -> None:
    where = cluster(place, keep={"last": 2})

    def look(ckpt: ts.Checkpointer, rank: int) -> Any:
        found = [v.step for v in ckpt.versions()], [d.name for d in ckpt.diff(1, 2)]
        assert ckpt.verify(deep=True).ok
        ckpt.prune()
        return found

    assert [tuple(map(list, one)) for one in in_turn(where, look, [0, 1, 2])] == [([0, 1, 2], ["w", "part"])] * 3
    for got in where.together(lambda ckpt, rank: ckpt.load(step=2)):
        check(got, 2)


def test_a_host_keeps_what_the_site_lacks_though_another_rank_prunes_that(place: Path) -> None:
    cluster(place).together(saved)
    for seq in (2, 3):
        (place / f"lustre/versions/run/{seq:012d}").unlink()
    hosts = [0, 0, 1]

    def spec(host: int) -> ts.Policy:
        local = tier("nvme", place / f"host-{host}", keep={"last": 1})
        return policy({"local": local, "site": tier("lustre", place)})

    def rank(team: Team) -> Any:
        with ts.Checkpointer(spec(hosts[team.rank]), "run", team) as ckpt:
            found = ckpt.prune(dry_run=True)
            team.gather("pruned", b"")
            return [(one.tier, sorted(one.drop), one.keep.get(2)) for one in found.tiers]

    found = as_ranks(hosts, rank)
    assert all(isinstance(one, list) for one in found), found
    assert found[1] == []
    assert found[2] == [one for one in found[0] if one[0] == "local"]
    assert found[2][0][1] == [1]
    assert "site has not got it yet" in str(found[2][0][2])


@pytest.mark.parametrize("who", [[1], [0, 1, 2]])
def test_copies_into_another_place(place: Path, who: list[int]) -> None:
    where = cluster(place)
    other = [policy({"there": tier("nvme", place / f"copy-{rank}")}) for rank in range(3)]
    in_turn(where, lambda ckpt, rank: ckpt.copy(step=1, into=other[rank]), who)
    for rank in who:
        with ts.Checkpointer(other[rank], "run") as ckpt:
            check(ckpt.load(), 1)


def test_records_of_one_tier_that_are_lost_are_made_again_by_those_of_another(place: Path) -> None:
    where = cluster(place)
    where.together(lambda ckpt, rank: saved(ckpt, rank))
    for path in (place / "lustre" / "versions").rglob("0*"):
        path.unlink()
    with ts.Checkpointer(where.policy(0), "run") as alone:
        found = alone.rebuild("site")
        assert [(v.seq, v.rebuilt) for v in found.versions] == [(3, True), (2, True), (1, True)]
        for step in range(3):
            check(alone.load(step=step), step)
        assert unreferenced(where.log(None).tier, "run") == set()


def test_a_host_finds_its_own_chunks_again_by_the_records_of_the_site(place: Path) -> None:
    where = cluster(place)
    where.together(lambda ckpt, rank: saved(ckpt, rank))
    for path in (where.folder(1) / "nvme" / "versions").rglob("0*"):
        path.unlink()
    with ts.Checkpointer(where.policy(1), "run") as alone:
        assert not alone.rebuild("local").ok
        found = alone.rebuild("local", partial=True)
        assert [(v.seq, v.rebuilt, 0 < v.found < v.chunks) for v in found.versions] == [
            (n, True, True) for n in (3, 2, 1)
        ]
    for path in (place / "lustre").rglob("versions/run/0*"):
        path.unlink()
    for got in where.together(lambda ckpt, rank: ckpt.load()):  # from the parts of both hosts
        check(got, 2)


def test_where_every_record_is_lost_nothing_says_what_a_team_saved(place: Path) -> None:
    """The packs hold the chunks, and no copy of the whole version; that is told, and nothing is made up."""
    spec = policy({"site": tier("lustre", place)})

    def rank(team: Team) -> None:
        with ts.Checkpointer(spec, "run", team) as ckpt:
            saved(ckpt, team.rank)

    as_ranks([0, 0, 1], rank)
    for path in (place / "lustre" / "versions").rglob("0*"):
        path.unlink()
    with ts.Checkpointer(spec, "run") as alone:
        found = alone.rebuild("site")
        assert (found.versions, found.unknown) == ([], [1, 2, 3])
        assert alone.versions() == []
