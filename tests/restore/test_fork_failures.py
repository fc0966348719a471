"""Forks that fail, that are interrupted, or beside which others work: a fork under a pin is there, or neither."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from support.checkpointer_worlds import alike, faulty, names, opened, pins, policy, tensors, tier, wrapped
from support.forked_runs import forked, one_tier, saved, two_days_old
from support.outcomes import Background

import tierstate as ts
from tierstate.engine.maintain import prune
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.engine.versions import fork
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import NotFound, TierError, TierUnavailable
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.leases import VersionLease, pin_version
from tierstate.manifest.history.log import Log, commit_id
from tierstate.manifest.history.retention import OTHER_LEAVES, LeafGroups
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault

# Forks that fail or were interrupted

OPERATIONS = ["put", "list", "read", "size", "delete"]


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("nth", range(1, 6))
def test_a_fork_that_fails_leaves_nothing(operation: str, nth: int) -> None:
    """Whichever call fails, there is a fork under a pin, or neither of them."""
    inner = Memory()
    with wrapped(inner) as keys:
        spec = policy({"only": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            saved(ckpt, 1, 2)
            ckpt.load()
            faulty(keys).add(Fault(operation, nth, TierUnavailable("no answer")))  # type: ignore[arg-type]
            try:
                ckpt.fork("run-b", 1)
            except (TierError, ts.Damaged):
                assert Log(inner, "run-b").seqs() == []
                assert pins(inner, "run") == {}
            else:
                assert Log(inner, "run-b").seqs() == [1]
                assert pins(inner, "run") == {1: "forked by run-b"}
            faulty(keys).heal()
            if not Log(inner, "run-b").seqs():
                ckpt.fork("run-b", 1)
        with ts.Checkpointer(spec, "run-b") as ckpt:
            assert alike(ckpt.load(), tensors(9000, 4096, seed=1))


def test_a_commit_of_which_nobody_knows_keeps_its_pin() -> None:
    inner = Memory()
    with wrapped(inner) as keys:
        spec = policy({"only": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            saved(ckpt, 1)
            where = faulty(keys)
            put = where.put

            def lost(key: str, data: Buffer) -> None:
                put(key, data)
                if key.startswith("versions/"):
                    where.add(Fault("size", 0, TierUnavailable("no answer")))
                    raise TierUnavailable("no answer")

            where.put = lost  # type: ignore[method-assign]
            with pytest.raises(TierError) as caught:
                ckpt.fork("run-b")
            assert "was not confirmed" in str(caught.value)
            where.heal()
        assert pins(inner, "run") == {1: "forked by run-b"}
        assert Log(inner, "run-b").seqs() == [1], "it had taken effect"


def test_a_pin_that_is_there_already_is_left(place: Path) -> None:
    """As after a fork that was interrupted before its commit."""
    spec = one_tier(place)
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1)
        nvme = opened(spec, "nvme")
        before = pin_version(nvme, "run", 1, "run-b")
        ckpt.fork("run-b")
    assert len(names(nvme, "leases/run/")) == 2
    assert before in names(nvme, "leases/run/")
    assert pins(nvme, "run") == {1: "forked by run-b"}


def test_no_fork_is_made_while_a_tier_cannot_say_whether_the_run_is_there(place: Path) -> None:
    inner = Memory()
    with wrapped(inner) as keys:
        spec = policy({"only": keys, "nvme": tier("nvme", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(9000, seed=1), step=1).wait("nvme")
            faulty(keys).add(Fault("list", 0, TierUnavailable("no answer")))
            with pytest.raises(TierError, match="whether run 'run-b' has versions already cannot be told: only: no"):
                ckpt.fork("run-b")
            faulty(keys).heal()
            assert names(opened(spec, "nvme"), "leases/") == names(opened(spec, "nvme"), "versions/run-b/") == []
            ckpt.fork("run-b")


def test_a_record_that_cannot_be_taken_back_keeps_its_pin(place: Path) -> None:
    spec = one_tier(place)

    class Failing(Log):
        def holds(self, record: Record) -> bool:
            raise TierUnavailable("no answer")

        def forget(self, seq: int, generations: Iterable[int] = (0,)) -> None:
            raise TierUnavailable("no answer")

    with pytest.MonkeyPatch.context() as patch, ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1)
        patch.setattr(ckpt._tier_runs[0].log, "holds", Failing(ckpt._tier_runs[0].tier, "run").holds)
        patch.setattr(fork, "Log", Failing)
        with pytest.raises(TierError, match="was not forked"):
            ckpt.fork("run-b")
    nvme = opened(spec, "nvme")
    assert Log(nvme, "run-b").seqs() == [1]
    assert pins(nvme, "run") == {1: "forked by run-b"}
    with ts.Checkpointer(spec, "run") as ckpt:
        assert ckpt.fork("run-b").step == 1, "it is finished by doing it again"


def test_a_fork_whose_packs_have_gone_is_not_taken_for_done(place: Path) -> None:
    """Whoever made it was killed before it looked whether the version was still there."""
    spec = one_tier(place)
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1)
        ckpt.fork("run-b")
        (pack,) = (place / "nvme/packs/run").iterdir()
        pack.unlink()
        with pytest.raises(TierError, match=f"was not forked: nvme: .*{pack.name}"):
            ckpt.fork("run-b")


def test_a_pin_that_was_lost_is_told_and_made_again(place: Path) -> None:
    spec, nvme, pin = forked(place)
    nvme.delete(pin)
    with ts.Checkpointer(spec, "run-b") as ckpt:
        (problem,) = ckpt.verify().problems
        assert "no pin under leases/run/" in problem.what
        assert not ckpt.verify().ok
        assert ckpt.verify(mend=True).ok
        assert ckpt.verify().problems == []
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 2, 3)
        ckpt.prune(grace=0)
    with ts.Checkpointer(spec, "run-b") as ckpt:
        assert alike(ckpt.load(), tensors(9000, 4096, seed=1))


# What others do meanwhile


def test_a_source_that_is_dropped_meanwhile_is_noticed() -> None:
    """Between pin and commit somebody who did not see the pin drops the version: no fork is left of it."""
    inner = Memory()
    with wrapped(inner) as keys:
        spec = policy({"only": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            saved(ckpt, 1, 2)
            where = faulty(keys)
            put = where.put

            def dropped(key: str, data: Buffer) -> None:
                put(key, data)
                if key.startswith("versions/run-b/"):
                    Log(inner, "run").forget(1)

            where.put = dropped  # type: ignore[method-assign]
            with pytest.raises(TierError, match="step 1 of run 'run' was not forked"):
                ckpt.fork("run-b", 1)
        assert Log(inner, "run-b").seqs() == []
        assert pins(inner, "run") == {}


def test_a_prune_takes_away_the_pin_of_a_dead_fork_and_not_that_of_one_beside_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prune has found that a pin of two days ago is needed by nobody; the same fork is made before that goes."""
    spec = one_tier(place)
    look = prune.unneeded_fork_pins
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1)
        nvme = opened(spec, "nvme")
        dead = pin_version(nvme, "run", 1, "run-b")
        two_days_old(place / "nvme" / dead)

        def meanwhile(tier_run: TierRun, grace: float) -> list[VersionLease]:
            found = look(tier_run, grace)
            assert Background(lambda: ckpt.fork("run-b")).outcome() is None
            return found

        monkeypatch.setattr(prune, "unneeded_fork_pins", meanwhile)
        assert ckpt.prune().tiers[0].pins == ((1, "run-b"),)
    assert pins(nvme, "run") == {1: "forked by run-b"}
    assert dead not in names(nvme, "leases/")
    with ts.Checkpointer(one_tier(place, keep={"last": 1}), "run") as ckpt:
        saved(ckpt, 2, 3)
    with ts.Checkpointer(spec, "run-b") as ckpt:
        assert alike(ckpt.load(), tensors(9000, 4096, seed=1))


