"""Routes ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` that are given only a path to the tiers of a policy.

DCP chooses its own storage for a call without a writer or a reader, by classes that one of its modules names; and an
asynchronous save makes that choice later, in a thread or a process. `routed` replaces these names for a while.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from torch.distributed.checkpoint import _storage_utils, state_dict_saver
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.posix.files import is_file

from .marker import METADATA, is_marker
from .plugins import TierReader, TierWriter
from .step import names_step

EXECUTORS = ("_ThreadBasedAsyncCheckpointExecutor", "_ProcessBasedAsyncCheckpointExecutor")
"""The names under which DCP has what runs asynchronous saves."""


@contextmanager
def routed(
    policy: Policy | str | os.PathLike[str],
    run: str,
    *,
    metadata: Mapping[str, Any] | None = None,
    marker: bool = False,
    process_group: Any = None,
) -> Iterator[None]:
    """In the block DCP saves and loads through the tiers, wherever it is given a ``checkpoint_id`` and no storage.

    So code that calls ``dcp.save(state, checkpoint_id=path)`` needs no change, a framework's for example. The path
    says the step, by the number at the end of its last part; an ending such as ``.ckpt`` does not count. Where there is
    no number, the last part is a tag: a save gets the next step, and the version the tag; a load finds it by the tag.
    The rest of the path has no meaning: give each folder of checkpoints a run of its own.

    A load of a path where DCP's own checkpoint lies (``.metadata`` that is no marker) is left to DCP.

    It holds for all threads. Saves that begin in the block are routed to their end. Blocks may be nested; the inner one
    counts.

    Args:
        policy, run, metadata, process_group: as for `TierWriter`.
        marker: as for `TierWriter`: for tools that look for ``.metadata`` in the folder.
    """

    def writer(checkpoint_id: Any) -> TierWriter:
        named = _tag_of(checkpoint_id)
        return _PathWriter(policy, run, metadata=metadata, marker=marker, process_group=process_group, tag=named)

    def reader(checkpoint_id: Any) -> StorageReader:
        if _is_dcp(checkpoint_id):
            return default(checkpoint_id)  # type: ignore[call-arg]
        return _PathReader(policy, run, tag=_tag_of(checkpoint_id), process_group=process_group)

    default: type[StorageReader] = vars(_storage_utils)["FileSystemReader"]
    replaced = [
        (_storage_utils, "FileSystemWriter", _Choice(writer)),
        (_storage_utils, "FileSystemReader", _Choice(reader)),
        *(
            (state_dict_saver, name, _routing(getattr(state_dict_saver, name), writer))
            for name in EXECUTORS
            if hasattr(state_dict_saver, name)
        ),
    ]
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, new in replaced:
        setattr(module, name, new)
    try:
        yield
    finally:
        for (module, name, _), old in zip(replaced, before, strict=True):
            setattr(module, name, old)


class _PathWriter(TierWriter):
    """A writer for one path, which says a step or a tag."""

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id if names_step(checkpoint_id) else None)
        self._where = checkpoint_id


class _PathReader(TierReader):
    """A reader of one path, which says a step or a tag."""

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id if names_step(checkpoint_id) else None)


class _Choice:
    """Takes the place of a storage class of DCP: takes every id.

    Args:
        make: makes the storage for an id.
    """

    def __init__(self, make: Any) -> None:
        self._make = make

    def validate_checkpoint_id(self, checkpoint_id: Any) -> bool:
        """True: an id that cannot be used raises an error of its own."""
        return True

    def __call__(self, checkpoint_id: Any) -> Any:
        return self._make(checkpoint_id)


def _routing(executor: type[Any], writer: Any) -> type[Any]:
    """An executor of asynchronous saves that gives those without a writer ours."""

    class Routing(executor):  # type: ignore[misc]
        def execute_save(
            self, staged: Any, *, checkpoint_id: Any = None, storage_writer: StorageWriter | None = None, **rest: Any
        ) -> Any:
            if storage_writer is None and checkpoint_id:
                storage_writer = writer(checkpoint_id)
            return super().execute_save(staged, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **rest)

    return Routing


def _tag_of(checkpoint_id: Any) -> str | None:
    """The tag that an id names; None where it names a step."""
    return None if names_step(checkpoint_id) else PurePath(os.fsdecode(checkpoint_id)).name


def _is_dcp(checkpoint_id: Any) -> bool:
    """Whether DCP's own checkpoint lies at an id."""
    if not isinstance(checkpoint_id, (str, os.PathLike)):
        return False
    metadata = Path(os.fsdecode(checkpoint_id)) / METADATA
    return is_file(metadata) and not is_marker(metadata)
