"""The log: what a commit is, also when its answer is lost, and what is found among other things."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    CommitUnknown,
    Damaged,
    FormatError,
    NotFound,
    Oversized,
    TierFull,
    TierUnavailable,
)
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, Version
from tierstate.manifest.history import log as log_module
from tierstate.manifest.history.log import LAST_BY_CLOCK, Log, check_run, commit_id, list_runs, next_seq


class Shelf:
    """Objects in a dict. ``put_fails`` and ``get_fails`` are raised once; a put may have stored before it fails."""

    name = "tier run"

    def __init__(self):
        self.objects = {}
        self.put_fails = self.get_fails = None
        self.stores_first = False
        self.reads = []

    def put(self, key, data):
        error, self.put_fails = self.put_fails, None
        if error is not None and not self.stores_first:
            raise error
        if key in self.objects:
            raise AlreadyExists(f"{key} is taken", tier=self.name, key=key)
        self.objects[key] = to_bytes(data)
        if error is not None:
            raise error

    def get(self, key):
        self.reads.append(key)
        error, self.get_fails = self.get_fails, None
        if error is not None:
            raise error
        if key not in self.objects:
            raise NotFound(f"no {key}", tier=self.name, key=key)
        return as_buffer(self.objects[key])

    def get_within(self, key, most, what):
        if self.size(key) > most:
            raise Oversized(f"{key}: too many for {what}")
        return self.get(key)

    def list(self, prefix):
        return iter(sorted(key for key in self.objects if key.startswith(prefix)))

    def size(self, key):
        if key not in self.objects:
            raise NotFound(f"no {key}", tier=self.name, key=key)
        return len(self.objects[key])

    def delete(self, key):
        self.objects.pop(key, None)


def record(seq, run="run", step=0):
    version = Version.build(Head(run, seq, step, 0.0), [], [], np.zeros((0, 2), "u8"))
    return Record(version, Layout.build([], {}), {"id": commit_id()})


@pytest.fixture
def tier_run():
    return Shelf()


@pytest.fixture
def log(tier_run):
    return Log(tier_run, "run")


@given(st.sets(st.integers(0, 10**12 - 1), max_size=6), st.randoms())
def test_what_was_committed_is_found_in_order(seqs, random):
    log = Log(Shelf(), "run")
    for seq in random.sample(sorted(seqs), len(seqs)):
        log.commit(record(seq, step=seq // 2))
    assert log.seqs() == sorted(seqs)
    assert [found.seq for found in log.newest_first()] == sorted(seqs, reverse=True)
    for found in log.newest_first():
        assert found.error is None
        assert found.record.version.head.step == found.seq // 2
    latest = log.latest()
    assert (latest.version.head.seq if latest else None) == max(seqs, default=None)


def test_an_empty_log(log):
    assert (log.seqs(), list(log.newest_first()), log.latest()) == ([], [], None)
    with pytest.raises(NotFound):
        log.read(1)


def test_newest_first_reads_no_more_than_is_asked_for(tier_run, log):
    for seq in range(5):
        log.commit(record(seq))
    assert next(log.newest_first()).seq == 4
    assert tier_run.reads == [log.key(4)]


def test_a_damaged_record_does_not_hide_the_older_ones(tier_run, log):
    for seq in (1, 2, 3):
        log.commit(record(seq))
    tier_run.objects[log.key(2)] = tier_run.objects[log.key(2)][:-1]
    found = list(log.newest_first())
    assert [f.seq for f in found] == [3, 2, 1]
    assert [f.record is None for f in found] == [False, True, False]
    assert isinstance(found[1].error, FormatError)
    assert log.key(2) in str(found[1].error)
    assert log.latest().version.head.seq == 3


@pytest.mark.parametrize("error", [TierUnavailable, AccessDenied, Damaged, NotFound])
def test_a_look_gives_every_error_of_the_tier_as_a_value(tier_run, log, error):
    log.commit(record(1))
    tier_run.get_fails = error("no")
    assert isinstance(log.look(1).error, error)
    assert log.look(1).record is not None
    tier_run.get_fails = error("no")
    with pytest.raises(error):
        log.read(1)


def test_latest_says_so_when_the_newest_cannot_be_read(tier_run, log):
    log.commit(record(1))
    tier_run.objects[log.key(2)] = b"?"
    with pytest.raises(FormatError, match=log.key(2)):
        log.latest()


def test_foreign_names_are_passed_over(tier_run, log):
    log.commit(record(7))
    for key in [
        "versions/run/7", "versions/run/0000000000007", "versions/run/000000000008.tmp", "versions/run/README",
        "versions/run/000000000009/part", "versions/run/00000000000x", "versions/run/००००००००००१२",
        "versions/run2/000000000001", "versions/other/README", "versions/loose", "versions/.x/000000000001",
        "packs/run/x",
    ]:  # fmt: skip
        tier_run.objects[key] = b"?"
    assert log.seqs() == [7]
    assert list_runs(tier_run) == ["run", "run2"]


@pytest.mark.parametrize(("run", "seq"), [("run", 3), ("other", 2)])
def test_a_record_copied_to_another_place_is_refused(tier_run, log, run, seq):
    log.commit(record(2))
    copy = Log(tier_run, run)
    tier_run.objects[copy.key(seq)] = tier_run.objects[log.key(2)]
    with pytest.raises(FormatError, match="holds version 2 of run 'run'"):
        copy.read(seq)


def test_a_record_too_big_is_refused_without_reading_it(tier_run, log, monkeypatch):
    log.commit(record(1))
    monkeypatch.setattr(log_module, "MAX_RECORD", tier_run.size(log.key(1)) - 1)
    with pytest.raises(FormatError, match="too many for a record"):
        log.read(1)
    assert tier_run.reads == []


def test_of_two_writers_one_wins(tier_run, log):
    ours, theirs = record(1, step=1), record(1, step=2)
    log.commit(theirs)
    before = dict(tier_run.objects)
    with pytest.raises(AlreadyExists):
        log.commit(ours)
    assert tier_run.objects == before
    assert log.read(1).commit == theirs.commit


def test_the_same_content_of_two_writers_is_still_a_conflict(log):
    """Same bytes but for the commit's id: only one of them may believe that its packs are the ones."""
    log.commit(record(1))
    with pytest.raises(AlreadyExists):
        log.commit(record(1))


