"""Ten thousand random single damages: each is found, or repaired, or in bytes that no version uses."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import policy, scratch, tensors, tier
from support.damage import objects, touches
from support.equality import difference

import tierstate as ts

pytestmark = pytest.mark.slow

HOW = ("flip", "overwrite", "truncate", "grow", "delete", "swap")
TIERS = ("nvme", "file")
STEPS = range(4)


@dataclass(frozen=True)
class Repository:
    """Versions in two tiers, and what they were."""

    place: Path
    truth: list[dict[str, torch.Tensor]]

    def copy(self, place: Path) -> None:
        for folder in ("nvme", "object"):
            shutil.copytree(self.place / folder, place / folder)


def hierarchy(place: Path, only: str = "") -> ts.Policy:
    """A policy of both tiers, or of one."""
    tiers = {"nvme": tier("nvme", place, codec="small"), "file": tier("file", place)}
    return policy({name: keys for name, keys in tiers.items() if only in ("", name)})


@pytest.fixture(scope="module")
def repository() -> Iterator[Repository]:
    with scratch() as place:
        state, truth = tensors(20_000, 300, 9000, 40), []
        state["half"] = torch.randn(3000).bfloat16().float()  # what can be compressed
        with ts.Checkpointer(hierarchy(place), "run") as ckpt:
            for step in STEPS:
                state["abcd"[step]] += 1.0
                state["half"][step] = -1.0
                ckpt.save(state, step=step, metadata={"loss": step})
                truth.append({name: t.clone() for name, t in state.items()})
        yield Repository(place, truth)


def hit(path: Path, others: list[Path], dice: random.Random) -> str:
    """Damage one object at one place; what was done, or nothing where it would be the same."""
    how, before = dice.choice(HOW), path.read_bytes()
    data, at = bytearray(before), dice.randrange(len(before))
    if how == "delete":
        path.unlink()
        return how
    if how == "flip":
        data[at] ^= 1 << dice.randrange(8)
    elif how == "overwrite":
        data[at : at + 16] = dice.randbytes(min(16, len(data) - at))
    elif how == "truncate":
        del data[at:]
    elif how == "grow":
        data += dice.randbytes(dice.randrange(1, 40))
    else:
        data = bytearray(dice.choice(others).read_bytes())
    path.write_bytes(data)
    return how if bytes(data) != before else ""


def tried(repository: Repository, dice: random.Random) -> str:
    """One damage: how it was found."""
    with scratch() as place:
        repository.copy(place)
        name = dice.choice(TIERS)
        paths = objects(place, name, ".")
        path = dice.choice(paths)
        before = path.read_bytes()
        if not hit(path, paths, dice):
            return "nothing was changed"
        pack = "packs" in path.parts
        real = not pack or not path.exists() or touches(hierarchy(repository.place), name, path, before)
        if dice.random() < 0.5:
            return alone(repository, place, name, real)
        return together(repository, place, name, real)


def alone(repository: Repository, place: Path, name: str, real: bool) -> str:
    """With the damaged tier alone every version is as it was, or refused; and a look finds what is wrong."""
    errors = 0
    with ts.Checkpointer(hierarchy(place, name), "run") as ckpt:
        for step in STEPS:
            try:
                assert difference(ckpt.load(step=step), repository.truth[step]) == ""
            except ts.TierstateError:
                errors += 1
        there = {info.step for info in ckpt.versions()}
        found = not ckpt.verify(data=True).ok or there != set(STEPS)
        assert found or not errors
        assert found == real
    return "found" if found else "no version has it"


def together(repository: Repository, place: Path, name: str, real: bool) -> str:
    """With both tiers every version is as it was; what was read damaged is mended, and what was not read is found."""
    for _ in range(2):
        with ts.Checkpointer(hierarchy(place), "run") as ckpt:
            for step in STEPS:
                assert difference(ckpt.load(step=step), repository.truth[step]) == ""
            report = ckpt.verify(data=True)
            everywhere = all(info.tiers == TIERS for info in ckpt.versions())
            if name != TIERS[0]:
                assert (not report.ok or not everywhere) == real
            assert not any(p.leaf for p in report.problems if p.tier == TIERS[0])
    return "no version has it" if not real else "mended" if name == TIERS[0] else "found"


def many(repository: Repository, count: int, seed: int) -> Counter[str]:
    """So many damages; each has dice of its own, so that one that fails can be tried alone."""
    found = Counter[str]()
    for i in range(count):
        try:
            found[tried(repository, random.Random(f"{seed}-{i}"))] += 1
        except BaseException as error:
            error.add_note(f"with random.Random('{seed}-{i}')")
            raise
    return found


def test_single_damages(repository: Repository) -> None:
    found = many(repository, 40, seed=1)
    assert found["found"] > 5
    assert found["mended"] > 5


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_single_damages(repository: Repository) -> None:
    found = many(repository, 10_000, seed=2)
    print(dict(found))
    assert found.total() == 10_000
