"""Lazy capture on devices: what a step, a replayed graph and a capture may do while a save is under way."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import policy, tier
from support.device_jobs import on_the_host
from support.equality import difference
from support.outcomes import Background, until

import tierstate as ts
from tierstate.engine.capture import capture
from tierstate.engine.capture.capture import Capture
from tierstate.engine.publish.save_state import SaveState
from tierstate.manifest.errors import CaptureError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Gate:
    """Holds the capture at one place until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def before(self, own: Any) -> Any:
        def gated(*args: Any, **keys: Any) -> Any:
            assert self.opened.wait(60)
            return own(*args, **keys)

        return gated


@pytest.fixture
def ckpt(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ts.Checkpointer]:
    monkeypatch.setattr(capture, "WORTH_A_THREAD", 1000)
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, arena={"size": "1MiB"}), "run") as made:
        yield made


def values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    params = {str(i): param for i, param in enumerate(optimizer.param_groups[0]["params"])}
    return {**params, "optimizer": optimizer}


def truth_of(optimizer: torch.optim.Optimizer) -> Any:
    torch.cuda.synchronize()
    return copy.deepcopy(on_the_host({**values(optimizer), "optimizer": optimizer.state_dict()}))


def made(**keys: Any) -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.randn(9000, device="cuda")) for _ in range(3)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.Adam(params, lr=0.1, **keys)
    optimizer.step()
    return optimizer


