"""The fsspec file system ``tierstate://``: versions as files that are read by ranges from any tier, without an export.

A URL is ``tierstate://POLICY.yaml/RUN@VERSION/FILE``. fsspec finds this class by its entry point; `TierstateFileSystem`
says what the parts of a URL are and which files there are.
"""

from __future__ import annotations

import datetime
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from fsspec.utils import stringify_path

from tierstate.checkpointer import Checkpointer, open_quietly
from tierstate.engine.info import VersionInfo
from tierstate.engine.store.catalog import ID_LENGTH, VersionCopies
from tierstate.manifest.errors import AccessDenied, NotFound, TierstateError, Unreadable, tier_text
from tierstate.manifest.history.log import check_run
from tierstate.run import runs_of
from tierstate.tiers.policy.policy import Policy

from .ranges import ChunkCache, RangeReader, VirtualFile
from .virtual import FOLDERS, VersionFiles

GRAMMAR = (
    "a URL is tierstate://POLICY.yaml/RUN@VERSION/FILE, with VERSION as latest, step-120, tag:best, or the beginning "
    "of an id"
)
"""What errors say is right."""


SUFFIXES = (".yaml", ".yml")
"""How the name of a policy file ends."""


LATEST = "latest"


MAX_VERSIONS = 8
"""How many versions of a file system's runs are kept in memory: a record of a large state has many megabytes."""


_LAST_TIME = 253_402_300_799
"""The last second of the year 9999, in seconds since 1970."""


_STEP = re.compile(r"step-([0-9]{1,19})")


_ID = re.compile(rf"[0-9a-f]{{1,{ID_LENGTH}}}")


class Address(NamedTuple):
    """The parts of a path.

    Attributes:
        root: the path up to the run and its version, without the file.
        policy: path of the policy file.
        run, selector: the run, and the text behind its ``@``; both empty for the policy itself.
        name: the file in the version; empty for the version itself.
    """

    root: str
    policy: str
    run: str = ""
    selector: str = ""
    name: str = ""

    @classmethod
    def parse(cls, path: str) -> Address:
        """The parts of an absolute path without its protocol.

        The policy is what precedes the component after the first existing file with the suffix ``.yaml`` or ``.yml``.

        Raises:
            FileNotFoundError: no part of the path is a policy file, or the rest can name nothing.
        """
        parts = path.split("/")
        ends = (i for i, part in enumerate(parts, 1) if part.lower().endswith(SUFFIXES))
        cut = next((end for end in ends if os.path.isfile("/".join(parts[:end]))), None)
        if cut is None:
            raise FileNotFoundError(f"{path}: no part of it is an existing policy file; {GRAMMAR}")
        policy, rest = "/".join(parts[:cut]), parts[cut:]
        if not rest:
            return cls(policy, policy)
        if any(part in ("", ".", "..") for part in rest):
            raise FileNotFoundError(f"{path}: behind the policy an empty name, '.' or '..' is no name; {GRAMMAR}")
        run, at, selector = rest[0].partition("@")
        try:
            check_run(run)
        except ValueError as error:
            raise FileNotFoundError(f"{path}: {error}") from error
        return cls(f"{policy}/{rest[0]}", policy, run, selector if at else LATEST, "/".join(rest[1:]))

    def wanted(self) -> dict[str, Any]:
        """The version that the selector names, as arguments of `Run.info`.

        Raises:
            FileNotFoundError: it is no selector.
        """
        if self.selector == LATEST:
            return {}
        if self.selector.startswith("tag:"):
            return {"tag": self.selector.removeprefix("tag:")}
        if found := _STEP.fullmatch(self.selector):
            return {"step": int(found[1])}
        if _ID.fullmatch(self.selector):
            return {"version": self.selector}
        raise FileNotFoundError(f"{self.root}: {self.selector!r:.60} names no version; {GRAMMAR}")


class TierstateFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Read-only files of versions, under ``tierstate://POLICY.yaml/RUN@VERSION/FILE``.

    ``POLICY.yaml`` is an existing policy file, relative to the working directory or absolute. ``VERSION`` is
    ``latest`` (also where there is no ``@``), ``step-120``, ``tag:best``, or the beginning of a version's id. A version
    has ``model.safetensors``, ``version.json``, ``values.json`` and the folders ``leaves`` and ``dcp``: see
    docs/how-to/read-a-version-as-files.md.

    What ``latest``, a step or a tag names is looked up once and kept, so that all files are of one version, until
    `invalidate_cache`, or for ``listings_expiry_time`` seconds if that is given. Every chunk is verified, and what one
    tier has damaged is read from the next one; nothing is written to a tier.

    Threads may share an instance; its opened files too, each by one thread at a time. `close` closes the tiers; the
    next call opens them again. At the end of the process they are closed in any case.

    Raises:
        FileNotFoundError: there is no such run, version or file.
        PermissionError: a tier denies access, or something would be written.
        PolicyError: the policy cannot be used.
        TierstateError: what a restore raises: `Damaged`, `Unreadable`, `TierUnavailable` and so on.
    """

    protocol: ClassVar[str] = "tierstate"
    root_marker: ClassVar[str] = "/"

    def __init__(self, *args: Any, listings_expiry_time: float | None = None, **options: Any) -> None:
        super().__init__(*args, listings_expiry_time=listings_expiry_time, **options)
        self._expiry = listings_expiry_time
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._cache = ChunkCache()
        self._opened: dict[tuple[str, str], Checkpointer] = {}
        self._resolved: dict[str, tuple[str, float]] = {}
        self._versions: OrderedDict[tuple[str, str, str], VersionFiles] = OrderedDict()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = str(stringify_path(path)).removeprefix(f"{cls.protocol}://").removeprefix(f"{cls.protocol}::")
        if not text:
            return cls.root_marker
        return (text if text.startswith("/") else f"{os.getcwd()}/{text}").rstrip("/") or cls.root_marker

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List the versions of all runs of a policy, or the files of a version."""
        path = self._strip_protocol(path)
        with _os_errors():
            found = list(self._list(Address.parse(path), path))
        return found if detail else [one["name"] for one in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """A file or folder: name, size, type; of its version also the id (``version``), ``step``, ``created`` (UTC)."""
        path = self._strip_protocol(path)
        with _os_errors():
            return self._info(Address.parse(path), path)

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether there is such a file or folder. Raises where that cannot be told, since a tier cannot be asked."""
        return self._type(path) is not None

    def isfile(self, path: str) -> bool:
        """As `exists`, for a file."""
        return bool(self._type(path) == "file")

    def isdir(self, path: str) -> bool:
        """As `exists`, for a folder."""
        return bool(self._type(path) == "directory")

    def _type(self, path: str) -> Any:
        try:
            return self.info(path)["type"]
        except FileNotFoundError:
            return None

    def created(self, path: str) -> datetime.datetime:
        """When the version was saved, in UTC."""
        found = self.info(path).get("created")
        if not isinstance(found, datetime.datetime):
            raise IsADirectoryError(f"{path} is no version, nor in one")
        return found

    modified = created

    def ukey(self, path: str) -> str:
        """A key of the content: another one for another version."""
        found = self.info(path)
        name = Address.parse(self._strip_protocol(path)).name
        return sha256(f"{found.get('version', '')}/{name}".encode()).hexdigest()

    def checksum(self, path: str) -> int:
        """As `ukey`, as a number."""
        return int(self.ukey(path), 16)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """The bytes ``start:end`` of a file, as a slice has them. Reads only the chunks that these overlap."""
        path = self._strip_protocol(path)
        with _os_errors():
            files, file = self._file(Address.parse(path))
            first, last, _ = slice(start, end).indices(file.size)
            return files.read(file, first, last)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> VersionFile:
        if mode != "rb":
            self._read_only(path)
        with _os_errors():
            address = Address.parse(path)
            files, file = self._file(address)
            # By its id: where the file is opened again, in another process for one, it is of the same version.
            pinned = f"{address.policy}/{address.run}@{files.entry.version.id}/{address.name}"
        return VersionFile(self, pinned, files, file, block_size, cache_options=cache_options, **kwargs)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget which versions ``latest``, steps and tags name, for all paths: they are looked up again."""
        with self._locked():
            self._resolved.clear()
        super().invalidate_cache(path)

    def close(self) -> None:
        """Close all tiers. Files that are open can be read no longer; a later call opens the tiers again."""
        with self._locked():
            opened = list(self._opened.values())
            self._begin()
        for ckpt in opened:
            ckpt.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_only(self, path: Any = "", *_: Any, **__: Any) -> NoReturn:
        raise PermissionError(
            f"tierstate:// is read-only, and {path} was to be written or removed; save by a Checkpointer, and remove "
            "versions by `tierstate rm`"
        )

    mkdir = makedirs = rmdir = rm = rm_file = _rm = cp_file = copy = mv = touch = _read_only
    pipe = pipe_file = put = put_file = write_text = write_bytes = _read_only

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            self._begin()  # a forked child: locks, files and threads belong to the parent
        with self._lock:
            yield

    def _file(self, address: Address) -> tuple[VersionFiles, VirtualFile]:
        if address.name in ("", *FOLDERS):
            if address.run:
                self._version(address)
            raise IsADirectoryError(f"{address.root}/{address.name}".rstrip("/") + " is a folder")
        files = self._version(address)
        with _named(address):
            return files, files.file(address.name)

    def _version(self, address: Address) -> VersionFiles:
        with self._locked(), _named(address):
            known, now = self._resolved.get(address.root), time.monotonic()
            if known is None or (self._expiry is not None and now - known[1] >= self._expiry):
                entry = self._ckpt(address)._find(**address.wanted())
                self._resolved[address.root] = (entry.version.id, now)
                return self._keep(address, entry)
            if (kept := self._versions.get((address.policy, address.run, known[0]))) is not None:
                return kept
            return self._keep(address, self._ckpt(address)._find(version=known[0]))

    def _keep(self, address: Address, entry: VersionCopies) -> VersionFiles:
        key, ckpt = (address.policy, address.run, entry.version.id), self._ckpt(address)
        if key not in self._versions:
            first = [entry]  # found just now

            def find() -> VersionCopies:
                return first.pop() if first else ckpt._find(version=key[2])

            self._versions[key] = VersionFiles(RangeReader(find, ckpt._arena, self._cache))
            while len(self._versions) > MAX_VERSIONS:
                self._versions.popitem(last=False)
        self._versions.move_to_end(key)
        return self._versions[key]

    def _ckpt(self, address: Address) -> Checkpointer:
        key = (address.policy, address.run)
        if key not in self._opened:
            self._opened[key] = open_quietly(address.policy, address.run)
        return self._opened[key]

    def _list(self, address: Address, path: str) -> Iterator[dict[str, Any]]:
        if not address.run:
            yield from self._list_versions(address)
            return
        if address.name not in ("", *FOLDERS):
            yield self._info(address, path)
            return
        files = self._version(address)
        about = _about(files)
        if not address.name:
            for name in FOLDERS:
                yield {"name": f"{path}/{name}", "size": 0, "type": "directory", **about}
        with _named(address):
            found = files.folder(address.name) if address.name else files.top()
        for name, file in found.items():
            yield {"name": f"{path}/{name}", "size": file.size, "type": "file", **about}

    def _list_versions(self, address: Address) -> Iterator[dict[str, Any]]:
        """Every version of every run once: by its step, or by its id where a newer one has the same step."""
        failed: list[tuple[str, TierstateError]] = []
        policy = Policy.load(address.policy)
        for run in runs_of(policy, lambda tier, error: failed.append((tier, error))):
            for name, info in self._names_of(address._replace(run=run)):
                about = {"version": info.id, "step": info.step, "created": utc_time(info.time)}
                yield {"name": f"{address.policy}/{run}@{name}", "size": 0, "type": "directory", **about}
        if failed:
            told = "; ".join(tier_text(*one) for one in failed)
            raise Unreadable(f"{address.policy}: not all runs can be listed now: {told}", tier=failed[0][0])

    def _names_of(self, address: Address) -> Iterator[tuple[str, VersionInfo]]:
        with self._locked():
            if (ckpt := self._opened.get((address.policy, address.run))) is not None:
                infos = ckpt.versions()
            else:  # closed again: there may be many runs
                with open_quietly(address.policy, address.run) as once:
                    infos = once.versions()
        newest = {info.step: info.id for info in infos}
        for info in infos:
            if info.id:
                yield f"step-{info.step}" if newest[info.step] == info.id else info.id, info

    def _info(self, address: Address, path: str) -> dict[str, Any]:
        if not address.run:
            return {"name": path, "size": 0, "type": "directory"}
        files = self._version(address)
        if address.name in ("", *FOLDERS):
            return {"name": path, "size": 0, "type": "directory", **_about(files)}
        with _named(address):
            return {"name": path, "size": files.file(address.name).size, "type": "file", **_about(files)}


class VersionFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file of a version; it stays of that version."""

    def __init__(
        self,
        fs: TierstateFileSystem,
        path: str,
        files: VersionFiles,
        file: VirtualFile,
        block_size: int | None,
        **options: Any,
    ) -> None:
        self._files, self._file, self._pid = files, file, os.getpid()
        # A file that is unpickled is opened with its size.
        super().__init__(fs, path, "rb", block_size or "default", **{**options, "size": file.size})

    def _fetch_range(self, start: int, end: int) -> bytes:
        if os.getpid() != self._pid:  # a forked child has tiers of its own
            self._files, self._file = self.fs._file(Address.parse(self.path))
            self._pid = os.getpid()
        with _os_errors():
            return self._files.read(self._file, start, end)


def _about(files: VersionFiles) -> dict[str, Any]:
    version = files.entry.version
    return {"version": version.id, "step": version.head.step, "created": utc_time(version.head.time)}


def utc_time(seconds: float) -> datetime.datetime:
    """A time in seconds since 1970, in UTC; what is later than a `datetime` can be is the end of the year 9999."""
    return datetime.datetime.fromtimestamp(min(seconds, _LAST_TIME), datetime.UTC)


@contextmanager
def _named(address: Address) -> Iterator[None]:
    """Say which URL an error is about, where it says that nothing is there."""
    try:
        yield
    except NotFound as error:
        raise FileNotFoundError(f"{address.root}: {error}") from error


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise what users of file systems expect, where there is an error for it; all others say more as they are."""
    try:
        yield
    except NotFound as error:
        raise FileNotFoundError(str(error)) from error
    except AccessDenied as error:
        raise PermissionError(str(error)) from error
