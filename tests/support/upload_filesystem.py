"""A file system of fsspec that sends long files as resumable uploads, as gcsfs does, with faults at each request."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

PROTOCOL, FILES_ONLY = "uploads", "uploads-by-files"

Request: TypeAlias = Literal["open", "begin", "chunk", "finish", "discard", "info"]
Dialect: TypeAlias = Literal["as gcsfs", "early", "replacing", "keeping", "gathering", "unbuffered", "no xb"]
"""What its files do: as they should; visible from the first block on; replace what was created meanwhile; visible once
they are given up; send nothing before their end; are no files of fsspec; cannot be opened exclusively."""


class Fault(NamedTuple):
    """A request that fails.

    Attributes:
        request: which one.
        at: its number, from 1; 0 for every one.
        error: raised instead of it, or after it took effect.
        after: whether it takes effect.
    """

    request: Request
    at: int
    error: Exception
    after: bool = False


class Site:
    """What one store has, for all file systems that name it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[int, bytearray] = {}
        self.dialect: Dialect = "as gcsfs"
        self.faults: Sequence[Fault] = ()
        self.calls: Counter[str] = Counter()
        self.longest = 0
        """Bytes of the longest body of a request."""

    def inject(self, *faults: Fault) -> None:
        """Let requests from now on fail."""
        self.calls.clear()
        self.faults = faults

    def fault(self, request: Request) -> Fault | None:
        """Count a request; raises its error if that comes instead of it."""
        self.calls[request] += 1
        found = next((f for f in self.faults if f.request == request and f.at in (0, self.calls[request])), None)
        if found is not None and not found.after:
            raise found.error
        return found

    def create(self, path: str, data: bytes, *, exclusive: bool) -> None:
        """Create an object, whole."""
        with self.lock:
            if exclusive and path in self.objects:
                raise FileExistsError(path)
            self.objects[path] = data


SITES: dict[str, Site] = {}


class UploadingFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file that is sent block by block, and appears when it is closed."""

    fs: UploadFileSystem

    def _initiate_upload(self) -> None:
        site = self.fs.site
        fault = site.fault("begin")
        self.location = id(self)
        site.uploads[self.location] = bytearray()
        _raise(fault)

    def _upload_chunk(self, final: bool = False) -> bool:
        site, data = self.fs.site, self.buffer.getvalue()
        if site.dialect == "gathering" and not final:
            return False
        fault = site.fault("finish" if final else "chunk")
        site.longest = max(site.longest, len(data))
        site.uploads[self.location] += data
        if final:
            exclusive = site.dialect != "replacing"
            site.create(self.path, bytes(site.uploads.pop(self.location)), exclusive=exclusive)
        elif site.dialect == "early":
            site.objects[self.path] = bytes(site.uploads[self.location])
        _raise(fault)
        return True

    def flush(self, force: bool = False) -> None:
        """As all do, but for those that gather everything."""
        if force or self.fs.site.dialect != "gathering":
            super().flush(force)

    def discard(self) -> None:
        """Drop the upload."""
        site = self.fs.site
        fault = site.fault("discard")
        data = site.uploads.pop(self.location, None)
        if data is not None and site.dialect == "keeping":
            site.objects[self.path] = bytes(data)
        _raise(fault)


def _raise(fault: Fault | None) -> None:
    if fault is not None:
        raise fault.error


class UploadFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Objects in the memory of the process; the first part of a path names the `Site`."""

    protocol = PROTOCOL

    def __init__(self, *, site: str, **keys: Any) -> None:
        super().__init__(**keys)
        self.site = SITES.setdefault(site, Site())

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **keys: Any) -> Any:
        if self.site.dialect == "no xb" and mode == "xb":
            raise NotImplementedError("File mode not supported")
        if self.site.dialect == "unbuffered":
            self.site.create(path, b"", exclusive=True)
            return fsspec.filesystem("memory", skip_instance_cache=True).open("/scratch", "wb")
        if mode != "rb":
            self.site.fault("open")
        return UploadingFile(self, path, mode, block_size=block_size, **keys)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Create an object by one request."""
        self.site.create(self._strip_protocol(path), bytes(value), exclusive=mode == "create")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Bytes of an object."""
        self.info(path)
        return self.site.objects[self._strip_protocol(path)][start:end]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Size of an object."""
        path = self._strip_protocol(path)
        _raise(self.site.fault("info"))
        if path not in self.site.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.site.objects[path]), "type": "file"}

    def find(self, path: str, *, detail: bool = False, **_: Any) -> Any:
        """All objects below a folder; with ``detail`` what `info` says of each."""
        found = [one for one in list(self.site.objects) if one.startswith(self._strip_protocol(path) + "/")]
        return {one: self.info(one) for one in found} if detail else found

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        with self.site.lock:
            if self.site.objects.pop(self._strip_protocol(path), None) is None:
                raise FileNotFoundError(path)


class FilesOnlyFileSystem(UploadFileSystem):
    """The same, in which objects are created by way of files only, as those of fsspec by default."""

    protocol = FILES_ONLY
    pipe_file = AbstractFileSystem.pipe_file


def register() -> None:
    """Make fsspec know the protocols."""
    for cls in (UploadFileSystem, FilesOnlyFileSystem):
        fsspec.register_implementation(cls.protocol, f"{__name__}.{cls.__name__}", clobber=True)
