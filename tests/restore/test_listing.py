"""The listing from summaries: the very same as from whole records, for any tiers, writers, damage and index."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, scratch, tier

import tierstate as ts
from tierstate.engine.info import VersionInfo
from tierstate.engine.placement import Routes
from tierstate.engine.publish.backlog import PendingVersion, missed_versions
from tierstate.engine.store.catalog import RunCatalog, VersionCopies
from tierstate.engine.versions import tags as versions
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import TierUnavailable
from tierstate.manifest.format.layout import ChunkPlace, Layout
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.manifest.history.log import Log, commit_id
from tierstate.tiers.policy.policy import TierPolicy
from tierstate.tiers.testing import Fault, Faulty

TIERS = ("nvme", "lustre", "file")


def by_records(catalog: RunCatalog, spec: ts.Policy) -> list[VersionInfo]:
    """What is to be told, from every record of every tier, read whole."""
    places = list(catalog.newest_first())[::-1]
    entries = [entry for place in places for entry in place.entries[::-1]]
    problems = {place.seq: {name: str(error) for name, error in place.problems} for place in places}
    late: dict[int, list[str]] = {}
    for one in spec.tiers:
        if one.persistent and one.name not in catalog.unreachable:
            for seq in lacking(one, entries, spec):
                late.setdefault(seq, []).append(one.name)
    found = [
        replace(VersionInfo.of(e), late=tuple(late.get(seq, ())), unreadable=problems[seq])
        for e in entries
        for seq in [e.version.head.seq]
    ]
    found += [
        VersionInfo("run", place.seq, -1, "", 0.0, 0, (), unreadable=problems[place.seq])
        for place in places
        if place.problems and not place.entries
    ]
    return sorted(found, key=lambda info: info.seq)


def lacking(one: TierPolicy, entries: Sequence[VersionCopies], spec: ts.Policy) -> list[int]:
    heads = [entry.version.head for entry in entries if one.name in entry.tiers]
    newest = max(heads, key=lambda head: head.seq, default=None)
    routes = Routes(spec)
    newer = [
        PendingVersion.of(entry.version)
        for entry in entries
        if (newest is None or entry.version.head.seq > newest.seq)
        and routes.of(entry.version.leaves)[one.name].leaves.any()
    ]
    return [due.seq for due in missed_versions(one.every, (newest.step, newest.time) if newest else None, newer)]


def version(seq: int, writer: int, leaves: Sequence[str]) -> Version:
    """A version of one chunk per leaf; another writer's has another time, and so another id."""
    head = Head("run", seq, 10 * seq, 100.0 * seq + writer, chunk=16, metadata={"writer": writer})
    found = [Leaf((name,), Spec("tensor", shape=(16,))) for name in leaves]
    rows = [ShardRow(i, 0, Box.whole((16,))) for i in range(len(found))]
    return Version.build(head, found, rows, np.arange(2 * len(found), dtype="u8"))


def record(made: Version, absent: bool) -> Record:
    key = f"packs/run/{made.head.seq}-0-0-x"
    places = [None if absent and i == 0 else ChunkPlace(key, 16 * i, 16, "raw") for i in range(len(made.digests))]
    return Record(made, Layout.build(places, {key: 160}), {"id": commit_id()})


copies = st.tuples(
    st.integers(1, 8),
    st.sampled_from(TIERS),
    st.integers(0, 1),
    st.sampled_from([(), ("a",), ("a", "b"), ("b",)]),
    st.sampled_from(["whole", "whole", "part", "damaged", "twice"]),
)


