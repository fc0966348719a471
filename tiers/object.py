"""The object tier: any store that has a URL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

from tierstate.manifest.chunk import Buffer

from .base import ObjectWriter, Range, Tier, Traits
from .bucket import Bucket
from .directory import Directory
from .object_errors import scrub, secrets_in
from .s3_bucket import S3Bucket
from .s3_checksums import Choice
from .units import Seconds, Size, parse_seconds

DEADLINE = 60.0
ORPHAN_AGE = 24 * 3600.0
_OF_S3: dict[str, Any] = {"checksum": "auto", "deadline": DEADLINE, "orphan_age": ORPHAN_AGE}


class ObjectStore(Tier):
    """Objects under a URL: ``s3://bucket/prefix`` and whatever else fsspec reaches.

    ``file://`` is served by the recipe of directory tiers, since fsspec's own files are neither created whole nor only
    once. ``memory://`` holds for the process, for tests. Of the others S3 is the one that was tried against servers;
    on a store where a write can be seen before it is complete, so can ours.

    Args:
        url: where; the bucket must exist.
        options: what fsspec's file system takes, as in ``{endpoint_url: ..., key: ..., secret: ...}``; never printed.
        capacity: bytes that the objects may have together; None for as many as the store takes.
        checksum: of S3: what is sent with every body, for the store to refuse what was damaged on its way. ``auto``
            looks what the store verifies, and takes crc32 before md5.
        deadline: of S3: seconds that one request may take with all its attempts.
        orphan_age: of S3: seconds after which an upload in parts that has not ended counts as a dead writer's, and is
            aborted.

    Raises:
        ValueError: no URL, one of a protocol not known, or keys of S3 for another one.
        ImportError: a package for the protocol is missing.
    """

    persistent: ClassVar[bool] = True

    def __init__(
        self,
        *,
        url: str,
        options: dict[str, Any] | None = None,
        capacity: Size | None = None,
        checksum: Choice = "auto",
        deadline: Seconds = DEADLINE,
        orphan_age: Seconds = ORPHAN_AGE,
    ) -> None:
        protocol, found, path = url.partition("://")
        if not found or not path.strip("/"):
            shown = scrub(url, secrets_in(url, options or {}))
            raise ValueError(f"url: {shown!r} does not say where; write protocol, bucket and path, as in 's3://b/ckpt'")
        keys = {"checksum": checksum, "deadline": deadline, "orphan_age": orphan_age}
        self._inner: Tier
        if protocol in ("s3", "s3a"):
            self._inner = S3Bucket(url, options or {}, capacity, **_checked(keys))
            return
        if wrong := sorted(name for name, value in keys.items() if value != _OF_S3[name]):
            raise ValueError(f"{wrong[0]}: only s3:// URLs take it; remove it")
        if protocol in ("file", "local"):
            if options:
                raise ValueError("options: a file:// URL takes none; remove them")
            self._inner = Directory(Path(path), capacity)
        else:
            self._inner = Bucket(url, options or {}, capacity)

    @property
    def name(self) -> str:
        """The tier's name in the policy; set by the engine, used in messages."""
        return self._inner.name

    @name.setter
    def name(self, name: str) -> None:
        self._inner.name = name

    @property
    def traits(self) -> Traits:
        return self._inner.traits

    def put(self, key: str, data: Buffer) -> None:
        self._inner.put(key, data)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self._inner.read(key, ranges)

    def list(self, prefix: str) -> Iterator[str]:
        return self._inner.list(prefix)

    def size(self, key: str) -> int:
        return self._inner.size(key)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def discard(self, keys: Iterable[str]) -> None:
        self._inner.discard(keys)

    def age(self, key: str) -> float | None:
        return self._inner.age(key)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        return self._inner.writer(key, size_hint)

    def room(self) -> int | None:
        return self._inner.room()

    def close(self) -> None:
        self._inner.close()


def _checked(keys: dict[str, Any]) -> dict[str, Any]:
    # A policy checks them by their annotations; whoever calls the class does not.
    if keys["checksum"] not in get_args(Choice):
        raise ValueError(f"checksum: {keys['checksum']!r} is none of {', '.join(get_args(Choice))}")
    return {name: parse_seconds(value) if name != "checksum" else value for name, value in keys.items()}
