"""The S3 client: every request goes through one botocore client, is repeated until a deadline, and answered by S3."""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tierstate.manifest.errors import NotFound
from tierstate.tiers.base import Range
from tierstate.tiers.concurrency import WorkerPool
from tierstate.tiers.latch import Latch
from tierstate.tiers.object.filesystem import (
    ObjectClient,
    ObjectTimes,
    error_status,
    store_error_class,
    store_error_code,
)
from tierstate.tiers.secrets import LogScrubber

from .checksums import Checksum
from .http_session import Body, Broken, HttpSession
from .multipart import SentPart
from .options import S3Options, read_options, split_path
from .retry import RetryUntilDeadline, is_transient
from .transfers import GetRequest, Transfers, plan_gets

PARALLEL_REQUESTS = 8
"""Data requests that run in parallel, besides those of reading threads themselves."""


BRIEF_DEADLINE = 5.0
"""Deadline in seconds of cleanup requests, which are not worth a long wait."""


UNASKED_BODY = 1 << 20
"""Bodies up to this many bytes are sent without asking first whether the server wants them."""


MAX_PAGES = 1_000_000
"""Most pages of a listing that are read: a billion names."""


_DEFINITE = (404, 412, 416)
"""Statuses by which the tier decides what is there, so that they count only if an S3 server said them."""


_OUTDATED = frozenset({"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "400"})
"""Error codes, beside the statuses 401 and 403, after which credentials are looked up again. A HEAD has only 400."""


SWIFT_HEADER = "x-openstack-request-id"
"""A header of every answer of OpenStack Swift."""


DIRECTORY_BUCKETS = ("--x-s3", "--xa-s3")
"""How the names of directory buckets (S3 Express One Zone), and of access points to them, end."""


R2_HOST = ".r2.cloudflarestorage.com"
"""How the names of Cloudflare R2's endpoints end."""


_LIBRARIES = ("botocore", "urllib3")
"""Whose loggers see requests."""


class _Opened(NamedTuple):
    """A client of botocore, and the credentials with which it was opened; None for anonymous requests."""

    client: Any
    credentials: tuple[str | None, ...] | None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.client!r})"


class S3Session:
    """The client, connections and threads of one process. A forked child must not use its parent's.

    Args:
        options: of the tier.
        deadline: seconds for one operation with all its attempts.

    Attributes:
        is_swift: whether OpenStack Swift has answered.
    """

    def __init__(self, options: S3Options, deadline: float) -> None:
        self.pid = os.getpid()
        self._options = options
        self._patience = RetryUntilDeadline(deadline, silence=options.silence)
        self._brief = RetryUntilDeadline(min(deadline, BRIEF_DEADLINE))
        self._opening = threading.RLock()
        self._opened: _Opened | None = None
        self._http: HttpSession | None = None
        self.transfers = Transfers(self.call, self._patience)
        self._pool = WorkerPool(PARALLEL_REQUESTS, "tierstate-s3")
        # For a tier that is dropped without being closed: the threads hold a reference to the pool, not to this object.
        weakref.finalize(self, self._pool.end).atexit = False
        self.is_swift = False

    @property
    def endpoint(self) -> str:
        """The URL that requests go to; as far as it is known."""
        return str(self._opened.client.meta.endpoint_url) if self._opened else self._options.endpoint

    # Requests

    def once(self, method: str, **params: Any) -> Any:
        """Send a request once; returns its answer."""
        return self.call(method, self._patience.deadline, params)

    def briefly(self, method: str, **params: Any) -> Any:
        """Send an idempotent request, with retries and a short deadline; returns its answer."""
        return self._brief.run(lambda left: self.call(method, left, params))

    def uploads(self, **params: Any) -> Any:
        """A page of the unfinished uploads; some servers cannot list them, and say ``NoSuchUpload``."""
        return self._brief.run(
            lambda left: self.call("list_multipart_uploads", left, params),
            again=lambda error: is_transient(error) and store_error_code(error) != "NoSuchUpload",
        )

    def patiently(self, attempt: Callable[[], Any]) -> Any:
        """Retry until an attempt succeeds; returns its result."""
        return self._patience.run(lambda _: attempt())

    def head(self, where: Mapping[str, str]) -> Any:
        """The head of an object, with retries; as in `Transfers`."""
        return self._patience.run(lambda _: self.transfers.head(where))

    def call(self, method: str, left: float, params: Mapping[str, Any]) -> Any:
        """Send a request; once more if it was denied and there are newer credentials.

        Args:
            method: the name of the operation.
            left: seconds that connecting, and every wait, may take.
            params: its parameters.

        Raises:
            Broken: the answer is not one of an S3 server.
            botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, OSError
        """
        opened = self._open()
        try:
            return self._send(opened, method, left, params)
        except Exception as error:
            if not _is_outdated(error) or not self._renew(opened):
                raise _checked(error, method) from None
        if (body := params.get("Body")) is not None:
            body.seek(0)
        try:
            return self._send(self._open(), method, left, params)
        except Exception as error:
            raise _checked(error, method) from None

    def _send(self, opened: _Opened, method: str, left: float, params: Mapping[str, Any]) -> Any:
        client = opened.client
        members = client.meta.service_model.operation_model(
            client.meta.method_to_api_mapping[method]
        ).input_shape.members
        extra = {name: value for name, value in self._options.extra.items() if name in members}
        given = {**extra, **params}
        if "Metadata" in extra and "Metadata" in params:
            given["Metadata"] = {**extra["Metadata"], **params["Metadata"]}
        assert self._http is not None
        with self._http.within(left):
            return getattr(client, method)(**given)

    def _open(self) -> _Opened:
        with self._opening:
            if self._opened is None:
                self._opened = self._new()
            return self._opened

    def _new(self) -> _Opened:
        import botocore.session
        from botocore.config import Config

        keep_out_of_logs(self._options.secrets)
        session = botocore.session.Session(profile=self._options.profile)
        # Clients share the parsed API description of S3, as parsing it takes most of the start time.
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
        client = session.create_client("s3", config=Config(**self._options.config), **self._options.client)
        if self._http is None:
            self._http = _http_session(session, client, self._options)
        self._http.serve(client)
        client.meta.events.register_last("before-call.s3", self._send_at_once)
        client.meta.events.register("before-parse.s3.CreateSession", _hide_session)
        client.meta.events.register("after-call.s3", self._look_at_server)
        credentials = None if self._options.fixed else _frozen(session)
        keep_out_of_logs(frozenset(filter(None, (credentials or ())[1:])))
        return _Opened(client, credentials)

    def _send_at_once(self, params: dict[str, Any], **_: Any) -> None:
        """Take back that botocore asks whether the server wants a body, where that takes longer than sending it."""
        body = params.get("body")
        if isinstance(body, Body) and not (len(body) > UNASKED_BODY and self._http and self._http.asks_first):
            params["headers"].pop("Expect", None)

    def _look_at_server(self, parsed: Mapping[str, Any], **_: Any) -> None:
        if SWIFT_HEADER in parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {}):
            self.is_swift = True

    def _renew(self, used: _Opened) -> bool:
        """Look the credentials up again. Returns whether there are others now."""
        if self._options.fixed:
            return False
        with self._opening:
            if self._opened is used:
                found = self._new()
                if found.credentials == used.credentials:
                    return False
                self._opened = found
            return True

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
        stop: Latch,
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
        if self._http is not None:
            self._http.close()
        if self._opened is not None:
            self._opened.client.close()


