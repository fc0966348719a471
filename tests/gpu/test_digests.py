"""Digests that a device computes of what it holds, and what is not copied because of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import arena_of, policy, tier
from support.device_jobs import on_the_host, truth_of
from support.equality import difference
from support.fake_cuda import LATE, RANDOM, fake, is_installed, timing

import tierstate as ts
from tierstate.engine.capture import capture, device_digests
from tierstate.manifest.digest import digest_function
from tierstate.tiers.memory import kernels as kernels_room
from tierstate.tiers.memory.kernels import ALIGN, fits_kernel, kernels_of, xxh3_digests
from tierstate.tiers.testing import random_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
XXH3 = digest_function("xxh3-128")


@pytest.fixture(autouse=True)
def _few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_digests, "SIDE_BY_SIDE", 1)


@pytest.fixture
def ckpt(place: Path) -> Iterator[ts.Checkpointer]:
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, arena={"size": "64MiB"}, chunk="1MiB"), "run") as made:
        yield made


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(16, 700), st.integers(0, 3)), min_size=1, max_size=20),
    st.integers(0, 1 << 30),
    st.sampled_from([LATE, RANDOM]),
)
def test_they_are_those_of_the_host(cuts: list[tuple[int, int]], seed: int, when: int) -> None:
    timing(when, seed)
    memory = random_bytes(sum(16 * (length + gap) for length, gap in cuts), seed)
    there, chunks, at = memory.to(here()), [], 0
    for length, gap in cuts:
        chunks.append(slice(at, at + 16 * length))
        at += 16 * (length + gap)
    kernels = kernels_of(here())
    assert kernels is not None
    digests = xxh3_digests(kernels, [there[chunk] for chunk in chunks])
    torch.cuda.synchronize()
    found = digests.numpy()
    assert [row.tobytes() for row in found] == [XXH3(memory[chunk]) for chunk in chunks]


@pytest.mark.parametrize("nbytes", [256, 1008, 1024, 1040, 1088, 2048, 2064, 16 * MIB, 16 * MIB + 1024 - 16])
def test_long_ones_and_those_at_the_ends_of_blocks_and_stripes(nbytes: int) -> None:
    memory = random_bytes(nbytes, nbytes)
    kernels = kernels_of(here())
    assert kernels is not None
    digests = xxh3_digests(kernels, [memory.to(here())])
    torch.cuda.synchronize()
    [found] = digests.numpy()
    assert found.tobytes() == XXH3(memory)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("gpu", [False, True], ids=["nvme", "gpu"])
@pytest.mark.parametrize("digest", ["xxh3-128", "sha256"])
def test_a_version_is_the_same_as_one_of_the_host(place: Path, lazy: bool, gpu: bool, digest: str) -> None:
    """Also chunks that no device digests: short ones, those at odd addresses, and strided ones."""

    def memory() -> torch.Tensor:
        return torch.randint(0, 255, (5 * MIB,), dtype=torch.uint8, device="cuda")

    state = {
        "long": torch.randn(3 * MIB // 4 + 4, device="cuda"),
        "short": torch.randn(100, device="cuda"),
        "odd": memory()[3 : 3 + 2 * MIB],
        "ragged": memory()[: 2 * MIB + 5],
        "strided": memory().view(5, MIB).t()[::2],
        "host": torch.randn(MIB),
    }
    tiers = {**({"gpu": {"type": "gpu", "keep": {"last": 1}}} if gpu else {}), "nvme": tier("nvme", place)}
    with ts.Checkpointer(policy(tiers, arena={"size": "64MiB"}, chunk="1MiB", digest=digest), "run") as ckpt:
        optimizer = torch.optim.SGD([torch.nn.Parameter(state["long"])], lr=0.1)
        if lazy:
            ckpt.guard(optimizer)
        found = []
        for step, one in enumerate((state, truth_of(state))):
            ckpt.save(one, step=step).wait()
            capturing = ckpt._pipeline._capturing
            assert capturing is not None
            version = capturing._version
            assert version is not None
            found.append(
                [
                    (version.leaves[leaf].name, data.tobytes())
                    for leaf, data in zip(version.chunk_leaf, version.digests, strict=True)
                ]
            )
        assert found[0] == found[1]
        assert difference(truth_of(state), ckpt.load(step=0)) == ""


def test_chunks_that_do_not_change_cross_the_bus_no_more(ckpt: ts.Checkpointer) -> None:
    """As those of a model that is frozen, with a small part that is trained."""
    frozen = {str(i): torch.randint(0, 99, (MIB // 2,), dtype=torch.int32, device="cuda") for i in range(6)}
    trained = torch.randint(0, 99, (MIB // 2,), dtype=torch.int32, device="cuda")
    all_of_it, of_trained = 14, 2
    steps = iter(range(20))

    def downloads() -> int:
        trained.add_(1)
        before = fake().counts().get("download", 0) if is_installed() else 0
        ckpt.save({**frozen, "trained": trained}, step=next(steps)).wait()
        return fake().counts().get("download", 0) - before if is_installed() else of_trained

    # The third save knows that of the second one little had changed; a later one, where a tier was not done in time.
    counts = [downloads() for _ in range(3)]
    while counts[-1] != of_trained:
        counts.append(downloads())
    frozen["2"].add_(1)
    counts.append(downloads())
    assert not is_installed() or counts[0] == counts[1] == all_of_it
    assert not is_installed() or counts[-1] in (of_trained + 2, all_of_it)
    last = next(steps) - 1
    for step in range(last + 1):
        loaded = ckpt.load(step=step)
        assert torch.equal(loaded["0"], frozen["0"].cpu())
        assert torch.equal(loaded["trained"], trained.cpu() - (last - step))
        assert torch.equal(loaded["2"], frozen["2"].cpu() - int(step < last))
    assert arena_of(ckpt).in_flight == 0


def test_a_step_comes_after_the_digests(ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "WORTH_A_THREAD", 1000)  # threads digest the rest
    opened, own = threading.Event(), capture.Capture._take

    def gated(*args: Any) -> None:  # so that nobody waits for digests before the step
        assert opened.wait(60)
        own(*args)

    params = [torch.nn.Parameter(torch.randn(n, device="cuda")) for n in (MIB, 1000)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    ckpt.guard(optimizer)
    state = {str(i): param for i, param in enumerate(params)}
    truth = truth_of(state)
    monkeypatch.setattr(capture.Capture, "_take", gated)
    save = ckpt.save(state, step=0)
    optimizer.step()
    torch.cuda.current_stream().synchronize()
    opened.set()
    save.wait()
    assert difference(truth, on_the_host(ckpt.load())) == ""


def test_where_kernels_cannot_be_compiled_the_host_digests(
    ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("NVRTC failed with error 6")

    monkeypatch.setattr(kernels_room, "CompiledKernels", refused)
    monkeypatch.setattr(kernels_room, "_kernels", {})
    state = {"w": torch.randn(3 * MIB, device="cuda")}
    for step in range(2):
        ckpt.save(state, step=step).wait()
        assert difference(truth_of(state), ckpt.load(step=step)) == ""
    assert len([text for text in caplog.messages if "NVRTC failed with error 6" in text]) == 1


def test_kernels_that_compute_other_digests_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = kernels_room.CompiledKernels(here())
    launch = made.launch

    class Wrong:
        def __init__(self, _: torch.device) -> None: ...

        def launch(self, name: str, blocks: int, threads: int, *args: Any) -> None:
            launch(name, blocks, threads, *args)
            if name == "xxh3_lanes":
                args[-1].add_(1)

    monkeypatch.setattr(kernels_room, "CompiledKernels", Wrong)
    monkeypatch.setattr(kernels_room, "_kernels", {})
    assert kernels_of(here()) is None
    assert "a digest that the device computed is not right" in caplog.text


def test_a_device_without_memory_leaves_it_to_the_host(ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(device_digests, "xxh3_digests", full)
    state = {"w": torch.randn(3 * MIB, device="cuda")}
    ckpt.save(state, step=0).wait()
    assert difference(truth_of(state), ckpt.load()) == ""


@pytest.mark.skipif(not is_installed(), reason="a real device is never quite full")
def test_a_full_device_keeps_training_s_cache(ckpt: ts.Checkpointer) -> None:
    state = {"w": torch.randn(3 * MIB, device="cuda")}
    torch.cuda.synchronize()
    fake().limit(torch.cuda.memory_reserved() + kernels_room.LANES)
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    ckpt.save(state, step=0).wait()
    assert torch.cuda.memory_stats()["num_alloc_retries"] == before
    assert difference(truth_of(state), ckpt.load()) == ""


def test_what_changes_on_the_way_to_the_host_is_found(ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest is of what the device holds, so that what an error of the bus makes of it is never taken for it."""
    state, own = {"w": torch.randn(3 * MIB, device="cuda")}, device_digests.DeviceDigests.of

    def late(digests: Any, row: int) -> Any:
        found = own(digests, row)
        return found if row else np.array(found) ^ np.uint64(1)

    monkeypatch.setattr(device_digests.DeviceDigests, "of", late)
    ckpt.save(state, step=0).wait()
    with pytest.raises(ts.Damaged):
        ckpt.load()


def test_only_what_fits_the_kernel_is_given_to_it() -> None:
    memory = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    assert fits_kernel(memory[ALIGN : 2 * ALIGN])
    assert not fits_kernel(memory[1 : 1 + ALIGN])
    assert not fits_kernel(memory[: ALIGN + 1])
    assert not fits_kernel(on_the_host(memory))


@pytest.mark.parametrize(("count", "on_device"), [(3, False), (4, True)])
def test_a_few_long_chunks_are_left_to_the_host(
    ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch, count: int, on_device: bool
) -> None:
    monkeypatch.undo()
    asked, own = [], device_digests.xxh3_digests
    monkeypatch.setattr(device_digests, "xxh3_digests", lambda *args: asked.append(1) or own(*args))
    state = {"w": torch.randn(count * MIB // 4, device="cuda")}
    ckpt.save(state, step=0).wait()
    assert bool(asked) == on_device
    assert difference(truth_of(state), ckpt.load()) == ""
