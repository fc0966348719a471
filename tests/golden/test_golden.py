"""Golden repositories: what earlier versions of tierstate stored comes back bit for bit, and can be gone on with."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden import make
from support.equality import difference

import tierstate as ts
from tierstate.engine.packs.keys import is_mend

STORED = sorted(path for path in make.HERE.glob("format-*") if path.is_dir())
READER = Path(__file__).resolve().parents[2] / "examples" / "read_version.py"
CASES = [(run, name) for run, tiers in make.STEPS.items() for name in tiers]


@pytest.fixture(params=STORED, ids=lambda path: path.name)
def stored(request: pytest.FixtureRequest, place: Path) -> Path:
    """A repository, where it may be written to."""
    shutil.copytree(request.param, place / "stored")
    return place / "stored"


def part(state: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name in names}


def has(run: str, name: str, step: int) -> tuple[str, ...]:
    """Which top keys of the state a tier has at a step."""
    if name in make.OTHER:
        return make.FILES
    gone = step not in make.WITH_OPTIMIZER.get(run, (step,))
    return tuple(key for key in make.state(run, step) if not (gone and key == "optimizer"))


def check(ckpt: ts.Checkpointer, run: str, step: int, names: tuple[str, ...]) -> None:
    """Fill another state with a version, or those keys of it, and compare."""
    whole = names == tuple(make.state(run, step))
    into = part(make.state(run, 9), names)
    only = None if whole else [pattern for name in names for pattern in (name, f"{name}.**")]
    ckpt.restore(into, step=step, only=only, allow_lossy=True)
    assert difference(into, part(make.restored(run, step), names)) == "", (run, step)


def test_there_is_a_repository_for_each_format_number() -> None:
    assert [path.name for path in STORED] == [f"format-{number}" for number in range(1, make.FORMAT + 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "name"), CASES)
def test_each_tier_alone_gives_back_every_version(stored: Path, run: str, name: str) -> None:
    for other in make.STEPS["main"].keys() - {name}:
        shutil.rmtree(stored / other)
    with ts.Checkpointer(make.policy(stored, name, run=run), run) as ckpt:
        assert tuple(v.step for v in ckpt.versions()) == make.STEPS[run][name]
        for step in make.STEPS[run][name]:
            check(ckpt, run, step, has(run, name, step))


@pytest.mark.slow
@pytest.mark.parametrize("run", make.STEPS)
def test_all_tiers_together_do_and_a_save_on_top_goes_on(stored: Path, run: str) -> None:
    spec = make.policy(stored, run=run)
    with ts.Checkpointer(spec, run) as ckpt:
        known = {v.step: v for v in ckpt.versions()}
        assert sorted(known) == sorted({step for steps in make.STEPS[run].values() for step in steps})
        for step, version in known.items():
            assert version.tiers == tuple(n for n, steps in make.STEPS[run].items() if step in steps)
            check(ckpt, run, step, has(run, next(iter(version.tiers)), step))
        ckpt.save(make.state(run, 6), 6).wait()
    with ts.Checkpointer(spec, run) as ckpt:
        for step in (*known, 6):
            check(ckpt, run, step, has(run, "object", step) if step < 6 else tuple(make.state(run, 6)))
        assert ckpt.prune(grace=0).ok
        check(ckpt, run, 6, tuple(make.state(run, 6)))


def test_names_forks_and_metadata_are_as_they_were(stored: Path) -> None:
    with ts.Checkpointer(make.policy(stored), "main") as ckpt:
        assert {name: found.step for name, found in ckpt.tags().items()} == {"best": 4}
        assert ckpt.info(tag="best").metadata == {"loss": 0.25, "note": "ü"}
        assert ckpt.info().lossy == ("bf16", "int8")
        origin = ckpt.info(step=3)
        with pytest.raises(ts.Unsafe, match="fewer bits"):
            ckpt.load()
        assert any(is_mend(path.as_posix()) for path in stored.rglob("packs/*/*"))
    with ts.Checkpointer(make.policy(stored, run="branch"), "branch") as ckpt:
        assert ckpt.info(step=3).parent == origin.id


@pytest.mark.parametrize("run", make.STEPS)
def test_what_is_stored_is_found_sound(stored: Path, run: str) -> None:
    """The damaged chunk was mended; of versions that were thinned the rest is there."""
    with ts.Checkpointer(make.policy(stored, run=run), run) as ckpt:
        report = ckpt.verify(deep=True)
    assert report.ok
    assert report.problems == []
    thinned = {s for steps in make.STEPS[run].values() for s in steps} - {*make.WITH_OPTIMIZER.get(run, (1, 2))}
    assert {lost.step for lost in report.lost} == thinned


def test_the_reader_that_knows_only_the_format_reads_it(stored: Path) -> None:
    read = runpy.run_path(str(READER))["read"]
    found, expected = read(stored / "nvme", "plain"), make.restored("plain", 2)
    assert np.array_equal(found['["weight"]'], expected["weight"].numpy())
    assert found['["half"]'].tobytes() == expected["half"].view(torch.uint8).numpy().tobytes()
    with pytest.raises(AssertionError, match="no codecs"):
        read(stored / "nvme", "main")
    with pytest.raises(AssertionError, match="delta"):
        read(stored / "object", "main")


@pytest.mark.slow
def test_todays_tables_are_those_of_the_format(place: Path) -> None:
    """Who adds a column says so in the list: `described` makes it. The stored repository was made before some of them;
    none is left out any more, or of another type."""
    listed = json.loads((make.HERE / f"format-{make.FORMAT}.json").read_text())
    stored = make.described(make.HERE / f"format-{make.FORMAT}")
    assert stored.keys() == listed.keys()
    assert all(stored[table].items() <= listed[table].items() for table in listed)
    make.build(place)
    assert make.described(place) == listed
