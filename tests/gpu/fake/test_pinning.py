"""Pinning that is refused, now and then or always: nothing is lost, nothing left behind, and it is told once."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import arena_of, policy, scratch, tier
from support.device_jobs import on_the_host
from support.equality import difference
from support.fake_cuda import LATE, RANDOM, Runtime, fake
from support.outcomes import Background, until

import tierstate as ts
from tierstate.dcp.staging import TierStager
from tierstate.engine.capture import capture
from tierstate.engine.capture.capture import Capture
from tierstate.tiers.memory import arena as arena_room
from tierstate.tiers.memory import pinning
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.numa import NumaNode
from tierstate.tiers.memory.pages import PAGE

CALLS = {"register": "cudaHostRegister", "unregister": "cudaHostUnregister"}


@contextmanager
def failing(what: str, every: int) -> Iterator[list[str]]:
    """Every n-th such call fails; none with 0. The block's value is the threads that made one, by name."""
    own, threads, lock = getattr(Runtime, CALLS[what]), [], threading.Lock()

    def call(self: Runtime, *args: int) -> int:
        with lock:
            threads.append(threading.current_thread().name)
            if every and len(threads) % every == 0:
                fake().fail(what)
            code: int = own(self, *args)
            fake().fail(what, -1)
        return code

    setattr(Runtime, CALLS[what], call)
    try:
        yield threads
    finally:
        setattr(Runtime, CALLS[what], own)