def test_a_commit_done_again_is_done(log):
    ours = record(1)
    log.commit(ours)
    log.commit(ours)
    assert log.seqs() == [1]


@pytest.mark.parametrize("error", [TierUnavailable, AlreadyExists])
def test_a_lost_answer_is_settled_by_reading_back(tier_run, log, error):
    """Also AlreadyExists: a store that tried again by itself met its own first try."""
    tier_run.put_fails, tier_run.stores_first = error("no answer"), True
    ours = record(1)
    log.commit(ours)
    assert log.read(1).commit == ours.commit


def test_a_commit_that_did_not_arrive(tier_run, log):
    tier_run.put_fails = TierUnavailable("no answer")
    with pytest.raises(TierUnavailable, match="no answer"):
        log.commit(record(1))
    assert tier_run.objects == {}


def test_a_lost_answer_and_a_record_of_anothers(tier_run, log):
    log.commit(record(1))
    tier_run.put_fails = TierUnavailable("no answer")
    with pytest.raises(TierUnavailable, match="no answer"):
        log.commit(record(1))


@pytest.mark.parametrize("first", [TierUnavailable, AlreadyExists])
@pytest.mark.parametrize("second", [TierUnavailable, AccessDenied, Damaged])
@pytest.mark.parametrize("stored", [True, False])
def test_nobody_knows_when_reading_back_fails_too(tier_run, log, first, second, stored):
    tier_run.put_fails, tier_run.stores_first, tier_run.get_fails = first("first"), True, second("second")
    if not stored:
        tier_run.objects[log.key(1)] = record(1).encode()
        tier_run.stores_first = False
    before = set(tier_run.objects)
    with pytest.raises(CommitUnknown, match=r"first.*second.*nothing was deleted") as caught:
        log.commit(record(1))
    assert isinstance(caught.value.__cause__, first)
    assert set(tier_run.objects) >= before
    assert log.key(1) in tier_run.objects


