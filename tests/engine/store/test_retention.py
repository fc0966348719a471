"""Retiring: leaves go before versions do, whatever interrupts it, and nothing that is promised goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.engine.packs.pack import PackWriter
from tierstate.engine.store import retention
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Buffer, as_buffer, to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError, TierUnavailable
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.manifest.history.leases import Leases, pin_version
from tierstate.manifest.history.retention import BestVersions, RetentionPolicy, dropped_groups
from tierstate.tiers.base import Tier, Traits
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing.faulty import Fault, Faulty, FaultyCall

CHUNK = 4096
OPTIMIZER = "optimizer.**"


def version(
    tier: Tier, seq: int, leaves: Mapping[tuple[str, ...], bytes], like: Record | None = None, run: str = "run", **head
) -> Record:
    """A version of short leaves; what ``like`` has of the same bytes lies where it has it, the rest in a new pack."""
    writer, places = PackWriter(tier, run, seq), []
    known = {} if like is None else {d.tobytes(): i for i, d in enumerate(like.version.digests)}
    for data in leaves.values():
        row = known.get(checksum(data))
        place = like.layout.place(row) if like is not None and row is not None else None
        places.append(place or writer.add(as_buffer(data), checksum(data), len(data), "raw"))
    writer.close()
    digests = np.frombuffer(b"".join(map(checksum, leaves.values())), "<u8").reshape(-1, 2)
    specs = [Leaf(path, Spec("bytes", shape=(len(data),))) for path, data in leaves.items()]
    shards = [ShardRow(i, 0, Box.whole((len(data),))) for i, data in enumerate(leaves.values())]
    found = Version.build(Head(run, seq, seq, **{"time": float(seq), **head}, chunk=CHUNK), specs, shards, digests)
    sizes = {place.object: tier.size(place.object) for place in places}
    return Record(found, Layout.build(places, sizes), {"id": f"{run}-{seq}", "note": "kept"})


def state(seq: int, model: int, optimizer: int) -> dict[tuple[str, ...], bytes]:
    """What is saved; numbers say which bytes each part has."""
    parts = {("model", "w"): b"w%d" % model, ("optimizer", "m"): b"m%d" % optimizer, ("optimizer", "v"): b"v%d" % seq}
    return {path: data + bytes(20) for path, data in parts.items()}


def there(tier: Tier, record: Record) -> dict[tuple[str, ...], bytes]:
    """The leaves that a record says are there, read from where it says."""
    found = {}
    for row, leaf in enumerate(record.version.chunk_leaf.tolist()):
        if (place := record.layout.place(row)) is not None:
            data = to_bytes(tier.get(place.object)[place.offset : place.offset + place.stored])
            assert checksum(data) == record.version.digests[row].tobytes()
            found[record.version.leaves[leaf].path] = data
    return found


def unnamed(tier: Tier, tier_run: TierRun) -> set[str]:
    """Packs that no record names."""
    listed = tier_run.log.generations()
    named = {k for s, found in listed.items() for n in found for k in tier_run.log.read_generation(s, n).layout.objects}
    return set(tier.list(f"packs/{tier_run.run}/")) - named


def tag(tier: Tier, seq: int, name: str = "best", number: int = 1) -> None:
    tier.put(f"tags/run/{name}@{number:06d}", as_buffer(json.dumps({"seq": seq, "id": "?"}).encode()))


class Dying(Faulty):
    """A tier of a process that dies after so many changes to it."""

    left = 1 << 30

    def begin(self, operation: FaultyCall) -> Fault | None:
        if operation in ("put", "delete"):
            if not self.left:
                raise TierUnavailable("the process is dead")
            self.left -= 1
        return super().begin(operation)


# Thinning


def thinning(last: int, optimizer: int) -> tuple[RetentionPolicy, dict[str, RetentionPolicy]]:
    return RetentionPolicy(last=last), {OPTIMIZER: RetentionPolicy(last=optimizer)}


def filled(tier: Tier, tier_run: TierRun, parts: Sequence[tuple[int, int]]) -> list[dict[tuple[str, ...], bytes]]:
    """Publish versions that share what is alike; return what each was."""
    truth, before = [], None
    for seq, (model, optimizer) in enumerate(parts, 1):
        truth.append(state(seq, model, optimizer))
        before = version(tier, seq, truth[-1], before)
        tier_run.publish(before)
    return truth


PARTS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=6)


@given(PARTS, st.integers(1, 4), st.integers(1, 4), st.integers(0, 30), st.booleans())
def test_a_crash_at_any_step_loses_nothing_and_the_next_retire_finishes(
    parts: list[tuple[int, int]], last: int, optimizer: int, dies: int, reopened: bool
) -> None:
    tier = Dying(Memory())
    keep, rules = thinning(last, optimizer)
    tier_run = TierRun(tier, "run", keep, rules)
    truth = filled(tier, tier_run, parts)
    expected = {
        seq: {path: data for path, data in was.items() if age < (last if path[0] == "model" else optimizer)}
        for age, (seq, was) in enumerate(reversed(list(enumerate(truth, 1))))
        if age < max(last, optimizer)
    }
    tier.left = dies
    died = False
    try:
        tier_run.retire()
    except TierUnavailable:
        died = True
    tier.left = 1 << 30
    for seq, generations in tier_run.log.generations().items():
        for generation in generations:
            found = there(tier, tier_run.log.read_generation(seq, generation))
            assert expected.get(seq, {}).items() <= found.items() <= truth[seq - 1].items()
    assert expected.keys() <= set(tier_run.log.seqs())
    tier_run = TierRun(tier, "run", keep, rules) if reopened else tier_run
    tier_run.retire()
    assert all(len(generations) == 1 for generations in tier_run.log.generations().values())
    assert {seq: there(tier, tier_run.log.read(seq)) for seq in tier_run.log.seqs()} == expected
    if not (died and reopened):
        assert unnamed(tier, tier_run) == set()
    decision = tier_run.retire()
    assert (decision.drop, decision.thin) == ((), {})
    assert tier_run.decision().drop == ()


def test_what_was_thinned_says_so_and_keeps_what_else_was_said() -> None:
    tier = Memory()
    tier_run = TierRun(tier, "run", *thinning(3, 1))
    filled(tier, tier_run, [(0, 0), (1, 1), (2, 2)])
    decision = tier_run.decision()
    assert decision.thin == {1: ("**",), 2: ("**",)}
    assert decision.keep[3] == ("newest", "last 3", f"{OPTIMIZER}: last 1")
    assert tier_run.log.generations() == {1: [0], 2: [0], 3: [0]}, "a decision changes nothing"
    assert tier_run.retire().thin == decision.thin
    assert tier_run.log.generations() == {1: [1], 2: [1], 3: [0]}
    commit = tier_run.log.read(1).commit
    assert dropped_groups(commit) == (OPTIMIZER,)
    assert commit["note"] == "kept"
    assert commit["id"] != "run-1"
    assert dropped_groups(tier_run.log.read(3).commit) == ()


@pytest.mark.parametrize("said", [None, "x", 3, {"a": 1}, [["a"]]])
def test_a_commit_that_says_it_otherwise_is_none_of_ours(said: object) -> None:
    assert dropped_groups({"thinned": said}) == (("['a']",) if isinstance(said, list) else ())


def test_leaves_may_also_stay_longer_than_the_rest() -> None:
    tier = Memory()
    tier_run = TierRun(tier, "run", *thinning(1, 3))
    truth = filled(tier, tier_run, [(0, 0), (1, 1), (2, 2), (3, 3)])
    decision = tier_run.retire()
    assert decision.drop == (1,)
    assert decision.thin == {2: (OPTIMIZER,), 3: (OPTIMIZER,)}
    for seq in (2, 3):
        assert there(tier, tier_run.log.read(seq)) == {p: d for p, d in truth[seq - 1].items() if p[0] == "optimizer"}
        assert dropped_groups(tier_run.log.read(seq).commit) == ("**",)
    assert there(tier, tier_run.log.read(4)) == truth[3]


def test_another_policy_goes_on_from_what_is_left() -> None:
    tier = Memory()
    filled(tier, first := TierRun(tier, "run", *thinning(4, 1)), [(0, 0), (1, 1), (2, 2), (3, 3)])
    first.retire()
    rules = {"optimizer.v": RetentionPolicy(last=4), OPTIMIZER: RetentionPolicy(last=2)}
    assert TierRun(tier, "run", RetentionPolicy(last=2), rules).retire().drop == (1, 2)
    assert TierRun(tier, "run", RetentionPolicy(all=True)).decision().keep == {3: ("all",), 4: ("newest", "all")}


def test_a_leaf_stays_as_long_as_one_that_is_tied_to_it() -> None:
    tier = Memory()
    tier_run = TierRun(tier, "run", *thinning(3, 1))
    leaves = [
        Leaf(("optimizer", "w"), Spec("bytes", shape=(30,))),
        Leaf(("optimizer", "m"), Spec("bytes", shape=(30,))),
        Leaf(("model", "w"), Spec("tied", shape=(30,), attrs={"to": '["optimizer","w"]'})),
    ]
    for seq in (1, 2, 3):
        made = version(tier, seq, {("optimizer", "w"): b"%030d" % seq, ("optimizer", "m"): b"m%029d" % seq})
        shards = [ShardRow(i, 0, Box.whole((30,))) for i in range(2)]
        tier_run.publish(
            Record(Version.build(made.version.head, leaves, shards, made.version.digests), made.layout, made.commit)
        )
    assert tier_run.retire().thin == {1: ("**",), 2: ("**",)}
    assert there(tier, tier_run.log.read(1)) == {("optimizer", "w"): b"%030d" % 1}
    for again in (tier_run, TierRun(tier, "run", *thinning(3, 1))):
        assert again.retire().thin == {}, "what is there for another leaf's sake is not dropped again"
    assert TierRun(tier, "run", *thinning(2, 1)).retire().drop == (1,)


def test_a_record_that_was_damaged_meanwhile_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    tier = Memory()
    tier_run = TierRun(tier, "run", *thinning(4, 1))
    filled(tier, tier_run, [(0, 0), (1, 1), (2, 2)])
    tier.delete(tier_run.log.key(1))
    tier.put(tier_run.log.key(1), as_buffer(b"not a record"))
    packs = set(tier.list("packs/"))
    tier_run.retire()
    assert tier_run.log.generations() == {1: [0], 2: [1], 3: [0]}
    assert set(tier.list("packs/")) == packs, "nobody knows what it named"
    tier_run.retire()
    assert caplog.text.count("version 1 of run run is left alone") == 1, "told once, not after each save"


def test_a_version_that_another_process_drops_just_now_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Memory):
        """A tier of which lists still have a record that is gone."""

        late: tuple[str, ...] = ()

        def list(self, prefix: str) -> Iterator[str]:
            return iter(sorted({*super().list(prefix), *(key for key in self.late if key.startswith(prefix))}))

    tier = Late()
    tier_run = TierRun(tier, "run", *thinning(4, 1))
    filled(tier, tier_run, [(0, 0), (1, 1), (2, 2)])
    tier.late = (tier_run.log.key(1),)
    tier.delete(tier_run.log.key(1))
    again = TierRun(tier, "run", *thinning(4, 1))
    again.retire()
    assert "is left alone" not in caplog.text
    again.retire()
    assert "version 1 of run run is left alone" in caplog.text, "it is not just now"


class Meeting(Memory):
    """A tier in which another process does something when a record goes."""

    then: Callable[[], None] | None = None

    def delete(self, key: str) -> None:
        super().delete(key)
        if key.startswith("versions/") and self.then is not None:
            then, self.then = self.then, None
            then()


def test_packs_that_another_process_began_to_name_meanwhile_stay() -> None:
    """A repack of another process gives one version after the other a new record, in a pack of both."""
    tier = Meeting()
    tier_run = TierRun(tier, "run", RetentionPolicy(last=2))
    filled(tier, tier_run, [(0, 0), (1, 1)])
    both = version(tier, 9, {(str(seq), *path): data for seq in (1, 2) for path, data in state(seq, seq, seq).items()})
    first = version(tier, 1, state(1, 1, 1), both)
    second = version(tier, 2, state(2, 2, 2), both)

    def repack(record: Record) -> None:
        tier_run.log.commit(record, 1)
        tier_run.log.forget(record.version.head.seq)

    repack(first)
    tier.then = lambda: repack(second)
    tier_run.publish(version(tier, 3, state(3, 2, 2)))
    assert tier_run.retire().drop == (1,)
    assert there(tier, tier_run.log.read(2)) == state(2, 2, 2)
    tier_run.publish(version(tier, 4, state(4, 4, 4)))
    tier_run.publish(version(tier, 5, state(5, 5, 5)))
    assert tier_run.retire().drop == (2, 3)
    assert not set(both.layout.objects) & set(tier.list("packs/"))


def test_a_fork_leaves_the_packs_of_the_run_it_came_from() -> None:
    tier = Memory()
    one, two = TierRun(tier, "run"), TierRun(tier, "fork", RetentionPolicy(last=1))
    truth = filled(tier, one, [(0, 0)])
    two.publish(version(tier, 1, truth[0], one.log.read(1), run="fork"))
    two.publish(version(tier, 2, state(2, 5, 5), run="fork"))
    assert two.retire().drop == (1,)
    assert there(tier, one.log.read(1)) == truth[0]


# What is promised: pins, tags, the only durable copy


def test_what_was_forked_stays_whole() -> None:
    tier = Memory()
    tier_run = TierRun(tier, "run", *thinning(2, 1))
    filled(tier, tier_run, [(0, 0), (1, 1), (2, 2), (3, 3)])
    tier.put("leases/run/000000000001-fork-run-b", as_buffer(b"{}"))
    tier.put("leases/run/note", as_buffer(b"{}"))
    decision = tier_run.retire({3: "s3 has not got it yet"})
    assert decision.keep[1] == ("forked by run-b",)
    assert decision.keep[3] == ("s3 has not got it yet", "last 2")
    assert (decision.drop, decision.thin) == ((2,), {})
    tier.delete("leases/run/000000000001-fork-run-b")
    decision = tier_run.retire()
    assert (decision.drop, decision.thin) == ((1,), {3: ("**",)})


def test_leases_and_tags_are_asked_for_only_where_something_would_go() -> None:
    tier = Faulty(Memory())
    tier_run = TierRun(tier, "run", RetentionPolicy(last=2, tags=True))
    filled(tier, tier_run, [(0, 0), (1, 1)])
    before = tier.calls["list"]
    tier_run.retire()
    assert tier.calls["list"] == before + 1
    tier_run.publish(version(tier, 3, state(3, 2, 2)))
    tier_run.retire()
    assert tier.calls["list"] > before + 2


def test_what_has_a_tag_stays_where_the_policy_says_so() -> None:
    tier = Memory()
    tier_run = TierRun(tier, "run", RetentionPolicy(last=1, tags=True), {OPTIMIZER: RetentionPolicy(last=1, tags=True)})
    filled(tier, tier_run, [(0, 0), (1, 1), (2, 2)])
    tag(tier, 1)
    tag(tier, 1, "good")
    assert tier_run.retire().keep[1] == ("tag best", "tag good", f"{OPTIMIZER}: tag best", f"{OPTIMIZER}: tag good")
    tag(tier, 3, number=2)
    tag(tier, 3, "good", number=10)
    assert tier_run.retire().drop == (1,)


@pytest.mark.parametrize("said", [b"{", b"[]", b'{"seq": "1"}', b'{"seq": true}', b"{" * 5000], ids=range(5))
def test_a_tag_that_cannot_be_read_keeps_everything(said: bytes) -> None:
    tier = Memory()
    tier_run = TierRun(tier, "run", RetentionPolicy(last=1, tags=True))
    filled(tier, tier_run, [(0, 0), (1, 1)])
    tier.put("tags/run/best@000001", as_buffer(said))
    with pytest.raises(FormatError, match=r"tags/run/best@000001: .*(tag again|too many for a tag)"):
        tier_run.retire()
    assert tier_run.log.seqs() == [1, 2]


class Disk(Memory):
    """Memory that says it lasts."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, persistent=True)


