"""Find the first version of a run for which something holds, and look at as few versions as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tierstate.engine.info import VersionInfo


class Look(NamedTuple):
    """One version that was looked at.

    Attributes:
        version: the version.
        holds: whether it holds there; None where that cannot be told.
    """

    version: VersionInfo
    holds: bool | None


class Bisection(NamedTuple):
    """What was found.

    Attributes:
        first: the first version for which it holds; None: it does not hold for the newest one.
        before: the last version before it for which it does not hold; None: it holds for the oldest one, or that is not
            known. Versions between the two could not be looked at.
        looks: the versions that were looked at, in this order.
    """

    first: VersionInfo | None
    before: VersionInfo | None
    looks: Sequence[Look]


def bisect(versions: Sequence[VersionInfo], holds: Callable[[VersionInfo], bool | None]) -> Bisection:
    """Find the first version for which something holds that, once it does, holds for all later ones.

    Looks at 1 + log2(n) versions, and more only where it cannot be told.

    Args:
        versions: oldest first.
        holds: returns whether it holds for a version; None where that cannot be told.
    """
    looks: list[Look] = []
    silent: set[int] = set()

    def look(index: int) -> bool | None:
        looks.append(Look(versions[index], holds(versions[index])))
        if looks[-1].holds is None:
            silent.add(index)
        return looks[-1].holds

    last = next((i for i in reversed(range(len(versions))) if look(i) is not None), -1)
    if last < 0 or not looks[-1].holds:
        return Bisection(None, versions[last] if last >= 0 else None, looks)
    low, high = -1, last
    while high - low > 1:
        for index in _from_the_middle(low, high):
            if index not in silent and (found := look(index)) is not None:
                low, high = (low, index) if found else (index, high)
                break
        else:
            break  # of none in between can it be told
    return Bisection(versions[high], versions[low] if low >= 0 else None, looks)


def _from_the_middle(low: int, high: int) -> Iterator[int]:
    """The indices between two, the middle one first, then those beside it."""
    middle = (low + high) // 2
    return iter(sorted(range(low + 1, high), key=lambda index: (abs(index - middle), index)))


def has_nonfinite(state: Any) -> bool:
    """Whether a tensor or array of a state has a NaN or an infinity."""
    if isinstance(state, dict):
        return any(map(has_nonfinite, state.values()))
    if isinstance(state, (list, tuple)):
        return any(map(has_nonfinite, state))
    if isinstance(state, torch.Tensor):
        if not (state.is_floating_point() or state.is_complex()):
            return False
        # Types of fewer than 16 bits have no `isfinite` of their own.
        wide = state.float() if state.element_size() == 1 else state
        return not bool(torch.isfinite(wide).all())
    if isinstance(state, np.ndarray) and state.dtype.kind in "fc":
        return not bool(np.isfinite(state).all())
    return isinstance(state, float) and not np.isfinite(state)
