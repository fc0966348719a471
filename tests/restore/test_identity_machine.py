"""Tiers that are mounted, unmounted, copied, replaced and adopted in any order: no fresh start, and nothing lost."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.checkpointer_worlds import policy, scratch, tensors
from support.equality import difference

import tierstate as ts
from tierstate.engine.maintain.adopt import adopt_tier, init_tiers
from tierstate.engine.store.identity import read_marker
from tierstate.manifest.format.marker import named_tiers
from tierstate.manifest.history.log import Log
from tierstate.tiers.posix.directory import Nvme

SITES = ("near", "far")
RUNS = ("one", "two")


class Mounts(RuleBasedStateMachine):
    """Hosts with a disk each, and two file systems of the site that come and go.

    A disk is a folder under ``disks``; it is mounted by a rename to its mount point, and unmounted by one back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = ExitStack()
        self.place: Path = self.held.enter_context(scratch())
        (self.place / "disks").mkdir()
        self.mounted: dict[str, str | None] = dict.fromkeys((*SITES, "local"))
        self.adopted: dict[str, set[str]] = {}
        """Ids that a tier is used in place of."""
        self.promised: dict[str, dict[str, set[int]]] = {}
        """Of each disk: the steps of each run that were said to be durable there."""
        self.disks = self.step = 0

    def teardown(self) -> None:
        self.held.close()

    @initialize(required=st.booleans())
    def start(self, required: bool) -> None:
        tiers = {name: {"type": "lustre", "path": str(self.place / name)} for name in SITES}
        tiers["far"] |= {"every": 2, "initialized": required}
        self.policy = policy({"local": {"type": "nvme", "path": str(self.place / "local")}, **tiers}, durable="near")
        self.required = required
        for name in self.mounted:
            self.mount(name, self.new_disk())

    def new_disk(self) -> str:
        self.disks += 1
        disk = f"disk-{self.disks}"
        (self.place / "disks" / disk).mkdir()
        self.promised[disk] = {}
        return disk

    def path(self, disk: str) -> Path:
        """Where a disk lies now."""
        where = next((name for name, there in self.mounted.items() if there == disk), None)
        return self.place / where if where else self.place / "disks" / disk

    def mount(self, name: str, disk: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self.place / name)  # the mount point
        (self.place / "disks" / disk).rename(self.place / name)
        self.mounted[name] = disk

    def unmount(self, name: str, *, leave: bool = True) -> None:
        disk = self.mounted[name]
        assert disk is not None
        (self.place / name).rename(self.place / "disks" / disk)
        self.mounted[name] = None
        if leave:
            (self.place / name).mkdir()

    def ids(self) -> set[str]:
        """All ids that the tiers in sight have or stand for."""
        found: set[str] = set()
        for name, disk in self.mounted.items():
            marker = read_marker(Nvme(path=self.place / name)) if disk else None
            found |= {marker.id, *marker.replaces} if marker else set()
        return found

    def seen(self, run: str) -> dict[int, dict[str, str]]:
        """The versions of a run that can be seen, by step, and the ids of the site's tiers that they name."""
        found: dict[int, dict[str, str]] = {}
        for name, disk in self.mounted.items():
            if disk:
                for entry in Log(Nvme(path=self.place / name), run).newest_first():
                    assert entry.record is not None
                    named = {n: t.id for n, t in named_tiers(entry.record.commit).items() if n in SITES}
                    found.setdefault(entry.record.version.head.step, {}).update(named)
        return found

    # What happens to file systems

    @rule(name=st.sampled_from(SITES), leave=st.booleans())
    def lose(self, name: str, leave: bool) -> None:
        if self.mounted[name]:
            self.unmount(name, leave=leave)

    @rule(data=st.data())
    def bring_back(self, data: st.DataObject) -> None:
        """The disk that was there, or any other one that was used for this tier or not."""
        name = data.draw(st.sampled_from(SITES))
        free = sorted(set(self.promised) - set(self.mounted.values()))
        if not self.mounted[name] and free:
            self.mount(name, data.draw(st.sampled_from(free)))

    @rule()
    def go_on_on_another_host(self) -> None:
        """With a local disk of its own, which is empty, or with none: its folder is made by the first save."""
        self.unmount("local", leave=False)
        self.mount("local", self.new_disk())

    @rule(name=st.sampled_from(SITES))
    def move_to_a_copy(self, name: str) -> None:
        """The disk is copied, and the copy takes its place."""
        disk = self.mounted[name]
        if disk is None:
            return
        self.unmount(name, leave=False)
        copy = self.new_disk()
        shutil.copytree(self.place / "disks" / disk, self.place / "disks" / copy, dirs_exist_ok=True)
        self.promised[copy] = {run: set(steps) for run, steps in self.promised[disk].items()}
        self.mount(name, copy)

    # What people do

    @rule(name=st.sampled_from(SITES))
    def adopt(self, name: str) -> None:
        if self.mounted[name]:
            adopt_tier(self.policy, name)

    @rule()
    def init(self) -> None:
        if all(self.mounted.values()):
            with suppress(ts.WrongTier, ts.PolicyError):
                init_tiers(self.policy)

    # What jobs do

    @rule(run=st.sampled_from(RUNS), count=st.integers(1, 2), vanishing=st.sampled_from([None, None, *SITES]))
    def save(self, run: str, count: int, vanishing: str | None) -> None:
        """Also without a look at what is there. A file system may go away between two saves of one process."""
        known = {name for other in RUNS for names in self.seen(other).values() for name in names}
        with suppress(ts.TierstateError), ts.Checkpointer(self.policy, run) as ckpt:
            for number in range(count):
                if number and vanishing and self.mounted[vanishing]:
                    self.unmount(vanishing)
                    known.add(vanishing)
                self.step += 1
                try:
                    made = ckpt.save(tensors(6000, seed=self.step), step=self.step)
                except ts.TierstateError:
                    continue
                for name in made.tiers:
                    with suppress(ts.TierstateError):
                        made.wait(name, timeout=60)
                        self.promise(name, run, known)

    def promise(self, name: str, run: str, known: set[str]) -> None:
        """A save to a tier was said to be durable."""
        if self.mounted[name] is None:
            assert name not in known, f"{name} is not mounted, as could be known"
            disk = self.new_disk()  # nothing in sight knows it: the mount point is its first place
            (self.place / "disks" / disk).rmdir()
            self.mounted[name] = disk
        self.promised[str(self.mounted[name])].setdefault(run, set()).add(self.step)

    @rule(run=st.sampled_from(RUNS))
    def resume(self, run: str) -> None:
        seen, ids, state = self.seen(run), self.ids(), tensors(6000, seed=10**6)
        newest = max(seen, default=None)
        named = seen[newest] if newest is not None else {}
        try:
            with ts.Checkpointer(self.policy, run) as ckpt:
                found = ckpt.resume(into=state)
        except ts.WrongTier:
            others = {id for other in RUNS for names in self.seen(other).values() for id in names.values()}
            bare = self.required and not self.marked("far")
            assert bare or others - ids, "all that records name is there"
            return
        except ts.PolicyError:
            raise AssertionError("no two tiers lie in one place") from None
        assert not set(named.values()) - ids, "a tier is missing that the newest version names"
        if found is None:
            assert newest is None
            missing = {n for n in SITES if not self.marked(n)}
            for other in RUNS:
                for names in self.seen(other).values():
                    assert not missing & names.keys() or not {names[n] for n in missing & names.keys()} - ids
            return
        assert found.step == newest
        assert difference(tensors(6000, seed=found.step), state) == ""

    def marked(self, name: str) -> bool:
        return self.mounted[name] is not None and read_marker(Nvme(path=self.place / name)) is not None

    @precondition(lambda self: self.step)
    @invariant()
    def nothing_lies_in_a_mount_point(self) -> None:
        """But what was made at the first use of all, of which `promise` hears."""
        for name in SITES:
            if self.mounted[name] is None and (self.place / name).exists():
                assert not list((self.place / name).glob("versions/*/*"))

    @invariant()
    def what_was_promised_is_there(self) -> None:
        for disk, runs in self.promised.items():
            for run, steps in runs.items():
                log = Log(Nvme(path=self.path(disk)), run)
                assert steps <= {log.read(seq).version.head.step for seq in log.seqs()}, (disk, run)


TestMounts = pytest.mark.slow(Mounts.TestCase)
TestMounts.settings = settings(max_examples=15, stateful_step_count=15)
