"""The index: whatever happened to records and index objects, what it tells is what the records say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.manifest_strategies import small_record, small_version

from tierstate.engine.store import index as room
from tierstate.engine.store.index import IndexObjects, SeqSummaries, Summaries
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.errors import FormatError, TierstateError, TierUnavailable
from tierstate.manifest.format.layout import ChunkPlace, Layout
from tierstate.manifest.format.record import Record, Summary, encode_index
from tierstate.manifest.format.version import Head
from tierstate.manifest.history.log import Log, commit_id
from tierstate.manifest.history.retention import RetentionPolicy
from tierstate.tiers.base import Tier, Traits
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault, Faulty


class Lasting(Faulty):
    """Memory that says it lasts."""

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, persistent=True)


def record(seq: int, nth: int = 0) -> Record:
    """A record of which the packs tell generations apart."""
    key = f"packs/run/{seq}-{nth}-0-x"
    places = [ChunkPlace(key, 16 * i, n, "raw") for i, n in enumerate((16, 16, 8))]
    version = small_version(Head("run", seq, 10 * seq, 1.5, chunk=16, metadata={"loss": seq / 3}))
    return Record(version, Layout.build(places, {key: 40}), {"id": commit_id()})


def filled(seqs: int) -> Lasting:
    tier = Lasting(Memory())
    for seq in range(1, seqs + 1):
        Log(tier, "run").commit(record(seq))
    return tier


def by_records(tier: Tier) -> dict[int, tuple[tuple[Summary, ...], int]]:
    """The same by reading every record: summaries, and how many cannot be read."""
    found = {}
    log = Log(tier, "run")
    for seq, generations in log.generations().items():
        said, bad = [], 0
        for generation in generations:
            try:
                said.append(Summary.of(log.read_generation(seq, generation), generation))
            except FormatError:
                bad += 1
        found[seq] = tuple(said), bad
    return found


def told(seen: dict[int, SeqSummaries]) -> dict[int, tuple[tuple[Summary, ...], int]]:
    return {seq: (found.summaries, len(found.problems)) for seq, found in seen.items()}


actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["commit", "commit", "commit", "forget", "replace", "write", "reopen", "spoil", "junk", "look"]
        ),
        st.integers(0, 50),
    ),
    max_size=30,
)


class World:
    """A run's records and index objects, and what a process that lives on knows of them."""

    def __init__(self) -> None:
        self.tier, self.next = Lasting(Memory()), 1
        self.log, self.living = Log(self.tier, "run"), Summaries(self.tier, "run")

    def commit(self, n: int) -> None:
        made = record(self.next)
        self.log.commit(made)
        if n % 2:
            self.living.add(made)
        self.next += 1

    def forget(self, n: int) -> None:
        if seqs := self.log.seqs():
            seq = seqs[n % len(seqs)]
            self.log.forget(seq, self.log.generations()[seq])

    def replace(self, n: int) -> None:
        if seqs := self.log.seqs():
            seq = seqs[n % len(seqs)]
            before = self.log.generations()[seq]
            self.log.commit(record(seq, before[-1] + 1), before[-1] + 1)
            if n % 3:  # otherwise interrupted: both are there
                self.log.forget(seq, before)

    def write(self, n: int) -> None:
        (Summaries(self.tier, "run") if n % 2 else self.living).write()

    def reopen(self, _n: int) -> None:
        self.living = Summaries(self.tier, "run")

    def spoil(self, n: int) -> None:
        if keys := list(self.tier.list("index/run/")):
            key = keys[n % len(keys)]
            data = bytearray(to_bytes(self.tier.get(key)))
            data[n % len(data)] ^= 1
            self.tier.delete(key)
            self.tier.put(key, as_buffer(bytes(data)))

    def junk(self, n: int) -> None:
        self.tier.put(f"index/run/{n:012d}-{commit_id()[:12]}", as_buffer(b"junk"))

    def look(self, _n: int) -> None:
        assert told(self.living.look()) == by_records(self.tier)


@given(actions)
def test_summaries_are_what_the_records_say(steps: list[tuple[str, int]]) -> None:
    """To a process that lives on and to one that begins, after any commits, forgets, replacements, index objects."""
    world = World()
    for action, n in steps:
        getattr(world, action)(n)
        assert told(Summaries(world.tier, "run").look()) == by_records(world.tier)
    world.look(0)
    packs = {key for said, _ in by_records(world.tier).values() for one in said for key in one.packs}
    assert world.living.packs() == packs


def test_with_an_index_no_record_is_read_and_what_came_since_is() -> None:
    tier = filled(20)
    first = Summaries(tier, "run")
    seen = first.look()
    first.write()
    Log(tier, "run").commit(record(21))
    tier.calls.clear()
    later = Summaries(tier, "run").look()
    assert tier.calls["read"] == 2, "the index, and the record that came since"
    assert {seq: later[seq] for seq in seen} == seen
    assert later[21].current is not None