def test_a_fork_beside_a_saver_that_thins_begins_anew_with_what_is_left(place: Path) -> None:
    """The record that was read is replaced before the commit: what it named besides must not be named."""
    spec = one_tier(place)
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1, 2)
    hit = list[Record]()

    class Beside(Log):
        def commit(self, record: Record, generation: int = 0) -> None:
            if not hit:
                hit.append(record)
                log = Log(self.tier, "run")
                less = LeafGroups(["b"]).thin(log.read(1), [OTHER_LEAVES])
                assert less is not None
                log.commit(less, 1)
                log.forget(1)
            super().commit(record, generation)

    with pytest.MonkeyPatch.context() as patch, ts.Checkpointer(spec, "run") as ckpt:
        patch.setattr(fork, "Log", Beside)
        with pytest.raises(
            NotFound, match=r"'run' is not whole in nvme: 1 leaves .*`keep` has dropped .* \(b from nvme\)"
        ):
            ckpt.fork("run-b", 1)
    nvme = opened(spec, "nvme")
    assert len(hit) == 1
    assert Log(nvme, "run-b").seqs() == []
    assert pins(nvme, "run") == {}


def test_a_record_that_is_replaced_by_one_as_whole_is_followed(place: Path) -> None:
    spec = one_tier(place)
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1, 2)
    left = [2]

    class Beside(Log):
        def commit(self, record: Record, generation: int = 0) -> None:
            super().commit(record, generation)
            if left[0]:
                left[0] -= 1
                log = Log(self.tier, "run")
                ((before,),) = (log.generations()[1],)
                known = log.read(1)
                log.commit(Record(known.version, known.layout, {**known.commit, "id": commit_id()}), before + 1)
                log.forget(1, [before])

    with pytest.MonkeyPatch.context() as patch, ts.Checkpointer(spec, "run") as ckpt:
        patch.setattr(fork, "Log", Beside)
        ckpt.fork("run-b", 1)
        assert left == [0]
        left[0] = 99
        with pytest.raises(TierError, match="the record of version 1 is being replaced; try again"):
            ckpt.fork("run-c", 1)
    nvme = opened(spec, "nvme")
    assert Log(nvme, "run-c").seqs() == []
    assert pins(nvme, "run") == {1: "forked by run-b"}
    with ts.Checkpointer(spec, "run-b") as ckpt:
        assert alike(ckpt.load(), tensors(9000, 4096, seed=1))
