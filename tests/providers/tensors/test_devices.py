"""Which devices are taken, and what is said of the others."""

from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import policy, tier

import tierstate as ts
from tierstate.providers.tensors.devices import absence, refusal


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3"])
def test_the_host_and_cuda_are_taken(device: str) -> None:
    assert refusal(torch.device(device)) == ""


@pytest.mark.parametrize("device", ["xla:0", "hpu", "meta", "vulkan"])
def test_a_device_that_torch_cannot_wait_for_is_refused(device: str, place: Path) -> None:
    assert f"a tensor on '{device}'" in refusal(torch.device(device))
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save({"w": torch.zeros(3)}, step=1).wait()
        with pytest.raises(ValueError, match=f"load\\(device='{device}'\\): .* use the host first"):
            ckpt.load(device=device)


def test_the_accelerator_that_torch_names_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert refusal(torch.device("xpu:1")) == ""
    assert "of CUDA and ROCm, and of xpu, and does not know how" in refusal(torch.device("mps"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a process that sees no CUDA device")
def test_a_load_to_a_device_that_is_not_there_does_not_call_versions_damaged(place: Path) -> None:
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save({"w": torch.zeros(3)}, step=1).wait()
        for device in ("cuda", "cuda:7"):
            for on_damage in ("raise", "older"):
                with pytest.raises(ValueError, match=f"load\\(device='{device}'\\): this process sees no cuda devices"):
                    ckpt.load(device=device, on_damage=on_damage)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "index"), [(1, 1), (2, 5)])
def test_a_device_beyond_those_that_are_there_is_named(monkeypatch: pytest.MonkeyPatch, count: int, index: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert absence(torch.device("cuda", index)).startswith(f"this process sees {count} cuda device")
    assert absence(torch.device("cuda", count - 1)) == absence(torch.device("cuda")) == ""
