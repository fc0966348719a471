"""The object tier: picks the backend for a URL: S3, a directory for ``file://``, or another fsspec file system."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, get_args

from pydantic import AfterValidator, WithJsonSchema

from tierstate.manifest.chunk import Buffer
from tierstate.tiers.base import KeepingArena, ObjectWriter, Place, Range, Tier, Traits
from tierstate.tiers.object.s3.checksums import ChecksumChoice
from tierstate.tiers.posix.directory import Directory
from tierstate.tiers.posix.ownership import PRIVATE, FileMode, Group, Permissions
from tierstate.tiers.secrets import scrub, secrets_in
from tierstate.tiers.units import Seconds, Size, parse_seconds
from tierstate.tiers.wrappers.breaker import Breaking
from tierstate.tiers.wrappers.deadline import Deadline

from .bucket import Bucket

if TYPE_CHECKING:
    from tierstate.tiers.object.s3.bucket import S3Bucket

REQUEST_DEADLINE = 60.0
"""Default deadline in seconds of one S3 operation with all its attempts."""


ORPHAN_AGE = 24 * 3600.0
"""Default age in seconds after which an unfinished multipart upload is aborted."""


_OF_S3: dict[str, Any] = {"checksum": "auto", "orphan_age": ORPHAN_AGE}


_KNOWN = ("s3", "s3a", "file", "local", "memory", "gs", "gcs", "abfs", "az")
"""Protocols that are known without asking fsspec, whose import takes a while."""


_NO_HOST = ("file", "local")


_THROUGH_OTHERS = frozenset(
    {
        "blockcache",
        "cached",
        "dask",
        "dir",
        "filecache",
        "generic",
        "libarchive",
        "reference",
        "simplecache",
        "tar",
        "tierstate",
        "zip",
    }
)
"""File systems of fsspec that read through another one. A tier gains nothing by them: they neither create exclusively
nor read what was just written. The caches believe files in a folder that others may write to, pickles among them."""


_SHOWN_EARLY = (
    "shows an object while it is still being written, so that a writer that is killed leaves part of one; mount it, "
    "and write a tier of 'type: lustre' with the mounted folder as its 'path'"
)


_WEB = (
    "is a web server, which need not list what it has, and creates nothing exclusively; for an S3 store write "
    "'s3://bucket/ckpt', and its address as 'endpoint_url' in the tier's 'options'"
)


_NO_STORES: dict[str, str] = {
    **dict.fromkeys(("arrow_hdfs", "ftp", "hdfs", "sftp", "smb", "ssh", "webhdfs"), _SHOWN_EARLY),
    **dict.fromkeys(("http", "https"), _WEB),
}
"""Protocols of fsspec that cannot keep the promises of a tier, and why: of a web server that lists nothing a run would
look as if it had no version, and a job would begin afresh."""


def check_url(url: str, options: Mapping[str, Any] | None = None) -> str:
    """The URL itself, if it says where objects are kept; does not connect.

    Args:
        options: their values are not shown in messages.

    Raises:
        ValueError: the message says what is right.
    """
    protocol, found, rest = url.partition("://")
    if why := _wrong_with(protocol, found, rest):
        shown = scrub(url, secrets_in(url, options or {}) | secrets_in(url.replace(":/", "://", 1), {}))
        raise ValueError(f"{shown!r} {why}")
    return url


def _wrong_with(protocol: str, found: str, rest: str) -> str:
    """What is wrong with a URL, and what is right; empty if nothing is."""
    if not found:
        return _no_url(protocol)
    if "::" in protocol or "::" in rest or protocol in _THROUGH_OTHERS:
        return (
            "leads through another file system (a chain, a cache or an archive of fsspec); write the URL of the store "
            "itself, as in 's3://bucket/ckpt'"
        )
    if protocol in _NO_STORES:
        return _NO_STORES[protocol]
    if protocol not in _KNOWN and protocol not in _protocols():
        near = get_close_matches(protocol.lower(), _KNOWN, n=1)
        meant = (
            f"; did you mean {near[0] + '://'!r}?" if near else "; known are s3, file, memory, and what fsspec knows"
        )
        return f"has a protocol that is not known here{meant}"
    if not rest.strip("/"):
        return "does not say where; write protocol, bucket and path, as in 's3://bucket/ckpt'"
    if protocol not in (*_NO_HOST, "memory") and rest.startswith("/"):
        return f"names no bucket; write it after two slashes, as in '{protocol}://bucket/ckpt'"
    return ""


def _no_url(text: str) -> str:
    if text.startswith(("/", "./", "../", "~")):
        return "is a path and no URL; write 'file:///path', or a tier of 'type: nvme' with 'path:'"
    protocol, colon, _ = text.partition(":")
    if colon and protocol in _KNOWN:
        slashes = (
            "three slashes and the whole path, as in 'file:///ckpt'"
            if protocol in _NO_HOST
            else "two slashes and the bucket, as in 's3://bucket/ckpt'"
        )
        return f"is no URL; write {slashes}"
    return "is no URL; write protocol, bucket and path, as in 's3://bucket/ckpt'"


def _protocols() -> Collection[str]:
    from fsspec.registry import available_protocols

    found: Collection[str] = available_protocols()
    return found


ObjectUrl: TypeAlias = Annotated[
    str,
    AfterValidator(check_url),
    WithJsonSchema({"title": "URL", "type": "string", "pattern": r"^[A-Za-z0-9+.]+://.|\$\{"}),
]
"""A URL of `ObjectStore`: a policy that has another one is refused when it is loaded."""


class ObjectStore(Tier):
    """Objects under a URL: ``s3://bucket/prefix`` or any other protocol of fsspec.

    ``file://`` is served by `Directory`, since fsspec's own files are created neither atomically nor exclusively.
    ``memory://`` keeps objects in the process, for tests. Of the other protocols only S3 was tested with servers,
    ``abfs://`` and ``gs://`` with emulators. Long objects are sent while they are written; if the files of a store show
    a write before it is complete, or replace an object, they are gathered in memory instead, and ``traits.notes`` says
    so. A store whose single writes are not atomic either is refused, as far as that can be found out.

    Args:
        url: protocol, bucket and prefix, as in ``s3://bucket/ckpt``; the bucket must exist.
        options: arguments of fsspec's file system for that protocol, as in ``{endpoint_url: "https://s3.site.org"}``;
            never printed.
        capacity: total bytes of the objects, as in ``20TiB``; without it, no limit. What other processes write is
            counted as for `nvme`.
        checksum: ``s3://`` only: what is sent with every body, so that the store refuses one that was damaged on its
            way. ``auto`` tries at opening which of them the store verifies, and takes crc32 (2 GB/s per core), else md5
            (0.6 GB/s), else none, and says so in the tier's notes.
        deadline: ``s3://``: how long one request is tried, with all its attempts, before the tier counts as
            unavailable. Others: a call from which nothing has come for so long is given up; as in ``5min``.
        orphan_age: ``s3://`` only: an upload in parts that was begun so long ago and has not ended is a dead writer's,
            and is aborted when the tier is first written to; longer than any object takes, as in ``2d``.
        mode: ``file://`` only: of files, as for `nvme`, as in ``"0640"``.
        group: ``file://`` only: of files and folders, as for `nvme`, as in ``physics``.

    Raises:
        ValueError: the URL is not valid, its protocol is not known, or keys are given that are of another protocol.
        ImportError: a package for the protocol is missing.
    """

    persistent: ClassVar[bool] = True

    @classmethod
    def persists(cls, options: Mapping[str, Any]) -> bool:
        return not str(options.get("url", "")).startswith("memory://")

    def __init__(
        self,
        *,
        url: ObjectUrl,
        options: dict[str, Any] | None = None,
        capacity: Size | None = None,
        checksum: ChecksumChoice = "auto",
        deadline: Seconds = REQUEST_DEADLINE,
        orphan_age: Seconds = ORPHAN_AGE,
        mode: FileMode = PRIVATE.mode,
        group: Group | None = None,
        arena: KeepingArena | None = None,
    ) -> None:
        protocol, _, path = check_url(url, options or {}).partition("://")
        keys = {"checksum": checksum, "orphan_age": orphan_age}
        permissions = Permissions.of(mode, group)
        if permissions != PRIVATE and protocol not in _NO_HOST:
            raise ValueError(
                "mode and group: only file:// URLs take them; remove them, and let the store say who has access"
            )
        deadline = parse_seconds(deadline)
        self._inner: Tier
        self._outer: Tier  # watches `_inner`
        if protocol in ("s3", "s3a"):
            # S3's own calls end at the deadline, and read into the caller's memory: they need no threads to watch them.
            self._inner = _s3_bucket()(url, options or {}, capacity, deadline=deadline, **_checked(keys))
            self._outer = Breaking(self._inner, deadline)
            return
        if wrong := sorted(name for name, value in keys.items() if value != _OF_S3[name]):
            raise ValueError(f"{wrong[0]}: only s3:// URLs take it; remove it")
        if protocol in _NO_HOST:
            if options:
                raise ValueError("options: a file:// URL takes none; remove them")
            self._inner = Directory(Path(path), capacity, permissions=permissions)
        else:
            self._inner = Bucket(url, options or {}, capacity)
        self._outer = self._inner if protocol == "memory" else Deadline(self._inner, deadline, arena)

    @property
    def name(self) -> str:
        """The tier's name in the policy; set by the engine, used in messages."""
        return self._outer.name

    @name.setter
    def name(self, name: str) -> None:
        self._outer.name = name

    @property
    def traits(self) -> Traits:
        return self._outer.traits

    @property
    def trouble(self) -> str:
        return self._outer.trouble

    def put(self, key: str, data: Buffer) -> None:
        self._outer.put(key, data)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self._outer.read(key, ranges)

    def list(self, prefix: str) -> Iterator[str]:
        return self._outer.list(prefix)

    def size(self, key: str) -> int:
        return self._outer.size(key)

    def delete(self, key: str) -> None:
        self._outer.delete(key)

    def discard(self, keys: Iterable[str]) -> None:
        self._outer.discard(keys)

    def age(self, key: str) -> float | None:
        return self._outer.age(key)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        return self._outer.writer(key, size_hint)

    def room(self) -> int | None:
        return self._outer.room()

    def place(self) -> Place | None:
        return self._inner.place()

    def close(self) -> None:
        self._outer.close()


def _s3_bucket() -> type[S3Bucket]:
    # Late: botocore takes long to import.
    try:
        from tierstate.tiers.object.s3.bucket import S3Bucket
    except ImportError as error:
        raise ImportError("s3:// needs the package botocore: pip install botocore") from error
    return S3Bucket


def _checked(keys: dict[str, Any]) -> dict[str, Any]:
    # A policy checks them by their annotations; a direct call of the class does not.
    if keys["checksum"] not in get_args(ChecksumChoice):
        raise ValueError(f"checksum: {keys['checksum']!r} is none of {', '.join(get_args(ChecksumChoice))}")
    return {name: parse_seconds(value) if name != "checksum" else value for name, value in keys.items()}