def test_nobody_knows_when_what_is_read_back_is_garbled(tier_run, log):
    """A bit that flips on the way back must not make us delete the packs of a record that is ours."""
    ours = record(1)
    tier_run.put_fails, tier_run.stores_first = TierUnavailable("no answer"), True
    whole = tier_run.get
    tier_run.get = lambda key: as_buffer(to_bytes(whole(key))[:-1] + bytes([to_bytes(whole(key))[-1] ^ 1]))
    with pytest.raises(CommitUnknown):
        log.commit(ours)
    tier_run.get = whole
    log.commit(ours)


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_what_is_no_error_of_a_tier_does_not_say_that_there_is_no_record(tier_run, log, error):
    tier_run.put_fails, tier_run.stores_first = error("late"), True
    log.commit(record(1))
    tier_run.put_fails, tier_run.stores_first = error("late"), False
    with pytest.raises(error, match="late"):
        log.commit(record(2))
    tier_run.put_fails, tier_run.stores_first, tier_run.get_fails = error("late"), True, error("again")
    with pytest.raises(CommitUnknown, match=r"late.*again.*nothing was deleted"):
        log.commit(record(3))


@pytest.mark.parametrize("error", [TierFull, AccessDenied])
def test_other_errors_of_a_commit_come_through(tier_run, log, error):
    tier_run.put_fails = error("no")
    with pytest.raises(error):
        log.commit(record(1))
    assert tier_run.reads == []


def test_a_record_of_another_run_is_not_committed(tier_run, log):
    with pytest.raises(FormatError, match="no place in the log of 'run'"):
        log.commit(record(1, run="other"))
    assert tier_run.objects == {}


def test_forgetting_is_safe_to_do_again(tier_run, log):
    for seq in (1, 2):
        log.commit(record(seq))
    log.forget(1)
    log.forget(1)
    assert log.seqs() == [2]


@given(st.text(max_size=120))
def test_names_of_runs(name):
    right = (
        0 < len(name) <= 100 and name[0].isalnum() and all(c.isalnum() or c in "._-" for c in name) and name.isascii()
    )
    if right:
        assert check_run(name) == name
    else:
        with pytest.raises(ValueError, match="cannot name a run"):
            check_run(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\n", "-a", "_a", "é", "a" * 101, "a b"])
def test_names_that_would_lead_astray(name):
    with pytest.raises(ValueError, match="cannot name a run"):
        Log(Shelf(), name)


@pytest.mark.clock_numbers
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400)), max_size=40), st.integers(0, 10**11))
def test_numbers_rise_in_the_order_of_the_saves_whichever_logs_are_in_sight(jobs, start):
    """Each job, some hundredths of a second after the one before, sees only the log of its own host."""
    logs, now, numbers = {}, start, []
    with pytest.MonkeyPatch.context() as patch:
        # In the middle of a hundredth: at its beginning the product may be rounded down to the one before.
        patch.setattr(log_module.time, "time", lambda: (now + 0.5) / log_module.PER_SECOND)
        for host, pause in jobs:
            now += 1 + pause
            numbers.append(next_seq(logs.get(host, 0)))
            logs[host] = numbers[-1]
    assert numbers == sorted(set(numbers))


@pytest.mark.clock_numbers
@given(st.integers(0, 10**12 - 2), st.floats(-1e12, 1e12))
def test_a_number_is_above_all_in_sight_whatever_the_clock_says(highest, now):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module.time, "time", lambda: now)
        found = next_seq(highest)
    assert highest < found <= max(highest + 1, LAST_BY_CLOCK)
    Head("run", found, 0, 0.0).check()