class Heard(logging.Handler):
    """The warnings of a block."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("tierstate").addHandler(self)
        return self.said

    def __exit__(self, *_: object) -> None:
        logging.getLogger("tierstate").removeHandler(self)


def state_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    there = {str(i): torch.randn(3000 + i, device=f"cuda:{i % 2}") for i in range(6)}
    return {**there, "strided": torch.randn(40, 30, device="cuda").t()[::2], "host": torch.randn(5000)}


def kernels_run() -> None:
    for index in range(2):
        assert torch.ones(3, device=f"cuda:{index}").add_(1).sum().item() == 6


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 30),
    timing=st.sampled_from([LATE, RANDOM]),
    register=st.integers(0, 9),
    unregister=st.sampled_from([0, 2, 3, 4, 7]),
    limit=st.none() | st.integers(0, 40),
    slabs=st.integers(4, 64),
)
def test_saves_and_restores_are_exact_whatever_is_refused_and_nothing_is_left(
    seed: int, timing: int, register: int, unregister: int, limit: int | None, slabs: int
) -> None:
    fake().timing(timing, seed)
    fake().device.set_pin_limit((1 << 63) - 1 if limit is None else limit * 4096)
    state, truth = state_of(seed), {}
    with scratch() as place, Heard() as said, failing("register", register), failing("unregister", unregister):
        with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, arena={"size": slabs * 4096}), "run") as ckpt:
            for step in range(3):
                truth[step] = copy.deepcopy(on_the_host(state))
                save = ckpt.save(state, step=step)
                for tensor in state.values():
                    tensor.add_(1)
                save.wait()
            for step in range(3):
                ckpt.restore(state, step=step)
                assert difference(truth[step], on_the_host(state)) == ""
            refused = arena_of(ckpt).pinning.refused
        assert fake().pinned() == {}
        assert fake().device.peek_last_error() == 0
        kernels_run()
    assert len(said) == refused
    assert all("CUDA refused to pin 4 KiB of an arena of " in one for one in said)
    fake().device.set_pin_limit((1 << 63) - 1)
    assert fake().faults() == []


def test_memory_that_cuda_never_unpins_stays_mapped_and_close_goes_on() -> None:
    arena = Arena(8 * PAGE, PAGE)
    held, late = [arena.acquire(last=True) for _ in range(4)], arena.acquire(last=True)
    for slab in held:
        slab.release()
    registered = fake().pinned()
    assert len(registered) == 5
    with failing("unregister", 1), Heard() as said:
        arena.close()
        late.release()
    try:
        assert [one for one in said if "did not unpin memory of an arena of 32 KiB (error 1)" in one] == said
        assert len(said) == 1, "told once"
        assert arena.shared is None or arena.shared.descriptor == -1
        assert fake().pinned() == registered
        assert {buffer.data_ptr() for buffer in pinning._still_pinned} >= set(registered)
        maps = Path("/proc/self/maps").read_text().splitlines()
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
        assert all(any(start <= at < end for start, end in ranges) for at in registered)
        kernels_run()
    finally:
        for address in registered:
            assert fake().runtime.cudaHostUnregister(address) == 0
        pinning._still_pinned.clear()


def test_an_error_of_an_earlier_kernel_does_not_keep_memory_pinned() -> None:
    arena = Arena(8 * PAGE, PAGE)
    for slab in [arena.acquire() for _ in range(3)]:
        slab.release()
    with Heard() as said:
        fake().fail("unregister", 1)
        arena.close()
    assert fake().pinned() == {}
    assert said == []
    kernels_run()


def test_save_itself_pins_nothing_and_what_is_prepared_is_pinned_once(place: Path) -> None:
    state = {str(i): torch.randn(9000, device="cuda") for i in range(8)}
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, arena={"size": "1MiB"}), "run") as ckpt:
        with failing("register", 0) as threads:
            for step in range(3):
                ckpt.save(state, step=step).wait()
            until(lambda: not arena_of(ckpt)._preparing)
        assert threads
        assert set(threads) <= {"tierstate-arena", "tierstate-capture", "tierstate-copy"}
        assert len(threads) == len(fake().pinned()), "no slab twice"
    arena = Arena(8 * PAGE, PAGE)
    with failing("register", 0) as threads:
        arena.prepare(8 * PAGE)
        until(lambda: not arena._preparing)
        assert threads == ["tierstate-arena"] * 8
        slabs = [arena.acquire() for _ in range(7)]
        assert len(threads) == 8
    for slab in slabs:
        slab.release()
    arena.close()
    assert fake().pinned() == {}


def test_after_a_refusal_no_call_is_made_any_more() -> None:
    fake().device.set_pin_limit(3 * PAGE)
    arena = Arena(16 * PAGE, PAGE)
    with failing("register", 0) as threads, Heard() as said:
        arena.prepare(8 * PAGE)
        until(lambda: not arena._preparing)
        slabs = [arena.acquire() for _ in range(14)]
    assert len(threads) == 4
    assert sum(slab.pinned is True for slab in slabs) == 3, "what is pinned stays pinned"
    assert len(said) == 1
    assert "of an arena of 64 KiB (error 2), of which 12 KiB are pinned" in said[0]
    for slab in slabs:
        slab.release()
    arena.close()
    assert fake().pinned() == {}
    kernels_run()


def test_a_slab_that_is_pinned_while_the_arena_closes_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, here, go_on = Arena(8 * PAGE, PAGE), threading.Event(), threading.Event()
    own = Runtime.cudaHostRegister

    def slow(self: Runtime, *args: int) -> int:
        here.set()
        assert go_on.wait(60)
        return own(self, *args)

    monkeypatch.setattr(Runtime, "cudaHostRegister", slow)
    arena.prepare(8 * PAGE)
    assert here.wait(60)
    closing = Background(arena.close)
    until(lambda: arena.closed)
    go_on.set()
    assert closing.outcome() is None
    assert fake().counts()["cudaHostRegister"] == 1
    assert fake().pinned() == {}


def test_staged_states_are_exact_and_leave_nothing_when_pinning_is_refused() -> None:
    state = {"w": torch.randn(3000, device="cuda"), "host": torch.randn(100)}
    for register, unregister in ((1, 0), (2, 0), (0, 2)):
        with failing("register", register), failing("unregister", unregister):
            stager = TierStager()
            for _ in range(3):
                staged = stager.stage(state)
                assert all(torch.equal(tensor.cpu(), staged[name]) for name, tensor in state.items())
                del staged
                state["w"] = torch.randn(state["w"].numel() * 2, device="cuda")
            stager.close()
        assert fake().pinned() == {}
        kernels_run()


@pytest.mark.parametrize("on_device", [True, False])
def test_threads_that_capture_run_on_the_node_and_no_others(
    place: Path, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    allowed = os.sched_getaffinity(0)
    node = {min(allowed)}
    if node == allowed:
        pytest.skip("needs two CPUs")
    monkeypatch.setattr(
        arena_room, "node_of_device", lambda device: None if device is None else NumaNode(0, frozenset(node))
    )
    monkeypatch.setattr(capture, "WORTH_A_THREAD", 1000)
    monkeypatch.setattr(capture, "usable_cores", lambda: 2)
    seen: list[tuple[str, set[int]]] = []

    def noting(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append((threading.current_thread().name, os.sched_getaffinity(0)))
            return own(*args)

        return call

    monkeypatch.setattr(Capture, "_take", noting(Capture._take))
    monkeypatch.setattr(Capture, "_copy", noting(Capture._copy))
    device = "cuda" if on_device else "cpu"
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, arena={"size": "1MiB"}), "run") as ckpt:
        state = {str(i): torch.randn(9000, device=device) for i in range(8)}
        state["host"] = torch.randn(9000)
        ckpt.save(state, step=1).wait()
        names = {name for name, _ in seen}
        assert names <= {"tierstate-capture", "tierstate-copy", "tierstate-digest"}
        assert not on_device or "tierstate-digest" in names
        assert all(where == node for _, where in seen)
        threads = [int(one.name) for one in Path("/proc/self/task").iterdir()]
        assert all(os.sched_getaffinity(thread) == allowed for thread in threads)
        assert difference(on_the_host(state), ckpt.load(step=1)) == ""
