"""Saves of a state that is nearly the last one: what has changed is seen, however little it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import alone, arena_of
from support.equality import difference

import tierstate as ts
from tierstate.engine.capture.guard import Guard
from tierstate.manifest.chunk import Buffer, Chunk, as_buffer, spans
from tierstate.manifest.format.leaf import Spec
from tierstate.providers.base import memory_of
from tierstate.providers.registry import REGISTRY
from tierstate.providers.tensors.tensors import TensorProvider


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Providers of this file are known to it alone."""
    monkeypatch.setattr(REGISTRY, "_kinds", dict(REGISTRY._kinds))
    monkeypatch.setattr(REGISTRY, "_types", dict(REGISTRY._types))
    ts.register_provider(Odd, OddProvider)


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [False, True])
def test_keys_that_are_equal_to_python_are_other_keys(place: Path, lazy: bool) -> None:
    tensor = torch.arange(3.0)
    optimizer = torch.optim.SGD([tensor.requires_grad_()])
    states: list[dict[Any, Any]] = [
        {"x": {key: tensor.detach(), "n": key}} for key in (1, True, 1.0, 1, "1", (1, 2), (True, 2), 0.0, -0.0)
    ]
    with ts.Checkpointer(alone("nvme", place), "run") as ckpt:
        if lazy:
            ckpt.guard(optimizer)
        for step, state in enumerate(states):
            ckpt.save(state, step=step).wait("only")
        for step, state in enumerate(states):
            assert difference(state, ckpt.load(step=step)) == ""


class Odd:
    """What a provider of somebody's has to do with."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __state_provider__(self) -> ts.Provider:
        return OddProvider(self)


class OddProvider(ts.Provider):
    kind = "odd-memory"

    def __init__(self, value: Odd) -> None:
        self._value = value

    @property
    def spec(self) -> Spec:
        return Spec(self.kind, shape=(64,))

    def chunks(self, size: int) -> Any:
        for start, n in spans(64, size):
            yield Chunk(start, n, lambda out: out.zero_() and None)

    def memory(self) -> Buffer | None:
        return self._value.memory() if callable(self._value.memory) else self._value.memory

    @classmethod
    def fresh(cls, spec: Spec, device: Any = None) -> OddProvider:
        return cls(Odd(as_buffer(bytearray(64))))

    def load(self, start: int, data: Buffer) -> None:
        raise AssertionError("its memory is read into")

    def done(self) -> Odd:
        return self._value


def lost() -> Any:
    raise OSError("lost")


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (torch.zeros(65, dtype=torch.uint8), "gave 65 elements of torch.uint8 on cpu; right are 64 bytes"),
        (torch.zeros(64), "gave 64 elements of torch.float32"),
        (torch.zeros(128, dtype=torch.uint8)[::2], "without gaps"),
        (lost, "lost"),
    ],
)
def test_memory_that_is_not_what_it_should_be_is_refused(place: Path, memory: Any, message: str) -> None:
    good = torch.arange(64, dtype=torch.uint8)
    with ts.Checkpointer(alone("nvme", place), "run") as ckpt:
        with pytest.raises(ts.CaptureError, match=rf"leaf a\.odd: .*{message}"):
            ckpt.save({"a": {"odd": Odd(memory)}}, step=0)
        ckpt.save({"a": {"odd": Odd(good)}}, step=1).wait("only")
        with pytest.raises(ts.StateMismatch, match=rf"a\.odd: .*{message}"):
            ckpt.restore(into={"a": {"odd": Odd(memory)}})
        into = {"a": {"odd": Odd(torch.zeros(64, dtype=torch.uint8))}}
        assert torch.equal(ckpt.restore(into=into)["a"]["odd"].memory, good)
        assert arena_of(ckpt).in_flight == 0


def test_a_plan_that_failed_halfway_is_not_built_upon(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = torch.arange(64, dtype=torch.uint8)
    state = {"w": torch.full((1000,), 1.0), "lr": 0.5, "odd": Odd(good)}
    with ts.Checkpointer(alone("nvme", place), "run") as ckpt:
        ckpt.save(state, step=1).wait("only")
        state |= {"w": torch.full((1000,), 2.0), "lr": 0.25, "odd": Odd(lost)}
        with pytest.raises(ts.CaptureError, match="lost"):
            ckpt.save(state, step=2)
        state["odd"] = Odd(good)
        ckpt.save(state, step=3).wait("only")
        found = ckpt.load(step=3, only=["w", "lr"])
        assert torch.equal(found["w"], state["w"])
        assert found["lr"] == 0.25

        def interrupted(*args: Any) -> Any:
            raise KeyboardInterrupt

        state |= {"w": torch.full((1000,), 3.0), "lr": 0.125}
        monkeypatch.setattr(Guard, "tensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(state, step=4)
        monkeypatch.undo()
        ckpt.save(state, step=5).wait("only")
        found = ckpt.load(step=5, only=["w", "lr"])
        assert torch.equal(found["w"], state["w"])
        assert found["lr"] == 0.125


@pytest.mark.parametrize("emptied", ["a", "b"])
def test_a_tied_tensor_that_becomes_empty(place: Path, emptied: str) -> None:
    weight = torch.arange(100.0)
    state = {"a": weight, "b": weight}
    with ts.Checkpointer(alone("nvme", place), "run") as ckpt:
        ckpt.save(state, step=1).wait("only")
        state[emptied] = torch.empty(0)
        ckpt.save(state, step=2).wait("only")
        assert difference(state, ckpt.load()) == ""


@pytest.mark.slow
def test_what_a_guarded_optimizer_no_longer_owns_is_captured_at_once(place: Path) -> None:
    weight, average = torch.ones(5000, requires_grad=True), torch.zeros(5000)
    optimizer = torch.optim.SGD([weight])
    with ts.Checkpointer(alone("nvme", place), "run") as ckpt:
        ckpt.guard(optimizer)
        for step in range(4):
            weight.data, average.data = average.data, weight.data  # as an evaluation with averaged weights does
            truth = {"weight": weight.detach().clone(), "average": average.clone()}
            ckpt.save({"weight": weight.detach(), "average": average}, step=step)
            average.add_(1)
            ckpt.save({"weight": weight.detach(), "average": average}, step=step + 100).wait("only")
            assert difference(truth, ckpt.load(step=step)) == ""


def test_a_provider_that_changes_what_it_inherits_is_asked_for_chunks(place: Path) -> None:
    class Inverted(TensorProvider):
        kind = "inverted-bytes"

        def __init__(self, value: Any) -> None:
            super().__init__(value.tensor if isinstance(value, Holder) else value)

        def chunks(self, size: int) -> Any:
            for start, n, fill in super().chunks(size):
                yield Chunk(start, n, lambda out, fill=fill: (fill(out), out.bitwise_not_())[0])

        def load(self, start: int, data: Buffer) -> Any:
            return super().load(start, data.bitwise_not())

    class Holder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __state_provider__(self) -> ts.Provider:
            return Inverted(self)

    ts.register_provider(Holder, Inverted)
    tensor = torch.arange(50, dtype=torch.uint8)
    assert memory_of(Inverted(tensor), 50) is None
    with ts.Checkpointer(alone("nvme", place), "run") as ckpt:
        ckpt.save({"x": Holder(tensor)}, step=0).wait("only")
        into = {"x": Holder(torch.zeros(50, dtype=torch.uint8))}
        ckpt.restore(into=into)
        assert torch.equal(into["x"], tensor)
        stored = b"".join(p.read_bytes() for p in place.rglob("packs/*/*"))
        assert bytes(255 - i for i in range(50)) in stored
