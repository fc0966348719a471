"""The proof as a machine: any history of a hierarchy of tiers, beside a model that knows what was saved and damaged."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import currently_in_test_context, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.checkpointer_worlds import scratch
from support.equality import difference
from support.leaks import idle, temporary
from support.scaled_thresholds import MOSTLY, Crossings, expected
from support.state_strategies import scrambled
from support.storage_sites import Power, sites, tried
from support.tier_claims import Claim, Look, Tops, claimed, globs, newest, number, unmended, whole
from support.tier_strategies import KINDS, MIXES, PLANS, Plan
from support.training_state import CHANGES, Change, Changes, Training

import tierstate as ts
from tierstate.engine.packs.keys import is_mend
from tierstate.engine.publish import backlog
from tierstate.manifest.history.log import Log
from tierstate.tiers.backoff import Backoff

pytestmark = pytest.mark.slow

TOPS = ("model", "optimizer", "leaves", "steps")
ONLY = [None, None, ("model",), ("optimizer", "steps"), ("leaves",)]
SECONDS = 60.0
"""After which a wait is taken for one that never ends."""


class Hit(NamedTuple):
    """Damage to an object: ``where`` is a share of its length, ``other`` what it is swapped with."""

    which: int
    how: str
    where: float
    other: int


HITS = st.lists(
    st.builds(
        Hit,
        st.integers(0, 30),
        st.sampled_from(["flip", "flip", "truncate", "delete", "swap"]),
        st.integers(0, 99).map(lambda percent: percent / 100),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=4,
)


class Hierarchy(RuleBasedStateMachine):
    """Saves, restores, losses and damage in any order.

    Attributes:
        truths: by number of the save, its step and what the state was.
        durable: by tier, what a save said to be durable there: number of the save, and of the version.
        tags: by name, what may have it; only one where nothing is amiss.
        forks: by run, what it began with.
        emptied: packs whose chunks a prune has put into another one: the next prune sweeps them.
        calm: nothing has been damaged, lost, away or killed so far, so that nothing may fail.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.place = self.stack.enter_context(scratch())
        self.training = Training()
        self.truths: dict[int, tuple[int, Any]] = {}
        self.durable: dict[str, dict[int, int]] = {}
        self.pending: list[tuple[int, ts.Save]] = []
        self.tags: dict[str, set[int]] = {}
        self.forks: dict[str, int] = {}
        self.calm, self.step = True, 0
        self.emptied: set[str] = set()
        self.in_parts = False  # whether some versions are, by the rules of this policy or an earlier one

    # Processes

    @initialize(mix=MIXES, plan=PLANS, saves=st.integers(1, 3))
    def begin(self, mix: list[str], plan: Plan, saves: int) -> None:
        self._begin(mix, plan, saves)

    def _begin(self, mix: list[str], plan: Plan, saves: int, **keys: Mapping[str, Any]) -> None:
        self.sites = self.stack.enter_context(sites(mix, self.place, **keys))
        self.durable = {name: {} for name in mix}
        self.keeps: dict[str, list[Any]] = {name: [] for name in mix}
        self._open(plan)
        for seed in range(saves):
            self.save(1, seed)

    def _open(self, plan: Plan) -> None:
        self.plan, self.power = plan, Power()
        self.in_parts = self.in_parts or bool(plan.thinned or plan.parted)
        for name, site in self.sites.items():
            site.power = self.power
            self.keeps[name].append(plan.tiers[name].get("keep"))
        self.ckpt = ts.Checkpointer(plan.policy(self.sites), "run")
        if plan.guarded:
            self.ckpt.guard(self.training.optimizer)

    def _close(self) -> None:
        self._wait(list(self.sites))
        _, error = tried(self.ckpt.close)
        self._expect(error)
        self.pending = []

    def _expect(self, error: ts.TierstateError | None) -> None:
        """A failure is right only where something is amiss."""
        assert error is None or not self.calm, error

    @rule(plan=PLANS)
    def reopen_with_another_policy(self, plan: Plan) -> None:
        self._close()
        self._open(plan)

    @rule(after=st.integers(0, 60), saves=st.integers(0, 2), plan=st.one_of(st.none(), PLANS))
    def crash(self, after: int, saves: int, plan: Plan | None) -> None:
        self.calm = False
        self.power.left = after
        for i in range(saves):
            self.save(1, i)
        if after % 2:
            self._wait(list(self.sites))
        self.power.left = 0
        self._close()
        self._open(plan or self.plan)

    # Saves

    @rule(ahead=st.integers(-1, 3), seed=st.integers(0, 99))
    def save(self, ahead: int, seed: int) -> None:
        self._save(ahead)
        self.training.train(seed)

    @rule(changes=CHANGES, ahead=st.integers(-1, 3), after=CHANGES, wait=st.booleans())
    def change_and_save_and_change(self, changes: Changes, ahead: int, after: Changes, wait: bool) -> None:
        self.training.change(changes)
        self._save(ahead)
        self.training.change(after)
        if wait:
            self._wait(list(self.sites))

    def _save(self, ahead: int) -> None:
        n = len(self.truths)
        self.step = max(0, self.step + ahead)
        self.truths[n] = self.step, self.training.truth()
        save, error = tried(lambda: self.ckpt.save(self.training.state, step=self.step, metadata={"n": n}))
        self._expect(error)
        if save is not None:
            self.pending.append((n, save))

    @rule(which=st.integers(0, 3))
    def wait(self, which: int) -> None:
        self._wait([list(self.sites)[which % len(self.sites)]])

    def _wait(self, names: Sequence[str]) -> None:
        for n, save in self.pending:
            for name in set(save.tiers) & set(names):
                start = time.monotonic()
                _, error = tried(lambda save=save, name=name: save.wait(name, SECONDS))  # type: ignore[misc]
                assert time.monotonic() - start < SECONDS, f"{save} never came to {name}"
                if error is None:
                    self.durable[name][n] = save.seq
                elif not isinstance(error, ts.NotFound):
                    self._expect(error)

    def _quiet(self) -> None:
        """Wait until nothing is under way."""
        for _, save in self.pending:
            tried(save.wait_captured)
        self._wait(list(self.sites))
        end = time.monotonic() + SECONDS
        while not all(map(idle, self.ckpt._pipeline.queues.values())):
            assert time.monotonic() < end, "it never gets quiet"
            time.sleep(0.0005)

    # What happens to tiers

    @rule(which=st.integers(0, 3), folders=st.booleans())
    def lose_a_tier(self, which: int, folders: bool) -> None:
        self._quiet()
        self.calm = False
        name = list(self.sites)[which % len(self.sites)]
        site = self.sites[name]
        # Without its marker a tier counts as not mounted (`test_identity_machine.py`).
        markers = [(key, site.raw.get(key)) for key in site.objects("tier.json")]
        site.lose(folders=folders)
        for key, data in markers:
            site.raw.put(key, data)
        self.durable[name] = {}

    @rule(which=st.integers(0, 3), away=st.booleans())
    def take_a_tier_away_or_bring_it_back(self, which: int, away: bool) -> None:
        site = self.sites[list(self.sites)[which % len(self.sites)]]
        site.away = away
        self.calm = self.calm and not away

    @rule(which=st.integers(0, 3), hits=HITS)
    def damage_packs(self, which: int, hits: list[Hit]) -> None:
        self._damage("packs/run/", which, hits)

    @rule(which=st.integers(0, 3), hits=HITS)
    def damage_records(self, which: int, hits: list[Hit]) -> None:
        self._damage("versions/run/", which, hits)

    def _damage(self, prefix: str, which: int, hits: list[Hit]) -> None:
        self._quiet()
        site = self.sites[list(self.sites)[which % len(self.sites)]]
        for hit in hits:
            if keys := site.objects(prefix):
                self.calm = False
                site.damage(keys[hit.which % len(keys)], hit.how, hit.where, keys[hit.other % len(keys)])

    # Names and forks

    @rule(name=st.sampled_from(["best", "x"]), which=st.integers(0, 30))
    def tag(self, name: str, which: int) -> None:
        self._quiet()
        if claim := self._pick(self._reached(), which):
            info, error = tried(lambda: self.ckpt.tag(name, version=claim.record.version.id))
            self._expect(error)
            # A tag that not every tier took may be known again, or not, later.
            self.tags.setdefault(name, set()).add(claim.n)
            if error is None and self.calm:
                assert name in info.tags
                self.tags[name] = {claim.n}

    @rule(name=st.sampled_from(["best", "x"]))
    def untag(self, name: str) -> None:
        _, error = tried(lambda: self.ckpt.untag(name))
        assert error is None or name not in self.tags or not self.calm
        if self.calm:
            self.tags.pop(name, None)

    @rule(name=st.sampled_from(["best", "x"]))
    def load_by_name(self, name: str) -> None:
        self._quiet()
        out, error = tried(lambda: self.ckpt.load(tag=name))
        if error is None:
            assert self._restored(self.ckpt) in self.tags[name]
            self._same(self._restored(self.ckpt), out, None)
        else:
            assert name not in self.tags or not self.calm or self.in_parts, error

    @rule(which=st.integers(0, 30))
    def fork(self, which: int) -> None:
        self._quiet()
        name = f"fork{len(self.forks)}"
        looks = [site.look() for site in self.sites.values() if not site.away]
        if claim := self._pick(looks, which):
            _, error = tried(lambda: self.ckpt.fork(name, version=claim.record.version.id))
            assert error is None or not self.calm or (isinstance(error, ts.NotFound) and self.in_parts), error
            if error is None:
                self.forks[name] = claim.n

    @rule()
    def prune(self) -> None:
        self._quiet()
        report, error = tried(lambda: self.ckpt.prune(grace=0))
        self._expect(error)
        if report is None:
            return
        for name, site in self.sites.items():
            look = site.look()
            told = next(one for one in report.tiers if one.tier == name)
            self.emptied |= set(told.repacked.packs)
            if not (site.away or look.unread or told.problems):
                left = {key for key in look.packs - look.named() if key.startswith("packs/run/") and not is_mend(key)}
                left -= set(told.repacked.packs)
                assert left == set(), f"{name}: {left} are named by no version, and were not swept: {told}"

    @rule(which=st.integers(0, 3), version=st.integers(0, 30))
    def copy(self, which: int, version: int) -> None:
        self._quiet()
        to = list(self.sites)[which % len(self.sites)]
        if claim := self._pick(self._reached(), version):
            _, error = tried(lambda: self.ckpt.copy(version=claim.record.version.id, to=to))
            # What rules part, or `keep` has dropped, may be whole in no tier that is reached.
            assert error is None or not self.calm or isinstance(error, ts.AlreadyExists) or self.in_parts, error

    @rule(which=st.integers(0, 3))
    def rebuild(self, which: int) -> None:
        self._quiet()
        _, error = tried(lambda: self.ckpt.rebuild(list(self.sites)[which % len(self.sites)]))
        self._expect(error)

    def _pick(self, looks: Iterable[Look], which: int) -> Claim | None:
        """One of what these tiers claim to have."""
        claims = [claim for look in looks for claim in claimed(look)]
        return claims[which % len(claims)] if claims else None

    def _load_forks(self) -> None:
        for name, n in self.forks.items():
            looks = [Look(site.raw, site.hits, name) for site in self.sites.values()]
            right = newest(looks, None, False)
            assert right in (None, n)
            with ts.Checkpointer(self.plan.policy(self.sites), name) as forked:
                out, error = tried(forked.load)
                if error is None:
                    assert self._restored(forked) == n
                    self._same(n, out, None)
                else:
                    assert right is None, error

    # Restores

    @rule(only=st.sampled_from(ONLY), older=st.booleans())
    def load_the_newest(self, only: Tops, older: bool) -> None:
        self._quiet()
        self._load_newest(self.ckpt, self._reached(), only, older)

    @rule(number=st.integers(0, 30), only=st.sampled_from(ONLY), fresh=st.booleans())
    def load_a_version(self, number: int, only: Tops, fresh: bool) -> None:
        self._quiet()
        claims = [claim for look in self._looks() for claim in claimed(look)]
        if claims:
            version = claims[number % len(claims)].record.version.id
            self._load(self.ckpt, self._reached(), version, only, fresh)

    @rule(number=st.integers(0, 30))
    def resume(self, number: int) -> None:
        """Into the state that is being trained, if it fits."""
        self._quiet()
        claims = [claim for look in self._looks() for claim in claimed(look)]
        if not claims:
            return
        before, version = self.training.truth(), claims[number % len(claims)].record.version
        _, error = tried(lambda: self.ckpt.restore(self.training.state, version=version.id))
        if isinstance(error, ts.StateMismatch):
            assert difference(before, self.training.truth()) == ""
        elif error is None:
            self._same(self._restored(self.ckpt), self.training.truth(), None)
        else:
            assert not whole(version, self._reached(), None), error

    @rule(mask=st.integers(1, 7), number=st.integers(0, 30), only=st.sampled_from(ONLY))
    def load_from_some_tiers_alone(self, mask: int, number: int, only: Tops) -> None:
        self._quiet()
        chosen = [name for i, name in enumerate(self.sites) if mask >> i & 1] or [*self.sites][:1]
        looks = [self.sites[name].look() for name in chosen if not self.sites[name].away]
        claims = [claim for look in looks for claim in claimed(look)]
        with self._reader(chosen) as reader:
            self._load_newest(reader, looks, only, False)
            if claims:
                self._load(reader, looks, claims[number % len(claims)].record.version.id, only, True)

    @rule()
    def verify(self) -> None:
        self._quiet()
        looks = {name: site.look() for name, site in self.sites.items() if not site.away}
        report = self.ckpt.verify(deep=True)
        assert set(report.unreachable) == {name for name, site in self.sites.items() if site.away}
        told = {problem.tier for problem in report.problems}
        for name, look in looks.items():
            hit = unmended(look)
            assert name in told or not hit, f"{hit} of {name} are damaged, and verify does not see it"
            assert name not in told or self.sites[name].hits, [p for p in report.problems if p.tier == name]

    @contextmanager
    def _reader(self, names: Sequence[str]) -> Iterator[ts.Checkpointer]:
        """Another process, whose policy has these tiers alone."""
        for name in names:
            self.sites[name].power = Power()
        with ts.Checkpointer(self.plan.policy(self.sites, names), "run") as reader:
            yield reader

    def _looks(self) -> list[Look]:
        """At every tier, also those that are away."""
        mine = [Look(tier_run.tier, {}) for tier_run in self.ckpt._tier_runs if tier_run.name == "mine"]
        return mine + [site.look() for site in self.sites.values()]

    def _reached(self) -> list[Look]:
        mine = [Look(tier_run.tier, {}) for tier_run in self.ckpt._tier_runs if tier_run.name == "mine"]
        return mine + [site.look() for site in self.sites.values() if not site.away]

    def _load_newest(self, ckpt: ts.Checkpointer, looks: list[Look], only: Tops, older: bool) -> None:
        right = newest(looks, only, older)
        out, error = tried(lambda: ckpt.load(only=globs(only), on_damage="older" if older else "raise"))
        if error is None:
            n = self._restored(ckpt)
            assert right in (None, n)
            self._same(n, out, only)
        else:
            assert right is None, f"save {right} is whole, and was not restored: {error}"
            told(f"newest: {type(error).__name__}")

    def _load(self, ckpt: ts.Checkpointer, looks: list[Look], version: str, only: Tops, fresh: bool) -> None:
        claims = [c for look in looks for c in claimed(look) if c.record.version.id == version]
        right = claims[0].n if claims and whole(claims[0].record.version, looks, only) else None
        if fresh or only or right is None:
            out, error = tried(lambda: ckpt.load(version=version, only=globs(only)))
        else:
            into = scrambled(self.truths[right][1])
            out, error = tried(lambda: ckpt.restore(into, version=version))
        if error is None:
            n = self._restored(ckpt)
            assert right in (None, n)
            self._same(n, out, only)
        else:
            assert right is None, f"save {right} is whole, and was not restored: {error}"
            told(f"version: {type(error).__name__}")

    def _restored(self, ckpt: ts.Checkpointer) -> int:
        assert ckpt.restored is not None
        n = int(ckpt.restored.metadata["n"])
        assert ckpt.restored.step == self.truths[n][0]
        return n

    def _same(self, n: int, out: Any, only: Tops) -> None:
        was = self.truths[n][1]
        assert difference(was if only is None else {top: was[top] for top in was if top in only}, out) == ""

    # What always holds

    @invariant()
    def what_was_durable_is_there(self) -> None:
        for name, site in self.sites.items():
            log = Log(site.raw, "run")
            there = set(log.seqs())
            hit = {number(key) for key in site.hits if key.startswith("versions/")}
            for n, seq in self.durable[name].items():
                newer = sum(other > seq for other in there | hit)
                dropped = any(keep is not None and newer >= keep["last"] for keep in self.keeps[name])
                assert seq in there | hit or dropped, f"save {n} was durable on {name}, and is gone"

    def teardown(self) -> None:
        with self.stack:
            if hasattr(self, "ckpt"):
                self._end()

    def _end(self) -> None:
        for site in self.sites.values():
            site.away = False
        self._close()
        self._open(self.plan)
        self.verify()
        if self.calm:
            for look in map(Look, (site.raw for site in self.sites.values()), ({} for _ in self.sites)):
                assert look.packs - self.emptied == look.named()
        for names in [*([name] for name in self.sites), list(self.sites)]:
            with self._reader(names) as reader:
                looks = [self.sites[name].look() for name in names]
                for version in {c.record.version.id for look in looks for c in claimed(look)}:
                    self._load(reader, looks, version, None, True)
        self._load_forks()
        self._close()
        assert temporary(self.place) == []


