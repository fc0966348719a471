"""Places in files: where a tensor's bytes go when they are written instead of restored."""

from __future__ import annotations

import math

import numpy as np

from tierstate.manifest.box import Box
from tierstate.manifest.chunk import Buffer
from tierstate.tiers.files import BufferedFile


class FilePlace:
    """A run of a file that takes the bytes of a whole tensor, in row-major order.

    Args:
        offset: where in the file it begins.
        shape, itemsize: of the tensor.
    """

    def __init__(self, file: BufferedFile, offset: int, shape: tuple[int, ...], itemsize: int) -> None:
        self._file, self._offset = file, offset
        self._shape, self._itemsize = shape, itemsize

    def load(self, start: int, data: Buffer) -> None:
        """Write bytes that follow each other in the tensor."""
        self._file.write(self._offset + start, data)

    def scatter(self, at: Box, data: Buffer, part: Box) -> None:
        """Write a box of the elements, row by row."""
        axis = len(self._shape)
        while axis > 0 and part.shape[axis:] == self._shape[axis:]:
            axis -= 1  # what lies in axes that the part has all of is one run with what is before it
        cells = data.view(*at.shape, self._itemsize)[part.slices(at.offset)]
        rows = cells.reshape(math.prod(part.shape[:axis]), -1)
        index = np.indices(part.shape[:axis]).reshape(axis, len(rows)).T + part.offset[:axis]
        steps = [self._itemsize * math.prod(self._shape[d + 1 :]) for d in range(len(self._shape))]
        first = self._offset + sum(o * s for o, s in zip(part.offset[axis:], steps[axis:], strict=True))
        for place, row in zip((index @ np.array(steps[:axis], "i8")).tolist(), rows, strict=True):
            self._file.write(first + place, row)