KINDS = [{"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}]


@pytest.mark.parametrize("keys", KINDS, ids=lambda keys: next(iter(keys.items())).__repr__())
def test_a_step_does_not_wait_for_copies_that_are_queued_and_comes_after_them(
    ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch, keys: dict[str, bool]
) -> None:
    optimizer, gate = made(**keys), Gate()
    ckpt.guard(optimizer)
    truth = truth_of(optimizer)
    monkeypatch.setattr(Capture, "_take", gate.before(Capture._take))  # copies are queued, and nobody waits for them
    save = ckpt.save(values(optimizer), step=1)
    optimizer.step()
    assert not save._save_state.captured.done()
    torch.cuda.current_stream().synchronize()  # the device does the step, and so the copies before it
    assert difference(truth, truth_of(optimizer)) != ""
    gate.opened.set()
    save.wait()
    assert difference(truth, on_the_host(ckpt.load(step=1))) == ""


def test_a_change_before_the_step_fails_the_save_although_the_step_did_not_wait(
    ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, gate = made(), Gate()
    ckpt.guard(optimizer)
    monkeypatch.setattr(Capture, "_take", gate.before(Capture._take))
    save = ckpt.save(values(optimizer), step=1)
    with torch.no_grad():
        optimizer.param_groups[0]["params"][1].mul_(2)
    optimizer.step()
    gate.opened.set()
    with pytest.raises(CaptureError, match='leaf "1": changed between the return of save and its capture'):
        save.wait()
    optimizer.step()
    ckpt.save(values(optimizer), step=2).wait()


def graph_of(work: Any, mode: str = "global") -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        work()
    return graph


@pytest.mark.parametrize("guarded_first", [False, True], ids=["captured-before-guard", "captured-after-guard"])
def test_a_replay_of_a_step_comes_after_the_copies(
    ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch, guarded_first: bool
) -> None:
    optimizer, gate = made(capturable=True), Gate()
    if guarded_first:
        ckpt.guard(optimizer)
    graph = graph_of(optimizer.step)
    ckpt.guard(optimizer)
    graph.replay()
    for step in (1, 2):
        truth = truth_of(optimizer)
        gate = Gate()
        with monkeypatch.context() as patch:
            patch.setattr(Capture, "_take", gate.before(Capture._take))
            save = ckpt.save(values(optimizer), step=step)
            graph.replay()
            torch.cuda.current_stream().synchronize()
            assert difference(truth, truth_of(optimizer)) != ""
            gate.opened.set()
            save.wait()
        assert difference(truth, on_the_host(ckpt.load(step=step))) == ""
        assert ckpt.stats().waited > 0, "saves stay lazy"


def test_a_replay_waits_until_the_copies_are_queued_and_a_graph_without_a_step_does_not(
    ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, gate = made(capturable=True), Gate()
    ckpt.guard(optimizer)
    step, other = graph_of(optimizer.step), torch.zeros(10, device="cuda")
    forward = graph_of(lambda: other.add_(1))
    truth = truth_of(optimizer)
    monkeypatch.setattr(Capture, "_all_queued", gate.before(Capture._all_queued))
    save = ckpt.save(values(optimizer), step=1)
    forward.replay()
    assert other.sum().item() == 10
    arrived, own = threading.Event(), SaveState.release_state
    monkeypatch.setattr(SaveState, "release_state", lambda save_state: arrived.set() or own(save_state))
    stepped = Background(step.replay)
    until(arrived.is_set)
    assert not save._save_state.queued.is_set()
    gate.opened.set()
    assert stepped.outcome() is None
    save.wait()
    assert difference(truth, on_the_host(ckpt.load(step=1))) == ""
    assert difference(truth, truth_of(optimizer)) != ""


@pytest.mark.parametrize("how", ["in place", "through a view"])
def test_a_graph_that_changes_a_parameter_without_a_step_waits_too(
    ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    optimizer, gate = made(), Gate()
    ckpt.guard(optimizer)
    first = optimizer.param_groups[0]["params"][0].detach()
    graph = graph_of(lambda: (first if how == "in place" else first[5:50]).mul_(2))
    truth = truth_of(optimizer)
    monkeypatch.setattr(Capture, "_take", gate.before(Capture._take))
    save = ckpt.save(values(optimizer), step=1)
    graph.replay()
    torch.cuda.synchronize()
    gate.opened.set()
    save.wait()
    assert difference(truth, on_the_host(ckpt.load(step=1))) == ""
    assert difference(truth, truth_of(optimizer)) != ""


def test_a_loop_of_its_own_calls_before_step(ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, gate = made(), Gate()
    ckpt.guard(optimizer)
    truth = truth_of(optimizer)
    monkeypatch.setattr(Capture, "_take", gate.before(Capture._take))
    save = ckpt.save(values(optimizer), step=1)
    ckpt.before_step()
    first = optimizer.param_groups[0]["params"][0]
    first.data.fill_(3)  # a change that no version counter tells of
    torch.cuda.synchronize()
    gate.opened.set()
    save.wait()
    assert difference(truth, on_the_host(ckpt.load(step=1))) == ""


@pytest.mark.parametrize("gpu", [False, True], ids=["nvme", "gpu"])
def test_a_save_in_the_background_does_not_break_a_capture(
    place: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    optimizer, gate = made(capturable=True), Gate()
    tiers = {**({"gpu": {"type": "gpu", "keep": {"last": 1}}} if gpu else {}), "nvme": tier("nvme", place)}
    other, stream = torch.zeros(10, device="cuda"), torch.cuda.Stream()
    with ts.Checkpointer(policy(tiers, arena={"size": "256KiB"}), "run") as ckpt:
        ckpt.guard(optimizer)
        truth = truth_of(optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(Capture, "_take", gate.before(Capture._take))
            save = ckpt.save(values(optimizer), step=1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="global")
            gate.opened.set()
            for name in tiers:
                save.wait(name)
            other.add_(1)
            graph.capture_end()
        graph.replay()
        assert other.sum().item() == 10
        assert difference(truth, on_the_host(ckpt.load(step=1))) == ""


def test_a_save_in_a_capture_is_refused_and_the_capture_goes_on(ckpt: ts.Checkpointer) -> None:
    optimizer = made(capturable=True)
    refused: list[BaseException] = []

    def work() -> None:
        try:
            ckpt.save(values(optimizer), step=1)
        except CaptureError as error:
            refused.append(error)
        optimizer.step()

    graph = graph_of(work)
    graph.replay()
    assert "save was called while a CUDA graph is being captured" in str(refused[0])
    ckpt.save(values(optimizer), step=2).wait()
    assert [version.step for version in ckpt.versions()] == [2]


def test_graphs_are_torchs_own_again_when_nothing_is_guarded(ckpt: ts.Checkpointer) -> None:
    own = torch.cuda.CUDAGraph.replay
    optimizer = made()
    ckpt.guard(optimizer)
    assert torch.cuda.CUDAGraph.replay is not own
    ckpt.unguard(optimizer)
    assert torch.cuda.CUDAGraph.replay is own


def added(other: torch.Tensor) -> torch.optim.Optimizer:
    """An optimizer over this tensor, which `made` ones do not know."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(other)], lr=0.1)
    assert optimizer.param_groups[0]["params"][0].data_ptr() == other.data_ptr()
    return optimizer


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Saves, and returns whether a replay waited for it; the version must be the state at the call of save."""

    def saved(ckpt: ts.Checkpointer, optimizer: torch.optim.Optimizer, graph: torch.cuda.CUDAGraph, step: int) -> bool:
        gate, waited, own = Gate(), [], SaveState.release_state
        truth = truth_of(optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(Capture, "_take", gate.before(Capture._take))
            patch.setattr(SaveState, "release_state", lambda save_state: waited.append(1) or own(save_state))
            save = ckpt.save(values(optimizer), step=step)
            graph.replay()
            torch.cuda.current_stream().synchronize()
            gate.opened.set()
            save.wait()
        assert difference(truth, on_the_host(ckpt.load(step=step))) == ""
        return bool(waited)

    return saved


def test_a_graph_that_is_captured_anew_while_nothing_is_guarded_waits(ckpt: ts.Checkpointer, waits: Any) -> None:
    optimizer, other = made(capturable=True), torch.zeros(10, device="cuda")
    ckpt.guard(optimizer)
    graph = graph_of(lambda: other.add_(1))
    assert not waits(ckpt, optimizer, graph, 1)
    ckpt.unguard(optimizer)
    graph.reset()
    with torch.cuda.graph(graph):
        optimizer.step()
    ckpt.guard(optimizer)
    assert waits(ckpt, optimizer, graph, 2)


@pytest.mark.parametrize("how", ["guard", "another Checkpointer", "add_param_group", "data"])
def test_a_graph_waits_that_changes_what_is_guarded_after_its_capture(
    ckpt: ts.Checkpointer, place: Path, waits: Any, how: str
) -> None:
    optimizer, other = made(), torch.randn(9000, device="cuda")
    ckpt.guard(optimizer)
    graph = graph_of(lambda: other.add_(1))
    assert not waits(ckpt, optimizer, graph, 1)
    if how == "add_param_group":
        optimizer.add_param_group({"params": [torch.nn.Parameter(other)]})
        optimizer.param_groups.reverse()
    elif how == "data":
        optimizer.param_groups[0]["params"][1].data = other
    else:
        optimizer = added(other)
    if how != "another Checkpointer":
        ckpt.guard(optimizer)
        assert waits(ckpt, optimizer, graph, 2)
        return
    with ts.Checkpointer(policy({"nvme": tier("nvme", place / "other")}), "other") as second:
        second.guard(optimizer)
        assert waits(second, optimizer, graph, 2)


def test_a_forward_graph_does_not_wait_though_the_first_step_makes_the_optimizers_state(
    ckpt: ts.Checkpointer, waits: Any
) -> None:
    optimizer, other = made(), torch.zeros(10, device="cuda")
    fresh = torch.optim.Adam(optimizer.param_groups[0]["params"], lr=0.1)
    ckpt.guard(fresh)
    graph = graph_of(lambda: other.add_(1))
    fresh.step()
    assert not waits(ckpt, fresh, graph, 1)
    assert not waits(ckpt, fresh, graph, 2)
