"""The process's global random generators as one thing with a state."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class Rng:
    """Python's ``random``, NumPy's legacy global generator, torch's CPU generator and those of all CUDA devices.

    Put ``Rng()`` into the state, once per process. Generators of your own (``torch.Generator``, ``random.Random``,
    ``numpy.random.Generator``) go into the state themselves.

    Args:
        cuda: also keep the generators of the CUDA devices, if CUDA is in use when the state is taken.
    """

    def __init__(self, *, cuda: bool = True) -> None:
        self._cuda = cuda

    def state_dict(self) -> dict[str, Any]:
        """``python``, ``numpy``, ``torch``, and ``cuda`` (one uint8 tensor per device) where CUDA is in use."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }
        if self._cuda and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all generators, or none of them.

        Raises:
            ValueError: the state has other generators than this process: a missing one, or another number of devices.
        """
        self._check(state)
        before = self.state_dict()
        try:
            self._set(state)
        except BaseException:
            self._set(before)
            raise

    def _check(self, state: Mapping[str, Any]) -> None:
        missing = {"python", "numpy", "torch"} - set(state)
        if missing:
            raise ValueError(f"the saved state has no generator {', '.join(sorted(missing))}")
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        saved = len(state.get("cuda", ()))
        if self._cuda and saved and saved != devices:
            raise ValueError(
                f"the saved state has generators of {saved} CUDA devices, here are {devices}; use Rng(cuda=False)"
            )

    def _set(self, state: Mapping[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        if self._cuda and state.get("cuda"):
            torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])
