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
        tiers = [Ill(), Ill()]
        keys = [stack.enter_context(wrapped(tier)) for tier in tiers]
        spec = policy({"one": keys[0], "two": keys[1]}, durable="two")
        with ts.Checkpointer(spec, "run") as ckpt:
            for step in STEPS:
                ckpt.save({"w": torch.full((64,), float(step))}, step=step)
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