@settings(max_examples=max(8, settings().max_examples // 2))
@given(
    made=st.lists(copies, max_size=16, unique_by=lambda c: (c[0], c[1])),
    every=st.sampled_from([None, 20, 30]),
    parted=st.booleans(),
    indexed=st.sets(st.sampled_from(TIERS)),
)
def test_it_tells_what_the_records_tell(
    made: list[tuple[int, str, int, tuple[str, ...], str]], every: int | None, parted: bool, indexed: set[str]
) -> None:
    with scratch() as place:
        cadence = {} if every is None else {"every": every}
        rules = [{"match": "a", "tiers": ["nvme", "file"]}] if parted else []
        tiers = {name: tier(name, place, **(cadence if name != "nvme" else {})) for name in TIERS}
        with ts.Checkpointer(policy(tiers, rules=rules), "run") as ckpt:
            tier_runs = {tier_run.name: tier_run for tier_run in ckpt._tier_runs}
            for seq, name, writer, leaves, how in made:
                log = Log(tier_runs[name].tier, "run")
                if how == "damaged":
                    log.tier.put(log.key(seq), as_buffer(b"junk"))
                    continue
                log.commit(record(version(seq, writer, leaves), how == "part"))
                if how == "twice":
                    log.commit(record(version(seq, writer, leaves), True), 1)
            told = by_records(ckpt._catalog(), ckpt.policy)
            assert ckpt.versions() == told
            for name in indexed:
                tier_runs[name].summaries.write()
        with ts.Checkpointer(policy(tiers, rules=rules), "run") as ckpt:
            assert ckpt.versions() == told


def test_a_tier_that_cannot_be_listed_is_told_and_not_said_to_lack_anything(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = policy({name: tier(name, place) for name in ("nvme", "lustre")})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save({"a": 1}, step=1).wait("lustre")
    with ts.Checkpointer(spec, "run") as ckpt:
        tier_run = ckpt._tier_runs[1]
        away = Faulty(tier_run.tier, Fault("list", 0, TierUnavailable("no answer")))
        away.name = "lustre"
        monkeypatch.setattr(tier_run.summaries._log, "tier", away)
        (found,) = ckpt.versions()
    assert (found.tiers, found.late) == (("nvme",), ())
    assert "lustre: its log cannot be listed: no answer" in caplog.text


def test_a_plain_table_for_many_rows_has_the_same_cells(capsys: pytest.CaptureFixture[str]) -> None:
    from tierstate.cli.output import lines as tables

    rows = [(n, "x" * (n % 5), f"{n}:") for n in range(tables.PLAIN_ABOVE + 1)]
    tables.table([">seq", "text", "last"], rows)
    many = [line.split() for line in capsys.readouterr().out.splitlines()]
    tables.table([">seq", "text", "last"], rows[:-1])
    few = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert many[:-1] == few
    assert many[-1] == [str(tables.PLAIN_ABOVE), f"{tables.PLAIN_ABOVE}:"]


@pytest.mark.soak
def test_ten_thousand_versions(place: Path, record_property: Callable[[str, object], None]) -> None:
    """All of them are told, from the index or without; how long that takes is for people."""
    spec = policy({"nvme": tier("nvme", place)})
    folder = place / "nvme/versions/run"
    folder.mkdir(parents=True)
    for seq in range(1, 10_001):
        made = record(version(seq, 0, ("a", "b", "c")), False)
        (folder / f"{seq:012d}").write_bytes(made.encode())
    found = []
    for what in ("from records", "from an index"):
        with ts.Checkpointer(spec, "run") as ckpt:
            start, cpu = time.perf_counter(), time.process_time()
            found.append(ckpt.versions())
            told = f"{time.perf_counter() - start:.3f} s, of the processor {time.process_time() - cpu:.3f} s"
            record_property(what, told)
            print(f"{what}: {told}")
            ckpt._tier_runs[0].summaries.write()
    assert found[0] == found[1]
    assert [v.seq for v in found[1]] == list(range(1, 10_001))


@pytest.mark.clock_numbers
def test_versions_of_hosts_that_never_saw_each_other_are_in_the_order_of_their_saves(place: Path) -> None:
    spec = policy({name: tier("nvme", place / name) for name in ("one", "two")}, durable="one")
    for step, host in enumerate(["one", "one", "two", "one", "two"]):
        with ts.Checkpointer(policy({host: tier("nvme", place / host)}), "run") as ckpt:
            ckpt.save({"w": step}, step=step)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert [version.step for version in ckpt.versions()] == [0, 1, 2, 3, 4]
        assert ckpt.load() == {"w": 4}
        ckpt.save({"w": 5}, step=5).wait()
        assert ckpt.versions()[-1].step == 5


@pytest.mark.slow
def test_the_beginning_of_an_id_that_several_versions_have_names_none(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place, every=2)})
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(17):  # of seventeen ids two begin with the same digit
            ckpt.save({"w": step}, step=step).wait()
        ids = [version.id for version in ckpt.versions()]
        many = next(one[0] for i, one in enumerate(ids) if one[0] in {other[0] for other in ids[:i]})
        for call in (ckpt.load, ckpt.info, ckpt.leaves):
            with pytest.raises(ValueError, match=f"'{many}' fits the ids of [2-9] versions: "):
                call(version=many)
        for step, one in enumerate(ids):
            assert ckpt.load(version=one) == {"w": step}
            assert ckpt.load(version=one[:8]) == {"w": step}


READS = {
    "versions": lambda ckpt: ckpt.versions(),
    "verify": lambda ckpt: ckpt.verify(),
    "history": lambda ckpt: ckpt.history(),
    "doctor": lambda ckpt: ckpt.doctor(),
    "prune": lambda ckpt: ckpt.prune(dry_run=True),
}


@pytest.mark.parametrize("read", [pytest.param(name, marks=pytest.mark.slow) for name in READS])
def test_what_reads_all_records_reads_several_at_once(place: Path, monkeypatch: pytest.MonkeyPatch, read: str) -> None:
    """A tier far away answers after some 20 ms, and a run has thousands of versions."""
    spec = policy({"nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(8):
            ckpt.save({"step": step}, step).wait()
    together, reading, plain = threading.Condition(), set[int](), Log.read_generation

    def read_generation(self: Log, seq: int, generation: int) -> Record:
        with together:
            reading.add(threading.get_ident())
            together.notify_all()
            together.wait_for(lambda: len(reading) > 1, timeout=1)
        return plain(self, seq, generation)

    with ts.Checkpointer(spec, "run") as ckpt:
        monkeypatch.setattr(Log, "read_generation", read_generation)
        READS[read](ckpt)
    assert len(reading) > 1, "each record was waited for by itself"


def test_tags_are_read_several_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, plain = threading.Barrier(2, timeout=60), versions.read_tag
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save({"step": 1}, 1).wait()
        for name in ("a", "b"):
            ckpt.tag(name)

        def read_tag(*args: Any) -> Any:
            together.wait()
            return plain(*args)

        monkeypatch.setattr(versions, "read_tag", read_tag)
        assert set(ckpt.tags()) == {"a", "b"}
