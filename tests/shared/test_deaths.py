"""Servers of a shared file system that die or stop answering while saves go there, and come back."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.checkpointer_worlds import alike, arena_of, engine_threads, policy, tensors
from support.leaks import at_rest
from support.outcomes import until

import tierstate as ts

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

MIB = 1 << 20
DEADLINE = 5.0


def hangs(ckpt: ts.Checkpointer) -> bool:
    (tier_run,) = [s for s in ckpt._tier_runs if s.name == "shared"]
    return any(note.startswith("hangs") for note in tier_run.tier.traits.notes)


def spec(shared: Path, local: Path | None = None, deadline: float = DEADLINE) -> ts.Policy:
    tiers = {} if local is None else {"local": {"type": "nvme", "path": str(local)}}
    tiers["shared"] = {"type": "lustre", "path": str(shared), "deadline": f"{deadline:g}s"}
    return policy(tiers, chunk="1MiB", arena={"size": "8MiB"})


def state(step: int) -> dict:
    return tensors(24 * MIB, 2 * MIB, 3000, seed=step)


@pytest.mark.parametrize("how", ["kill", "pause"])
@pytest.mark.parametrize("part", ["osd", "mds"])
def test_training_goes_on_without_the_shared_tier_until_it_is_back(own_mounts, place, part, how):
    fs, states, blocked = own_mounts.fs, {}, {}
    ckpt = ts.Checkpointer(spec(own_mounts.here, place / "local"), "run")

    def save(step: int) -> ts.Save:
        states[step] = state(step)
        start = time.monotonic()
        made = ckpt.save(states[step], step=step)
        blocked[step] = round(time.monotonic() - start, 3)
        return made

    save(1).wait("shared")
    under_way = save(2)
    under_way.wait("local")
    getattr(fs, how)(part)  # while it is being copied
    for step in range(3, 7):
        save(step).wait("local")
    with suppress(ts.TierstateError):
        under_way.wait("shared")
    with pytest.raises(ts.TierstateError, match="hangs since"):
        save(7).wait("shared")
    until(lambda: at_rest(ckpt), within=240)
    assert alike(ckpt.load(), states[7]), "restored from what answers"
    kept = arena_of(ckpt).kept

    fs.resume(part)
    fs.start(part)
    seconds = until(lambda: not hangs(ckpt), within=240)
    last = 8
    while True:
        try:
            save(last).wait("shared")
            break
        except (ts.TierUnavailable, ts.CommitUnknown):
            # It may hang once more while the servers find each other.
            until(lambda: not hangs(ckpt), within=240)
            last += 1
    with suppress(ts.TierUnavailable):  # tells of the saves that did not arrive
        ckpt.close()
    found = check(own_mounts.there, states)
    assert {1, last} <= set(found)
    assert kept <= arena_of(ckpt).slots
    print(json.dumps({"part": part, "how": how, "blocked": blocked, "back": seconds, "kept": kept, "found": found}))


def check(shared: Path, states: dict[int, dict]) -> list[int]:
    """Every version on the shared tier, as another host sees it, restored from it alone; their steps."""
    # This mount's client has its own time to find out that the servers are back.
    with ts.Checkpointer(spec(shared, deadline=120), "run") as ckpt:
        found = [version.step for version in ckpt.versions()]
        for step in found:
            assert alike(ckpt.load(step=step), states[step])
        assert ckpt.verify(deep=True).ok
    return found


@pytest.mark.parametrize("part", ["osd", "mds"])
def test_a_shared_tier_alone_holds_up_a_save_once(own_mounts, part):
    """No other tier takes the slabs: they leave the arena's budget, and the state is free after one deadline."""
    fs, blocked = own_mounts.fs, []
    ckpt = ts.Checkpointer(spec(own_mounts.here), "run")
    states = {1: state(1), 2: state(2), 5: state(5)}
    ckpt.save(states[1], step=1).wait()
    fs.pause(part)
    for step in (2, 3, 4):
        start = time.monotonic()
        with suppress(ts.TierUnavailable):
            ckpt.save(states[2], step=step).wait()
        blocked.append(round(time.monotonic() - start, 3))
    assert hangs(ckpt)
    until(lambda: at_rest(ckpt), within=240)
    kept = arena_of(ckpt).kept
    fs.resume(part)
    until(lambda: not hangs(ckpt), within=240)
    until(lambda: not arena_of(ckpt).kept, within=240)
    with suppress(ts.TierUnavailable):  # the failure of the save before, which nobody was told of
        ckpt.save(states[5], step=5).wait()
    ckpt.save(states[5], step=6).wait()
    with suppress(ts.TierUnavailable):
        ckpt.close()
    found = check(own_mounts.there, {**states, 3: states[2], 4: states[2], 6: states[5]})
    assert {1, 6} <= set(found)
    print(json.dumps({"part": part, "seconds of save and wait": blocked, "slabs kept": kept, "found": found}))


def test_closing_and_ending_while_servers_are_dead(own_mounts, place):
    fs = own_mounts.fs
    ckpt = ts.Checkpointer(spec(own_mounts.here, place / "local"), "run")
    ckpt.save(state(1), step=1).wait("shared")
    fs.pause("osd", "mds")
    ckpt.save(state(2), step=2).wait("local")
    start = time.monotonic()
    with pytest.raises(ts.TierUnavailable):
        ckpt.close()
    print(f"closed in {time.monotonic() - start:.2f} s")
    fs.resume("osd", "mds")
    until(lambda: not engine_threads(), within=240)
    assert 1 in check(own_mounts.there, {1: state(1), 2: state(2)})
