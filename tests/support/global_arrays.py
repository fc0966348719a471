"""Shards of global arrays as the ranks of a job hold them, and the arrays read back from records chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch

from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Buffer, Chunk, empty_buffer, to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.format.leaf import Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.log import Log
from tierstate.providers.base import Provider
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.tiers.base import Range, Tier


class Pieces:
    """What a rank holds of an array of float32.

    Args:
        whole: the array; what lies in the boxes is copied out of it.
        boxes: those that the rank holds.
    """

    def __init__(self, whole: torch.Tensor, boxes: Sequence[Box]) -> None:
        self.shape, self.boxes = tuple(whole.shape), list(boxes)
        self.values = [whole[box.slices()].clone() for box in boxes]

    def __state_provider__(self) -> Provider:
        return _Pieces(self)


class _Piece(TensorProvider):
    def __init__(self, value: torch.Tensor, at: Box) -> None:
        super().__init__(value)
        self._at = at

    @property
    def box(self) -> Box:
        return self._at


class _Pieces(Provider):
    kind = "tensor"

    def __init__(self, value: Pieces) -> None:
        self._value = value

    @property
    def spec(self) -> Spec:
        return Spec("tensor", "float32", 4, self._value.shape)

    @property
    def parts(self) -> Sequence[Provider]:
        return [_Piece(value, box) for value, box in zip(self._value.values, self._value.boxes, strict=True)]

    def chunks(self, size: int) -> Iterator[Chunk]:
        raise AssertionError("pieces are saved one by one")

    @classmethod
    def fresh(cls, spec: Spec, device: torch.device | None = None) -> Self:
        raise NotImplementedError

    def load(self, start: int, data: Buffer) -> None:
        raise NotImplementedError

    def done(self) -> Any:
        raise NotImplementedError


def read(where: Sequence[Tier], run: str, seq: int) -> tuple[Record, dict[str, np.ndarray[Any, Any]]]:
    """A version, of which several tiers may each have parts, and its leaves' bytes by name: arrays as arrays.

    Every chunk lies in one of the tiers, raw, and is what its digest says.
    """
    records = [Log(tier, run).read(seq) for tier in where]
    version = records[0].version
    assert {record.version.id for record in records} == {version.id}
    found: dict[str, np.ndarray[Any, Any]] = {}
    row = 0
    for shard, leaf in enumerate(version.shard_leaf.tolist()):
        data = b""
        for _ in range(row, int(version.chunk_end[shard])):
            data += _chunk(where, records, row)
            assert checksum(data[-int(version.chunk_nbytes[row]) :]) == version.digests[row].tobytes()
            row += 1
        spec, box = version.leaves[leaf].spec, version.boxes[shard]
        kind = np.float32 if spec.dtype == "float32" else np.uint8
        whole = found.setdefault(version.leaves[leaf].name, np.zeros(spec.shape, kind))
        whole[box.slices()] = np.frombuffer(data, kind).reshape(box.shape)
    return records[0], found


def _chunk(where: Sequence[Tier], records: Sequence[Record], row: int) -> bytes:
    for tier, record in zip(where, records, strict=True):
        if (place := record.layout.place(row)) is not None:
            out = empty_buffer(place.stored)
            tier.read(place.object, [Range(place.offset, out)])
            return to_bytes(out)
    raise AssertionError(f"chunk {row} lies nowhere")