def line(*keeps: tuple[type[Memory], RetentionPolicy, dict[str, RetentionPolicy]]) -> list[TierRun]:
    """The run in several tiers, fastest first."""
    tier_runs = [TierRun(kind(), "run", keep, rules) for kind, keep, rules in keeps]
    for tier_run in tier_runs:
        tier_run.beside = tier_runs
    return tier_runs


ONE, TAGGED, ALL = RetentionPolicy(last=1), RetentionPolicy(last=1, tags=True), RetentionPolicy(all=True)


@pytest.mark.parametrize(
    ("tiers", "stays"),
    [
        ([(Disk, ONE)], [True]),
        ([(Memory, ONE), (Disk, ONE)], [False, True]),
        ([(Disk, ONE), (Memory, TAGGED)], [True, True]),
        ([(Disk, ONE), (Disk, TAGGED)], [False, True]),
        ([(Disk, TAGGED), (Disk, ONE)], [True, False]),
        ([(Disk, ONE), (Disk, ALL)], [False, True]),
        ([(Disk, ONE), (Disk, ONE)], [False, True]),
        ([(Disk, ONE), (Disk, ONE), (Disk, ONE)], [False, False, True]),
    ],
)
def test_the_only_durable_copy_of_a_tagged_version_stays(tiers, stays) -> None:
    """Wherever the tiers stand, and in whatever order they retire."""
    for backwards in (False, True):
        tier_runs = line(*((kind, keep, {}) for kind, keep in tiers))
        for tier_run in tier_runs:
            filled(tier_run.tier, tier_run, [(0, 0), (1, 1), (2, 2)])
            tag(tier_run.tier, 1)
        for tier_run in reversed(tier_runs) if backwards else tier_runs:
            tier_run.retire()
            tier_run.retire()
        assert [1 in tier_run.log.seqs() for tier_run in tier_runs] == stays
        assert not any(2 in tier_run.log.seqs() and tier_run.keep is not ALL for tier_run in tier_runs)