class Long(Hierarchy):
    """The same where what is short counts as long, and with the engines of direct I/O.

    Every history has what crosses most thresholds: a disk that takes bytes raw, and a save of what has hardly changed.
    """

    @initialize(
        mix=MIXES,
        plan=PLANS,
        engines=st.sampled_from([("auto", "threads"), ("threads", "buffered"), ("auto", "auto")]),
        changes=CHANGES,
    )
    def begin_with_a_disk(self, mix: list[str], plan: Plan, engines: tuple[str, str], changes: Changes) -> None:
        mix = ["nvme", *(kind for kind in mix if kind != "nvme")]
        nvme, lustre = ({"io": io} for io in engines)
        self._begin(mix, raw(plan), 1, nvme=nvme, lustre=lustre)
        for what in ([], changes):
            self._quiet()
            self.change_and_save_and_change(what, 1, [], True)
        self.load_from_some_tiers_alone(1, 0, None)

    begin = None  # type: ignore[assignment]


def raw(plan: Plan, **keys: Any) -> Plan:
    """The plan with a disk that gets everything as it is, in long chunks, and more keys of it."""
    tiers = {**plan.tiers, "nvme": {"codec": "raw", **keys}}
    return replace(plan, tiers=tiers, whole={**plan.whole, "chunk": 8192, "arena": {"size": 8 * 8192}}, parted=None)


