"""The log of events in tiers: read by another process, bounded, and no failure of a save."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, tier

import tierstate as ts
from tierstate.engine.events import Event
from tierstate.manifest.errors import Unauthentic
from tierstate.telemetry import event_log
from tierstate.telemetry.event_log import EventLog, read_events
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.memory.host import Memory


def world(place: Path) -> ts.Policy:
    return policy(
        {"host": tier("host", place), "nvme": tier("nvme", place), "lustre": tier("lustre", place)},
        metrics={"events": True},
    )


def save(place: Path, *steps: int) -> None:
    with ts.Checkpointer(world(place), "run") as ckpt:
        for step in steps:
            ckpt.save({"w": torch.full((1000,), float(step))}, step).wait("lustre")


def test_every_tier_has_its_events_and_those_of_the_process(place: Path) -> None:
    save(place, 1, 2)
    save(place, 3)
    for name in ("nvme", "lustre"):
        pieces = sorted((place / name / "events" / "run").iterdir())
        assert len(pieces) == 2
        said = [json.loads(line) for piece in pieces for line in piece.read_text().splitlines()]
        assert {event["tier"] for event in said if "tier" in event and event["kind"] != "restored"} == {name}
        assert [event["step"] for event in said if event["kind"] == "saved"] == [1, 2, 3]
    with ts.Checkpointer(world(place), "run") as ckpt:
        found = ckpt.events()
        assert found == sorted(found, key=lambda event: event.time)
        assert [event.step for event in found if event.kind == "saved"] == [1, 2, 3]
        assert [event.step for event in found if event.tier == "lustre" and event.kind == "cascaded"] == [1, 2, 3]
        later = ckpt.events(since=found[-1].time)
        assert later == [event for event in found if event.time >= found[-1].time]


def log_to(**tiers: Tier) -> EventLog:
    """A log that is written to these tiers."""
    log = EventLog([], "run")
    log._tiers, log._waiting, log._try_at = tiers, {name: [] for name in tiers}, dict.fromkeys(tiers, 0.0)
    return log


def write_pieces(store: Tier, count: int) -> list[Event]:
    """Log so many pieces of one event each: a second and a step after the one before."""
    events = [Event("saved", 1000.0 + number, "run", step=number) for number in range(count)]
    for event in events:
        log = log_to(store=store)
        log.event(event)
        log.close()
    return events


def test_only_the_newest_pieces_stay_and_what_is_no_event_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Memory()
    monkeypatch.setattr(event_log, "PIECES", 64)
    written = write_pieces(store, event_log.PIECES + 5)
    assert read_events({"store": store}, "run") == written[5:]
    keys = list(store.list("events/"))
    assert len(keys) == event_log.PIECES
    store.put(
        "events/run/0000000000001-00000000.jsonl",
        torch.frombuffer(bytearray(b'{"kind": 1}\nno\n[]\n\n'), dtype=torch.uint8),
    )
    store.put("events/run/other.txt", torch.zeros(3, dtype=torch.uint8))
    assert read_events({"store": store}, "run") == written[5:]


def test_pieces_of_a_clock_that_was_ahead_are_not_taken_for_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "PIECES", 4)
    store = Memory()
    for at in (9e9, 9.1e9, 9.2e9, 9.3e9, 1e9, 1.1e9, 1.2e9, 1.3e9, 1.4e9):
        log = log_to(store=store)
        log.event(Event("saved", at, "run"))
        log.close()
    assert [event.time for event in read_events({"store": store}, "run")] == [1.1e9, 1.2e9, 1.3e9, 1.4e9]


def test_a_clock_that_is_set_back_holds_no_event_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "PIECE_SECONDS", 0.0)
    store = Memory()
    log_to(store=store).event(Event("saved", time.time() + 1e6, "run"))  # it was set back after the event
    assert len(read_events({"store": store}, "run")) == 1


def test_what_fails_in_one_tier_is_logged_in_the_others_and_one_that_cannot_be_read_is_passed_over() -> None:
    class Broken(Memory):
        def list(self, prefix: str) -> Iterator[str]:
            raise ts.TierUnavailable("planted")

    good, broken = Memory(), Broken()
    log = log_to(good=good, broken=broken)
    log.event(Event("failed", 1000.0, "run", "broken", 1, 1, reason="planted"))
    log.close()
    assert [event.tier for event in read_events({"broken": broken, "good": good}, "run")] == ["broken"]
    with pytest.raises(ts.TierUnavailable):
        read_events({"broken": broken}, "run")


def test_a_piece_that_is_damaged_is_passed_over_and_a_tier_with_no_other_is_one_that_cannot_be_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Damaging(Memory):
        bad: tuple[str, ...] = ("events/run/0000001001000",)

        def read(self, key: str, ranges: Sequence[Range]) -> None:
            if key.startswith(self.bad):
                raise Unauthentic(f"{key}: planted")
            super().read(key, ranges)

    store = Damaging()
    write_pieces(store, 3)
    assert [event.step for event in read_events({"store": store}, "run")] == [0, 2]
    assert "1 of 3 pieces of its log cannot be read: events/run/0000001001000" in caplog.text
    store.bad = ("events/",)
    with pytest.raises(Unauthentic):
        read_events({"store": store}, "run")


def test_no_more_is_read_than_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_READ", 200)
    store = Memory()
    for number in range(10):
        text = json.dumps(Event("saved", float(number), "run", step=number).encode()).encode()
        key = f"events/run/{number:013d}-00000000.jsonl"
        store.put(key, torch.frombuffer(bytearray(text), dtype=torch.uint8))
    found = read_events({"store": store}, "run")
    assert 0 < len(found) < 10
    assert found[-1].step == 9


def test_all_that_has_waited_for_a_tier_can_be_read() -> None:
    """Also if each event has a long reason, as those of a tier that fails have."""
    store = Memory()
    log = log_to(store=store)
    log._try_at["store"] = math.inf  # it is away
    events = [
        Event("failed", 1000.0 + number / 2, "run", "store", number, reason="x" * 1500)
        for number in range(event_log.WAITING)
    ]
    for event in events:
        log.event(event)
    log.close()
    assert read_events({"store": store}, "run") == events


def test_what_the_job_deletes_while_it_is_read_is_passed_over() -> None:
    class Deleting(Memory):
        """Loses a piece after it was listed, and one after its length was asked."""

        def size(self, key: str) -> int:
            if key.startswith("events/run/0000001001000"):
                self.delete(key)
            return super().size(key)

        def read(self, key: str, ranges: Sequence[Range]) -> None:
            if key.startswith("events/run/0000001002000"):
                self.delete(key)
            super().read(key, ranges)

    store = Deleting()
    write_pieces(store, 5)
    assert [event.step for event in read_events({"store": store}, "run")] == [0, 3, 4]


@given(st.lists(st.floats(-30_000, 30_000), min_size=1, max_size=20), st.floats(-40_000, 40_000) | st.just(math.inf))
def test_the_latest_events_are_found_without_the_old_pieces(steps: list[float], since: float) -> None:
    """Also of a tier that was away while they happened, and of a clock that went back."""
    store, moment, happened = Memory(), 1e9, []
    log = log_to(store=store)
    for number, seconds in enumerate(steps):
        moment += seconds
        happened.append(Event("saved", moment, "run", step=number))
        log.event(happened[-1])
    log.close()
    since += moment
    found = read_events({"store": store}, "run", since)
    assert {event.step for event in found} == {event.step for event in happened if event.time >= since}
    if all(seconds >= 1 for seconds in steps):  # the numbers of pieces are times
        firsts = [json.loads(bytes(store.get(key).numpy()).splitlines()[0])["time"] for key in store.list("events/")]
        assert len(reads(store, since)) == sum(int(1000 * first) >= 1000 * (since - 3600) for first in firsts)


def reads(store: Memory, since: float) -> list[str]:
    """The pieces that are read for the events since a time."""
    seen: list[str] = []

    class Noting(Memory):
        def list(self, prefix: str) -> Iterator[str]:
            return store.list(prefix)

        def size(self, key: str) -> int:
            return store.size(key)

        def read(self, key: str, ranges: Sequence[Range]) -> None:
            seen.append(key)
            store.read(key, ranges)

    read_events({"store": Noting()}, "run", since)
    return seen


def test_several_pieces_are_read_at_once() -> None:
    """A tier far away answers after some 20 ms, and a day has 1,440 pieces."""
    together = threading.Barrier(4, timeout=60)

    class Far(Memory):
        def size(self, key: str) -> int:
            together.wait()
            return super().size(key)

        def read(self, key: str, ranges: Sequence[Range]) -> None:
            together.wait()
            super().read(key, ranges)

    store = Far()
    write_pieces(store, 8)
    assert len(read_events({"store": store}, "run")) == 8


def test_a_tier_that_hangs_is_not_waited_for_and_gets_its_events_later() -> None:
    class Hanging(Memory):
        trouble = "hangs since 10:00:00: put"

    store = Hanging()
    log = log_to(store=store)
    log.event(Event("saved", 1000.0, "run", step=1))
    log.event(Event("committed", 1000.0, "run", tier="memory of a process", step=1))
    log.close()
    assert list(store.list("")) == []
    Hanging.trouble = ""
    log.close()
    assert [event.kind for event in read_events({"store": store}, "run")] == ["saved"]


def test_a_tier_that_takes_no_events_loses_no_save(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "PIECE_EVENTS", 1)
    (place / "nvme").mkdir(mode=0o700)
    (place / "nvme" / "events").write_text("in the way")
    save(place, 1, 2)
    with ts.Checkpointer(world(place), "run") as ckpt:
        assert [info.step for info in ckpt.versions()] == [1, 2]
    assert os.path.isfile(place / "nvme" / "events")