def test_a_tier_that_does_not_know_of_the_tag_is_not_relied_upon() -> None:
    for keep in (ONE, TAGGED):
        fast, slow = line((Disk, ONE, {}), (Disk, keep, {}))
        for tier_run in (fast, slow):
            filled(tier_run.tier, tier_run, [(0, 0), (1, 1), (2, 2)])
        tag(fast.tier, 1)
        assert fast.retire().keep[1] == ("only durable copy of tag best",)
        tag(slow.tier, 1)
        assert fast.retire().drop == (1,)
        assert slow.retire().keep.keys() == {1, 3}


def test_a_copy_that_lacks_leaves_or_is_another_version_is_no_copy() -> None:
    fast, slow = line((Disk, ONE, {}), (Disk, TAGGED, {OPTIMIZER: TAGGED}))
    filled(fast.tier, fast, [(0, 0), (1, 1), (2, 2)])
    tag(fast.tier, 1)
    tag(slow.tier, 1)
    assert fast.retire().keep[1] == ("only durable copy of tag best",)
    slow.log.commit(version(slow.tier, 1, state(1, 7, 7)))
    assert fast.retire().keep[1] == ("only durable copy of tag best",)
    slow.log.forget(1)
    half = fast.log.read(1)
    half = version(slow.tier, 1, state(1, 0, 0))
    lacking = Layout.build([half.layout.place(0), None, None], dict.fromkeys(half.layout.objects, 1 << 20))
    slow.log.commit(Record(half.version, lacking, half.commit))
    assert fast.retire().drop == ()
    slow.log.forget(1)
    slow.log.commit(half)
    assert fast.retire().drop == (1,)


