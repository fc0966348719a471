"""``policy check --live``: what is found of real tiers, by a process of its own, and what should be done about it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.checkpointer_worlds import names, opened, wrapped
from support.cli_calls import Answer, Call

import tierstate as ts
from tierstate.cli.output.policies import show_live
from tierstate.cluster import advice, check, process
from tierstate.cluster.advice import advise, bytes_to_keep
from tierstate.cluster.check import THROUGHPUT_CHECK, TierFinding, check_tier
from tierstate.engine.progress import status_line
from tierstate.manifest.errors import AccessDenied, TierFull
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.memory.limits import MemoryLimits
from tierstate.tiers.object.s3.bucket import S3Bucket
from tierstate.tiers.registry import _registered
from tierstate.tiers.testing import PROMISES, Fault, Faulty

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstate.tiers.registry._registered", dict(_registered))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials with little data, for what is looked at in this process."""
    monkeypatch.setattr(check, "FIRST", 1 << 16)
    monkeypatch.setattr("tierstate.cluster.check.MOST", 1 << 18)


def parse(tiers: dict[str, Any], **keys: Any) -> ts.Policy:
    return ts.Policy.parse(yaml.safe_dump({**keys, "tiers": tiers}, sort_keys=False))


def live(call: Call, place: Path, tiers: dict[str, Any], *options: str) -> Answer:
    path = place / "live.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "tiers": tiers}, sort_keys=False))
    return call("policy", "check", path, "--live", *options)


# The whole way, through a process of its own


def test_every_tier_is_tried_and_nothing_is_left(call: Call, place: Path) -> None:
    small = {"capacity": "40MiB"}  # of which a quarter at most is used for the trial
    tiers = {
        "memory": {"type": "memory", **small},
        "nvme": {"type": "nvme", "path": str(place / "nvme"), "keep": {"last": 2}, "bandwidth": "64MiB/s", **small},
        "lustre": {"type": "lustre", "path": str(place / "lustre"), "stripe_count": 2, **small},
        "store": {"type": "object", "url": f"file://{place}/object", **small},
        "bucket": {"type": "object", "url": f"memory://{place.name}", **small},
        "file": {"type": "nvme", "path": str(place / "live.yaml")},
        "odd": {"type": "lustre", "path": str(place / "odd"), "stripe_size": "1KiB"},
    }
    answer = live(call, place, tiers, "--json", "--state", "1KiB")
    assert answer.status == 1, answer
    found = {f["name"]: f for f in answer.json}
    assert list(found) == list(tiers)
    good = [name for name, f in found.items() if f["ok"]]
    assert good == ["memory", "nvme", "lustre", "store", "bucket"]
    for name in good:
        one = found[name]
        assert (one["reached"], one["broken"], one["error"], one["problems"]) == (True, {}, "", [])
        assert len(one["kept"]) == len(PROMISES)
        assert min(one[key] for key in ("write", "read", "put_seconds", "list_seconds", "moved")) > 0
        assert one["moved"] <= 10 << 20
    assert found["nvme"]["limits"] == {"bandwidth": 64 << 20}
    assert found["nvme"]["room"] > 0
    assert any("not on a Lustre file system" in note for note in found["lustre"]["notes"])
    assert any("grows" in note for note in found["lustre"]["notes"])
    assert "not a folder" in found["file"]["error"]
    assert "is not a multiple of 64KiB" in found["odd"]["error"]
    left = {place / "live.yaml", *(place / name for name in ("nvme", "lustre", "object"))}
    assert set(place.rglob("*")) == left, "nor empty folders"
    assert names(opened(ts.Policy.load(place / "live.yaml"), "bucket")) == []


ODD = """
import os, time
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.memory.limits import MemoryLimits
from tierstate.tiers.registry import register_tier

class Hangs(Memory):
    def size(self, key):
        time.sleep(3600)

class Dies(Memory):
    def size(self, key):
        print("this is no answer", flush=True)
        os._exit(7)

register_tier("hangs", Hangs)
register_tier("dies", Dies)
"""


