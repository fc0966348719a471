"""Lazy capture: `save` returns early, and the steps of optimizers wait until the guarded tensors are captured.

Between two steps the parameters and the optimizer's state do not change, so they can be copied while the next forward
and backward pass runs (DataStates-LLM, arXiv 2406.10707). That nothing else changed them is validated (`read_set`).
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierstate.manifest.format.leaf_path import Path
from tierstate.providers.base import Provider
from tierstate.providers.sharded.shards import ShardsProvider
from tierstate.providers.tensors.tensors import TensorProvider, local_of
from tierstate.tiers.latch import Completion
from tierstate.tiers.trace import span

from .graph_steps import (
    Memory,
    distrust_graphs,
    in_step_of_graph,
    trusts_graphs,
    watch_replays,
    watch_replays_no_more,
)

log = logging.getLogger("tierstate")


WRAPPED = ("optimizer", "_optimizer", "optim", "base_optimizer")
"""Attributes under which wrappers have the optimizer that they wrap: accelerate, DeepSpeed, Lightning, Megatron,
``torch.distributed.optim`` and others.
"""


WRAPPED_LISTS = ("optimizers", "chained_optimizers")
"""Attributes under which wrappers have several."""


SIZED_STEP = 3
"""The step before which the memory of optimizers is counted. They make their state in the first one, and a wrapper's
step may count twice."""


NOTICED = 0.001
"""Seconds of a wait below which it is no event."""


class Stepper(Protocol):
    """What `Guard.add` takes, or has inside: parameters in groups, state by parameter, and a step that changes them."""

    param_groups: list[dict[str, Any]]
    state: Any

    def step(self, closure: Any = None) -> Any:
        """Change the parameters and the state."""


class Watched(Protocol):
    """A copy of guarded tensors under way: `SaveState`, or a staged state of DCP."""

    captured: Completion

    def release_state(self) -> None:
        """Wait until the tensors may change."""


class _Guarded(NamedTuple):
    """One guarded optimizer: as given, it and those that it wraps, and what undoes the patches of their steps."""

    given: object
    layers: list[Stepper]
    undo: list[Callable[[], None]]


class Guard:
    """The guarded optimizers of a Checkpointer, and the saves for whose capture steps wait.

    Attributes:
        waited: seconds that steps have waited.
        when_waited: called with the seconds of each wait that is long enough to be told.
        when_sized: called once, before the third step, by which optimizers have made their state: with the bytes of
            parameters and state, of this process.
        unstable: paths of leaves that were changed outside of a step, so that a save failed. They are captured before
            `save` returns from then on.
    """

    def __init__(self) -> None:
        self._guarded: list[_Guarded] = []
        self._hook: Any = None
        self._save_states: list[Watched] = []
        self._recorded = False
        self._pid = os.getpid()
        self.waited = 0.0
        self.when_waited: Callable[[float], None] | None = None
        self.when_sized: Callable[[int], None] | None = None
        self._steps = 0
        self.unstable: set[Path] = set()

    @property
    def lazy(self) -> bool:
        """Whether anything may be captured after `save` has returned."""
        return bool(self._guarded) and not self._recorded

    def add(self, optimizer: object) -> None:
        """Guard an optimizer, or one that wraps others: from now on steps wait for captures.

        Raises:
            TypeError: there is no optimizer in it.
        """
        if any(known.given is optimizer for known in self._guarded):
            return
        layers = list(_layers(optimizer))
        if not layers:
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            raise TypeError(
                f"guard takes an optimizer, or what has one as .{', .'.join((*WRAPPED, *WRAPPED_LISTS))}: {kind} has "
                "no param_groups, nor has anything in it"
            )
        if self._hook is None:
            self._hook = _run_first(_step_hook(self))
        self._guarded.append(
            _Guarded(optimizer, layers, [_patch(one, self.before_step) for one in layers if not _hooked(one)])
        )
        watch_replays(self)
        distrust_graphs(self.memory())

    def remove(self, optimizer: object) -> None:
        """Wait for all captures, then let go of an optimizer. Nothing happens if it is not guarded."""
        if any(known.given is optimizer for known in self._guarded):
            self.wait()
            self._drop([known for known in self._guarded if known.given is optimizer])

    def close(self) -> None:
        """Wait for all captures, then let go of all optimizers."""
        self.wait()
        self._drop(list(self._guarded))

    def _drop(self, guarded: Sequence[_Guarded]) -> None:
        for known in guarded:
            for undo in known.undo:
                undo()
            self._guarded.remove(known)
        if not self._guarded and self._hook is not None:
            self._hook.remove()
            self._hook, self._recorded = None, False
            watch_replays_no_more(self)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that steps of the guarded optimizers change: parameters and optimizer state."""
        layers = [layer for known in self._guarded for layer in known.layers]
        found = [tensor for layer in layers for tensor in _tensors(layer)]
        return found if len(layers) < 2 else list({id(tensor): tensor for tensor in found}.values())

    def versions(self) -> list[int]:
        """The version counters of those tensors, which each change moves; of inference tensors, which have none, 0."""
        return [0 if tensor.is_inference() else tensor._version for tensor in self.tensors()]

    def memory(self) -> set[Memory]:
        """Device and address of the storages of the guarded tensors, as they are now."""
        return {_memory(tensor) for tensor in self.tensors()}

    def covers(self) -> Callable[[Provider], bool]:
        """Returns a function: whether a provider's tensor lies in memory of the guarded tensors, as they are now."""
        memory = self.memory()
        return lambda provider: _lies_in(provider, memory)

    def watch(self, save_state: Watched) -> None:
        """Wait for this save too, unless it is captured already."""
        if not save_state.captured.done():
            self._save_states.append(save_state)
            self._distrust_graphs()

    def _distrust_graphs(self) -> None:
        """Make the graphs wait that were captured before a parameter came to a guarded optimizer, or its memory did.

        Parameters only: the memory of optimizer state is mostly made by the first step, after forward and backward
        graphs were captured, so that these cannot change it.
        """
        if trusts_graphs():  # rarely: thousands of parameters take milliseconds
            groups = (group for known in self._guarded for layer in known.layers for group in layer.param_groups)
            distrust_graphs({_memory(parameter) for group in groups for parameter in group["params"]})

    def wait(self) -> None:
        """Wait until every watched save is captured or has failed. Does not raise its error: the `Save` reports it."""
        self._wait(lambda save_state: save_state.captured.exception())

    def before_step(self) -> None:
        """Wait until a step may be queued: then everything in host memory is copied. Copies from devices may be under
        way: the current streams of this thread wait for them, and the host goes on.
        """
        if in_step_of_graph():
            self.wait()  # what is captured into a graph may not wait for events from outside of it
        else:
            self._tell_size()
            self._wait(lambda save_state: save_state.release_state())

    def _tell_size(self) -> None:
        if self.when_sized is None or not self._guarded or os.getpid() != self._pid:
            return
        self._steps += 1
        if self._steps == SIZED_STEP:
            tell, self.when_sized = self.when_sized, None
            try:
                tell(sum(local_of(tensor).nbytes for tensor in self.tensors()))
            except Exception as error:  # of a kind of tensor that nobody has met yet: no step may fail of that
                log.debug("memory for a first save is not prepared: %r", error)

    def _wait(self, until: Callable[[Watched], object]) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the threads that capture are the parent's
        save_states, start = list[Watched](), time.monotonic()
        with span("wait of a step") if self._save_states else nullcontext():
            while new := [one for one in self._save_states.copy() if one not in save_states]:
                for save_state in new:
                    until(save_state)
                save_states += new
        # After an interrupt above, the state is still being read: the next call must wait for those saves too. Taken
        # out one by one, as `watch` may bring another one at any moment: of another thread, or of a signal handler.
        for save_state in save_states:
            if save_state.captured.done():
                with suppress(ValueError):  # another thread's wait has taken it out
                    self._save_states.remove(save_state)
        if save_states:
            seconds = time.monotonic() - start
            self.waited += seconds
            if self.when_waited is not None and seconds > NOTICED:
                self.when_waited(seconds)

    def record(self) -> None:
        """A step is recorded, to be run again without Python: it cannot wait, so that nothing is captured lazily."""
        if not self._recorded:
            self._recorded = True
            log.warning(
                "a guarded step is part of a graph (torch.compile with fullgraph=True), in which it cannot wait: save "
                "returns when all is copied from now on"
            )


