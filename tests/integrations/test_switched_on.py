"""The frameworks themselves: each is there in the environment of `make test-integrations`, and needed nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tierstate.integrations

MODULES = sorted(file.stem for file in Path(tierstate.integrations.__path__[0]).glob("[a-z]*.py"))
SHARED = {"version_folders", "version_uri"}  # what several adapters use, of no framework
PARTS = {"lightning_strategies": "lightning", "lightning_versions": "lightning"}  # modules, and whose they are
FRAMEWORKS = [name for name in MODULES if name not in SHARED | PARTS.keys()]


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_its_own_framework_only(module: str) -> None:
    framework = PARTS.get(module, module)
    pytest.importorskip(framework if framework in FRAMEWORKS else "torch")
    others = [name for name in FRAMEWORKS if name != framework]
    code = f"import sys, tierstate.integrations.{module}; print([n for n in {others} if n in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Of their own accord: Lightning imports torchmetrics, which imports transformers where it is installed.
    allowed = {"transformers": ["accelerate"], "lightning": ["transformers"]}.get(framework, [])
    assert [name for name in eval(ran.stdout) if name not in allowed] == []
