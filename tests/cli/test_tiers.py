"""`tierstate init` and `adopt`, and what `policy check` says of two tiers in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.cli_calls import Call

import tierstate as ts


@pytest.fixture
def shared(place: Path) -> Path:
    """A policy of a local tier and a shared one that must be initialized."""
    return write(place, site={"type": "lustre", "path": str(place / "site"), "initialized": True})


def write(place: Path, **more: dict[str, Any]) -> Path:
    tiers = {"host": {"type": "host"}, "local": {"type": "nvme", "path": str(place / "local")}, **more}
    document = {"arena": {"size": "1MiB"}, "chunk": "64KiB", "tiers": tiers}
    file = place / "shared.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def save(policy: Path, step: int) -> dict[str, BaseException]:
    with ts.Checkpointer(str(policy), "run") as ckpt:
        made = ckpt.save({"w": torch.ones(9)}, step=step)
        for name in ("local", "site"):
            try:
                made.wait(name)
            except ts.TierstateError:
                continue
        return made.errors()


def test_init_marks_the_tiers_once(call: Call, shared: Path) -> None:
    assert isinstance(save(shared, 1)["site"], ts.WrongTier)
    first = call("init", "-p", shared, "--json")
    assert first.status == 0
    assert [(one["tier"], one["created"]) for one in first.json] == [("local", False), ("site", True)]
    again = call("init", "-p", shared, "site")
    assert "as it was" in again.out
    assert save(shared, 2) == {}


def test_adopt_takes_what_is_there(call: Call, shared: Path, place: Path) -> None:
    call("init", "-p", shared)
    assert save(shared, 1) == {}
    (place / "site").rename(place / "away")
    assert call("init", "-p", shared).status == 2
    gone = call("restore", "-p", shared, "-r", "run", place / "out.pt")
    assert gone.status == 2
    assert "tierstate adopt site" in gone.err
    adopted = call("adopt", "-p", shared, "site", "--json")
    (one,) = adopted.json
    assert one["created"]
    assert len(one["replaces"]) == 1
    assert save(shared, 2) == {}
    assert call("restore", "-p", shared, "-r", "run", place / "out.pt").status == 0


def test_what_is_no_tier_that_lasts_is_told(call: Call, shared: Path) -> None:
    for verb in ("adopt", "init"):
        answer = call(verb, "-p", shared, "host")
        assert answer.status == 2
        assert "'host' is no tier of this policy that survives the host; those are local, site" in answer.err


@pytest.mark.parametrize("live", [(), ("--live",)])
def test_policy_check_finds_two_tiers_in_one_place(call: Call, place: Path, live: tuple[str, ...]) -> None:
    (place / "link").symlink_to(place / "local")
    policy = write(place, site={"type": "object", "url": f"file://{place}/link/sub"})
    answer = call("policy", "check", policy, *live)
    assert answer.status == 1
    assert "tiers.local and tiers.site lie in one place" in answer.out
    assert call("policy", "check", policy, *live, "--json").json["ok"] is False
    assert not (place / "local").exists()