def _step_hook(guard: Guard) -> Callable[[Any, Any, Any], None]:
    """The hook that waits before a step, also where `torch.compile` traces the step."""

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def in_one_graph() -> bool:
        """Runs while the step is traced, once. Whether the graph cannot be left in order to wait (`fullgraph`)."""
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracing = InstructionTranslator.current_tx()
        whole = bool(getattr(tracing, "one_graph", True) or getattr(tracing, "error_on_graph_break", False))
        if whole:
            guard.record()
            guard.wait()
        return whole

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait() -> None:
        guard.before_step()

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() and in_one_graph():
            return
        wait()

    return hook


def _run_first(hook: Callable[[Any, Any, Any], None]) -> Any:
    """Register a hook that runs before the step of every optimizer, and before all other hooks.

    Of every one, since any may have parameters of a guarded one: it may have replaced it.
    """
    handle = register_optimizer_step_pre_hook(hook)
    hooks = handle.hooks_dict_ref()
    if hooks is not None:
        hooks.move_to_end(handle.id, last=False)
    return handle


def _layers(optimizer: object) -> Iterator[Stepper]:
    """An optimizer and those that it wraps, from the outside in: all that have parameters in groups."""
    seen: set[int] = set()
    left: list[Any] = [optimizer]
    while left:
        layer = left.pop(0)
        if layer is None or id(layer) in seen:
            continue
        seen.add(id(layer))
        if isinstance(getattr(layer, "param_groups", None), list) and callable(getattr(layer, "step", None)):
            yield layer
        left += [getattr(layer, name, None) for name in WRAPPED]
        for name in WRAPPED_LISTS:
            several = getattr(layer, name, None)
            left += several if isinstance(several, (list, tuple)) else []