def test_a_rule_that_forgets_tags_takes_no_leaf_of_the_only_copy() -> None:
    (tier_run,) = line((Disk, TAGGED, {OPTIMIZER: ONE}))
    truth = filled(tier_run.tier, tier_run, [(0, 0), (1, 1), (2, 2)])
    tag(tier_run.tier, 1)
    assert tier_run.retire().drop == (2,)
    assert there(tier_run.tier, tier_run.log.read(1)) == truth[0]


# What the other rules need to know


def test_the_best_and_the_latest_are_told_by_head_and_metadata() -> None:
    tier = Memory()
    tier_run = TierRun(tier, "run", RetentionPolicy(last=1, within=10.0, best=BestVersions("eval.loss", "min")))
    losses = [3.0, 1.0, 2.0, None, 5.0, 4.0]
    for seq, loss in enumerate(losses, 1):
        told = {"metadata": {"eval": {"loss": loss}}, "time": 100.0 + 6 * seq}
        tier_run.publish(version(tier, seq, state(seq, seq, seq), **told))
    assert tier_run.decision(now=2e9).keep == {
        2: ("best eval.loss (min)",),
        5: ("within 10s",),
        6: ("newest", "last 1", "within 10s"),
    }
    assert tier_run.decision(now=120.0).keep.keys() == {2, 3, 4, 5, 6} | {2}
    assert tier_run.retire().drop == (1, 3, 4)
    assert TierRun(tier, "run", RetentionPolicy(best=BestVersions("eval.loss", "max", 2))).retire().drop == (2,)


