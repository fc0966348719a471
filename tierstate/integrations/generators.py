"""Random generators as frameworks resume them: on another number of CUDA devices a job still goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from tierstate.providers.values.stateful import Rng

log = logging.getLogger("tierstate")


class ResumedRng(Rng):
    """The generators of this process, of which a restore leaves those of CUDA devices as they are where the version has
    them of another number of devices. It tells so; the code that makes this object is no user's, who could choose.
    """

    _told = False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators, as `Rng` does."""
        saved = len(state.get("cuda", ()))
        here = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if saved not in (0, here):
            if not self._told:  # a restore sets generators twice
                log.warning(
                    "generators of %d CUDA devices were saved, and here are %d: they are not restored, so what draws "
                    "on a device goes on with other numbers", saved, here,
                )  # fmt: skip
            self._told = True
            state = {name: one for name, one in state.items() if name != "cuda"}
        super().load_state_dict(state)