def _hooked(optimizer: Stepper) -> bool:
    """Whether torch calls the hooks of steps in its step: it is an optimizer of torch, or wraps one."""
    return any(getattr(type(layer).step, "hooked", False) for layer in _layers(optimizer))


def _patch(optimizer: Stepper, wait: Callable[[], None]) -> Callable[[], None]:
    """Make the step of an object that is no torch optimizer wait. Returns what undoes it."""
    own = vars(optimizer).get("step")
    step, active = optimizer.step, True

    @functools.wraps(step)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        if active:
            wait()
        return step(*args, **kwargs)

    def undo() -> None:
        nonlocal active
        active = False
        if vars(optimizer).get("step") is not waiting:
            return  # patched again since, by a learning rate scheduler for example
        if own is None:
            del optimizer.step
        else:
            vars(optimizer)["step"] = own

    vars(optimizer)["step"] = waiting
    return undo


def _tensors(optimizer: Stepper) -> Iterator[torch.Tensor]:
    """The parameters and the state of an optimizer that lie in memory of their own. Sparse tensors, as the momentum of
    `Embedding(sparse=True)`, do not, and no provider reads them."""
    for group in optimizer.param_groups:
        yield from (one for one in group["params"] if one.layout is torch.strided)
    for state in getattr(optimizer, "state", {}).values():
        if isinstance(state, dict):
            for value in state.values():
                # The type first: isinstance takes ten times as long, and there are thousands.
                if (type(value) is torch.Tensor or isinstance(value, torch.Tensor)) and value.layout is torch.strided:
                    yield value


def _lies_in(provider: Provider, memory: set[Memory]) -> bool:
    if not isinstance(provider, (TensorProvider, ShardsProvider)) or provider.value is None:
        return False
    return _memory(provider.value) in memory


def _memory(tensor: torch.Tensor) -> Memory:
    """Device and address of a tensor's storage; of a DTensor, those of its local tensor."""
    return tensor.device, local_of(tensor).untyped_storage().data_ptr()