_log_scrubber = LogScrubber()


def keep_out_of_logs(secrets: frozenset[str]) -> None:
    """Keep secrets out of what the libraries log: at the level DEBUG that is requests with all headers, so also a
    session token and keys of customers."""
    _log_scrubber.learn(secrets)
    # A filter of a logger does not see what loggers below it log: each of them gets it.
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in _LIBRARIES:
            logging.getLogger(name).addFilter(_log_scrubber)


def _hide_session(response_dict: Mapping[str, Any], **_: Any) -> None:
    """Keep the credentials of a directory bucket's session out of logs; botocore logs the answer when it is parsed."""
    found = re.findall(rb"<(?:SessionToken|SecretAccessKey)>([^<]+)<", response_dict["body"])
    keep_out_of_logs(frozenset(one.decode(errors="replace") for one in found))


def _is_outdated(error: Exception) -> bool:
    return error_status(error) in (401, 403) or store_error_code(error) in _OUTDATED


def _checked(error: Exception, method: str) -> Exception:
    """The error itself, unless it decides what is there and was not said by an S3 server."""
    status = error_status(error)
    if status not in _DEFINITE or store_error_code(error) not in ("", str(status)):
        return error
    headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})  # type: ignore[attr-defined]
    if any(name.startswith("x-amz-") for name in headers):
        return error
    return Broken(f"the answer to {method} has status {status} and nothing of an S3 server")


@cache
def _loader(path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(path)


def _frozen(session: Any) -> tuple[str | None, ...] | None:
    found = session.get_credentials()
    return None if found is None else tuple(found.get_frozen_credentials()[:3])


def _http_session(session: Any, client: Any, options: S3Options) -> HttpSession:
    """Connections with the certificates and proxies that botocore would use."""
    import socket

    from botocore.utils import get_environ_proxies

    config, verify = client.meta.config, options.client.get("verify")
    if verify is None:
        verify = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE", True)
    alive = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] if config.tcp_keepalive else []
    return HttpSession(
        config.connect_timeout,
        config.read_timeout,
        verify=verify,
        proxies=config.proxies or get_environ_proxies(client.meta.endpoint_url),
        proxies_config=config.proxies_config,
        max_pool_connections=config.max_pool_connections,
        client_cert=config.client_cert,
        socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), *alive],
    )