def told(what: str) -> None:
    """Count it in the statistics of the test, if hypothesis runs it."""
    if currently_in_test_context():
        event(what)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is down is not tried again by itself, so that time decides nothing."""
    monkeypatch.setattr(backlog, "TIER_BACKOFF", Backoff(600.0, 600.0, 0.5))


PLAIN = Plan({kind: {} for kind in KINDS}, None, {"chunk": 8192, "arena": {"size": 8 * 8192}}, None, None, False)


def over_all_thresholds(machine: Long) -> None:
    """A history that crosses each of them, whatever hypothesis finds."""
    gpu = {"type": "gpu", "device": "cpu", "keep": {"last": 2}}
    files = {**PLAIN.tiers, "lustre": {"format": "safetensors"}, "file": {"codec": "auto", "keep": {"last": 1}}}
    plan = raw(replace(PLAIN, tiers=files), keep={"last": 2})
    machine._begin([*KINDS], plan, 1, nvme={"io": "auto"}, lustre={"io": "threads"})
    machine.training.change([Change(name, "tensor", 9000, torch.float32, i) for i, name in enumerate("cde")])
    for some in ("", "", "a", "acde", "b"):
        machine._quiet()
        machine.training.train(1) if len(some) > 1 else None
        changes = [Change(name, "one" if some == "a" else "add", 0, torch.uint8, 5) for name in some]
        machine.change_and_save_and_change(changes, 1, [], True)
        machine.load_the_newest(None, False)
    # Of the first pack only ``b`` is still wanted, and not by the newest version.
    machine.prune()
    for n in range(5):
        machine.load_a_version(n, None, True)
        machine.load_from_some_tiers_alone(15, n, None)
    # Longer chunks than a slab of the next process, which also keeps versions in the memory of a device.
    short = {"chunk": 4096, "arena": {"size": 8 * 4096}}
    machine.reopen_with_another_policy(replace(PLAIN, volatile=gpu, whole=short))
    machine.save(1, 1)
    machine.load_from_some_tiers_alone(2, 0, None)
    # All that the disk has: it is read in place, and healed from the other tiers; then damage everywhere.
    machine.damage_packs(0, [Hit(i, "flip", part / 16, 0) for i in range(12) for part in range(16)])
    for n in range(3):
        machine.load_from_some_tiers_alone(15, n, None)
    for which in range(1, len(machine.sites)):
        machine.damage_packs(which, [Hit(i, "flip", i / 9, 0) for i in range(9)])
    machine.load_the_newest(None, True)
    machine.verify()
    machine.what_was_durable_is_there()


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> Crossings:
    """Thresholds are scaled down."""
    return Crossings(monkeypatch)


def run(examples: int, steps: int, machine: type[Hierarchy] = Hierarchy) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=steps))


@pytest.mark.usefixtures("patient")
def test_any_history_of_a_hierarchy() -> None:
    run(max(10, settings().max_examples // 3), 15)


@pytest.mark.usefixtures("patient")
def test_a_history_that_crosses_every_threshold(crossings: Crossings, place: Path) -> None:
    machine = Long()
    with machine.stack:
        over_all_thresholds(machine)
        machine._close()
    assert expected(place) - set(+crossings.counts) == set(), crossings.counts


@pytest.mark.usefixtures("patient")
def test_any_history_where_the_short_counts_as_long(crossings: Crossings, place: Path) -> None:
    run(max(6, settings().max_examples // 8), 8, Long)
    assert (MOSTLY & expected(place)) - set(+crossings.counts) == set(), crossings.counts


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("patient")
def test_long_histories_of_a_hierarchy() -> None:
    run(max(500, settings().max_examples), 30)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("patient")
def test_long_histories_where_the_short_counts_as_long(crossings: Crossings, place: Path) -> None:
    run(max(500, settings().max_examples), 30, Long)
    assert expected(place) - set(+crossings.counts) == set(), crossings.counts
