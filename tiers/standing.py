"""What stood at the last save: by it an unchanged chunk is known before it is copied."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierstate.manifest.index import Array


@dataclass(frozen=True, eq=False)
class Standing:
    """The chunks of one capture.

    Attributes:
        nbytes: ``(sources,)``: lengths of the sources: rows mean the same as long as these do.
        digests: ``(chunks, 2)`` of uint64.
        samples: ``(chunks,)`` of uint64: of big chunks, a sample each; 0 where there is none.
        likely: ``(chunks,)`` of bool: which need not be copied if they have not changed.
    """

    nbytes: Array
    digests: Array
    samples: Array
    likely: Array

    @classmethod
    def nothing(cls, nbytes: Array, chunks: int) -> Standing:
        """Of a first save: everything is copied."""
        return cls(nbytes, np.zeros((chunks, 2), "<u8"), np.zeros(chunks, "<u8"), np.zeros(chunks, bool))

    def fits(self, nbytes: Array) -> bool:
        """Whether the sources are cut as they were."""
        return np.array_equal(self.nbytes, nbytes)
