"""Stores: what an object tier asks of fsspec's file systems, one class for each way of answering."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""What to install for a protocol, where that is not the module that is missing."""


_CREATED = ("created", "LastModified", "last_modified", "mtime", "updated")
"""Under which of these names file systems say when an object came to be; objects are written once."""


class Times(NamedTuple):
    """When an object was created, and what time it is there; None where the store does not say."""

    created: datetime | None
    now: datetime | None = None


class Store:
    """A file system of fsspec, by its plain methods. Errors come as fsspec raises them.

    Args:
        url: protocol, bucket and prefix.
        options: what the file system's constructor takes.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.protocol = url.partition("://")[0]
        self._fs, self.root = open_filesystem(url, options)
        endpoint = options.get("endpoint_url") or options.get("client_kwargs", {}).get("endpoint_url") or ""
        # By hand: a password may have a slash, at which others see the host's end.
        self.host = str(endpoint).partition("://")[2].rpartition("@")[2].partition("/")[0]

    def path(self, name: str) -> str:
        """Where the object of this name lies, as fsspec writes it: without the protocol."""
        return f"{self.root}/{name}"

    def fetch(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[bytes]:
        """The bytes of each range; shorter where the object ends."""
        answers: list[bytes] = self._fs.cat_ranges(
            [self.path(name)] * len(starts), list(starts), list(ends), on_error="raise"
        )
        return answers

    def names(self, prefix: str) -> list[str]:
        """Names of all objects that start with ``prefix``, in no order; never from a cache."""
        folder, _, stem = prefix.rpartition("/")
        found = self._find(self.path(folder).rstrip("/"), stem)
        start = f"{self.root}/"
        return [path[len(start) :] for path in found if path.startswith(start + prefix)]

    def _find(self, top: str, stem: str) -> Sequence[str]:
        try:
            paths: list[str] = self._fs.find(top)
        except FileNotFoundError:
            return []
        return paths

    def size(self, name: str) -> int:
        """Length of an object in bytes.

        Raises:
            FileNotFoundError: there is none.
        """
        info = self._fs.info(self.path(name))
        if info["type"] != "file":
            raise FileNotFoundError(self.path(name))
        return int(info["size"])

    def times(self, name: str) -> Times:
        """When an object was created.

        Raises:
            FileNotFoundError: there is none.
        """
        info = self._fs.info(self.path(name))
        found = (info.get(key) for key in _CREATED)
        return Times(next((t for t in found if isinstance(t, datetime) and t.tzinfo is not None), None))

    def create(self, name: str, body: memoryview) -> None:
        """Create an object under the condition that there is none; sent once."""
        self._fs.pipe_file(self.path(name), body, mode="create")

    def remove(self, name: str) -> None:
        """Remove an object, if there is one."""
        try:
            self._fs.rm_file(self.path(name))
        except FileNotFoundError:
            return

    def remove_all(self, names: Iterable[str]) -> None:
        """Remove objects, as many of them as there are."""
        for name in names:
            self.remove(name)

    def close(self) -> None:
        """Close connections."""


class MemoryStore(Store):
    """fsspec's memory file system: one dict of files for the whole process, which is not made for threads."""

    _one_at_a_time = threading.RLock()

    def fetch(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[bytes]:
        with self._one_at_a_time:
            return super().fetch(name, starts, ends)

    def names(self, prefix: str) -> list[str]:
        with self._one_at_a_time:
            return super().names(prefix)

    def size(self, name: str) -> int:
        with self._one_at_a_time:
            return super().size(name)

    def times(self, name: str) -> Times:
        with self._one_at_a_time:
            return super().times(name)._replace(now=datetime.now(UTC))

    def create(self, name: str, body: memoryview) -> None:
        with self._one_at_a_time:
            super().create(name, body)

    def remove(self, name: str) -> None:
        with self._one_at_a_time:
            super().remove(name)


def open_store(url: str, options: Mapping[str, Any]) -> Store:
    """The store for a URL, but for one of S3; nothing is connected yet.

    Raises:
        ImportError: the package for the protocol is missing; the message says how to install it.
        ValueError: the protocol is not known, or the URL names no bucket.
    """
    return (MemoryStore if url.startswith("memory://") else Store)(url, options)


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """A file system of its own, without caches, and the path of the URL in it. Raises as `open_store` does."""
    import fsspec
    from fsspec.core import url_to_fs

    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = _PACKAGES.get(protocol) or error.name or protocol
        raise ImportError(f"{protocol}:// needs the package {package}: pip install {package}") from error
    except ValueError:
        known = "file, memory, s3, and what fsspec knows"
        raise ValueError(f"{protocol}:// is no protocol known here; known are {known}") from None
    fs, root = url_to_fs(url, **{**options, "skip_instance_cache": True, "use_listings_cache": False})
    return fs, str(root).rstrip("/")