# What comes meanwhile


class Between(Memory):
    """A tier in which another process does something right before a record's next generation, or before or after a
    deletion."""

    before: Callable[[], None] | None = None
    earlier: Callable[[], None] | None = None
    after: Callable[[], None] | None = None

    def put(self, key: str, data: Buffer) -> None:
        if key.startswith("versions/") and "." in key and self.before is not None:
            then, self.before = self.before, None
            then()
        super().put(key, data)

    def discard(self, keys: Iterable[str]) -> None:
        if self.earlier is not None:
            then, self.earlier = self.earlier, None
            then()
        super().discard(keys)
        if self.after is not None:
            then, self.after = self.after, None
            then()


def test_a_reader_who_comes_while_leaves_go_keeps_them() -> None:
    tier = Between()
    tier_run = TierRun(tier, "run", *thinning(3, 1))
    truth = filled(tier, tier_run, [(0, 0), (0, 1)])
    old, leases = tier_run.log.read(1), Leases(tier, "run")
    held: list[str] = []
    tier.before = lambda: held.append(leases.take(1, record=old.commit["id"]))
    tier_run.retire()
    assert tier_run.log.generations()[1] == [0, 1]
    assert there(tier, old) == truth[0]
    tier_run.retire()
    assert there(tier, old) == truth[0]
    leases.release(held[0])
    tier_run.retire()
    assert tier_run.log.generations()[1] == [1]
    assert unnamed(tier, tier_run) == set()