def test_a_new_index_takes_the_place_of_the_old_ones() -> None:
    tier = filled(6)
    one, two = Summaries(tier, "run"), Summaries(tier, "run")
    one.look()
    one.write()
    Log(tier, "run").forget(2)
    two.look()
    two.write()
    (key,) = tier.list("index/")
    assert key.startswith("index/run/000000000006-")
    assert sorted(Summaries(tier, "run").look()) == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["000000000009-abcdef012345", "README", "000000000009-abc/deeper"])
def test_a_foreign_object_is_passed_over(name: str) -> None:
    tier = filled(8)
    tier.put(f"index/run/{name}", as_buffer(small_record().encode()))
    assert told(Summaries(tier, "run").look()) == by_records(tier)


def test_an_index_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = filled(8)
    one = Summaries(tier, "run")
    one.look()
    one.write()
    monkeypatch.setattr(room, "MAX_INDEX_BYTES", 10)
    tier.calls.clear()
    assert told(Summaries(tier, "run").look()) == by_records(tier)
    assert tier.calls["read"] == 16, "eight records, twice: no index among them"


def test_an_unreadable_record_is_told_and_nobody_knows_its_packs() -> None:
    tier = filled(8)
    tier.delete("versions/run/000000000003")
    tier.put("versions/run/000000000003", as_buffer(b"junk"))
    found = Summaries(tier, "run")
    seen = found.look()
    assert seen[3].current is None
    assert [type(error) for error in seen[3].problems] == [FormatError]
    assert found.packs() is None


def test_which_record_counts_is_which_the_log_reads() -> None:
    tier = filled(1)
    log = Log(tier, "run")
    log.commit(record(1, 1), 1)
    log.commit(record(1, 2), 2)
    for _ in range(3):
        current = Summaries(tier, "run").look()[1].current
        assert current is not None
        assert current.packs == log.read(1).layout.objects
        log.forget(1, log.generations()[1][:1])
        if not log.seqs():
            break


