"""Which steps wait: of wrapped, replaced, patched, compiled optimizers, before all hooks; what `unguard` restores."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpointer_worlds import policy, tier
from support.equality import difference
from support.guarded_jobs import Gates, Job, gated
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

import tierstate as ts
from tierstate.engine.capture.guard import Guard

# Of torch's own modules, as they are imported: torch.distributed.optim and the compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Accelerated(torch.optim.Optimizer):
    """The shape of accelerate's AcceleratedOptimizer: an Optimizer that was never initialised as one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Engine(torch.nn.Module):
    """The shape of DeepSpeed's engine: a module with an optimizer that is not one of torch, around one that is."""

    class Zero:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> Any:
            return self.optimizer.param_groups

        def step(self) -> None:
            self.optimizer.step()

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizer = Engine.Zero(optimizer)

    def step(self) -> None:
        self.optimizer.step()


class Chained:
    """The shape of Megatron's ChainedOptimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.chained_optimizers = [Engine.Zero(optimizer)]

    def step(self) -> None:
        for optimizer in self.chained_optimizers:
            optimizer.step()


class Homemade:
    """An optimizer of no library: parameters in groups, and a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1)


class Sgd(torch.optim.Optimizer):
    """An optimizer that can be compiled without a graph break."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.add_(state["momentum"], alpha=-group["lr"])


class Mixed:
    """Two optimizers in one, of which only the first is one of torch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        other = torch.nn.Parameter(torch.zeros(3))
        other.grad = torch.ones(3)
        self.optimizers = [torch.optim.SGD([other], lr=0.1), Homemade(optimizer)]

    def step(self) -> None:
        self.optimizers[1].step()
        self.optimizers[0].step()