def forked(tier: Tier, source: TierRun, leaves: Mapping[tuple[str, ...], bytes]) -> None:
    """The first version of a run becomes that of the run ``fork``."""
    pin_version(tier, source.run, 1, "fork")
    TierRun(tier, "fork").publish(version(tier, 1, leaves, source.log.read(1), run="fork"))


def test_a_fork_that_comes_while_leaves_go_keeps_them() -> None:
    tier = Between()
    tier_run, fork = TierRun(tier, "run", *thinning(3, 1)), TierRun(tier, "fork")
    truth = filled(tier, tier_run, [(0, 0), (0, 1)])
    tier.before = lambda: forked(tier, tier_run, truth[0])
    for _ in range(2):
        tier_run.retire()
        assert there(tier, fork.log.read(1)) == truth[0]


def test_a_fork_that_comes_right_before_the_record_goes_keeps_the_packs() -> None:
    """Its pin is there too late for the decision to drop the version, but before the packs are looked at."""
    tier = Between()
    tier_run, fork = TierRun(tier, "run", RetentionPolicy(last=1)), TierRun(tier, "fork")
    truth = filled(tier, tier_run, [(0, 0), (1, 1)])
    tier.earlier = lambda: forked(tier, tier_run, truth[0])
    assert tier_run.retire().drop == (1,)
    assert there(tier, fork.log.read(1)) == truth[0]
    tier_run.publish(version(tier, 3, state(3, 3, 3)))
    assert tier_run.retire().drop == (2,)
    assert there(tier, fork.log.read(1)) == truth[0]