def test_a_tier_that_fails_in_an_unknown_way_is_not_hidden() -> None:
    tier = filled(8)
    tier.add(Fault("read", 5, RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        Summaries(tier, "run").look()
    assert len(Summaries(tier, "run").look()) == 8


# The saver's part


def saved(found: Summaries, tier: Tier, first: int, last: int) -> None:
    for seq in range(first, last + 1):
        made = record(seq)
        Log(tier, "run").commit(made)
        found.add(made)
        found.keep()


def test_a_saver_writes_an_index_now_and_then() -> None:
    tier = Lasting(Memory())
    saved(Summaries(tier, "run"), tier, 1, 63)
    assert list(tier.list("index/")) == []
    found = Summaries(tier, "run")
    saved(found, tier, 64, 80)
    (key,) = tier.list("index/")
    assert key.startswith("index/run/000000000079-"), "also of versions that earlier processes saved"
    saved(found, tier, 81, 160)
    (key,) = tier.list("index/")
    assert key.startswith("index/run/000000000143-")


def test_numbers_that_are_used_again_after_records_were_deleted_by_hand() -> None:
    """The index speaks of the records that were there before: the next saver removes it."""
    tier = filled(8)
    old = Summaries(tier, "run")
    old.look()
    old.write()
    Log(tier, "run").forget(7)
    Log(tier, "run").forget(8)
    saved(Summaries(tier, "run"), tier, 7, 7)
    assert list(tier.list("index/")) == []
    assert told(Summaries(tier, "run").look()) == by_records(tier)


def test_a_saver_that_goes_on_leaves_the_index() -> None:
    tier = filled(8)
    old = Summaries(tier, "run")
    old.look()
    old.write()
    saved(Summaries(tier, "run"), tier, 9, 10)
    assert len(list(tier.list("index/"))) == 1


def test_a_tier_that_does_not_last_gets_none_and_a_failure_is_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory()
    saved(Summaries(memory, "run"), memory, 1, 70)
    assert list(memory.list("index/")) == []
    tier = Lasting(Memory())
    found = Summaries(tier, "run")
    saved(found, tier, 1, 63)
    error: TierstateError = TierUnavailable("no answer")
    tier.add(Fault("put", 2, error))
    with caplog.at_level("INFO", "tierstate"):
        saved(found, tier, 64, 64)
    assert "no index of its versions was written: no answer" in caplog.text
    assert list(tier.list("index/")) == []


# Numbers that come back


def test_a_number_that_comes_back_is_read_anew_by_everybody() -> None:
    """By a process that remembers the record before, and by one that begins and finds an index of it."""
    tier = filled(8)
    living = Summaries(tier, "run")
    living.look()
    living.write()
    assert living.packs() == {f"packs/run/{seq}-0-0-x" for seq in range(1, 9)}
    Log(tier, "run").forget(3)
    other = Summaries(tier, "run")
    other.expect(3)
    again = record(3, 7)
    Log(tier, "run").commit(again)
    for found in (living, other, Summaries(tier, "run")):
        packs = found.packs()
        assert packs is not None
        assert "packs/run/3-7-0-x" in packs
        assert "packs/run/3-0-0-x" not in packs
        assert told(found.look()) == by_records(tier)


def test_an_index_from_before_a_number_came_back_does_not_count() -> None:
    """Its writer was held up between his look at the records and its creation."""
    tier = filled(8)
    late = Summaries(tier, "run")
    late.look()
    late.write()
    (key,) = tier.list("index/")
    said = to_bytes(tier.get(key))
    Log(tier, "run").forget(3)
    Summaries(tier, "run").expect(3)
    Log(tier, "run").commit(record(3, 7))
    tier.put(key, as_buffer(said))
    assert told(Summaries(tier, "run").look()) == by_records(tier)


def test_an_index_after_a_number_came_back_counts() -> None:
    tier = filled(8)
    found = Summaries(tier, "run")
    for _ in range(2):
        found.expect(4)
    assert len(list(tier.list("index/"))) == 1, "marks do not pile up"
    found.look()
    found.write()
    tier.calls.clear()
    assert told(Summaries(tier, "run").look()) == by_records(tier)
    assert tier.calls["read"] == 1 + 8, "the index; and all records, by the test"


def test_a_number_above_all_makes_no_mark() -> None:
    tier = filled(8)
    found = Summaries(tier, "run")
    for seq in (9, 10):
        found.expect(seq)
    assert list(tier.list("index/")) == []


def test_no_pack_is_judged_by_an_index() -> None:
    """Somebody deleted the newest record by hand, and its number was used again before an index says so."""
    tier = filled(8)
    found = Summaries(tier, "run")
    found.look()
    found.write()
    Log(tier, "run").forget(8)
    Log(tier, "run").commit(record(8, 5))
    packs = Summaries(tier, "run").packs()
    assert packs is not None
    assert "packs/run/8-5-0-x" in packs


LIES = st.lists(
    st.tuples(
        st.sampled_from(["commit", "commit", "forget", "replace", "write", "reopen", "look at", "lie", "lie"]),
        st.integers(0, 50),
    ),
    max_size=30,
)


class Deceived(World):
    """A run whose index objects may say anything: of records before, by a program with an error, by somebody else."""

    def lie(self, n: int) -> None:
        """Other packs for a record that is there, as from a commit of its own or from the very same one."""
        said = [one for found, _ in by_records(self.tier).values() for one in found]
        wrong = [s._replace(packs=(f"packs/run/{s.seq}-wrong-0-x",), more=self.more(s, n)) for s in said[n % 3 :]]
        marks = [key for key in self.tier.list("index/run/") if "again-" in key]
        if wrong:
            key = IndexObjects(self.tier, "run").index_key(self.next, marks)
            self.tier.put(key, as_buffer(encode_index("run", wrong)))

    def more(self, summary: Summary, n: int) -> dict[str, Any]:
        return {**summary.more, "commit": summary.commit if n % 2 else commit_id()}

    def look_at(self, _n: int) -> None:
        """Which takes in what the index says, and not only where it is right."""
        self.living.look()


@given(LIES)
@example([("commit", 0)] * 6 + [("lie", 0)])
@example([("commit", 1)] + [("commit", 0)] * 6 + [("lie", 3), ("look at", 0)])
def test_packs_are_those_of_the_records_whatever_an_index_says(steps: list[tuple[str, int]]) -> None:
    """Whoever deletes packs asks by this which must stay."""
    world = Deceived()
    for action, n in steps:
        getattr(world, action.replace(" ", "_"))(n)
    packs = {key for said, _ in by_records(world.tier).values() for one in said for key in one.packs}
    later = Summaries(world.tier, "run")
    for found in (world.living, later):
        found.look()
        named = found.named()
        assert named is not None
        assert named.packs == packs
        found.look()
        assert found.packs() == packs


def test_retention_deletes_no_pack_because_an_index_says_so() -> None:
    """The index names the pack that stays for versions that go, and not for its own."""
    tier = Lasting(Memory())
    tier_run = TierRun(tier, "run")
    for seq in range(1, 9):
        made = record(seq)
        for key in made.layout.objects:
            tier.put(key, as_buffer(bytes(40)))
        tier_run.publish(made)
    said = [one for found, _ in by_records(tier).values() for one in found]
    wrong = [s._replace(packs=("packs/run/8-0-0-x", s.packs[0])) for s in said]
    wrong[-1] = wrong[-1]._replace(packs=("packs/run/7-0-0-x",))
    tier.put(IndexObjects(tier, "run").index_key(8, ()), as_buffer(encode_index("run", wrong)))
    assert TierRun(tier, "run", RetentionPolicy(last=1)).retire().drop == tuple(range(1, 8))
    assert list(tier.list("packs/")) == ["packs/run/8-0-0-x"]
