"""Long lives of runs: policies that change, forks, tags, going back, retention, damage; and a doctor now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from support.checkpointer_worlds import alike, policy, scratch, tensors
from support.damaged_runs import Blow, State, World, blows, damage

import tierstate as ts
from tierstate.engine.repair.health import DoctorReport

pytestmark = pytest.mark.slow

T = TypeVar("T")

KEEPS = st.sampled_from([None, None, {"last": 1}, {"last": 2}, {"last": 1, "every": 3}, {"last": 1, "tags": False}])
TIER = st.fixed_dictionaries(
    {"keep": KEEPS, "codec": st.sampled_from(["raw", "fast", "delta"]), "every": st.integers(1, 2)}
)
RULES = st.sampled_from([None, None, {"match": "b", "keep": {"last": 1}}, {"match": "b", "keep": {"last": 3}}])
PLANS = st.tuples(st.permutations(["one", "two"]), TIER, TIER, RULES)
Plan = tuple[list[str], dict[str, Any], dict[str, Any], dict[str, Any] | None]


class LongLife(RuleBasedStateMachine):
    """Two tiers of files that are never lost as a whole.

    Attributes:
        truth: what each save saved, by its number, which is in the version's metadata.
        steps: by run, the step of the last save.
        calm: nothing has been damaged so far, so that nothing may fail or be called lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scratch = scratch()
        self.place = self.scratch.__enter__()
        self.truth: list[State] = []
        self.steps = {"run": 0}
        self.calm = True
        self.state = tensors(9000, 20_000, 4000, 100)

    def teardown(self) -> None:
        try:
            if hasattr(self, "spec"):
                self.doctor()
        finally:
            self.scratch.__exit__(None, None, None)

    @initialize(plan=PLANS)
    def begin(self, plan: Plan) -> None:
        self.another_policy(plan)
        self.save(0, [(15, 1), (3, 1), (13, 1)])

    @rule(plan=PLANS)
    def another_policy(self, plan: Plan) -> None:
        """Wider, narrower, in another order; each save goes to the first tier at least."""
        (first, second), one, two, drops = plan
        keys = {first: {**one, "every": 1}, second: two}
        tiers = {name: {"type": "nvme", "path": str(self.place / name)} | _said(keys[name]) for name in (first, second)}
        self.spec = policy(tiers, rules=[drops] if drops else [])

    @contextmanager
    def open(self, which: int) -> Iterator[ts.Checkpointer]:
        with ts.Checkpointer(self.spec, list(self.steps)[which % len(self.steps)]) as ckpt:
            yield ckpt

    def tried(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except ts.TierstateError:
            assert not self.calm
            return None

    @rule(which=st.integers(0, 3), saves=st.lists(st.tuples(st.integers(1, 15), st.integers(0, 2)), max_size=4))
    def save(self, which: int, saves: list[tuple[int, int]]) -> None:
        with self.open(which) as ckpt:
            for changes, ahead in saves:
                self.state = {name: t + (changes >> i & 1) for i, (name, t) in enumerate(self.state.items())}
                self.steps[ckpt.run] += ahead
                save = ckpt.save(self.state, step=self.steps[ckpt.run], metadata={"n": len(self.truth)})
                self.truth.append(self.state)
                for name in save.tiers:
                    self.tried(lambda name=name, save=save: save.wait(name))  # type: ignore[misc]

    def pick(self, ckpt: ts.Checkpointer, number: int) -> ts.VersionInfo | None:
        found = [version for version in ckpt.versions() if not version.unreadable]
        return found[number % len(found)] if found else None

    def load(self, ckpt: ts.Checkpointer, version: ts.VersionInfo) -> State | None:
        """The state of a version, bit for bit what was saved; None if it is an error."""
        try:
            found = ckpt.load(version=version.id)
        except ts.TierstateError:
            assert not self.calm or version.partial
            return None
        assert alike(found, self.truth[version.metadata["n"]])
        return dict(found)

    @rule(which=st.integers(0, 3), number=st.integers(0, 9))
    def go_back(self, which: int, number: int) -> None:
        with self.open(which) as ckpt:
            if (version := self.pick(ckpt, number)) is not None and (state := self.load(ckpt, version)) is not None:
                self.state, self.steps[ckpt.run] = state, version.step

    @rule(which=st.integers(0, 3), number=st.integers(0, 9), name=st.sampled_from(["best", "x"]))
    def tag(self, which: int, number: int, name: str) -> None:
        with self.open(which) as ckpt:
            if (version := self.pick(ckpt, number)) is not None:
                self.tried(lambda: ckpt.tag(name, version=version.id))

    @rule(which=st.integers(0, 3), number=st.integers(0, 9))
    def fork(self, which: int, number: int) -> None:
        name = f"fork{len(self.steps)}"
        with self.open(which) as ckpt:
            version = self.pick(ckpt, number) if len(self.steps) < 3 else None
            if version is not None and not version.partial and self.tried(lambda: ckpt.fork(name, version=version.id)):
                self.steps[name] = version.step

    @rule(which=st.integers(0, 3))
    def prune(self, which: int) -> None:
        with self.open(which) as ckpt:
            report = self.tried(lambda: ckpt.prune(grace=0))
            assert report is None or report.ok or not self.calm, report

    @rule(struck=blows)
    def strike(self, struck: list[Blow]) -> None:
        self.calm = False
        for blow in struck:
            damage(World(self.place, self.spec), blow)

    @rule()
    def doctor(self) -> None:
        for which in range(len(self.steps)):
            self.doctor_of(which)

    def doctor_of(self, which: int) -> None:
        with self.open(which) as ckpt:
            had = {v.id for v in ckpt.versions() if not v.unreadable and self.load(ckpt, v) is not None}
        with self.open(which) as ckpt:
            said = ckpt.doctor()
            listed = {version.id for version in ckpt.versions() if not version.unreadable}
            self.is_right(said, had, listed)
            done = ckpt.doctor(apply=True)
            assert [repair for repair in done.repairs if not repair.done] == []
            assert ckpt.doctor().repairs == []
        with self.open(which) as ckpt:
            now = {v.id for v in ckpt.versions() if not v.unreadable and self.load(ckpt, v) is not None}
        assert now >= had | {v.id for v in said.versions if v.state in ("whole", "damaged") and not v.left_out}

    def is_right(self, said: DoctorReport, had: set[str], listed: set[str]) -> None:
        states = {version.id: version.state for version in said.versions}
        assert set(states) >= listed
        assert {id for id, state in states.items() if state == "whole"} <= had <= set(states)
        if self.calm:
            assert (said.notes, said.unreachable) == ([], {})
            assert set(states.values()) <= {"whole", "part", "damaged"}, said
            # What `keep` had dropped, and would keep by now, is made again.
            assert {r.kind for r in said.repairs if r.what != "record lost"} <= {"copy", "tag"}, said.repairs


def _said(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}


def test_a_long_life() -> None:
    run_state_machine_as_test(LongLife, settings=settings(max_examples=8, stateful_step_count=10))
