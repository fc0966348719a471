"""A trace: whole JSON, spans that nest, readable after a kill, and a stall that was planted is found in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, scratch, tier
from support.outcomes import until
from support.processes import Gang

import tierstate as ts
from tierstate.tiers import trace

Event = dict[str, Any]


def spans(path: Path) -> list[Event]:
    """The spans of a trace."""
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def check_nesting(found: list[Event]) -> None:
    """Within a thread, two spans are one within the other, or apart."""
    threads: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in found:
        threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for times in threads.values():
        open_ends: list[float] = []
        for start, end in sorted(times, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= start + 0.2:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.2
            open_ends.append(end)


def test_a_save_and_a_restore(place: Path) -> None:
    state = {f"w{i}": torch.randn(10_000) for i in range(4)}
    spec = policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place, codec="small")})
    with ts.Checkpointer(spec, "run") as ckpt:
        with ckpt.trace(place / "trace.json"):
            with pytest.raises(RuntimeError, match=r"being traced already, to .*trace\.json"), ckpt.trace("other"):
                pass
            ckpt.save(state, 7).wait("lustre")
            ckpt.restore(state)
        ckpt.save(state, 8)  # not traced any more
    found = spans(place / "trace.json")
    names = {event["name"] for event in found}
    assert names >= {"save", "plan", "capture", "copy", "digest", "publish", "cascade", "commit", "encode", "restore"}
    assert {event["args"]["step"] for event in found if event["name"] in ("save", "publish", "cascade")} == {7}
    assert {event["args"]["tier"] for event in found if event["name"] == "read"} >= {"nvme"}
    assert sum(event["args"]["bytes"] for event in found if event["name"] == "digest") == 160_000
    check_nesting(found)
    whole = json.loads((place / "trace.json").read_text())
    named = {event["tid"] for event in whole if event["name"] == "thread_name"}
    assert {event["tid"] for event in found} == named


@given(st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=4), max_leaves=20))
def test_spans_nest(tree: list[Any]) -> None:
    def run(node: list[Any]) -> int:
        with trace.span("node", children=len(node)) as one:
            count = 1 + sum(map(run, node))
            one.also(count=count)
        return count

    with scratch() as place:
        trace.begin(place / "trace.json")
        try:
            count = run(tree)
        finally:
            trace.end()
        found = [event for event in spans(place / "trace.json") if event["name"] == "node"]
    assert len(found) == count
    assert found[-1]["args"] == {"children": len(tree), "count": count}
    check_nesting(found)


def test_an_error_is_in_the_span_and_goes_on(place: Path) -> None:
    trace.begin(place / "trace.json")
    try:
        with pytest.raises(ValueError, match="planted"), trace.span("work", tier="t"):
            raise ValueError("planted")
    finally:
        trace.end()
    assert spans(place / "trace.json")[0]["args"] == {"tier": "t", "error": "ValueError: planted"}


def test_without_a_trace_a_span_is_nothing() -> None:
    assert trace.span("work", bytes=1) is trace.span("other")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_a_process_is_traced_by_its_environment(place: Path, killed: bool) -> None:
    program = f"""
import os, signal, time, torch, tierstate as ts
with ts.Checkpointer(ts.Policy.default("{place}/tier"), "run") as ckpt:
    ckpt.save({{"w": torch.ones(1000)}}, 1).wait()
    if os.fork() == 0:
        ckpt.restore({{"w": torch.ones(1000)}}) if False else os._exit(0)
    os.wait()
    while {killed} and '"publish"' not in open("{place}/trace-3.json").read():
        time.sleep(0.01)
    if {killed}:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    env = os.environ | {"TIERSTATE_TRACE": f"{place}/trace-{{rank}}.json", "RANK": "3"}
    ran = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == (-signal.SIGKILL if killed else 0), ran.stderr
    text = (place / "trace-3.json").read_text()
    found = json.loads(text if not killed else text.rstrip().rstrip(",") + "]")
    assert {"save", "publish"} <= {event["name"] for event in found}
    assert {event["pid"] for event in found} == {found[0]["pid"]}


