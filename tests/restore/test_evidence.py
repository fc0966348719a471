"""Damaged, not to be asked now, absent: three different things in every decision of a restore."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, wrapped
from support.ill_tiers import ANSWERS, HEALTH, SILENT, Health, Ill

import tierstate as ts

STEPS = range(3)


Healths = list[list[tuple[Health, Health]]]
"""For each version, oldest first, and each tier: the health of the record and of the pack."""


def expected(healths: Healths, on_damage: str) -> int | type[ts.TierstateError]:
    """The step that a restore of the newest version gives, or the error."""
    passed = False
    for step in reversed(STEPS):
        records = [record for record, _ in healths[step]]
        packs = [pack for record, pack in healths[step] if record in ANSWERS]
        if all(one == "lost" for one in records):
            continue  # no tier lists it
        if any(one in ANSWERS for one in packs):
            return step
        # A tier whose record cannot be read may have what the others have damaged.
        if any(one in SILENT for one in [*packs, *records]):
            return ts.Unreadable if packs else ts.NewestUnreadable
        if on_damage == "raise":
            return ts.Damaged
        passed = True
    return ts.Damaged if passed else ts.NotFound


health = st.sampled_from(HEALTH)
healths = st.lists(st.lists(st.tuples(health, health), min_size=2, max_size=2), min_size=3, max_size=3)
SOUND: list[tuple[Health, Health]] = [("sound", "sound")] * 2


def saved_twice(stack: ExitStack) -> tuple[ts.Policy, list[Ill]]:
    """A run whose versions are in two tiers, which can fall ill; and its policy."""
    tiers = [Ill(), Ill()]
    keys = [stack.enter_context(wrapped(tier)) for tier in tiers]
    spec = policy({"one": keys[0], "two": keys[1]}, durable="two")
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in STEPS:
            ckpt.save({"w": torch.full((64,), float(step))}, step=step)
    return spec, tiers


@pytest.mark.slow
@given(healths, st.sampled_from(["raise", "older"]))
@example([SOUND, SOUND, [("away", "sound")] * 2], "older")
@example([SOUND, SOUND, [("away", "sound"), ("damaged", "sound")]], "older")
@example([SOUND, SOUND, [("sound", "away")] * 2], "older")
@example([SOUND, SOUND, [("sound", "damaged"), ("sound", "denied")]], "older")
@example([SOUND, SOUND, [("sound", "damaged"), ("away", "sound")]], "older")
@example([SOUND, SOUND, [("sound", "damaged"), ("damaged", "sound")]], "older")
@example([SOUND, SOUND, [("flipped", "flipped")] * 2], "raise")
@example([SOUND, SOUND, [("sound", "damaged"), ("sound", "flipped")]], "raise")
@example([SOUND, SOUND, [("damaged", "sound")] * 2], "older")
@example([SOUND, SOUND, [("damaged", "sound"), ("lost", "lost")]], "raise")
def test_an_older_version_is_taken_for_damage_only(healths: Healths, on_damage: Any) -> None:
    with ExitStack() as stack:
        spec, tiers = saved_twice(stack)
        for step, places in enumerate(healths):
            for tier, (record, pack) in zip(tiers, places, strict=True):
                tier.fall_ill(step, record, pack)
        right = expected(healths, on_damage)
        with ts.Checkpointer(spec, "run") as ckpt:
            into = {"w": torch.full((64,), 9.0)}
            if isinstance(right, int):
                ckpt.restore(into, on_damage=on_damage)
                assert into["w"].eq(right).all()
            else:
                with pytest.raises(right):
                    ckpt.restore(into, on_damage=on_damage)


def expected_beside_silence(places: list[tuple[Health, Health]], step: int | None) -> int | type[ts.TierstateError]:
    """As `expected`, of one tier beside another one that says nothing, also for a step that is asked for."""
    if step is not None:
        return step if all(one in ANSWERS for one in places[step]) else ts.Unreadable
    for newest in reversed(STEPS):
        record, pack = places[newest]
        if record in ANSWERS:
            return newest if pack in ANSWERS else ts.Unreadable
        if record != "lost":
            return ts.NewestUnreadable
    return ts.Unreadable


@pytest.mark.slow
@given(st.lists(st.tuples(health, health), min_size=3, max_size=3), st.sampled_from([None, *STEPS]), st.booleans())
@example([*[("sound", "sound")] * 2, ("sound", "damaged")], None, True)
@example([*[("sound", "sound")] * 2, ("damaged", "sound")], None, True)
@example([*[("sound", "sound")] * 2, ("damaged", "sound")], 2, False)
@example([*[("sound", "sound")] * 2, ("lost", "lost")], 2, False)
def test_a_tier_that_lists_nothing_may_have_what_the_others_lack(
    places: list[tuple[Health, Health]], step: int | None, older: bool
) -> None:
    """It is neither damaged nor absent, so that nothing older is taken in its place."""
    with ExitStack() as stack:
        spec, tiers = saved_twice(stack)
        for at, (record, pack) in enumerate(places):
            tiers[0].fall_ill(at, record, pack)
        tiers[1].silent = True
        right = expected_beside_silence(places, step)
        with ts.Checkpointer(spec, "run") as ckpt:
            into = {"w": torch.full((64,), 9.0)}
            if isinstance(right, int):
                ckpt.restore(into, step=step, on_damage="older" if older else "raise")
                assert into["w"].eq(right).all()
            else:
                with pytest.raises(right):
                    ckpt.restore(into, step=step, on_damage="older" if older else "raise")


def test_a_record_in_a_bad_sector_hinders_no_save_and_is_made_again_by_rebuild() -> None:
    tier = Ill()
    with wrapped(tier) as keys:
        spec = policy({"one": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            for step in (0, 1):
                ckpt.save({"w": torch.full((64,), float(step))}, step=step)
        tier.fall_ill(1, "bad sector", "sound")
        with ts.Checkpointer(spec, "run") as ckpt:
            with pytest.raises(ts.NewestUnreadable, match="EIO"):
                ckpt.load()
            with pytest.raises(ts.NewestUnreadable, match="EIO"):
                ckpt.load(on_damage="older")
            for on_damage in ("raise", "older"):
                with pytest.raises(ts.Unreadable, match=r"no version with step 1 that can be read now: .*EIO"):
                    ckpt.load(step=1, on_damage=on_damage)
            assert ckpt.load(step=0)["w"].eq(0).all()
            assert [version.step for version in ckpt.versions()] == [0, -1]
            assert ["EIO" in problem.what for problem in ckpt.verify().problems] == [True]
            ckpt.save({"w": torch.full((64,), 2.0)}, step=2).wait()
            assert ckpt.load()["w"].eq(2).all()
            assert ckpt.prune(grace=0) is not None
            assert ckpt.rebuild("one").ok
            assert [version.step for version in ckpt.versions()] == [0, 1, 2]
            assert ckpt.load(step=1)["w"].eq(1).all()
            assert ckpt.verify(deep=True).ok
