"""The lock files have the versions of constraints.txt, with hashes, and all that pyproject.toml asks for but torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKED = {"dev": True, "test": True, "fuzz": True, "bench": True, "integrations": True, "docs": False, "tools": False}
"""The groups that are locked, and whether with what tierstate itself needs."""

HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")

pytestmark = pytest.mark.skipif(not (ROOT / "requirements").is_dir(), reason="the lock files stay in the checkout")


def locked(group: str) -> dict[str, tuple[Requirement, int]]:
    """By name what a lock file pins, and how many hashes it has."""
    text = (ROOT / "requirements" / f"{group}.txt").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [(Requirement(HASH.sub("", line).strip()), len(HASH.findall(line))) for line in lines]
    return {canonicalize_name(one.name): (one, hashes) for one, hashes in found}


def constrained() -> dict[str, str]:
    """The versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def asked(group: str) -> list[Requirement]:
    """What pyproject.toml asks for."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    found = list(document["project"]["dependencies"]) if LOCKED[group] else []
    pending = list(document["dependency-groups"][group])
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending += document["dependency-groups"][one["include-group"]]
        else:
            found.append(one)
    return [Requirement(text) for text in found]


@pytest.mark.parametrize("group", LOCKED)
def test_a_lock_has_all_that_is_asked_for_and_hashes_of_each(group: str) -> None:
    have = locked(group)
    for one in asked(group):
        name = canonicalize_name(one.name)
        if name != "torch":
            pinned = have[name][0]  # `make lock` writes it, if it is missing
            (version,) = (spec.version for spec in pinned.specifier)
            assert one.specifier.contains(version, prereleases=True), f"{one} and {pinned}: run make lock"
    assert all(hashes > 0 for _, hashes in have.values())
    assert "torch" not in have
    assert not any(name.startswith(("nvidia-", "triton")) for name in have)  # of torch's CUDA builds


@pytest.mark.parametrize("group", LOCKED)
def test_a_lock_has_the_versions_of_the_constraints(group: str) -> None:
    known = constrained()
    for name, (one, _) in locked(group).items():
        (spec,) = one.specifier
        assert spec.operator == "=="
        assert known.get(name, spec.version) == spec.version, f"{one}: constraints.txt has {known[name]}; run make lock"
