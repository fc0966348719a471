"""The S3 client: small requests (head, list, delete) by s3fs, data over HTTP connections of our own, both retried."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from tierstate.tiers.concurrency import WorkerPool
from tierstate.tiers.object.filesystem import ObjectClient, ObjectTimes, open_filesystem

from .http import Connections
from .multipart import SentPart
from .retry import RetryUntilDeadline
from .signing import Checksum, Signer, share_models
from .transfers import GetRequest, Transfers

PARALLEL_REQUESTS = 8
"""Data requests that run in parallel, besides those of reading threads themselves."""


CONNECT_TIMEOUT, READ_TIMEOUT = 5.0, 30.0
"""Default timeouts in seconds of connecting, and of waiting for a response or for part of a body. They are shorter than
the deadline, so that a request can be repeated after a dead connection."""


BRIEF_DEADLINE = 5.0
"""Deadline in seconds of cleanup requests, which are not worth a long wait."""


class S3Session:
    """The connections and threads of one process. A forked child must not use its parent's.

    Args:
        fs: a file system of s3fs, not connected yet, that sends every request once.
        deadline: seconds for one operation with all its attempts.
    """

    def __init__(self, fs: Any, deadline: float) -> None:
        from aiobotocore.session import AioSession  # type: ignore[import-untyped]

        self.pid = os.getpid()
        self.fs = fs
        fs.retries = 1
        self._patience = RetryUntilDeadline(deadline)
        self._brief = RetryUntilDeadline(min(deadline, BRIEF_DEADLINE))
        signer = Signer(fs)
        fs.session = AioSession(**fs.kwargs)  # as s3fs does, but it shares the API description parsed before
        share_models(fs.session)
        self._connections = Connections(fs, signer)
        self.transfers = Transfers(signer, self._connections, self._patience)
        self._pool = WorkerPool(PARALLEL_REQUESTS, "tierstate-s3")

    # Small requests

    def once(self, method: str, **params: Any) -> Any:
        """Send a request once; returns its response."""
        return self._call(self._patience.deadline, method, params)

    def again(self, method: str, **params: Any) -> Any:
        """Send an idempotent request, with retries; returns its response."""
        return self._patience.run(lambda left: self._call(left, method, params))

    def briefly(self, method: str, **params: Any) -> Any:
        """As `again`, with a short deadline."""
        return self._brief.run(lambda left: self._call(left, method, params))

    def _call(self, left: float, method: str, params: Mapping[str, Any]) -> Any:
        from fsspec.asyn import sync
        from fsspec.exceptions import FSTimeoutError

        try:
            return sync(self.fs.loop, self.fs._call_s3, method, timeout=left, **params)
        except FSTimeoutError:
            raise TimeoutError(f"no answer to {method} in {left:.1f} s") from None

    def patiently(self, attempt: Callable[[], Any]) -> Any:
        """Retry until an attempt succeeds; returns its result."""
        return self._patience.run(lambda _: attempt())

    # Data

    def fill(self, where: Mapping[str, str], gets: Sequence[GetRequest]) -> None:
        """Fill memory by several parallel requests, the first of them in this thread."""
        failed = False

        def fill(get: GetRequest) -> None:
            if not failed:
                self.transfers.fill(where, get)

        others = [self._pool.submit(partial(fill, get)) for get in gets[1:]]
        try:
            if gets:
                fill(gets[0])
            for other in others:
                other.result()
        except BaseException:
            failed = True
            raise
        finally:
            # The caller may reuse the memory when this returns: wait for all requests.
            for other in others:
                other.wait()

    def send_part(
        self,
        where: Mapping[str, str],
        number: int,
        body: Sequence[memoryview],
        sum: Checksum,
        stop: threading.Event,
        then: Callable[[SentPart], object],
    ) -> SentPart:
        """Send a part from a thread of the pool; ``then`` is called when that has ended."""
        return self._pool.submit(partial(self.transfers.send_part, where, number, body, sum, stop), then)

    def each(self, call: Callable[[str], None], names: Iterable[str]) -> None:
        """Call ``call`` for every name, several in parallel; raises the first error after all were tried."""
        calls = [self._pool.submit(partial(call, name)) for name in names]
        for one in calls:
            one.wait()
        for one in calls:
            one.result()

    def close(self) -> None:
        """Close connections, and end threads."""
        self._pool.close()
        self._connections.close()
        if self.fs._s3 is not None:
            self.fs.close_session(self.fs.loop, self.fs._s3)


class S3Client(ObjectClient):
    """The client of an S3 store. Requests are repeated after transient errors until the deadline.

    Args:
        url: protocol, bucket and prefix.
        options: arguments of s3fs.
        deadline: seconds for one operation with all its attempts.
    """

    def __init__(self, url: str, options: Mapping[str, Any], deadline: float) -> None:
        self._url, self._options, self._deadline = url, s3_options(options, deadline), deadline
        super().__init__(url, self._options)
        self._session = S3Session(self._fs, deadline)

    @property
    def session(self) -> S3Session:
        """The session of this process: a forked child opens its own."""
        if self._session.pid != os.getpid():
            self._fs, _ = open_filesystem(self._url, self._options)
            self._session = S3Session(self._fs, self._deadline)
        return self._session

    def where(self, name: str) -> dict[str, str]:
        """Bucket and key of an object, as parameters of S3 requests."""
        bucket, key, _ = self.session.fs.split_path(self.path(name))
        return {"Bucket": bucket, "Key": key}

    def fill(self, name: str, gets: Sequence[GetRequest]) -> None:
        """Fill memory from an object."""
        self.session.fill(self.where(name), gets)

    def _find(self, top: str, stem: str) -> Sequence[str]:
        session = self.session
        paths: list[str] = session.patiently(lambda: session.fs.find(top, prefix=stem))
        return paths

    def size(self, name: str) -> int:
        return int(self.session.again("head_object", **self.where(name))["ContentLength"])

    def times(self, name: str) -> ObjectTimes:
        answer = self.session.again("head_object", **self.where(name))
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return ObjectTimes(answer["LastModified"], parsedate_to_datetime(date) if date else None)

    def create_whole(self, name: str, body: Sequence[memoryview], sums: Mapping[str, str], **how: Any) -> None:
        """Create an object by one conditional request; as in `Transfers`."""
        self.session.transfers.create(self.where(name), body, sums, **how)

    def remove(self, name: str) -> None:
        session, path = self.session, self.path(name)

        def attempt() -> None:
            try:
                session.fs.rm_file(path)
            except FileNotFoundError:
                return

        session.patiently(attempt)

    def remove_all(self, names: Iterable[str]) -> None:
        # Not by DeleteObjects: servers differ in the checksum that it requires.
        self.session.each(self.remove, names)

    def close(self) -> None:
        if self._session.pid == os.getpid():
            self._session.close()


def s3_options(options: Mapping[str, Any], deadline: float) -> dict[str, Any]:
    """The options for s3fs: the user's override our defaults; this client does the retries.

    Raises:
        ValueError: they set a number of retries.
    """
    config: dict[str, Any] = {
        # botocore's own checksums are not supported by every store; the tier chooses its own (`choose_checksum`).
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "connect_timeout": min(CONNECT_TIMEOUT, deadline),
        "read_timeout": min(READ_TIMEOUT, deadline),
        **options.get("config_kwargs", {}),
    }
    config["s3"] = {"payload_signing_enabled": False, **config.get("s3", {})}
    if "retries" in config:
        raise ValueError(
            "options: config_kwargs: 'retries' is not taken; the tier's 'deadline' says how long requests are tried"
        )
    config["retries"] = {"mode": "standard", "total_max_attempts": 1}
    return {**options, "config_kwargs": config}