@pytest.fixture
def odd(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types of tiers that are known here and to the other process, as those of an installed package would be."""
    (place / "odd.py").write_text(ODD)
    exec(ODD, {})
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(process, "_CODE", f"import odd; {process._CODE}")


def test_an_arena_beyond_the_limits_of_this_machine_is_a_warning(
    call: Call, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = {"nvme": {"type": "nvme", "path": str(place / "nvme"), "capacity": "8MiB"}}
    monkeypatch.setattr(process, "check_tiers", lambda policy, seconds, told: [finding("nvme")])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(MemoryLimits, "of_process", lambda: MemoryLimits(8 << 20, 1 << 30, None, None))
    answer = live(call, place, tiers)
    assert answer.status == 0
    assert "arena: size is 2 GiB, but the limit of locked memory (RLIMIT_MEMLOCK) is 8 MiB and the " in answer.err
    assert "ulimit -l unlimited" in answer.err
    told = json.loads(live(call, place, tiers, "--json").err)["warning"]
    assert "the memory limit of the container (cgroup) is 1 GiB" in told
    monkeypatch.setattr(MemoryLimits, "of_process", lambda: MemoryLimits(None, 4 << 30, None, None))
    assert live(call, place, tiers).err == ""


@pytest.mark.usefixtures("odd")
def test_a_tier_that_hangs_is_given_up() -> None:
    steps: list[str] = []
    policy = parse({"stuck": {"type": "hangs"}, "n": {"type": "nvme", "path": "x"}})
    policy = policy.model_copy(update={"tiers": policy.tiers[:1]})
    (found,) = process.check_tiers(policy, 1.0, steps.append)
    assert (found.hung, found.reached, found.ok) == (True, False, False)
    assert found.error.startswith("stuck: did not come to an end within 1 s, at '")
    assert found.error.endswith("; what it wrote may be left behind")
    assert steps[0] == "stuck: open"


@pytest.mark.usefixtures("odd")
def test_a_tier_that_ends_the_process_does_not_end_the_check(capfd: pytest.CaptureFixture[str]) -> None:
    policy = parse({"dies": {"type": "dies"}, "last": {"type": "memory", "capacity": "40MiB"}, **TWO})
    policy = policy.model_copy(update={"tiers": policy.tiers[:2]})
    dead, last = process.check_tiers(policy, 300)
    assert "dies: took the process with it that looked at it, at 'reach'" in dead.error
    assert not dead.hung
    assert last.ok
    assert "this is no answer" in capfd.readouterr().err


ASKED = """
import sys, tierstate as ts
from tierstate.cluster.process import check_tiers
check_tiers(ts.Policy.load(sys.argv[1]), 300, lambda doing: print(doing, flush=True))
"""


def test_what_was_written_goes_when_whoever_asked_is_gone(place: Path) -> None:
    path = place / "live.yaml"
    path.write_text(yaml.safe_dump({"tiers": {"n": {"type": "nvme", "path": str(place / "nvme")}}}))
    command = [sys.executable, "-c", ASKED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        assert asking.stderr is not None
        next(line for line in asking.stdout if "winner" in line)
        asking.terminate()
        asking.stdout.close()
        # The other process has this one's standard error as its own: it has ended when that does.
        assert asking.stderr.read() == ""
    assert not [p for p in (place / "nvme").rglob("*") if p.is_file()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--live", "--limit", "soon"], "'soon' is not a duration"),
        (["--live", "--state", "big"], "'big' is not a size"),
        (["--state", "1GiB"], "say --live too"),
    ],
)
def test_options_that_say_nothing_are_refused(call: Call, policy: Path, options: list[str], said: str) -> None:
    answer = call("policy", "check", policy, *options)
    assert answer.status == 2
    assert said in answer.err


def test_what_is_being_done_shows_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with status_line() as told:
        told("nvme: deletes")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with status_line() as told:
        told("nvme: deletes")
    out, err = capsys.readouterr()
    assert out == ""
    assert "nvme: deletes" in err


# What is found


def looked(inner: Tier, *faults: Fault) -> TierFinding:
    with wrapped(Faulty(inner, *faults)) as keys:
        return check_tier(parse({"a": keys}).tier("a"))


@pytest.mark.usefixtures("quick")
def test_a_broken_promise_is_found_and_what_was_written_is_removed() -> None:
    inner = Memory()
    found = looked(inner, Fault("append", 200, damage="drop"))
    assert list(found.broken) == ["many pieces, and parts of longer buffers"]
    assert "size is" in found.broken["many pieces, and parts of longer buffers"]
    assert len(found.kept) == len(PROMISES) - 1
    assert not found.ok
    assert names(inner) == []


@pytest.mark.usefixtures("quick")
def test_errors_of_a_stranger_are_findings() -> None:
    found = looked(Memory(), Fault("delete", 2, KeyError("odd")))
    assert list(found.broken.values()) == ["KeyError: 'odd'"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("call", ["put", "list", "read", "delete", "room", "close"])
def test_errors_of_a_stranger_do_not_end_the_check(call: str) -> None:
    """At the first use, and by what comes before and after the promises are tried."""

    def raises(*args: Any, **kwargs: Any) -> None:
        raise KeyError("odd")

    ts.register_tier("odd", type("Odd", (Memory,), {call: raises}))
    found = check_tier(parse({"odd": {"type": "odd"}, "nvme": {"type": "nvme", "path": "x"}}).tiers[0])
    assert found.error == "KeyError: 'odd'"
    assert not found.ok
    assert found.traits["failure_domain"]


class Choosy(Memory):
    """Takes what it does not like for a fault of its caller."""

    def __init__(self, **given: Any) -> None:
        raise KeyError(f"who are {given}?")


def test_whatever_a_constructor_raises_is_told_without_secrets() -> None:
    ts.register_tier("choosy", Choosy)
    given = {"url": "x://me:pa/ss#wo?rd@h/b", "password": "hunter2", "options": {"keys": ["topsecret"], "n": 1}}
    spec = parse({"n": {"type": "memory"}, "nvme": {"type": "nvme", "path": "x"}}).tier("n")
    found = check_tier(spec.model_copy(update={"type": "choosy", "options": given}))
    assert not found.reached
    assert found.error.startswith("KeyError: ")
    assert "who are" in found.error
    assert not [part for part in ("pa/ss", "wo?rd", "hunter2", "topsecret") if part in found.error]


def test_what_could_not_be_tried_is_no_loss() -> None:
    class Small(Memory):
        def put(self, key: str, data: Any) -> None:
            if data.numel() > 100_000:
                raise TierFull("quota")
            super().put(key, data)

    found = looked(Small())
    full = {name: what for name, what in found.broken.items() if "quota" in what}
    assert full
    assert set(full.values()) == {"TierFull: quota"}
    (a, _) = advised(parse(TWO), replace(found, name="a"), finding("b"))
    said = [problem for problem in a.problems if problem.split(":")[0] in full]
    assert len(said) == len(full)
    assert all("for want of room" in problem for problem in said)
    (a, _) = advised(parse(TWO), finding("a", broken={"x": "TierUnavailable: away"}), finding("b"))
    assert a.problems == ["x: it could not be tried: see what it says"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("operation", ["put", "list", "size", "read"])
def test_a_place_that_cannot_be_used_is_told_once(operation: Any) -> None:
    found = looked(Memory(), Fault(operation, 1, AccessDenied("not for you")))
    assert (found.reached, found.error, found.kept, found.broken) == (False, "not for you", [], {})


@pytest.mark.parametrize(("given", "waited"), [({}, 0.5), ({"deadline": "5min"}, 0.5), ({"deadline": "0.2s"}, 0.2)])
def test_a_store_that_does_not_answer_is_told_soon(
    given: dict[str, str], waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves have the tier's deadline, a minute if none is given, which is long for somebody who waits for a check."""
    monkeypatch.setattr(check, "FIRST_ANSWER", 0.5)
    options = {"key": "a", "secret": "b", "endpoint_url": "http://127.0.0.1:9"}
    policy = parse({"s3": {"type": "object", "url": "s3://bucket/ckpt", "options": options, **given}})
    used, asked = {}, S3Bucket.list

    def listed(bucket: S3Bucket, prefix: str) -> Iterator[str]:
        used["deadline"] = bucket._s3._deadline
        return asked(bucket, prefix)

    monkeypatch.setattr(S3Bucket, "list", listed)
    steps: list[str] = []
    found = check_tier(policy.tiers[0], steps.append)
    assert (found.reached, found.kept, found.ok) == (False, [], False)
    assert used == {"deadline": waited}
    assert "see whether the store can be reached from this host" in found.error
    assert ("(this check waits 0.5 s at most, saves " in found.error) == (waited == 0.5)
    assert found.traits["failure_domain"] == "s3:127.0.0.1:9:bucket"
    assert steps == ["open", "reach"]


@pytest.mark.usefixtures("quick")
def test_a_trial_that_fails_is_broken() -> None:
    inner = Memory(capacity=36 << 20)
    found = looked(inner, Fault("writer", 0, None))
    assert found.ok
    assert found.room == 36 << 20

    class Shrunk(Memory):
        def room(self) -> int:
            return 1 << 40

        def writer(self, key: str, size_hint: int | None = None) -> Any:
            if "speed" in key:
                raise TierFull("quota")
            return super().writer(key, size_hint)

    found = looked(Shrunk())
    assert found.broken == {THROUGHPUT_CHECK: "quota"}
    assert (found.write, found.read) == (None, None)
    assert found.put_seconds


@pytest.mark.usefixtures("quick")
def test_a_tier_in_use_stays_as_it_is(policy: Path) -> None:
    spec = ts.Policy.load(policy)
    before = names(opened(spec, "nvme"))
    found = check_tier(spec.tier("nvme"))
    assert found.ok
    assert found.occupied
    assert names(opened(spec, "nvme")) == before


# What should be done


def finding(name: str, **more: Any) -> TierFinding:
    traits = {"persistent": True, "shared": "host", "failure_domain": f"host:{name}", "conditional_create": True}
    made = TierFinding(
        name, "nvme", reached=True, traits={**traits, **more.pop("traits", {})}, kept=["x"] * len(PROMISES)
    )
    return replace(made, **more)


def advised(policy: ts.Policy, *findings: TierFinding, state: int | None = None) -> Sequence[TierFinding]:
    advise(policy, findings, state)
    return findings


TWO = {"a": {"type": "nvme", "path": "a", "keep": {"last": 3}}, "b": {"type": "nvme", "path": "b"}}


def test_what_is_well_needs_no_advice() -> None:
    a, b = advised(parse(TWO), finding("a"), finding("b"))
    assert a.ok
    assert b.ok
    assert a.notes == b.notes == []


def test_every_promise_has_a_remedy_that_fits() -> None:
    for name, _ in PROMISES:
        a, _ = advised(parse(TWO), finding("a", broken={name: "no"}), finding("b"))
        assert len(a.problems) == 1
        assert a.problems[0].startswith(f"{name}: ")
        assert not a.ok
    assert set(advice.REMEDIES) <= {THROUGHPUT_CHECK, *(name for name, _ in PROMISES)}


@pytest.mark.parametrize(
    ("keep", "need"),
    [
        ({"last": 2, "best": {"metric": "loss", "mode": "min", "count": 3}}, 600),
        ({"best": {"metric": "loss", "mode": "max"}}, 300),
        ({"last": 2, "tags": True}, 300),
        ({"last": 2, "within": "2d"}, None),
    ],
)
def test_what_keep_needs_where_it_can_be_told(keep: dict[str, Any], need: int | None) -> None:
    policy = parse({"a": {"type": "nvme", "path": "a", "keep": keep}})
    assert bytes_to_keep(policy.tier("a"), 100) == need
    (found,) = advised(policy, finding("a", room=1000), state=100)
    assert not any("grows" in note for note in found.notes)


def test_room_is_compared_with_what_keep_needs() -> None:
    policy = parse({**TWO, "ram": {"type": "host", "keep": {"last": 1}}})
    a, b, ram = (policy.tier(name) for name in ("a", "b", "ram"))
    assert (bytes_to_keep(a, 100), bytes_to_keep(b, 100), bytes_to_keep(ram, 100)) == (400, None, 200)
    full, grows, _ = advised(policy, finding("a", room=399), finding("b", room=1), finding("ram"), state=100)
    assert full.problems == [
        "keep: needs about 400 B, there is room for 399 B: keep fewer versions, or make room",
    ]
    assert not full.ok
    assert grows.ok
    assert any("grows" in note for note in grows.notes)
    assert advised(policy, finding("a", room=400), finding("b"), finding("ram"), state=100)[0].ok
    # What is there already may be the very versions that are to be kept.
    used = finding("a", room=399, occupied=True)
    advise(policy, [used, finding("b"), finding("ram")], 100)
    assert used.ok
    assert any(note.startswith("keep: needs about 400 B") for note in used.notes)


def test_two_tiers_with_one_marker_are_a_problem(call: Call, policy: Path) -> None:
    """A copy of a disk, or one place that has two names: saves to both are refused."""
    assert [found["marker"] != "" for found in call("policy", "check", policy, "--live", "--json").json] == [True, True]
    shutil.copy(policy.parent / "nvme/tier.json", policy.parent / "object/tier.json")
    nvme, store = call("policy", "check", policy, "--live", "--json").json
    assert (nvme["ok"], nvme["marker"]) == (True, store["marker"])
    assert [problem[:23] for problem in store["problems"]] == ["has the marker of nvme:"]
    (policy.parent / "object/tier.json").write_bytes(b"?")
    assert all(found["ok"] for found in call("policy", "check", policy, "--live", "--json").json)


def test_the_durable_tier_must_last() -> None:
    a, b = advised(parse(TWO), finding("a", traits={"persistent": False}), finding("b"))
    assert "`durable` names it" in a.problems[0]
    assert advised(parse(TWO, durable="b"), replace(a, problems=[]), b)[0].ok


def test_races_domains_order_and_limits_are_worth_knowing() -> None:
    policy = parse({**TWO, "b": {**TWO["b"], "bandwidth": "1GiB/s"}})
    same = {"failure_domain": "host:x"}
    a, b = advised(
        policy,
        finding("a", write=1e6, traits={**same, "conditional_create": False}),
        finding("b", write=4e6, traits=same, limits={"bandwidth": 1 << 30}),
    )
    assert a.ok
    assert b.ok
    assert a.notes == ["several racing writers of one key may succeed: let one process at a time write a run here"]
    assert b.notes == [
        "limits: bandwidth 1 GiB/s",
        "the limit of its bandwidth is above what was reached, and changes nothing",
        "no tier is in another failure domain: if this one is lost, all that was saved is",
        "is much faster than a, which stands above it: put the fastest first",
    ]


def test_the_table_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    away = TierFinding("c", "object", error="c: no answer")
    hung = TierFinding("d", "lustre", error="d: did not come to an end", hung=True)
    bad = finding("a", broken={"deletes": "left"}, problems=["deletes: allow it"], write=5e8, put_seconds=0.01)
    show_live([bad, finding("b", room=1 << 30, notes=["striping left alone"]), away, hung], as_json=False)
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()[1:5]]
    assert [row[:2] for row in rows] == [["a", "BROKEN"], ["b", "ok"], ["c", "AWAY"], ["d", "HUNG"]]
    assert "477 MiB" in out
    assert "a: FOUND deletes: left\na: TO DO deletes: allow it\n" in out
    assert "c: FOUND no answer\n" in out
    assert "b: striping left alone\n" in out


def test_traits_that_nobody_probed_are_shown_as_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    away = replace(finding("b", traits={"persistent": False}), reached=False, error="b: no answer")
    show_live([finding("a", traits={"conditional_create": None, "persistent": False}), away], as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    assert rows == [["a", "ok", "no", "-", "-", "-", "-", "-"], ["b", "AWAY", "no", "-", "-", "-", "-", "-"]]
