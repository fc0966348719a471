"""tierstate as a checkpointing class of DLIO, so that MLPerf Storage's own program measures it on a real cluster.

In the workload's YAML, beside what its closed division says (the folder of this repository is on `PYTHONPATH`):

    checkpoint:
      checkpoint_mechanism_classname: benchmarks.field.dlio.TierstateCheckpointing

The policy is the file that `TIERSTATE_POLICY` names; without it, one NVMe tier in the workload's checkpoint folder. A
checkpoint counts once it is durable. Each rank has a run of its own, as in DLIO each has files of its own.

DLIO saves the same values again and again, of which tierstate would write nothing: a byte of each 64 KiB is changed
before a save, so that all of it is written.
"""

from __future__ import annotations

import os
from typing import Any, Self

import torch
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing

import tierstate as ts
from benchmarks.state import tensors

STEPS_OF_EPOCH = 10**6
"""Steps of an epoch have lower numbers."""


class TierstateCheckpointing(PyTorchCheckpointing):  # type: ignore[misc]
    """Saves and restores what `PyTorchCheckpointing` has in its files."""

    _instance: Self | None = None

    @classmethod
    def get_instance(cls) -> Self:
        """The one object of this process, as DLIO asks for it."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, ts.Checkpointer] = {}
        self._checkpointer(self.args.my_rank)  # here, since the first save is measured

    def _checkpointer(self, rank: int) -> ts.Checkpointer:
        if rank not in self._open:
            named = os.environ.get("TIERSTATE_POLICY")
            place = os.path.join(self.args.storage_root, self.args.checkpoint_folder, "tierstate")
            policy = ts.Policy.load(named) if named else ts.Policy.default(os.path.abspath(place))
            self._open[rank] = ts.Checkpointer(policy, run=f"rank-{rank}")
        return self._open[rank]

    def _state(self) -> dict[str, Any]:
        parts = {"model": self.model_state, "layers": self.layer_state, "optimizer": self.optimization_state}
        return {name: part for name, part in parts.items() if part}

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        """Save, and return when it is durable in the tier that the policy says."""
        rank = self.args.my_rank
        # DLIO counts the checkpoints by their folders.
        self.checkpoint_storage.create_node(f"global_epoch{epoch}_step{step_number}", exist_ok=True)
        if self.rank_to_checkpoint == rank and (state := self._state()):
            for tensor in tensors(state):
                tensor.view(torch.uint8)[:: 1 << 16].add_(1)
            self._checkpointer(rank).save(state, step=STEPS_OF_EPOCH * epoch + step_number).wait()

    def load_checkpoint(self, epoch: int, step_number: int) -> None:
        """Restore into the tensors that are there, on another host where the benchmark asks for that."""
        rank = self.args.my_rank
        if self.args.checkpoint_recovery_rank_shift:
            rank = (rank + self.MPI.npernode()) % self.MPI.size()
        if self.rank_to_checkpoint == self.args.my_rank and (state := self._state()):
            self._checkpointer(rank).restore(into=state, step=STEPS_OF_EPOCH * epoch + step_number)

    def finalize(self) -> None:
        """Let go of all."""
        for ckpt in self._open.values():
            ckpt.close()
        super().finalize()
