"""Processes that save until they are killed: each is forked from one that has imported everything, in milliseconds.

    python victims.py POLICY KILLS SEED

Kills so many savers at random moments, one after the other, in one place, and has a process of its own look at the
tiers after each. On standard output, at the end: what was counted, as JSON. It exits with 1 at the first thing that is
wrong, and says what.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

import tierstate as ts

RUN, SIDE, TAG = "job", "side", "good"
LINES, SHORTLY = 8, 0.03
"""A victim is killed so many lines after its start at most, and so many seconds after the last of them."""

KEPT_BACK = 400
"""Versions of which it is remembered that they were durable; older ones were dropped by retention long ago."""


def state_at(step: int) -> dict[str, torch.Tensor]:
    """The state of a step, which depends on nothing else: some of it never changes, some seldom, some always."""
    state = {}
    for i, (name, every) in enumerate([("frozen", 1 << 30), ("seldom", 5), ("often", 2), ("always", 1)]):
        generator = torch.Generator().manual_seed(1000 * i + step // every)
        state[name] = torch.randn(3000 + 700 * i, generator=generator)
    # What changes a little: a delta of it is short.
    state["little"] = torch.randn(3000, generator=torch.Generator().manual_seed(7)).bfloat16()
    state["little"][step % 3000] = float(step % 250)
    state["step"] = torch.tensor(step)
    return state


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two of these states are the same bit for bit."""
    return list(one) == list(other) and all(
        one[n].shape == other[n].shape and _bits(one[n]) == _bits(other[n]) for n in one
    )


def _bits(tensor: torch.Tensor) -> tuple[torch.dtype, bytes]:
    return tensor.dtype, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


class Speaker:
    """Says, one line at a time, what a victim knows to be durable.

    Args:
        out: the writing end of a pipe.
        run: whose saves they are.
    """

    def __init__(self, out: int, run: str = RUN) -> None:
        self._out, self._run = out, run
        self._pending: list[ts.Save] = []
        self._told: set[tuple[str, int]] = set()

    def say(self, *words: object) -> None:
        """One line."""
        os.write(self._out, (" ".join(map(str, words)) + "\n").encode())

    def add(self, save: ts.Save) -> None:
        """One more save; and say of each on which tiers it is durable by now."""
        self._pending.append(save)
        for pending in self._pending:
            for tier in filter(pending.done, pending.tiers):
                if (tier, pending.step) not in self._told:
                    self._told.add((tier, pending.step))
                    self.say("durable", f"{self._run}/{tier}", pending.step)
        self._pending = [save for save in self._pending if not all(map(save.done, save.tiers))]


def saver(policy: Path, out: int, chance: random.Random) -> None:
    """Restores, and saves step after step until it is killed: to the run, or to the fork of it if there is one."""
    run = RUN
    if chance.random() < 0.3:
        with ts.Checkpointer(policy, SIDE) as side:
            run = SIDE if side.versions() else RUN
    speaker = Speaker(out, run)
    with ts.Checkpointer(policy, run) as ckpt:
        step = restored(ckpt)
        speaker.say("ready", step)
        while True:
            step += 1
            save = ckpt.save(state_at(step), step=step)
            if chance.random() < 0.3:
                save.wait()
            speaker.add(save)
            if chance.random() < 0.25:
                maintain(ckpt, speaker, chance)


def maintain(ckpt: ts.Checkpointer, speaker: Speaker, chance: random.Random) -> None:
    """Prunes, names the newest version, or forks it: into the one run to which that is done, once."""
    what = chance.choice(["prune", "prune", "tag", "fork"])
    if what == "prune":
        # No grace: nobody else saves, since the victims before are dead.
        report = ckpt.prune(grace=0)
        assert report.ok, report
    elif ckpt.run == SIDE:
        return
    elif what == "tag":
        found = ckpt.tag(TAG)
        speaker.say("tagged", found.seq)
    else:
        with suppress(ts.AlreadyExists, ts.NotFound):
            found = ckpt.fork(SIDE)
            speaker.say("forked", found.step)


