"""Stores: what an object tier asks of fsspec's file systems, one class for each way of answering."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

ATTEMPTS = 3
"""How often a request is sent that may be sent again: by botocore, and by s3fs, which also sees broken bodies."""

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""What to install for a protocol, where that is not the module that is missing."""


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
        self.host = urlsplit(str(endpoint)).netloc.rpartition("@")[2]

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

    def create(self, name: str, body: memoryview) -> None:
        """Create an object under the condition that there is none; sent once."""
        self._fs.pipe_file(self.path(name), body, mode="create")

    def remove(self, name: str) -> None:
        """Remove an object, if there is one."""
        try:
            self._fs.rm_file(self.path(name))
        except FileNotFoundError:
            return

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

    def create(self, name: str, body: memoryview) -> None:
        with self._one_at_a_time:
            super().create(name, body)

    def remove(self, name: str) -> None:
        with self._one_at_a_time:
            super().remove(name)


class S3Store(Store):
    """An S3 store by way of s3fs. Reads and parts are tried again by the client; creates are sent once."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__(url, s3_options(options, once=False))
        self._fs.retries = ATTEMPTS
        self._url, self._options = url, options
        self._opening = threading.Lock()
        self._second: Any = None

    @property
    def _once(self) -> Any:
        """The client for creates: one that is sent again after a lost answer would find the name taken, by itself."""
        with self._opening:
            if self._second is None:
                self._fs.connect()
                # The session is most of what a client costs.
                options = {**s3_options(self._options, once=True), "session": self._fs.session}
                self._second, _ = open_filesystem(self._url, options)
                self._second.retries = 1
            return self._second

    def where(self, name: str) -> dict[str, str]:
        """Bucket and key of an object, as S3's requests want them."""
        bucket, key, _ = self._fs.split_path(self.path(name))
        return {"Bucket": bucket, "Key": key}

    def _find(self, top: str, stem: str) -> Sequence[str]:
        paths: list[str] = self._fs.find(top, prefix=stem)
        return paths

    def size(self, name: str) -> int:
        return int(self._fs.call_s3("head_object", **self.where(name))["ContentLength"])

    def create(self, name: str, body: memoryview) -> None:
        self._once.call_s3("put_object", **self.where(name), Body=_stream(body), IfNoneMatch="*")

    def upload(self, name: str) -> Upload:
        """A new upload in parts."""
        return Upload(self._fs, self._once, self.where(name))

    def close(self) -> None:
        for fs in (self._fs, self._second):
            if fs is not None and fs._s3 is not None:
                fs.close_session(fs.loop, fs._s3)


class Upload:
    """One multipart upload: begun when constructed, visible once completed.

    Args:
        fs, once: s3fs file systems, of which the second sends every request once.
        where: bucket and key.
    """

    def __init__(self, fs: Any, once: Any, where: Mapping[str, str]) -> None:
        self._fs, self._once = fs, once
        self._where = {**where, "UploadId": fs.call_s3("create_multipart_upload", **where)["UploadId"]}

    def part(self, number: int, body: memoryview) -> Future[dict[str, Any]]:
        """Send a copy of one part, numbered from 1; the future holds what `complete` needs of it."""
        stream = _stream(body)

        async def send() -> dict[str, Any]:
            answer = await self._fs._call_s3("upload_part", **self._where, PartNumber=number, Body=stream)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        return asyncio.run_coroutine_threadsafe(send(), self._fs.loop)

    def complete(self, parts: Sequence[dict[str, Any]]) -> None:
        """Make the object visible, if there is none of its name: AWS honours that condition here, Ceph does not."""
        self._once.call_s3(
            "complete_multipart_upload", **self._where, MultipartUpload={"Parts": list(parts)}, IfNoneMatch="*"
        )

    def abort(self) -> None:
        """Forget the parts."""
        self._fs.call_s3("abort_multipart_upload", **self._where)


def _stream(body: memoryview) -> io.BytesIO:
    # botocore can not send a memoryview again, and aiohttp warns of plain bytes beyond 1 MiB.
    return io.BytesIO(body)


def open_store(url: str, options: Mapping[str, Any]) -> Store:
    """The store for a URL; nothing is connected yet.

    Raises:
        ImportError: the package for the protocol is missing; the message says how to install it.
        ValueError: the protocol is not known, or the URL names no bucket.
    """
    kinds = {"memory": MemoryStore, "s3": S3Store, "s3a": S3Store}
    return kinds.get(url.partition("://")[0], Store)(url, options)


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


def s3_options(options: Mapping[str, Any], once: bool) -> dict[str, Any]:
    """The options for s3fs: the user's own, over what this package needs.

    Args:
        once: whether botocore may send a request only once.
    """
    config: dict[str, Any] = {
        # No checksums that not every store answers to, nor one over every body: chunks have digests of their own.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **options.get("config_kwargs", {}),
    }
    config["s3"] = {"payload_signing_enabled": False, **config.get("s3", {})}
    retries = {"mode": "standard", "total_max_attempts": ATTEMPTS, **config.get("retries", {})}
    config["retries"] = {"mode": "standard", "total_max_attempts": 1} if once else retries
    return {**options, "config_kwargs": config}