def test_a_trace_that_cannot_be_written_ends_no_training(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TIERSTATE_TRACE", f"{place}/missing/trace.json")
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run"):
        pass
    assert f"TIERSTATE_TRACE: {place}/missing/trace.json cannot be written" in caplog.text


@pytest.mark.slow
def test_a_slow_tier_is_found(place: Path) -> None:
    state = {"w": torch.randn(50_000)}  # so little that also on a busy machine the limit is what takes time
    spec = policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place, bandwidth="100KiB/s")})
    with ts.Checkpointer(spec, "run") as ckpt, ckpt.trace(place / "trace.json"):
        ckpt.save(state, 1).wait("lustre")
    found = spans(place / "trace.json")
    waits = [event for event in found if event["name"] == "wait for the limit"]
    assert waits
    assert {event["args"]["tier"] for event in waits} == {"lustre"}
    (copy,) = [event for event in found if event["name"] == "cascade"]
    end = copy["ts"] + copy["dur"]
    assert all(copy["ts"] <= event["ts"] and event["ts"] + event["dur"] <= end for event in waits)


def length(found: list[Event], name: str) -> float:
    """Seconds of all spans of a name."""
    return sum(float(event["dur"]) for event in found if event["name"] == name) / 1e6


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_is_found(place: Path, slow: int) -> None:
    """Who waits least for all ranks is the one for whom the others wait, and its own trace says what it did."""
    env = {"TIERSTATE_TRACE": f"{place}/trace-{{rank}}.json"}
    with Gang(2, "support.saving_jobs:one_slow", place, slow, env=env) as gang:
        gang.wait()
    ranks = [spans(place / f"trace-{rank}.json") for rank in range(2)]
    waits = [length(found, "commit with all ranks") for found in ranks]
    assert waits.index(min(waits)) == slow
    own = [length(found, "commit") - wait for found, wait in zip(ranks, waits, strict=True)]
    assert own.index(max(own)) == slow
    assert own[slow] > 1


def held(found: list[Event]) -> list[Event]:
    """Waits for the interpreter, not for a core, in which the process has computed: a thread of it held the lock."""
    waits = [event for event in found if event["name"] == "wait for the interpreter"]
    wanted = [event for event in waits if event["args"]["queued"] < event["dur"] / 2e6]
    return [event for event in wanted if event["args"]["cpu"] > event["dur"] / 1e7]


@pytest.mark.slow
def test_a_thread_that_holds_the_interpreter_is_found(place: Path) -> None:
    """As a call of C does that does not let go: here the sum of numbers."""

    def found() -> bool:
        """Not at each: another thread may get the interpreter first, or this process has no core for long."""
        sum(range(12_000_000))
        lines = [line for line in (place / "trace.json").read_text().splitlines() if "wait for the interpreter" in line]
        waits = held([json.loads(line.rstrip(",]")) for line in lines if line.endswith((",", "]"))])
        return any(one["dur"] > 5e4 and one["args"]["main thread"].startswith("test_trace.py:") for one in waits)

    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt, ckpt.trace(place / "trace.json"):
        saved = ckpt.save({"w": torch.randn(250_000)}, 1)
        until(found)
        saved.wait()


def test_a_thread_that_sleeps_holds_nothing(place: Path) -> None:
    trace.begin(place / "trace.json")
    try:
        time.sleep(0.3)
    finally:
        trace.end()
    assert held(spans(place / "trace.json")) == []


def test_a_full_disk_ends_the_trace_and_nothing_else(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace.begin("/dev/full")
    try:
        for number in range(20_000):
            with trace.span("work", number=number):
                pass
    finally:
        tracer = trace._tracer
        trace.end()
    assert "/dev/full: the trace ends here" in caplog.text
    assert tracer is not None
    assert tracer._queue.qsize() < 20_000
    assert tracer._failed
