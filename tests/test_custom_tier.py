"""A package that brings a tier, as a stranger would install it: into an environment of its own, beside tierstate."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tierstate.tiers.registry import known_tiers

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "custom_tier"

SAVE = """
import torch
import tierstate as ts
state = {"w": torch.arange(3_000_000.0), "step": 7}
with ts.Checkpointer("policy.yaml", run="mine") as ckpt:
    ckpt.save(state, step=7).wait()
"""

LOAD = """
import torch
import tierstate as ts
with ts.Checkpointer("policy.yaml", run="mine") as ckpt:
    state = ckpt.load()
assert torch.equal(state["w"], torch.arange(3_000_000.0)) and state["step"] == 7
assert ckpt.restored.tiers == ("db",), ckpt.restored
from tierstate.tiers.policy.schema import policy_schema
keys = policy_schema()["$defs"]["tier-sqlite"]["properties"]
assert {"path", "capacity", "timeout", "every", "bandwidth"} <= set(keys), keys
import sys
from tierstate.cli import main
sys.argv = ["tierstate", "policy", "check", "--live", "--json", "policy.yaml"]
main()
"""


class Environment:
    """An environment with the packages of this one, and the example installed on top. Nothing is downloaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False)
        self._python = folder / "venv" / "bin" / "python"
        found = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        # As it stands in this environment: with what its own .pth files add, such as a checkout.
        shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        lines = [f"import site; site.addsitedir({path!r})" for path in sorted(shared)]
        Path(found.strip(), "shared.pth").write_text("\n".join(lines) + "\n")
        # A copy, since a build leaves files beside its sources.
        shutil.copytree(
            EXAMPLE, folder / "example", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
        )
        options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        self.run("-m", "pip", "install", *options, str(folder / "example"))

    def run(self, *arguments: str) -> str:
        """Standard output of the environment's Python."""
        home = {**os.environ, "TIERSTATE_DB": str(self.folder / "ckpt.db")}
        done = subprocess.run(
            [self._python, *arguments],
            cwd=self.folder / "example" if (self.folder / "example").exists() else self.folder,
            env=home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("custom"))


def test_its_own_tests_pass(environment: Environment) -> None:
    test = environment.folder / "example" / "tests" / "test_contract.py"
    assert len([line for line in test.read_text().splitlines() if line.strip()]) <= 10
    out = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert " passed" in out
    assert "skipped" not in out


def test_a_run_is_saved_restored_and_checked(environment: Environment) -> None:
    assert "sqlite" not in known_tiers(), "it is installed there, not here"
    environment.run("-W", "error", "-c", SAVE)
    found = json.loads(environment.run("-W", "error", "-c", LOAD))
    assert [(tier["name"], tier["type"], tier["ok"]) for tier in found] == [("db", "sqlite", True)]
