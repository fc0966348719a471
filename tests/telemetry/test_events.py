"""Events: what happens to saves and tiers is told, once, to hooks that cannot hurt the training."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import arena_of, policy, tier
from support.given_tiers import handed
from support.outcomes import until

import tierstate as ts
from tierstate.engine import events as events_module
from tierstate.engine.events import EVERY, KINDS, Event, EventBus
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import FormatError
from tierstate.tiers.base import ObjectWriter
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.wrappers.base import Wrapping


def world(place: Path, **keys: Any) -> ts.Policy:
    """Two directories, of which the first keeps two versions."""
    return policy({"nvme": tier("nvme", place, keep={"last": 2}), "lustre": tier("lustre", place)}, **keys)


def told(found: list[Event], kind: str) -> list[tuple[str, int | None]]:
    return [(event.tier, event.step) for event in found if event.kind == kind]


def test_what_becomes_of_each_save_is_told_once(place: Path) -> None:
    found: list[Event] = []
    state = {"w": torch.randn(1000)}
    with ts.Checkpointer(world(place), "run") as ckpt:
        ckpt.on("*", found.append)
        for step in range(4):
            state["w"] += 1
            ckpt.save(state, step).wait("lustre")
        ckpt.restore(state)
    counts = Counter(event.kind for event in found)
    arrived = {"committed": 4, "cascaded": 4, "written": 8}
    assert counts == {"saved": 4, "captured": 4, **arrived, "dropped": 2, "restored": 1}
    for name, kind in (("nvme", "committed"), ("lustre", "cascaded")):
        of_tier = [event for event in found if event.tier == name and event.kind in ("written", kind)]
        assert [event.kind for event in of_tier] == ["written", kind] * 4, "its packs are synced before the commit"
        assert all((event.nbytes or 0) >= 4000 for event in of_tier)
    assert told(found, "committed") == [("nvme", step) for step in range(4)]
    assert told(found, "cascaded") == [("lustre", step) for step in range(4)]
    committed = [event for event in found if event.kind == "committed"]
    assert all(event.run == "run" and event.version and event.nbytes and event.seconds for event in committed)
    assert committed[0].time <= committed[-1].time <= time.time()
    assert all(event.nbytes == 4000 for event in found if event.kind == "captured")


class Away(Wrapping):
    """A tier that can be away."""

    away = False

    def put(self, key: str, data: Buffer) -> None:
        if self.away:
            raise ts.TierUnavailable("planted", tier=self.name, key=key)
        super().put(key, data)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        if self.away:
            raise ts.TierUnavailable("planted", tier=self.name, key=key)
        return super().writer(key, size_hint)


def test_a_tier_that_goes_away_and_comes_back(place: Path) -> None:
    found: list[Event] = []
    state, slow = {"w": torch.randn(1000)}, Away(Memory())
    with handed(slow) as (keys,):
        spec = policy({"nvme": tier("nvme", place), "slow": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.on(("away", "back", "failed", "owed", "brought"), found.append)
            ckpt.save(state, 0).wait("slow")
            slow.away = True
            with pytest.raises(ts.TierUnavailable):
                ckpt.save(state, 1).wait("slow")
            slow.away = False
            ckpt.save(state, 2).wait("slow")
            end = time.monotonic() + 30
            while not told(found, "brought") and time.monotonic() < end:
                time.sleep(0.05)
    assert told(found, "away") == [("slow", None)]
    assert told(found, "failed") == [("slow", 1)]
    assert told(found, "owed")[:1] == [("slow", 1)]
    assert told(found, "back")[0][0] == "slow"
    assert told(found, "brought") == [("slow", 1)]
    assert all(event.reason for event in found if event.kind in ("away", "failed", "owed"))


class Held(Wrapping):
    """A tier that writes nothing until it may."""

    def __init__(self, inner: Memory) -> None:
        super().__init__(inner)
        self.may, self.asked = threading.Event(), threading.Event()

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        self.asked.set()
        assert self.may.wait(60)
        return super().writer(key, size_hint)


@pytest.mark.parametrize("on_full", ["block", "skip"])
def test_a_save_that_finds_the_arena_full_says_for_how_long(on_full: str) -> None:
    found, held = list[Event](), Held(Memory())
    with handed(held) as (keys,):
        spec = policy({"held": keys}, chunk="4KiB", arena={"size": "16KiB", "on_full": on_full})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.on(("arena_full", "skipped"), found.append)
            first = ckpt.save({"w": torch.randn(2000)}, 1)
            assert held.asked.wait(60)

            def let_go() -> None:
                until(lambda: arena_of(ckpt).waited > 0)  # the second one waits; the first had room
                held.may.set()

            if on_full == "block":
                threading.Thread(target=let_go).start()
            second = ckpt.save({"w": torch.randn(2000)}, 2)
            held.may.set()
            first.wait()
            second.wait() if on_full == "block" else None
    full = {event.step: event.seconds for event in found if event.kind == "arena_full"}
    if on_full == "block":
        assert full[2] is not None
        assert full[2] > 0
    else:
        assert full == {2: 0.0}
        assert told(found, "skipped") == [("", 2)]


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_hooks_get_their_kinds_until_they_are_ended_and_what_they_raise_is_logged(
    caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    bus, one, all_of_them = EventBus("run"), list[str](), list[str]()

    def fails(event: Event) -> None:
        raise kind(f"planted at {event.kind}")

    end = bus.subscribe("saved", lambda event: one.append(event.kind))
    bus.subscribe(EVERY, fails)
    bus.subscribe(EVERY, lambda event: all_of_them.append(event.kind))
    bus.emit("saved", step=1)
    bus.emit("restored", step=1)
    until = time.monotonic() + 30
    while len(all_of_them) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    end()
    bus.emit("saved", step=2)
    bus.close()
    assert one == ["saved"]
    assert all_of_them == ["saved", "restored", "saved"]
    assert caplog.text.count("a hook for events has failed") == 3
    with pytest.raises(ValueError, match="'commited' is no kind of event; known are saved, captured"):
        bus.subscribe("commited", fails)
    with pytest.raises(TypeError, match="None cannot be called; give a function of an event"):
        bus.subscribe("saved", None)  # type: ignore[arg-type]


def test_the_thread_of_a_hook_that_closes_ends() -> None:
    bus, threads = EventBus("run"), list[threading.Thread]()

    def closes(_event: Event) -> None:
        bus.close()
        threads.append(threading.current_thread())

    bus.subscribe("saved", closes)
    bus.emit("saved", step=1)
    end = time.monotonic() + 30
    while not threads and time.monotonic() < end:
        time.sleep(0.01)
    threads[0].join(30)
    assert not threads[0].is_alive()


def test_a_slow_hook_delays_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(events_module, "MAX_WAITING", 10)
    monkeypatch.setattr(events_module, "CLOSE_WAIT", 0.1)
    bus, gate, found = EventBus("run"), threading.Event(), list[int | None]()

    def slow(event: Event) -> None:
        gate.wait(30)
        found.append(event.step)

    bus.subscribe(EVERY, slow)
    for step in range(100):
        bus.emit("saved", step=step)
    bus.close()  # it does not wait for ever
    assert found == []
    gate.set()
    end = time.monotonic() + 30
    while len(found) < 10 and time.monotonic() < end:
        time.sleep(0.01)
    assert found[:10] in ([*range(10)], [*range(10)])
    assert "events were dropped, since those who take them are too slow" in caplog.text


@pytest.mark.slow
def test_a_slow_hook_takes_nothing_from_the_log(place: Path) -> None:
    over = threading.Event()
    spec = world(place, metrics={"events": True})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.on("*", lambda _: over.wait(60))
        for step in range(5):
            ckpt.save({"w": torch.full((1000,), float(step))}, step).wait("lustre")
    with ts.Checkpointer(spec, "run") as ckpt:
        assert [event.step for event in ckpt.events() if event.kind == "cascaded"] == [*range(5)]
    over.set()


def test_a_save_that_goes_nowhere_is_not_captured(place: Path) -> None:
    found: list[Event] = []
    with ts.Checkpointer(policy({"nvme": tier("nvme", place, every=3)}), "run") as ckpt:
        ckpt.on("captured", found.append)
        for step in range(7):
            ckpt.save({"w": torch.ones(10)}, step)
    assert [event.step for event in found] == [0, 3, 6]


def test_a_line_for_a_person_once_per_save_and_tier(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tierstate")
    with ts.Checkpointer(world(place), "run") as ckpt:
        ckpt.save({"w": torch.ones(1000)}, 7).wait("lustre")
    lines = [record.getMessage() for record in caplog.records if "step 7 is on" in record.getMessage()]
    assert len(lines) == 2
    assert lines[0].startswith("run run: step 7 is on nvme after ")
    assert lines[1].startswith("run run: step 7 is on lustre, copied in ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
EVENTS = st.builds(
    Event,
    st.sampled_from(list(KINDS)),
    st.floats(0, 1e11),
    st.text(min_size=1, max_size=5),
    st.text(max_size=5),
    version=st.text(max_size=5),
    **dict.fromkeys(("step", "seq", "rank", "nbytes", "raw"), st.none() | st.integers(-5, 1 << 40)),
    **dict.fromkeys(("seconds", "saved"), st.none() | st.floats(0, 1e11)),
    reason=st.text(max_size=20),
)


@given(EVENTS)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    assert Event.decode(event.encode() | {"unknown": 1}) == event


@given(st.dictionaries(st.sampled_from([*Event._fields, "other"]), JSON))
def test_any_values_are_an_event_or_an_error(encoded: dict[str, Any]) -> None:
    try:
        found = Event.decode(encoded)
    except FormatError:
        return
    assert isinstance(hash(found), int)
    assert found.time >= 0
