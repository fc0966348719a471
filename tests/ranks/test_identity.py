"""Many ranks and the identity of tiers: all agree on a fresh start, and none trains on without what one misses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkpointer_worlds as worlds
from support.thread_ranks import Cluster

import tierstate as ts
from tierstate.engine.store.identity import read_marker
from tierstate.manifest.errors import RankFailed
from tierstate.manifest.format.marker import named_tiers

HOSTS = [0, 0, 1]


class Sites(Cluster):
    """A cluster of which each host mounts the site's file system for itself."""

    def policy(self, host: int) -> ts.Policy:
        tiers = {
            "local": worlds.tier("nvme", self.place / f"host-{host}"),
            "site": {"type": "lustre", "path": str(self.place / f"mount-{host}" / "site")},
        }
        return worlds.policy(tiers, durable="site")

    def mount(self, host: int) -> None:
        (self.place / f"mount-{host}").symlink_to(self.place / "shared")

    def unmount(self, host: int) -> None:
        (self.place / f"mount-{host}").unlink()
        (self.place / f"mount-{host}").mkdir()


@pytest.fixture
def cluster(place: Path) -> Sites:
    made = Sites(place, HOSTS)
    (place / "shared").mkdir()
    for host in set(HOSTS):
        made.mount(host)
    return made


def job(ckpt: ts.Checkpointer, rank: int) -> tuple[int | None, str]:
    """Go on, and save one step more; the step it went on from, and what became of the save."""
    state: dict[str, Any] = {"step": 0, "w": torch.zeros(5000)}
    found = ckpt.resume(into=state, only=["step", "w"] if ckpt.versions() else None)
    step = 0 if found is None else found.step
    assert state["step"] == step
    assert bool((state["w"] == step).all())
    own = {f"own-{rank}": torch.full((3000,), float(rank + step))}
    made = ckpt.save({"step": step + 1, "w": torch.full((5000,), float(step + 1)), **own}, step=step + 1)
    try:
        made.wait("site", timeout=60)
    except ts.TierstateError as error:
        return found and found.step, type(error).__name__
    return found and found.step, ""


def test_ranks_agree_on_a_fresh_start_and_on_what_they_go_on_from(cluster: Sites) -> None:
    assert cluster.together(job) == [(None, "")] * 3
    assert cluster.together(job) == [(1, "")] * 3
    markers = [read_marker(worlds.opened(cluster.policy(h), name)) for h in (0, 1) for name in ("local", "site")]
    assert len({marker.id for marker in markers if marker}) == 3, "each host's local tier has an id, the site's one"
    for host in (0, 1):
        record = cluster.log(host).latest()
        assert record is not None
        named = named_tiers(record.commit)
        assert named["site"].id == markers[1].id  # type: ignore[union-attr]
        assert {t.id for t in named.values()} <= {m.id for m in markers if m}


@pytest.mark.slow
@pytest.mark.parametrize("blind", [(1,), (0,), (0, 1)])
def test_no_rank_starts_afresh_where_one_does_not_see_the_site(cluster: Sites, blind: tuple[int, ...]) -> None:
    assert cluster.together(job) == [(None, "")] * 3
    for host in blind:
        cluster.unmount(host)
    found = cluster.together(job)
    assert all(isinstance(error, (ts.WrongTier, RankFailed)) for error in found), found
    for rank, error in enumerate(found):
        assert isinstance(error, ts.WrongTier) or HOSTS[rank] not in blind or "WrongTier" in str(error)
    shutil.rmtree(cluster.folder(1))
    found = cluster.together(job)  # a host with a new disk knows nothing
    if blind == (1,):
        assert {what for _, what in found} <= {"WrongTier", "RankFailed"}, "a version without the parts of a host"
    else:
        assert all(isinstance(error, (ts.WrongTier, RankFailed)) for error in found), found
    for host in blind:
        point = cluster.place / f"mount-{host}"
        assert not [path for path in point.rglob("*") if path.is_file()]
        shutil.rmtree(point)
        cluster.mount(host)
    went_on = cluster.together(job)
    assert went_on in ([(1, "")] * 3, [(2, "")] * 3), "2 where the local tiers got what the site did not"


def test_two_tiers_in_one_place_are_refused_on_all_ranks(place: Path) -> None:
    class Same(Cluster):
        def policy(self, host: int) -> ts.Policy:
            path = str(place / ("one" if host else f"{host}"))
            return worlds.policy({n: {"type": "nvme", "path": path if n == "b" else str(place / "one")} for n in "ab"})

    found = Same(place, [0, 1]).together(job)
    assert all(isinstance(error, ts.PolicyError) for error in found), found
    assert not (place / "one").exists()
