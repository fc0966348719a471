"""A version as a state whose tensors are read when somebody asks; one that ZeRO has saved, with whole parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tierstate.checkpointer import open_quietly
from tierstate.engine.progress import Progress, no_progress
from tierstate.files.readers.outline import NO_BYTES, OutlineLeaf, Selection, state_of_outline
from tierstate.files.readers.reader import ImportSource
from tierstate.files.readers.stored import FileValue, check_file_spec
from tierstate.files.readers.zero import DEEPSPEED, MODEL, OPTIMIZER, is_zero, whole_parameters
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.format.leaf import STORAGE, Spec
from tierstate.providers.tensors.arrays import ArrayProvider
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.tiers.policy.policy import Policy

from .export import read_values
from .ranges import ChunkCache, LeafRange, RangeReader

_KINDS = (TensorProvider.kind, ArrayProvider.kind, STORAGE)


def lazy_state(reader: RangeReader) -> Any:
    """The state of a version. Plain values are read now, tensors are `FileValue` that stay in the tiers.

    Raises:
        StateMismatch: the version has pickles, or values of a provider of somebody's own.
        Damaged, Unreadable: a value cannot be read.
    """
    version = reader.entry.version
    chosen = Selection(version.leaves).leaves()
    sources = [one.source for one in chosen if one.source != NO_BYTES]
    values = reader.use(lambda entry: read_values(entry, reader.arena, sources))
    parts = [
        OutlineLeaf(one.leaf, None if one.source == NO_BYTES else [str(one.source)], values.get(one.source))
        for one in chosen
    ]

    def find(name: Sequence[str], spec: Spec) -> FileValue:
        leaf = int(name[0])
        if spec.kind not in _KINDS:
            raise StateMismatch(f"leaf {version.leaves[leaf].name} is of kind {spec.kind!r}, and no tensor or value")
        return FileValue(check_file_spec(spec), partial(_read, reader, leaf), (version.id, leaf))

    return state_of_outline(parts, find, f"version {version.id[:12]}")


def _read(reader: RangeReader, leaf: int, start: int, out: Buffer) -> None:
    if out.numel():
        reader.read([LeafRange(leaf, start, out)])


@contextmanager
def open_zero_version(
    policy: Policy | str | os.PathLike[str],
    run: str,
    *,
    step: int | None = None,
    version: str | None = None,
    tag: str | None = None,
    progress: Progress = no_progress,
) -> Iterator[ImportSource]:
    """A context manager with whole parameters from a version that ZeRO has saved, by any number of ranks, through
    `tierstate.integrations.deepspeed`; or from one that has them already.

    Args:
        policy, run: of the version; its tiers are open inside the block.
        step, version, tag: which version; by default the newest.
        progress: called with the bytes read since the last call.

    Raises:
        NotFound: there is no such version.
        StateMismatch: it is of neither kind.
        FormatError: as `whole_parameters`.
        TierstateError: as a restore.
    """
    with open_quietly(policy, run) as ckpt:
        found = ckpt._find(step, version, tag).version
        reader = RangeReader(lambda: ckpt._find(None, found.id, None), ckpt._arena, ChunkCache())
        state, what = lazy_state(reader), f"step {found.head.step} of run {run!r}"
        yield _source(state, what, progress, found.head.step, found.head.metadata)


def _source(state: Any, what: str, progress: Progress, step: int, metadata: Mapping[str, Any]) -> ImportSource:
    # Without what says that the version is one of DeepSpeed's files.
    kept = {key: value for key, value in metadata.items() if key != DEEPSPEED}
    if isinstance(state, dict) and {MODEL, OPTIMIZER, DEEPSPEED} <= set(state):
        return ImportSource(state, step, kept)
    if not isinstance(state, dict) or not is_zero(str(name) for name in state):
        raise StateMismatch(f"{what} was not saved by DeepSpeed's ZeRO: it has no partitions of an optimizer")
    return ImportSource(whole_parameters(state, what, progress).state, step, kept)
