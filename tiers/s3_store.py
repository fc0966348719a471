"""The S3 store: small requests by way of s3fs, data on connections of our own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from email.utils import parsedate_to_datetime
from typing import Any

from .s3_checksums import Checksum
from .s3_connections import Connections
from .s3_reading import Get
from .s3_retries import Patience
from .s3_signing import Signer, share_models
from .s3_transfers import Transfers
from .stores import Store, Times, open_filesystem

PARALLEL = 8
"""Requests with data that are sent at once, beside those of the threads that read."""

CONNECT, READ = 5.0, 30.0
"""Seconds that a connection, and an answer or a stretch of a body, may take, where the options say nothing: less than
the deadline, so that what one dead connection holds up is asked for again."""

BRIEFLY = 5.0
"""Seconds for what is worth a try, and not worth waiting for."""


class S3Session:
    """What one process has open at a store. A forked child must not use its parent's.

    Args:
        fs: a file system of s3fs, not connected yet, that sends every request once.
        deadline: seconds for one operation with all its attempts.
    """

    def __init__(self, fs: Any, deadline: float) -> None:
        from aiobotocore.session import AioSession  # type: ignore[import-untyped]

        self.pid = os.getpid()
        self.fs = fs
        fs.retries = 1
        self._patience = Patience(deadline)
        self._brief = Patience(min(deadline, BRIEFLY))
        signer = Signer(fs)
        fs.session = AioSession(**fs.kwargs)  # what s3fs would do, only that this one has read already what S3 is
        share_models(fs.session)
        self._connections = Connections(fs, signer)
        self.transfers = Transfers(signer, self._connections, self._patience)
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="tierstate-s3")

    # Small requests

    def once(self, method: str, **params: Any) -> Any:
        """The answer to a request, sent once."""
        return self._call(self._patience.deadline, method, params)

    def again(self, method: str, **params: Any) -> Any:
        """The answer to a request that may be sent again."""
        return self._patience.run(lambda left: self._call(left, method, params))

    def briefly(self, method: str, **params: Any) -> Any:
        """The same, with less patience."""
        return self._brief.run(lambda left: self._call(left, method, params))

    def _call(self, left: float, method: str, params: Mapping[str, Any]) -> Any:
        from fsspec.asyn import sync
        from fsspec.exceptions import FSTimeoutError

        try:
            return sync(self.fs.loop, self.fs._call_s3, method, timeout=left, **params)
        except FSTimeoutError:
            raise TimeoutError(f"no answer to {method} in {left:.1f} s") from None

    def patiently(self, attempt: Callable[[], Any]) -> Any:
        """What an attempt gives that does not fail."""
        return self._patience.run(lambda _: attempt())

    # Data

    def fill(self, where: Mapping[str, str], gets: Sequence[Get]) -> None:
        """Fill memory by several requests side by side, the first of them in this thread."""
        others = [self._pool.submit(self.transfers.fill, where, get) for get in gets[1:]]
        try:
            if gets:
                self.transfers.fill(where, gets[0])
            for other in others:
                other.result()
        finally:
            # The memory is the caller's again when this returns.
            for other in others:
                other.cancel()
            wait(others)

    def send_part(
        self, where: Mapping[str, str], number: int, body: Sequence[memoryview], sum: Checksum, stop: threading.Event
    ) -> Future[dict[str, Any]]:
        """Send a part from a thread of the pool."""
        return self._pool.submit(self.transfers.send_part, where, number, body, sum, stop)

    def each(self, call: Callable[[str], None], names: Iterable[str]) -> None:
        """Call something for every name, several at once; the first error is raised once all have been tried."""
        calls = [self._pool.submit(call, name) for name in names]
        wait(calls)
        for one in calls:
            one.result()

    def close(self) -> None:
        """Close connections, and end threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._connections.close()
        if self.fs._s3 is not None:
            self.fs.close_session(self.fs.loop, self.fs._s3)


class S3Store(Store):
    """An S3 store. Every request is sent again while its error is transient and time is left.

    Args:
        url: protocol, bucket and prefix.
        options: what s3fs takes.
        deadline: seconds for one operation with all its attempts.
    """

    def __init__(self, url: str, options: Mapping[str, Any], deadline: float) -> None:
        self._url, self._options, self._deadline = url, s3_options(options, deadline), deadline
        super().__init__(url, self._options)
        self._session = S3Session(self._fs, deadline)

    @property
    def session(self) -> S3Session:
        """What this process has open: a forked child opens its own."""
        if self._session.pid != os.getpid():
            self._fs, _ = open_filesystem(self._url, self._options)
            self._session = S3Session(self._fs, self._deadline)
        return self._session

    def where(self, name: str) -> dict[str, str]:
        """Bucket and key of an object, as S3's requests want them."""
        bucket, key, _ = self.session.fs.split_path(self.path(name))
        return {"Bucket": bucket, "Key": key}

    def fill(self, name: str, gets: Sequence[Get]) -> None:
        """Fill memory from an object."""
        self.session.fill(self.where(name), gets)

    def _find(self, top: str, stem: str) -> Sequence[str]:
        session = self.session
        paths: list[str] = session.patiently(lambda: session.fs.find(top, prefix=stem))
        return paths

    def size(self, name: str) -> int:
        return int(self.session.again("head_object", **self.where(name))["ContentLength"])

    def times(self, name: str) -> Times:
        answer = self.session.again("head_object", **self.where(name))
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return Times(answer["LastModified"], parsedate_to_datetime(date) if date else None)

    def create_whole(self, name: str, body: Sequence[memoryview], sums: Mapping[str, str], **how: Any) -> None:
        """Create an object in one piece under the condition that there is none; as in `Transfers`."""
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
        # Not by DeleteObjects: which checksum it wants differs from server to server.
        self.session.each(self.remove, names)

    def close(self) -> None:
        if self._session.pid == os.getpid():
            self._session.close()


def s3_options(options: Mapping[str, Any], deadline: float) -> dict[str, Any]:
    """The options for s3fs: the user's own, over what this package needs, but for retries, which are ours.

    Raises:
        ValueError: they say how often to try.
    """
    config: dict[str, Any] = {
        # No checksums that not every store answers to: chunks have digests of their own.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "connect_timeout": min(CONNECT, deadline),
        "read_timeout": min(READ, deadline),
        **options.get("config_kwargs", {}),
    }
    config["s3"] = {"payload_signing_enabled": False, **config.get("s3", {})}
    if "retries" in config:
        raise ValueError(
            "options: config_kwargs: 'retries' is not taken; the tier's 'deadline' says how long requests are tried"
        )
    config["retries"] = {"mode": "standard", "total_max_attempts": 1}
    return {**options, "config_kwargs": config}