def plain(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer


def scheduled(optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler replaces the step of its optimizer."""
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def must_wait(ckpt: ts.Checkpointer, job: Job, gates: Gates, step: Callable[[], Any], number: int = 1) -> None:
    """A step must wait for the capture; then the version is the state at the call."""
    truth = job.truth()
    reached, opened = gates.hold(job.weight.data_ptr())
    save = ckpt.save(job.state(), step=number)
    assert reached.wait(60), "save has returned, and the capture of this leaf has only begun"
    job.backward()
    stepping = threading.Thread(target=step)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive()
    assert torch.equal(job.weight, truth["model"]["1.weight"])
    opened.set()
    stepping.join(60)
    assert not torch.equal(job.weight, truth["model"]["1.weight"])
    save.wait()
    assert difference(truth, ckpt.load(step=number)) == ""
    gates.held.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap", [plain, scheduled, Accelerated, Engine, Chained, Homemade, Mixed], ids=lambda w: w.__name__
)
def test_a_step_waits_through_whatever_wraps_it_until_unguarded(wrap: Callable[..., Any], place: Path) -> None:
    job = Job()
    wrapped = wrap(job.optimizer)
    before = vars(wrapped).get("step")
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt, gated() as gates:
        ckpt.guard(wrapped)
        ckpt.guard(wrapped)
        must_wait(ckpt, job, gates, wrapped.step)
        ckpt.unguard(wrapped)
        ckpt.unguard(wrapped)
        assert vars(wrapped).get("step") is before
        assert not _global_optimizer_pre_hooks
        save = ckpt.save(job.state(), step=2)
        save.wait_captured(0)
        ckpt.guard(wrapped)
        must_wait(ckpt, job, gates, wrapped.step, 3)
    assert vars(wrapped).get("step") is before
    assert not _global_optimizer_pre_hooks


@pytest.mark.slow
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", ["zero", "local"])
def test_wrappers_of_torch_wait(kind: str, place: Path) -> None:
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    job = Job()
    if kind == "zero":
        job.optimizer = ZeroRedundancyOptimizer(job.model.parameters(), torch.optim.AdamW, lr=0.1)
    else:
        averager = torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager(period=2)
        job.optimizer = PostLocalSGDOptimizer(job.optimizer, averager)
    job.backward()
    job.optimizer.step()
    guard = Guard()
    guard.add(job.optimizer)
    tensors = {tensor.data_ptr() for tensor in guard.tensors()}
    inner = job.optimizer.optim  # type: ignore[attr-defined]
    assert {t.data_ptr() for t in inner.state[job.weight].values()} < tensors
    assert {p.data_ptr() for p in job.model.parameters()} < tensors
    guard.close()
    state = {"model": job.model}
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt, gated() as gates:
        job.state = lambda: state  # type: ignore[method-assign]
        job.truth = lambda: {"model": copy.deepcopy(job.model.state_dict())}  # type: ignore[method-assign]
        ckpt.guard(job.optimizer)
        must_wait(ckpt, job, gates, job.optimizer.step)


@pytest.mark.slow
def test_the_step_waits_before_every_hook(place: Path) -> None:
    """Hooks that change parameters, global ones and the optimizer's, registered before the guard and after it."""
    job = Job()

    def change(*_args: Any) -> None:
        with torch.no_grad():
            job.weight.mul_(0.5)

    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt, gated() as gates:
        hooks = [register_optimizer_step_pre_hook(change), job.optimizer.register_step_pre_hook(change)]
        ckpt.guard(job.optimizer)
        hooks += [register_optimizer_step_pre_hook(change), job.optimizer.register_step_pre_hook(change)]
        must_wait(ckpt, job, gates, job.optimizer.step)
        for hook in hooks:
            hook.remove()


@pytest.mark.slow
def test_the_step_of_another_optimizer_of_the_same_parameters_waits(place: Path) -> None:
    job = Job()
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt, gated() as gates:
        ckpt.guard(job.optimizer)
        must_wait(ckpt, job, gates, torch.optim.SGD(job.model.parameters(), lr=1.0).step)


def test_a_step_that_was_patched_again_is_left_alone() -> None:
    job, guard = Job(), Guard()
    homemade = Homemade(job.optimizer)
    guard.add(homemade)
    ours = homemade.step
    homemade.step = lambda: ours()  # type: ignore[method-assign]
    theirs = homemade.step
    guard.remove(homemade)
    assert homemade.step is theirs
    before = job.weight.detach().clone()
    homemade.step()
    assert not torch.equal(job.weight, before)


@pytest.mark.parametrize("what", [torch.nn.Linear(2, 2), "adamw", None], ids=["module", "text", "none"])
def test_what_is_no_optimizer_is_refused(what: object, place: Path) -> None:
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        with pytest.raises(TypeError, match="guard takes an optimizer, or what has one as"):
            ckpt.guard(what)
        ckpt.unguard(what)


@pytest.mark.slow
def test_unguard_waits_for_the_capture(place: Path) -> None:
    job = Job()
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt, gated() as gates:
        ckpt.guard(job.optimizer)
        reached, opened = gates.hold(job.weight.data_ptr())
        save = ckpt.save(job.state(), step=1)
        assert reached.wait(60)
        threading.Timer(0.1, opened.set).start()
        ckpt.unguard(job.optimizer)
        save.wait_captured(0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("order", ["guard first", "compile first"])
def test_a_step_compiled_as_one_graph_works(backend: str, order: str, place: Path) -> None:
    """It cannot wait: so its tensors are captured before save returns, from when it is traced on."""
    torch._dynamo.reset()
    job = Job()
    job.optimizer = Sgd(job.model.parameters())

    @torch.compile(fullgraph=True, backend=backend)
    def step() -> None:
        job.optimizer.step()

    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        if order == "compile first":
            job.backward()
            step()
        ckpt.guard(job.optimizer)
        truths = {}
        for number in range(1, 6):
            truths[number] = job.truth()
            save = ckpt.save(job.state(), step=number)
            job.backward()
            step()
            assert difference(truths[number], job.truth()) != ""
            if number > 1:
                save.wait_captured(0)
        for number, truth in truths.items():
            assert difference(truth, ckpt.load(step=number)) == ""


@pytest.mark.slow
def test_a_compiled_step_that_may_leave_its_graph_waits(place: Path) -> None:
    torch._dynamo.reset()
    job = Job()
    step = torch.compile(job.optimizer.step, backend="eager")
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt, gated() as gates:
        ckpt.guard(job.optimizer)
        for number in (1, 2):
            must_wait(ckpt, job, gates, step, number)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait(place: Path) -> None:
    job = Job()
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt, gated() as gates:
        ckpt.guard(job.optimizer)
        reached, opened = gates.hold(job.weight.data_ptr())
        ckpt.save(job.state(), step=1)
        assert reached.wait(60)
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            with torch.no_grad():
                job.optimizer.step()
            os._exit(17)
        _, status = os.waitpid(child, 0)
        opened.set()
        assert os.waitstatus_to_exitcode(status) == 17
