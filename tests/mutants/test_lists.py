"""The lists of mutants stay true: each change still applies to the code, and its tests are there."""

import importlib.util
from pathlib import Path

import pytest

import tierstate

CHECKOUT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("mutants_run", Path(__file__).with_name("run.py"))
assert SPEC is not None
assert SPEC.loader is not None
run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run)


@pytest.mark.slow
@pytest.mark.skipif(
    Path(tierstate.__file__).resolve().parent != CHECKOUT / "tierstate", reason="lists are of the checkout's files"
)
def test_each_change_applies():
    mutants = run.read_mutants()
    assert not run.check(mutants)
    assert len(mutants) >= 150
