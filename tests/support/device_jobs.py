"""Training jobs on a CUDA device, real or fake, for tests."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from . import fake_cuda


class DeviceJob:
    """A model and its optimizer on a device, odd strides there, and what an ordinary state has on the host.

    Args:
        width: of its layers on a real device. The fake one computes on the host, and gets short ones.
        device: where the model is.
    """

    def __init__(self, width: int = 1024, device: str = "cuda") -> None:
        fake = fake_cuda.is_installed()
        self.device, self.rounds = device, 2 if fake else 20
        width, rows = (width // 32, 4) if fake else (width, 512)
        short = 100 if fake else 1
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(rows, width, device=device)
        self.odd = torch.randn(70, 900 // short, device=device).t()[::2]
        self.host, self.big = torch.randn(1000), torch.randn(600_000 // short)
        self.steps = 0

    def state(self) -> dict[str, Any]:
        """What is saved and restored."""
        here = {"host": self.host, "big": self.big, "odd": self.odd, "steps": self.steps}
        return {"model": self.model, "optimizer": self.optimizer, "rng": torch.cuda.get_rng_state(self.device), **here}

    def truth(self) -> Any:
        """The state's values now, on the host."""
        torch.cuda.synchronize(self.device)
        state = {**self.state(), "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return truth_of(state)

    def forward(self) -> None:
        """Work for the device that changes no parameter."""
        for _ in range(self.rounds):
            self.model(self.batch).square().mean().backward()

    def step(self) -> None:
        """One step of training, which changes everything."""
        self.forward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for tensor in (self.host, self.big, self.odd):
            tensor.mul_(1.5)
        self.steps += 1


class OddTensors:
    """Short tensors of several devices, kinds and strides, and of the host, guarded as an optimizer's are.

    Args:
        devices: the indices of CUDA devices.
        seed: of the values.
    """

    def __init__(self, devices: Iterable[int], seed: int) -> None:
        torch.manual_seed(seed)
        self.tensors: list[torch.Tensor] = []
        for index in devices:
            place = torch.device("cuda", index)
            wide = torch.randn(40, 30, device=place)
            self.tensors += [torch.randn(3000, device=place), wide.t()[::2], wide[1:, 3:9].clone()]
            self.tensors += [torch.randint(0, 99, (7,), device=place), torch.zeros(0, device=place)]
            self.tensors += [torch.randn(20, dtype=torch.complex64, device=place).conj()]
        self.tensors += [torch.randn(500), torch.randn(20, 30).t()]
        self.param_groups = [{"params": self.tensors}]
        self.state: dict[Any, Any] = {}

    def step(self, closure: Any = None) -> None:
        """Change all of them: queued on the devices."""
        for tensor in self.tensors:
            tensor.add_(1)

    def saved(self) -> dict[str, torch.Tensor]:
        """What is saved and restored."""
        return {str(i): tensor for i, tensor in enumerate(self.tensors)}


def truth_of(state: Any) -> Any:
    """A copy of its values, in host memory."""
    return copy.deepcopy(on_the_host(state))


def on_the_host(value: Any) -> Any:
    """The same values in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return type(value)((k, on_the_host(v)) for k, v in value.items())
    return value
