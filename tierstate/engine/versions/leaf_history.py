"""The history of a model: statistics, changes and drift of leaves and layers over the versions of a run.

It reads records and no chunks: of versions that were saved with ``statistics: true`` it knows NaN, range and norms, of
all others only which share of their bytes has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tierstate.engine.store.catalog import RunCatalog, VersionCopies
from tierstate.manifest.arrays import Array
from tierstate.manifest.format.globs import matches_any
from tierstate.manifest.format.leaf_path import Path, format_path
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.leaf_statistics import (
    LeafStatistics,
    changed_share,
    leaf_columns,
    leaf_nbytes,
    leaf_statistics,
)
from tierstate.tiers.concurrency import results_ahead


@dataclass(frozen=True, slots=True)
class VersionHistory:
    """Leaves of one version, beside those of the version before it in the history.

    Attributes:
        seq, step, time, id: of the version.
        statistics: by path; empty if it was saved without.
        changed: by path, the share of the leaf's bytes in chunks that are not as in the version before; empty for the
            first version of the history, and where the two are cut differently.
    """

    seq: int
    step: int
    time: float
    id: str
    statistics: Mapping[str, LeafStatistics]
    changed: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LayerHistory:
    """Layers over versions: what a map of layers and steps shows.

    Attributes:
        layers: common beginnings of paths, up to the first number in them (`layer_of`), in the order of the state.
        seqs, steps: of the versions, oldest first.
        nbytes: ``(layers, versions)``: their bytes.
        norm: ``(layers, versions)``: of all their floats; NaN where it is not known.
        nonfinite: ``(layers, versions)``: how many elements are NaN or infinite; -1 where it is not known.
        changed: ``(layers, versions)``: share of bytes in chunks that are not as in the version before; NaN where that
            is not known.
        norm_change: ``(layers, versions)``: by which part of itself the norm differs from that of the version before.
    """

    layers: Sequence[str]
    seqs: Sequence[int]
    steps: Sequence[int]
    nbytes: Array
    norm: Array
    nonfinite: Array
    changed: Array
    norm_change: Array

    def newest(self, count: int) -> LayerHistory:
        """The same of the newest versions only."""
        at = slice(max(0, len(self.seqs) - count), None)
        tables = (self.nbytes, self.norm, self.nonfinite, self.changed, self.norm_change)
        return LayerHistory(self.layers, self.seqs[at], self.steps[at], *(table[:, at] for table in tables))


def read_versions(catalog: RunCatalog, seqs: Collection[int] | None = None, last: int = 0) -> Iterator[VersionCopies]:
    """Versions of a run, oldest first, each as the first tier has it whose record of it can be read.

    Args:
        seqs: only these numbers.
        last: only so many of the newest; 0 for all.
    """
    here = catalog.seqs()
    wanted = [seq for seq in here if seqs is None or seq in seqs][-last:]

    def read(seq: int) -> VersionCopies | None:
        found = (catalog.look(seq, [tier_run]).entries for tier_run in here[seq])
        entries = next(filter(None, found), None)
        return None if entries is None else entries[0]

    yield from filter(None, results_ahead(read, wanted))


def leaf_history(versions: Iterator[VersionCopies], only: Sequence[str] = ()) -> Iterator[VersionHistory]:
    """The history of the leaves that match one of the globs, or of all leaves with numbers."""
    before: Version | None = None
    for entry in versions:
        version, head = entry.version, entry.version.head
        share = None if before is None else changed_share(version, before)
        changed = {} if share is None else _by_path(version, share, only)
        yield VersionHistory(head.seq, head.step, head.time, version.id, leaf_statistics(version, only), changed)
        before = version


def _by_path(version: Version, values: Array, only: Sequence[str]) -> dict[str, float]:
    known = np.flatnonzero(values == values).tolist()
    leaves = [version.leaves[i] for i in known]
    return {
        leaf.name: float(values[i])
        for i, leaf in zip(known, leaves, strict=True)
        if not only or matches_any(only, leaf.path)
    }


def layer_of(path: Path) -> str:
    """The layer of a leaf: the beginning of its path up to the first number, or all but the last key.

    Keys of state dicts have dots of their own: ``model."layers.3.attn.wq.weight"`` is of layer ``model.layers.3``.
    """
    keys = [key for part in path for key in (part.split(".") if isinstance(part, str) else [part])]
    for i, key in enumerate(keys):
        if i and (isinstance(key, int) or (isinstance(key, str) and key.isdigit())):
            return ".".join(map(_text, keys[: i + 1]))
    return ".".join(map(_text, keys[:-1] or keys))


def _text(key: object) -> str:
    return key if isinstance(key, str) and key.isprintable() else format_path((key,))


def layer_history(versions: Iterator[VersionCopies], only: Sequence[str] = ()) -> LayerHistory:
    """The history of the layers of the leaves that match one of the globs, or of all leaves."""
    rows: dict[str, int] = {}
    columns: list[tuple[Array, ...]] = []
    seqs, steps = [], []
    before: Version | None = None
    paths: tuple[str, ...] | None = None
    layer: Array = np.zeros(0, "i8")
    for entry in versions:
        version = entry.version
        if paths != version.catalog.paths:
            paths, layer = version.catalog.paths, _layers(version, only, rows)
        columns.append(_summed(version, before, layer, len(rows)))
        seqs.append(version.head.seq)
        steps.append(version.head.step)
        before = version
    filled = [np.full((len(rows), len(columns)), empty) for empty in (0, np.nan, -1, np.nan)]
    for at, values in enumerate(columns):
        for table, column in zip(filled, values, strict=True):
            table[: len(column), at] = column
    nbytes, norm, nonfinite, changed = filled
    change = np.full(norm.shape, np.nan)
    with np.errstate(all="ignore"):
        change[:, 1:] = np.abs(norm[:, 1:] - norm[:, :-1]) / norm[:, :-1]
    return LayerHistory(list(rows), seqs, steps, nbytes.astype("i8"), norm, nonfinite.astype("i8"), changed, change)


def _layers(version: Version, only: Sequence[str], rows: dict[str, int]) -> Array:
    """``(leaves,)``: the row of each leaf's layer, -1 for leaves that do not match or have no bytes."""
    found = np.full(len(version.leaves), -1)
    for i, leaf in enumerate(version.leaves):
        if leaf.spec.nbytes and (not only or matches_any(only, leaf.path)):
            found[i] = rows.setdefault(layer_of(leaf.path), len(rows))
    return found


def _summed(version: Version, before: Version | None, layer: Array, count: int) -> tuple[Array, ...]:
    """Bytes, norm, count of what is not finite, and changed share of each layer of a version."""
    norm, nonfinite, changed = np.full(count, np.nan), np.full(count, -1.0), np.full(count, np.nan)
    columns, share = leaf_columns(version), None if before is None else changed_share(version, before)
    held = leaf_nbytes(version)
    mine = (layer >= 0) & (held > 0)
    nbytes = np.bincount(layer[mine], held[mine], count)
    if columns is not None:
        floats = mine & (columns.squares == columns.squares)
        has = np.bincount(layer[floats], minlength=count) > 0
        norm[has] = np.sqrt(np.bincount(layer[floats], columns.squares[floats], count)[has])
        nonfinite[has] = np.bincount(layer[floats], (columns.nan + columns.infinite)[floats], count)[has]
    if share is not None:
        has = nbytes > 0
        changed[has] = np.bincount(layer[mine], (share * held)[mine], count)[has] / nbytes[has]
    return nbytes, norm, nonfinite, changed
