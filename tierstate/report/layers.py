"""The map of layers by versions: which layers have changed from one version to another, and how their values stand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierstate.engine.info import VersionInfo
from tierstate.manifest.arrays import Array
from tierstate.run import Run

from .data import LayerMap

MAP_VERSIONS = 100
"""Versions that are looked at, at most, evenly over the run."""


MAP_LAYERS = 60
"""Layers that are shown, at most: those with the most bytes."""


MAP_CHUNKS = 2_000_000
"""Chunks whose digests are compared, at most: of a state with very many, fewer versions are looked at."""


def layer_map(run: Run, versions: Sequence[VersionInfo]) -> LayerMap:
    """The map of a run. Reads the records of the versions that it looks at, and no chunk.

    Args:
        versions: of the run, oldest first.
    """
    there = [version for version in versions if version.id and version.tiers]
    found = run.layers(seqs={version.seq for version in sampled(there, run.policy.chunk)})
    size = found.nbytes.max(axis=1, initial=0)
    shown = np.sort(np.argsort(-size, kind="stable")[:MAP_LAYERS])
    return LayerMap(
        [found.layers[i] for i in shown.tolist()],
        list(found.steps),
        _numbers(found.norm[shown]),
        [[None if n < 0 else n for n in row] for row in found.nonfinite[shown].tolist()],
        _numbers(found.changed[shown]),
        _numbers(found.norm_change[shown]),
        len(found.layers) - len(shown),
    )


def _numbers(table: Array) -> list[list[float | None]]:
    """Rows of numbers; None for what is not known, and for what JSON has no number for."""
    return [[value if np.isfinite(value) else None for value in row] for row in table.tolist()]


def sampled(versions: Sequence[VersionInfo], chunk: int) -> list[VersionInfo]:
    """Versions that are looked at, evenly spread, with the first and the last one.

    Args:
        chunk: length of a chunk in bytes.
    """
    if not versions:
        return []
    chunks = 1 + versions[-1].nbytes // chunk
    count = min(len(versions), MAP_VERSIONS, max(2, MAP_CHUNKS // chunks))
    return [versions[i] for i in np.unique(np.linspace(0, len(versions) - 1, count).round().astype("i8")).tolist()]