def test_a_lease_on_a_record_that_has_gone_keeps_all_packs() -> None:
    tier = Memory()
    tier_run = TierRun(tier, "run", RetentionPolicy(last=1))
    filled(tier, tier_run, [(0, 0), (1, 1), (2, 2)])
    before, lease = set(tier.list("packs/")), Leases(tier, "run").take(3, record="another")
    assert tier_run.retire().drop == (1, 2)
    assert set(tier.list("packs/")) == before
    Leases(tier, "run").release(lease)
    tier_run.retire()
    assert unnamed(tier, tier_run) == set()


def test_what_is_tagged_while_others_go_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "DROP_BATCH", 2)
    tier = Between()
    tier_run = TierRun(tier, "run", RetentionPolicy(last=1, tags=True))
    truth = filled(tier, tier_run, [(i, i) for i in range(6)])
    tier.after = lambda: tag(tier, 4)
    decision = tier_run.retire()
    assert decision.drop == (1, 2, 3, 5)
    assert decision.keep[4] == ("tag best",)
    assert there(tier, tier_run.log.read(4)) == truth[3]


def test_a_key_that_is_not_understood_keeps_all_packs(caplog: pytest.LogCaptureFixture) -> None:
    tier = Memory()
    tier_run = TierRun(tier, "run", RetentionPolicy(last=1))
    truth = filled(tier, tier_run, [(0, 0), (1, 1)])
    later = tier_run.log.read(1)
    tier.put("versions/run/000000000001.kept-v2", as_buffer(later.encode()))
    assert tier_run.retire().drop == (1,)
    assert there(tier, later) == truth[0]
    assert "no pack is deleted" in caplog.text
    tier.delete("versions/run/000000000001.kept-v2")
    tier_run.retire()
    assert unnamed(tier, tier_run) == set()


def test_records_are_read_once_by_a_saver_that_drops_at_every_step() -> None:
    tier = Faulty(Memory())
    filled(tier, TierRun(tier, "run"), [(i, i) for i in range(8)])
    tier_run = TierRun(tier, "run", RetentionPolicy(last=8))
    for seq in range(9, 14):
        tier_run.publish(version(tier, seq, state(seq, seq, seq)))
        before = tier.calls["read"]
        tier_run.retire()
        assert seq == 9 or tier.calls["read"] == before
    assert unnamed(tier, tier_run) == set()


def test_what_is_there_stays_known_while_the_log_is_read_and_if_it_cannot_be() -> None:
    """Other threads ask meanwhile what a tier has: whether what is owed to a slower one is lost with this process."""
    seen: list[set[int]] = []

    class Watched(Memory):
        silent = False

        def list(self, prefix: str) -> Iterator[str]:
            seen.append(set(tier_run.known))
            if self.silent:
                raise TierUnavailable("no answer")
            return super().list(prefix)

    tier = Watched()
    tier_run = TierRun(tier, "run", *thinning(3, 3))
    filled(tier, tier_run, [(0, 0), (1, 1)])
    tier_run.retire(())
    seen.clear()
    tier_run.retire(())
    tier.silent = True
    with pytest.raises(TierUnavailable):
        tier_run.retire(())
    assert [*seen, set(tier_run.known)] == [{1, 2}] * (len(seen) + 1)
