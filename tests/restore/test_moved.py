"""Versions that another process drops, moves or sweeps while they are restored, copied, exported or verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpointer_worlds import alike, names, policy, scratch, wrapped

import tierstate as ts
from tierstate.engine.maintain.repack import _relaid
from tierstate.engine.packs.pack import PackWriter
from tierstate.engine.store import catalog
from tierstate.files.export import export
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.log import Log, commit_id
from tierstate.tiers.base import Range, Tier, Traits
from tierstate.tiers.memory.host import Memory


class Busy(Memory):
    """A tier of the site, where something happens at the first read of a pack, or after so many (``before``); or of
    what else lies below ``prefix``."""

    meanwhile: Callable[[], None] | None = None
    before = 0
    prefix = "packs/"
    leases: list[str]

    @property
    def traits(self) -> Traits:
        from dataclasses import replace

        return replace(super().traits, shared="site")

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self.before -= key.startswith(self.prefix)
        now = key.startswith(self.prefix) and self.before < 0
        call, self.meanwhile = self.meanwhile, None if now else self.meanwhile
        if now and call is not None:
            self.leases = names(self, "leases/")
            call()
        super().read(key, ranges)


STATES = [{"w": torch.full((2_000,), float(step))} for step in range(3)]


@contextmanager
def saved(keep: dict[str, int] | None = None) -> Iterator[tuple[Busy, ts.Policy]]:
    """A run of three versions, and a policy with this ``keep``, which was not applied yet."""
    tier = Busy()
    with scratch(), wrapped(tier) as keys:
        spec = policy({"only": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            for step, state in enumerate(STATES):
                ckpt.save(state, step=step)
        yield tier, policy({"only": {**keys, **({"keep": keep} if keep else {})}})


def move(tier: Tier, seq: int) -> None:
    """What repacking and a sweep do to a version."""
    from dataclasses import replace

    log = Log(tier, "run")
    old: Record = log.read(seq)
    writer, moved = PackWriter(tier, "run", seq), {}
    for row in range(len(old.version.digests)):
        place = old.layout.place(row)
        assert place is not None
        data = tier.get(place.object)[place.offset : place.offset + place.stored].clone()
        moved[place.object, place.offset] = writer.add(
            data, old.version.digests[row].tobytes(), int(old.version.chunk_nbytes[row]), place.codec
        )
    layout = _relaid(old.layout, moved, writer.close())
    assert layout is not None
    log.commit(replace(old, layout=layout, commit={"id": commit_id()}), 1)
    log.forget(seq)
    tier.discard(old.layout.objects)


def drop(tier: Tier, seq: int) -> None:
    log = Log(tier, "run")
    packs = log.read(seq).layout.objects
    log.forget(seq)
    tier.discard(packs)


def test_a_version_that_is_moved_while_it_is_read_is_read_where_it_lies_then() -> None:
    for step in (0, 2, None):
        with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
            tier.meanwhile = lambda tier=tier, step=step: move(tier, 3 if step is None else step + 1)  # type: ignore[misc]
            assert alike(ckpt.load(step=step), STATES[2 if step is None else step])


def test_one_that_is_dropped_is_told_unless_any_newest_will_do() -> None:
    with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
        tier.meanwhile = lambda: drop(tier, 1)
        with pytest.raises(ts.NotFound, match="was dropped"):
            ckpt.load(step=0)
        tier.meanwhile = lambda: drop(tier, 3)
        assert alike(ckpt.load(), STATES[1])


@pytest.mark.parametrize(
    "use",
    [ts.Checkpointer.info, lambda ckpt: ckpt.fork("new"), lambda ckpt: ckpt.tag("best")],
    ids=["info", "fork", "tag"],
)
def test_where_the_newest_is_dropped_as_it_is_looked_up_the_newest_of_those_left_is_taken(
    use: Callable[[ts.Checkpointer], ts.VersionInfo],
) -> None:
    with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
        tier.prefix, tier.meanwhile = "versions/", lambda: drop(tier, 3)
        assert use(ckpt).step == 1
        assert tier.meanwhile is None


def test_a_version_is_held_where_a_cascade_reads_it() -> None:
    """While it does, another process saves, and drops all versions but its own."""
    tier, slow = Busy(), Memory()
    with scratch(), wrapped(tier) as keys, wrapped(slow) as more:
        other = policy({"only": {**keys, "keep": {"last": 1}}})

        def saves() -> None:
            with ts.Checkpointer(other, "run") as ckpt:
                ckpt.save(STATES[1], step=1).wait()

        with ts.Checkpointer(policy({"only": keys, "slow": more}), "run") as ckpt:
            tier.meanwhile = saves
            ckpt.save(STATES[0], step=0).wait("slow")
            assert tier.meanwhile is None, "it was read from there"
            assert [key.startswith("leases/run/000000000001-read-") for key in tier.leases] == [True]
            assert Log(tier, "run").seqs() == [1, 2]
            assert names(tier, "leases/") == []
            assert Log(slow, "run").seqs() == [1]
            assert ckpt.verify(deep=True).ok


def test_a_long_restore_holds_what_it_reads_and_a_short_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
        for long in (False, True):
            monkeypatch.setattr(catalog, "LEASE_FROM", 1 if long else 1 << 30)
            tier.meanwhile = lambda: None
            ckpt.load(step=1)
            assert [key.startswith("leases/run/000000000002-read-") for key in tier.leases] == [True] * long
            assert names(tier, "leases/") == []


def copies(ckpt: ts.Checkpointer, place: Path) -> None:
    """Copy the first version into another policy, and compare."""
    into = policy({"there": {"type": "nvme", "path": str(place / "there")}})
    ckpt.copy(step=0, into=into)
    with ts.Checkpointer(into, "run") as there:
        assert alike(there.load(), STATES[0])


def exports(ckpt: ts.Checkpointer, place: Path) -> None:
    export(ckpt, place / "out.safetensors", step=0, force=True)
    assert alike(load_file(place / "out.safetensors"), STATES[0])


def compares(ckpt: ts.Checkpointer, _place: Path) -> None:
    (found,) = ckpt.diff(0, 1, values=True)
    assert found.numbers is not None
    assert found.numbers.largest == 1


READERS = pytest.mark.parametrize("reads", [copies, exports, compares], ids=lambda reads: reads.__name__)


@READERS
def test_what_is_moved_while_another_reader_than_a_restore_has_it_is_read_where_it_lies_then(
    reads: Callable[[ts.Checkpointer, Path], None],
) -> None:
    with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt, scratch() as place:
        tier.meanwhile = lambda: move(tier, 1)
        reads(ckpt, place)
        assert tier.meanwhile is None


@READERS
def test_what_is_dropped_while_another_reader_has_it_is_told_as_dropped_and_not_as_damaged(
    reads: Callable[[ts.Checkpointer, Path], None],
) -> None:
    with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt, scratch() as place:
        tier.meanwhile = lambda: drop(tier, 1)
        with pytest.raises(ts.NotFound, match="was dropped"):
            reads(ckpt, place)


@READERS
def test_long_copies_exports_and_comparisons_hold_what_they_read(
    reads: Callable[[ts.Checkpointer, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt, scratch() as place:
        monkeypatch.setattr(catalog, "LEASE_FROM", 1)
        tier.meanwhile = lambda: None
        reads(ckpt, place)
        held = {key.partition("-read-")[0] for key in tier.leases}
        numbers = {1, 2} if reads is compares else {1}
        assert held == {f"leases/run/{number:012d}" for number in numbers}
        assert names(tier, "leases/") == []


@pytest.mark.parametrize("deep", [False, True])
def test_a_verification_beside_a_job_takes_nothing_that_the_job_drops_or_moves_for_damaged_or_lost(deep: bool) -> None:
    """While the newest version is read: it, or one that was listed and not read yet."""
    for change in (drop, move):
        for seq in (1, 3):
            with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
                tier.meanwhile = lambda change=change, tier=tier, seq=seq: change(tier, seq)  # type: ignore[misc]
                report = ckpt.verify(data=True, deep=deep)
                assert (report.problems, report.lost, report.ok) == ([], [], True)
                assert tier.meanwhile is None


def test_a_verification_beside_a_job_still_tells_what_is_damaged() -> None:
    with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
        packs = Log(tier, "run").read(3).layout.objects

        def loses() -> None:
            drop(tier, 1)
            tier.discard(packs)

        tier.meanwhile = loses
        report = ckpt.verify(data=True)
        assert {problem.seq for problem in report.problems} == {3} == {bad.seq for bad in report.lost}


def commits(tier: Tier, seq: int) -> Callable[[], None]:
    """Take the record of a version away, and return what puts it there, as a save does at its end."""
    key = Log(tier, "run").key(seq)
    record = tier.get(key).clone()
    tier.delete(key)
    return lambda: tier.put(key, record)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["drop", "move", "commit"])
def test_a_doctor_beside_a_job_takes_nothing_that_the_job_drops_or_moves_or_saves_for_damaged_or_lost(
    change: str,
) -> None:
    """Whenever that happens while packs are read."""
    before, happened = 0, True
    while happened:
        with saved({"last": 2}) as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
            if change == "commit":
                tier.meanwhile = commits(tier, 3)
            else:
                tier.meanwhile = partial(drop if change == "drop" else move, tier, 1)
            tier.before = before
            report = ckpt.doctor()
            happened = tier.meanwhile is None
            assert not happened or (report.ok, report.repairs, report.unknown) == (True, [], [])
        before += 1
    assert before > 3


def test_a_doctor_finds_the_record_of_what_is_moved_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
        sized, moved = tier.size, list[str]()

        def size(key: str) -> int:
            if key == Log(tier, "run").key(1) and not moved:
                moved.append(key)
                move(tier, 1)
            return sized(key)

        monkeypatch.setattr(tier, "size", size)
        report = ckpt.doctor()
        assert [(one.seq, one.state) for one in report.versions] == [(3, "whole"), (2, "whole"), (1, "whole")]
        assert (report.ok, report.unknown, len(moved)) == (True, [], 1)


def test_a_doctor_beside_a_job_still_tells_what_is_damaged() -> None:
    with saved({"last": 2}) as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
        packs = Log(tier, "run").read(3).layout.objects

        def loses() -> None:
            drop(tier, 1)
            tier.discard(packs)

        tier.meanwhile = loses
        assert [(one.seq, one.state) for one in ckpt.doctor().versions] == [(3, "lost"), (2, "whole")]


def test_what_a_job_saves_meanwhile_is_not_rebuilt() -> None:
    with saved() as (tier, spec), ts.Checkpointer(spec, "run") as ckpt:
        tier.meanwhile = commits(tier, 3)
        assert ckpt.rebuild("only", dry_run=True).versions == []
        assert tier.meanwhile is None
