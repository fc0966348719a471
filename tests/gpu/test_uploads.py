"""What a `host` tier keeps goes to devices from where it lies, and devices verify what has arrived."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import arena_of, policy, tier
from support.device_jobs import on_the_host, truth_of
from support.equality import difference
from support.fake_cuda import LATE, RANDOM, fake, is_installed, timing

import tierstate as ts
from tierstate.engine.restore.uploads import host_in
from tierstate.tiers.memory.host import Host

MIB = 1 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def ckpt(place: Path) -> Iterator[ts.Checkpointer]:
    tiers = {"host": {"type": "host"}, "nvme": tier("nvme", place)}
    with ts.Checkpointer(policy(tiers, chunk="1MiB", arena={"size": "64MiB"}), "run") as made:
        yield made


def host_of(ckpt: ts.Checkpointer) -> Host:
    found = host_in(ckpt._tier_runs[0].tier)
    assert found is not None
    return found


def saved(ckpt: ts.Checkpointer, state: dict[str, Any]) -> None:
    """Save, and wait until both tiers have it: the slower one may be the first."""
    save = ckpt.save(state, step=1)
    save.wait("host")
    save.wait("nvme")


def read(ckpt: ts.Checkpointer) -> int:
    """Bytes that were read from the host tier into other host memory."""
    found = ckpt.stats().tiers["host"].operations.get("read")
    return 0 if found is None else found.nbytes


def values(nbytes: int, index: int = 0) -> torch.Tensor:
    device = f"cuda:{index % torch.cuda.device_count()}"
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)


def overwritten(state: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.zeros_like(value) for key, value in state.items()}


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 5 * MIB), st.integers(0, 32)), min_size=1, max_size=6),
    st.integers(0, 1 << 30),
    st.sampled_from([LATE, RANDOM]),
)
def test_any_lengths_offsets_and_devices_come_back(
    place: Path, cuts: list[tuple[int, int]], seed: int, when: int
) -> None:
    torch.manual_seed(seed)
    state = {str(i): values(nbytes + skip, i)[skip:] for i, (nbytes, skip) in enumerate(cuts)}
    state |= {"strided": values(6 * MIB).view(torch.int16).view(3, MIB).t(), "host": torch.randn(MIB // 2)}
    spec = policy({"host": {"type": "host"}, "nvme": tier("nvme", place)}, chunk="1MiB", arena={"size": "64MiB"})
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, state)
        timing(when, seed)
        into = overwritten(state)
        ckpt.restore(into=into)
        assert difference(truth_of(state), on_the_host(into)) == ""
        assert difference(truth_of(state), on_the_host(ckpt.load(device="cuda"))) == ""
        assert arena_of(ckpt).in_flight == 0


def test_the_host_reads_none_of_it(ckpt: ts.Checkpointer) -> None:
    state = {str(i): values(3 * MIB) for i in range(4)}
    saved(ckpt, state)
    before = read(ckpt)
    into = overwritten(state)
    ckpt.restore(into=into)
    loaded = ckpt.load(device="cuda")
    assert read(ckpt) - before < MIB
    assert difference(truth_of(state), on_the_host(into)) == ""
    assert difference(truth_of(state), on_the_host(loaded)) == ""


def test_damage_in_the_memory_is_found_on_the_device(ckpt: ts.Checkpointer, caplog: pytest.LogCaptureFixture) -> None:
    """The chunk comes from the next tier then."""
    state = {str(i): values(3 * MIB) for i in range(2)}
    saved(ckpt, state)
    [pack] = [held for key, held in host_of(ckpt)._objects.items() if key.startswith("packs/")]
    pack.pieces[0].buffer[4096] ^= 1
    into = overwritten(state)
    with caplog.at_level(logging.WARNING, "tierstate"):
        ckpt.restore(into=into)
    assert difference(truth_of(state), on_the_host(into)) == ""
    assert "1 damaged chunks were mended" in caplog.text


@pytest.mark.skipif(not is_installed(), reason="only the fake fails when it is asked to")
@pytest.mark.parametrize("after", range(8))
def test_a_copy_that_fails_leaves_it_to_the_slower_way(ckpt: ts.Checkpointer, after: int) -> None:
    state = {str(i): values(2 * MIB) for i in range(2)}
    saved(ckpt, state)
    into = overwritten(state)
    fake().synchronize()
    fake().fail("launch", after)
    ckpt.restore(into=into)
    fake().fail("launch", -1)
    assert difference(truth_of(state), on_the_host(into)) == ""


def test_a_deleted_version_stays_until_it_has_crossed(ckpt: ts.Checkpointer) -> None:
    tier = host_of(ckpt)
    state = {"a": values(3 * MIB)}
    saved(ckpt, state)
    [key] = [key for key in tier._objects if key.startswith("packs/")]
    with tier.reading(key) as held:
        tier.delete(key)
        whole = held.whole(0, MIB)
        assert whole is not None
        assert torch.equal(whole, state["a"][:MIB].cpu())
    assert held.whole(0, 1 << 40) is None


@pytest.mark.parametrize("keys", [{"bandwidth": "1GiB/s"}, {}])
def test_a_limit_holds_for_what_goes_to_devices_too(place: Path, keys: dict[str, str]) -> None:
    spec = policy({"host": {"type": "host", **keys}, "nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        assert (host_in(ckpt._tier_runs[0].tier) is None) == bool(keys)