def restored(ckpt: ts.Checkpointer) -> int:
    """The step of the newest version, which is as it was saved; 0 where there is none."""
    try:
        found = ckpt.load()
    except ts.NotFound:
        return 0
    step = int(found["step"])
    assert same(found, state_at(step)), f"step {step} was restored and is not what was saved"
    return step


def kept(steps: set[int], keep: Mapping[str, Any]) -> set[int]:
    """Which of the steps ``last`` and ``every`` keep."""
    ordered = sorted(steps)
    last = ordered[-keep["last"] :] if "last" in keep else []
    first: dict[int, int] = {}
    for step in reversed(ordered) if "every" in keep else ():
        first[step // keep["every"]] = step
    return {*ordered[-1:], *last, *first.values()} if keep and not keep.get("all") else steps


def alone(policy: Path, tier: str) -> ts.Policy:
    """The policy with one of its tiers only."""
    document = yaml.safe_load(policy.read_text())
    return ts.Policy.parse(yaml.safe_dump({**document, "tiers": {tier: document["tiers"][tier]}}, sort_keys=False))


def check_names(policy: Path, tagged: int, forked: int) -> None:
    """The tag is of the version that had it last, or a later one; the run that was forked is there."""
    with ts.Checkpointer(policy, RUN) as ckpt:
        found = ckpt.tags().get(TAG)
        assert not tagged or (found is not None and found.seq >= tagged), f"the tag was of {tagged} and is of {found}"
    with ts.Checkpointer(policy, SIDE) as side:
        steps = [version.step or 0 for version in side.versions()]
        assert not forked or max(steps, default=0) >= forked, f"step {forked} was forked; there is {steps}"


def check(policy: Path, told: Mapping[str, set[int]], seen: Mapping[str, set[int]]) -> dict[str, list[int]]:
    """Each tier alone has what it was to keep of each run, and gives what it lists bit for bit.

    Args:
        told: what was durable, by place: a run and a tier.
        seen: what was looked at byte by byte before, and is now only looked at by presence and length.

    Returns:
        The steps that each place lists.
    """
    there: dict[str, list[int]] = {}
    for place, name, run, keep in places(policy):
        with ts.Checkpointer(alone(policy, name), run) as ckpt:
            versions = ckpt.versions()
            steps = [version.step or 0 for version in versions]
            there[place] = steps
            assert steps == sorted(set(steps)), f"{place}: a step was saved twice: {steps}"
            lost = (kept(told[place] | set(steps), keep) & told[place]) - set(steps)
            assert not lost, f"{place}: steps {sorted(lost)} were durable and are lost; there are {steps}"
            report = ckpt.verify(deep=not seen[place])
            assert report.ok, report
            for version in [
                *(v for v in versions[:-1] if v.step not in seen[place]),
                *versions[-1:],
            ]:
                found = ckpt.load(version=version.id)
                assert same(found, state_at(version.step or 0)), f"{place}: step {version.step} is not what was saved"
    return there


def places(policy: Path) -> list[tuple[str, str, str, Mapping[str, Any]]]:
    """Every run in every tier: its name, the tier, the run, and what is kept there."""
    tiers = yaml.safe_load(policy.read_text())["tiers"]
    return [(f"{run}/{name}", name, run, keys.get("keep", {})) for name, keys in tiers.items() for run in (RUN, SIDE)]


class Nursery:
    """Forks processes, none of which outlives it; itself it has no threads, or a forked child could hang.

    Args:
        policy: the file of the policy that all of them use.
        seed: of the moments at which they are killed.
    """

    def __init__(self, policy: Path, seed: int) -> None:
        self.policy, self.chance = policy, random.Random(seed)
        self.told: dict[str, set[int]] = {place: set() for place, *_ in places(policy)}
        self.seen: dict[str, set[int]] = {name: set() for name in self.told}
        self.tagged = self.forked = 0
        self.counts: Counter[str] = Counter()

    def prepare(self) -> None:
        """Import what victims import, so that not each of them has to."""

        def scout(out: int) -> None:
            before = set(sys.modules)
            check(self.policy, self.told, self.seen)
            found = {name for name, module in sys.modules.items() if _is_a_file_of(module, name)}
            os.write(out, json.dumps(sorted(found - before)).encode())

        pid, pipe = self.fork(scout)
        said = self.rest(pipe)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, said.decode()
        for name in json.loads(said):
            importlib.import_module(name)
        assert threading.active_count() == 1, "what is imported starts no thread"

    def kill_one(self) -> None:
        """One victim: killed shortly after some line of what it says, or after it was started."""
        pid, pipe = self.fork(lambda out: saver(self.policy, out, random.Random(self.chance.random())))
        lines = self.chance.randrange(LINES)
        said = self.listen(pipe, lines)
        time.sleep(self.chance.uniform(0, SHORTLY))
        os.kill(pid, signal.SIGKILL)
        said += self.rest(pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == -signal.SIGKILL, f"a victim ended by itself with {status}: {said.decode()}"
        self.take(said.decode())
        self.counts["kills"] += 1
        self.counts["killed while it started"] += not lines

    def take(self, said: str) -> None:
        """What a victim said; the kill may have torn the last line."""
        for line in said.split("\n")[:-1]:
            word, *rest = line.split(" ", 2)
            assert word in ("ready", "durable", "tagged", "forked"), line
            self.counts[word] += 1
            if word == "tagged":
                self.tagged = int(rest[0])
            elif word == "forked":
                self.forked = int(rest[0])
            elif word == "durable":
                place, step = rest
                self.counts["saves durable on " + place.partition("/")[2]] += 1
                self.counts["saves durable in the fork"] += place.startswith(SIDE)
                self.told[place].add(int(step))
        for name, steps in self.told.items():
            self.told[name] = set(sorted(steps)[-KEPT_BACK:])

    def look(self, *, deep: bool = False) -> None:
        """Have a process look at what is there: at every byte of what is new, or of all."""
        seen = {name: set() for name in self.seen} if deep else self.seen

        def look(out: int) -> None:
            check_names(self.policy, self.tagged, self.forked)
            os.write(out, json.dumps(check(self.policy, self.told, seen)).encode())

        pid, pipe = self.fork(look)
        said = self.rest(pipe).decode()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, said
        for name, steps in json.loads(said).items():
            self.counts["versions found whole"] += len(set(steps) - self.seen[name])
            self.seen[name] = set(steps)

    def fork(self, work: Callable[[int], None]) -> tuple[int, int]:
        """A child that does this with the writing end of a pipe, and the reading end."""
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            _live(work, writing)
        os.close(writing)
        return pid, reading

    def listen(self, pipe: int, lines: int) -> bytes:
        """What is said, up to so many lines; less if its speaker ends by itself."""
        said = b""
        while said.count(b"\n") < lines and (piece := os.read(pipe, 1 << 16)):
            said += piece
        return said

    def rest(self, pipe: int) -> bytes:
        """What is said until the other end is closed."""
        said = b""
        while piece := os.read(pipe, 1 << 16):
            said += piece
        os.close(pipe)
        return said


def _is_a_file_of(module: Any, name: str) -> bool:
    """Whether a module can be imported by that name; some packages put others among them."""
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.has_location and spec.name == name


def _live(work: Callable[[int], None], out: int) -> NoReturn:
    try:
        work(out)
    except BaseException:
        os.write(out, f"failed {traceback.format_exc()}\n".encode())
        os._exit(1)
    os._exit(0)


def main(policy: Path, kills: int, seed: int) -> None:
    """Kill, look, kill again; say at the end what was counted."""
    torch.set_num_threads(1)
    begun = time.monotonic()
    nursery = Nursery(policy, seed)
    nursery.prepare()
    for i in range(kills):
        nursery.kill_one()
        nursery.look(deep=i + 1 == kills)
    counts = {**nursery.counts, "seconds": round(time.monotonic() - begun, 1)}
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
