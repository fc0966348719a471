"""The writer of a file: a temporary one, linked to the object's name once it is whole and synced."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tierstate.manifest.chunk import Buffer

from .base import Release
from .files import BufferedFile, sync_folder
from .gauge import Gauge
from .posix import explain, explained
from .stream import Stream
from .writing import StepWriter


class Folder(Protocol):
    """What a writer needs of its tier."""

    name: str

    @property
    def gauge(self) -> Gauge: ...


class FileWriter(StepWriter):
    """Writes a temporary file, and links it to the object's name when closed."""

    def __init__(self, tier: Folder, key: str, path: Path, file: BufferedFile, stream: Stream) -> None:
        super().__init__(f"{tier.name}: {key}")
        self._tier, self._key, self._path, self._file, self._stream = tier, key, path, file, stream
        self._length = 0

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        nbytes = buffer.numel()
        self._tier.gauge.take(nbytes, self._tier.name, self._key)
        self._length += nbytes
        with explained("write", self._tier.name, self._key, self._file.path):
            return self._stream.append(buffer, release)

    def _publish(self) -> None:
        with explained("write", self._tier.name, self._key, self._path):
            self._stream.finish()
            self._file.sync()
            self._link()
            try:
                sync_folder(self._path.parent)
            except OSError:
                # Seen by others perhaps, but not safe: nobody may rely on it.
                os.unlink(self._path)
                raise
        self._clear()

    def _link(self) -> None:
        try:
            os.link(self._file.path, self._path, follow_symlinks=False)
        except FileExistsError as error:
            # Over a network the first try's answer may be lost and the second find the name taken: by ourselves.
            if os.path.samestat(os.lstat(self._path), self._file.status()):
                return
            raise explain(error, "create", self._tier.name, self._key, self._path) from error

    def _discard(self) -> None:
        self._stream.give_up()
        self._tier.gauge.give_back(self._length)
        self._clear()

    def _clear(self) -> None:
        # What cannot be removed now is a dead writer's file for the next one who opens the tier.
        with suppress(OSError):
            os.unlink(self._file.path)
        self._file.close()
