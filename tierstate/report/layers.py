"""The map of layers by versions: which layers have changed from one version to another, and how their values stand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tierstate.engine.info import VersionInfo
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.format.leaf import CONTAINERS, Path, format_path
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.diff import LeafDiff, diff_versions
from tierstate.run import Run

from .data import LayerHistory

MAP_VERSIONS = 100
"""Versions that are looked at, at most, evenly over the run."""


MAP_LAYERS = 60
"""Layers that are shown, at most."""


MAP_CHUNKS = 2_000_000
"""Chunks whose digests are compared, at most: of a state with very many, fewer versions are looked at."""


def layer_history(run: Run, versions: Sequence[VersionInfo]) -> LayerHistory:
    """The map of a run. Reads the records of the versions that it looks at, and no chunk.

    Args:
        versions: of the run, oldest first.
    """
    there = [version for version in versions if version.id and version.tiers]
    looked = _records(run, sampled(there, run.policy.chunk))
    found = changed_layers(list(looked))
    return with_statistics(run, found)


def with_statistics(run: Run, found: LayerHistory) -> LayerHistory:
    """The map with the norms of the layers, and with how many of their values are not finite, where that is known."""
    return found


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


def _records(run: Run, versions: Sequence[VersionInfo]) -> Iterator[Version]:
    """The versions, each from the first tier that can read it; one that none can read is passed over."""
    tier_runs = {tier_run.name: tier_run for tier_run in run._tier_runs}
    for version in versions:
        for name in version.tiers:
            try:
                found = tier_runs[name].record(version.seq).version
            except TierstateError:
                continue
            if found.id == version.id:
                yield found
                break


def changed_layers(versions: Sequence[Version]) -> LayerHistory:
    """The share of each layer's bytes that has changed since the version before; None for the first one.

    Args:
        versions: those that are looked at, oldest first.
    """
    if not versions:
        return LayerHistory()
    leaves = [leaf.path for leaf in versions[-1].leaves if leaf.spec.kind not in CONTAINERS and leaf.spec.nbytes]
    depth = depth_for(leaves, MAP_LAYERS)
    layers = list(dict.fromkeys(path[:depth] for path in leaves))
    shown = {path: i for i, path in enumerate(layers[:MAP_LAYERS])}
    changed: list[list[float | None]] = [[None] * len(versions) for _ in shown]
    for at, (old, new) in enumerate(itertools.pairwise(versions), 1):
        for row, share in _shares(diff_versions(old, new), shown, depth).items():
            changed[row][at] = share
    nothing: list[list[None]] = [[None] * len(versions) for _ in shown]
    return LayerHistory(
        [format_path(path) for path in shown],
        [version.head.step for version in versions],
        nothing,
        nothing,
        changed,
        len(layers) - len(shown),
    )


def depth_for(paths: Sequence[Path], most: int) -> int:
    """How many keys of a path name a layer: as many as make at most so many layers, and 1 at least."""
    longest = max(map(len, paths), default=1)
    for depth in range(longest, 1, -1):
        if len({path[:depth] for path in paths}) <= most:
            return depth
    return 1


def _shares(leaves: Sequence[LeafDiff], shown: dict[Path, int], depth: int) -> dict[int, float]:
    """By row, the share of the layer's bytes that has changed."""
    total: dict[int, int] = {}
    fresh: dict[int, int] = {}
    for leaf in leaves:
        row = shown.get(leaf.path[:depth])
        if row is not None and leaf.change != "removed":
            total[row] = total.get(row, 0) + leaf.nbytes
            fresh[row] = fresh.get(row, 0) + leaf.changed_nbytes
    return {row: fresh[row] / nbytes for row, nbytes in total.items() if nbytes}
