"""`prune`: what goes and what stays, as tables and as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli_calls import Call

from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.history.leases import pin_version
from tierstate.tiers.posix.directory import Nvme


@pytest.fixture
def keeping(policy: Path) -> Path:
    """A policy for the same places that keeps less."""
    path = policy.with_name("keeping.yaml")
    path.write_text(policy.read_text().replace("/nvme}", "/nvme, keep: {last: 1}}"))
    return path


@pytest.mark.slow
def test_a_dry_run_shows_what_would_be_done(call: Call, keeping: Path) -> None:
    answer = call("prune", "-p", keeping, "-r", "gpt", "--dry-run")
    assert answer.status == 0, answer.err
    lines = [line.split() for line in answer.out.splitlines()]
    assert ["nvme", "1", "1", "dropped", "-"] in lines
    assert ["nvme", "3", "3", "kept", "newest,", "last", "1"] in lines
    assert "store: 0 packs, 0 B, would go" in answer.out
    found = call("prune", "-p", keeping, "-r", "gpt", "--dry-run", "--json").json
    assert found["dry_run"]
    assert found["tiers"][0]["drop"] == [1, 2]
    again = call("prune", "-p", keeping, "-r", "gpt", "--json").json
    assert again["tiers"] == found["tiers"]
    assert call("prune", "-p", keeping, "-r", "gpt", "--json").json["tiers"][0]["drop"] == []


@pytest.mark.slow
def test_everything_that_can_be_told_is_told(call: Call, keeping: Path) -> None:
    tier = Nvme(path=keeping.parent / "nvme")
    tier.put("packs/gpt/000000000009-0-0-x", as_buffer(b"left behind"))
    text = call("prune", "-p", keeping, "-r", "gpt", "--dry-run").out
    assert "nvme: 1 pack that no version names may be of a save under way, and stay" in text
    pin_version(tier, "gpt", 1, "fork")
    answer = call("prune", "-p", keeping, "-r", "gpt")
    assert answer.status == 1
    assert "kept     forked by fork" in answer.out
    assert "'fork' is being forked, and has no record yet" in answer.out
    tier.put("leases/gpt/odd", as_buffer(b"?"))
    answer = call("prune", "-p", keeping, "-r", "gpt", "--grace", "0")
    assert answer.status == 1
    assert "TO DO nvme: no pack was deleted: nvme: leases/gpt/odd: is not a lease" in answer.out
    assert "nvme: version 1 is not needed any more by run fork, which was forked from it" in answer.out
    tier.delete("leases/gpt/odd")
    text = call("prune", "-p", keeping, "-r", "gpt", "--grace", "0").out
    assert "nvme: 2 packs, " in text
    answer = call("prune", "-p", keeping, "-r", "gpt", "--grace", "soon")
    assert (answer.status, "'soon' is not a duration" in answer.err) == (2, True)
    tier.close()
