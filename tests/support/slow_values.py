"""A value whose bytes a callback provides, for states that are slow or fail during the capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import tierstate as ts
from tierstate.manifest.chunk import Buffer, Chunk, spans
from tierstate.manifest.format.leaf import Spec


class Filled(ts.Provider):
    """The provider of a `Fill`."""

    kind = "filled"

    def __init__(self, value: Fill) -> None:
        self.value = value

    @property
    def spec(self) -> Spec:
        return Spec(self.kind, shape=(self.value.nbytes,))

    def chunks(self, size: int) -> Iterator[Chunk]:
        for start, nbytes in spans(self.value.nbytes, size):
            yield Chunk(start, nbytes, self._fill)

    def _fill(self, out: Buffer) -> None:
        self.value.calls += 1
        self.value.called(out)

    @classmethod
    def fresh(cls, spec: Spec, device: torch.device | None = None) -> Filled:
        return cls(Fill(spec.shape[0], lambda _out: None))

    def load(self, start: int, data: Buffer) -> None:
        """Nothing: nobody asks for these bytes."""

    def done(self) -> Any:
        return self.value


class Fill:
    """So many bytes.

    Attributes:
        calls: fills so far.
    """

    def __init__(self, nbytes: int, called: Callable[[Buffer], object]) -> None:
        self.nbytes, self.called, self.calls = nbytes, called, 0

    def __state_provider__(self) -> ts.Provider:
        return Filled(self)