class S3Client(ObjectClient):
    """The client of an S3 store. Requests are repeated after transient errors until the deadline.

    Args:
        url: protocol, bucket and prefix.
        options: those of s3fs.
        deadline: seconds for one operation with all its attempts.

    Attributes:
        conditional: creates say that the name must be free; false for a store that refuses requests that say so.

    Raises:
        ValueError: an option is not known, not supported, or has a wrong value.
    """

    conditional = True

    def __init__(self, url: str, options: Mapping[str, Any], deadline: float) -> None:
        self._options, self._deadline = read_options(options, deadline), deadline
        protocol, _, path = url.partition("://")
        super().__init__(protocol, path.strip("/"), self._options.endpoint)
        self._bucket, self._prefix = split_path(self.root)
        self._session = S3Session(self._options, deadline)

    @property
    def session(self) -> S3Session:
        """The session of this process: a forked child opens its own."""
        if self._session.pid != os.getpid():
            self._session = S3Session(self._options, self._deadline)
        return self._session

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
        return self._session.endpoint

    @property
    def fixed_parts(self) -> bool:
        """Whether all parts of an upload but the last have one length: Cloudflare R2 takes no others."""
        if self._options.fixed_parts is not None:
            return self._options.fixed_parts
        return (urlsplit(self.endpoint).hostname or "").endswith(R2_HOST)

    def where(self, name: str) -> dict[str, str]:
        """Bucket and key of an object, as parameters of S3 requests."""
        return {"Bucket": self._bucket, "Key": f"{self._prefix}/{name}" if self._prefix else name}

    def fill(self, name: str, ranges: Sequence[Range]) -> None:
        self.session.fill(self.where(name), plan_gets(ranges))

    def names(self, prefix: str) -> list[str]:
        start = self.where("")["Key"]
        keys = (entry["Key"] for entry in self._listed(self.where(prefix)["Key"]))
        return [key[len(start) :] for key in keys if key.startswith(start + prefix)]

    def total(self) -> int:
        # Each once, as in a listing: some servers list a name twice.
        return sum({entry["Key"]: int(entry["Size"]) for entry in self._listed(self.where("")["Key"])}.values())

    def _listed(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        """Entries of objects with a prefix; a directory bucket lists only all that is below a slash."""
        if self._bucket.endswith(DIRECTORY_BUCKETS):
            prefix = prefix[: prefix.rfind("/") + 1]
        token: dict[str, str] = {}
        for _ in range(MAX_PAGES):
            page = self.session.patiently(partial(self._page, prefix, token))
            yield from page.get("Contents", ())
            if not page["IsTruncated"]:
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}
        raise Broken(f"the listing has more than {MAX_PAGES} pages")

    def _page(self, prefix: str, token: Mapping[str, str]) -> Any:
        page = self.session.once("list_objects_v2", Bucket=self._bucket, Prefix=prefix, **token)
        if "IsTruncated" not in page:
            raise Broken("the answer to a listing has nothing of a listing")
        follows = page.get("NextContinuationToken")
        if page["IsTruncated"] and (not follows or follows == token.get("ContinuationToken")):
            raise Broken("the answer to a listing has no end, and does not say where it goes on")
        return page

    def size(self, name: str) -> int:
        head = self.session.head(self.where(name))
        if "ContentLength" in head:
            return int(head["ContentLength"])
        where = self.where(name)["Key"]
        found = next((int(one["Size"]) for one in self._listed(where) if one["Key"] == where), None)
        if found is None:
            raise Broken("the length of an object is neither in its head nor in a listing")
        return found

    def times(self, name: str) -> ObjectTimes:
        head = self.session.head(self.where(name))
        date = head["ResponseMetadata"]["HTTPHeaders"].get("date")
        return ObjectTimes(head["LastModified"], parsedate_to_datetime(date) if date else None)

    def create(self, name: str, body: memoryview) -> None:
        self.create_whole(name, [body], {})

    def create_whole(self, name: str, body: Sequence[memoryview], sums: Mapping[str, str], **how: Any) -> None:
        """Create an object by one request; as in `Transfers`."""
        self.session.transfers.create(self.where(name), body, sums, conditional=self.conditional, **how)

    def remove(self, name: str) -> None:
        self.session.patiently(lambda: self._remove(self.where(name)))

    def _remove(self, where: Mapping[str, str]) -> None:
        failure: Exception = Broken("the answer to a deletion was none, and the object is there")
        try:
            if self.session.once("delete_object", **where)["ResponseMetadata"]["HTTPStatusCode"] == 204:
                return
        except Exception as error:
            if store_error_class(error) is NotFound:
                return
            # That of rclone fails so where there is no such object.
            if error_status(error) != 500:
                raise
            failure = error
        if not self._is_gone(where):
            raise failure

    def _is_gone(self, where: Mapping[str, str]) -> bool:
        try:
            self.session.transfers.head(where)
        except Exception as error:
            if store_error_class(error) is not NotFound:
                raise
            return True
        return False

    def remove_all(self, names: Iterable[str]) -> None:
        # Not by DeleteObjects: servers differ in the checksum that it requires.
        self.session.each(self.remove, names)

    def close(self) -> None:
        if self._session.pid == os.getpid():
            self._session.close()
