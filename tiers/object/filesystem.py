"""The client of fsspec file systems for the object tier, and the translation of their errors into tier errors.

`ObjectClient` is the small set of calls that a bucket needs. `store_errors_translated` maps errors of fsspec, botocore
and aiohttp by code, status or class, adds a remedy, and removes credentials from every message.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import unquote

from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    Damaged,
    NotFound,
    TierError,
    TierFull,
    TierstateError,
    TierUnavailable,
)
from tierstate.tiers.posix.files import errno_class

_CODES: dict[str, type[TierError]] = {
    "PreconditionFailed": AlreadyExists,
    # Two writers at once, and the store does not say who won: try again.
    "ConditionalRequestConflict": TierUnavailable,
    "OperationAborted": TierUnavailable,
    "RequestTimeout": TierUnavailable,
    "SlowDown": TierUnavailable,
    "QuotaExceeded": TierFull,
    "XMinioStorageFull": TierFull,
    "InsufficientStorage": TierFull,
    "InvalidAccessKeyId": AccessDenied,
    "SignatureDoesNotMatch": AccessDenied,
    "ExpiredToken": AccessDenied,
    "AuthorizationHeaderMalformed": AccessDenied,
    "RequestTimeTooSkewed": AccessDenied,
    "PermanentRedirect": AccessDenied,
    "TemporaryRedirect": TierUnavailable,
    # The data was damaged in transit.
    "BadDigest": TierUnavailable,
    "IncompleteBody": TierUnavailable,
    "TooManyRequests": TierUnavailable,
    "NoSuchUpload": TierUnavailable,
}


_STATUS: dict[int, type[TierError]] = {
    301: AccessDenied,
    401: AccessDenied,
    403: AccessDenied,
    404: NotFound,
    408: TierUnavailable,
    412: AlreadyExists,
    429: TierUnavailable,
    507: TierFull,
}


# By name, so that no client library has to be imported to recognise its errors.
_NAMES: dict[str, type[TierError]] = {
    "NoCredentialsError": AccessDenied,
    "PartialCredentialsError": AccessDenied,
    "CredentialRetrievalError": AccessDenied,
    "FileExistsError": AlreadyExists,
    "FileNotFoundError": NotFound,
    "PermissionError": AccessDenied,
    # It is an OSError too, but not transient.
    "SSLCertVerificationError": AccessDenied,
    "SSLError": TierUnavailable,
    "gaierror": TierUnavailable,
    "HTTPException": TierUnavailable,
    "TimeoutError": TierUnavailable,
    "ConnectionError": TierUnavailable,
    "HTTPClientError": TierUnavailable,
    "ClientConnectionError": TierUnavailable,
    "ClientPayloadError": TierUnavailable,
    "ResponseParserError": TierUnavailable,
    "IncompleteReadError": TierUnavailable,
    "IncompleteRead": TierUnavailable,
}


_REMEDIES: dict[type[TierError], str] = {
    AlreadyExists: "nothing was changed",
    NotFound: "there is no such object, or no such bucket",
    AccessDenied: "check the credentials in the environment or in the tier's 'options', and what they allow",
}


_THROTTLED = "the store asks for fewer requests; let fewer processes write at once, or raise the tier's 'deadline'"


_CODE_REMEDIES: dict[str, str] = {
    "NoSuchBucket": "there is no such bucket: create it, or correct the tier's 'url'",
    "SlowDown": _THROTTLED,
    "TooManyRequests": _THROTTLED,
    "429": _THROTTLED,
    "RequestTimeTooSkewed": "the clock of this host and that of the store differ: set it",
    "BadDigest": "the bytes were damaged on their way there",
    "SSLCertVerificationError": "give the authority that signed the store's certificate: 'client_kwargs: {verify: "
    "/path/to/ca.pem}' in the tier's 'options'",
}


_REGION = re.compile(r"[a-z0-9-]{1,40}")


_WRONG_REGION = frozenset(
    {"301", "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)


_PUBLIC = frozenset({"endpoint_url", "region_name", "profile", "protocol", "signature_version", "addressing_style"})


_FROM_ENVIRONMENT = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


_SHORTEST_SECRET = 4


_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""The package to install for a protocol, if its name differs from the missing module."""


_CREATED = ("created", "LastModified", "last_modified", "mtime", "updated")
"""Names under which file systems report the creation time of an object; objects are written once."""


def secrets_in(url: str, options: Mapping[str, Any]) -> frozenset[str]:
    """All secrets, which no message may show: users and passwords in URLs, option values, environment variables."""
    found = {os.environ.get(name, "") for name in _FROM_ENVIRONMENT} | _user_of(url)
    for key, value in options.items():
        if isinstance(value, Mapping):
            found |= secrets_in("", value)
        elif isinstance(value, list | tuple):
            found |= frozenset().union(*(secrets_in("", {key: item}) for item in value))
        elif isinstance(value, str):
            found |= _user_of(value) if key in _PUBLIC else {value}
    return frozenset(text for text in found if len(text) >= _SHORTEST_SECRET)


def _user_of(url: str) -> set[str]:
    # All up to the last "@", since a password may have characters that are not allowed in a URL.
    user, at, _ = url.partition("://")[2].rpartition("@")
    return {part for text in (user, unquote(user)) for part in (text, *text.split(":"))} if at else set()


def scrub(text: str, secrets: frozenset[str]) -> str:
    """The text without the secrets; longer ones first, since one may be part of another."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def store_error_class(error: BaseException) -> type[TierError]:
    """The error class of a tier for an error of fsspec, botocore, aiohttp or the operating system."""
    response = _response(error)
    if response is not None:
        code = str(response.get("Error", {}).get("Code", ""))
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") or (int(code) if code.isdigit() else 0)
        found = _CODES.get(code) or _STATUS.get(status)
        return found or (TierUnavailable if status >= 500 else TierError)
    for base in type(error).__mro__:
        if base.__name__ in _NAMES:
            return _NAMES[base.__name__]
    return errno_class(error.errno) if isinstance(error, OSError) else TierError


def store_error_code(error: BaseException) -> str:
    """The store's code for an error, or else the name of its class."""
    response = _response(error) or {}
    return str(response.get("Error", {}).get("Code") or type(error).__name__)


def is_beyond_end(error: BaseException) -> bool:
    """Whether the store refused a range because the object ends before it."""
    return store_error_code(error) in ("InvalidRange", "416")


def remedy(error: BaseException) -> str:
    """Advice for the user about an error; empty if there is none."""
    code, response = store_error_code(error), _response(error) or {}
    if code in _WRONG_REGION:
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = str(response.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region") or "")
        if _REGION.fullmatch(region):
            return f"the bucket is in region {region}: write 'client_kwargs: {{region_name: {region}}}' in 'options'"
    return _CODE_REMEDIES.get(code) or _REMEDIES.get(store_error_class(error), "")


def _response(error: BaseException) -> Mapping[str, Any] | None:
    """The store's response in an error of botocore, also if that is the cause of a translated error."""
    for one in _linked(error, lambda one: one.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):
            return response
    return None


@contextmanager
def store_errors_translated(doing: str, tier: str, key: str, place: str, secrets: frozenset[str]) -> Iterator[None]:
    """Raise an error of the client library as a tier error; chained to it unless that would show a secret."""
    try:
        yield
    except TierstateError:
        raise
    except Exception as error:
        where = ": ".join(filter(None, (tier, key)))
        if is_beyond_end(error):
            raise Damaged(f"{where}: the object ends before the range that is wanted") from None
        sort = store_error_class(error)
        text = f"{where}: cannot {doing} {place}: {type(error).__name__}: {error}"
        text = "; ".join(filter(None, (scrub(text, secrets), remedy(error))))
        shows = any(secret in str(one) for one in _chain(error) for secret in secrets)
        raise sort(text, tier=tier, key=key) from (None if shows else error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    return _linked(error, lambda one: one.__cause__ or one.__context__)


def _linked(
    error: BaseException, following: Callable[[BaseException], BaseException | None]
) -> Iterator[BaseException]:
    """An error and its causes, each once: an error that was raised from itself makes a cycle."""
    one: BaseException | None = error
    met: set[int] = set()
    while one is not None and id(one) not in met:
        met.add(id(one))
        yield one
        one = following(one)


class ObjectTimes(NamedTuple):
    """When an object was created, and the store's current time; None if the store does not report it."""

    created: datetime | None
    now: datetime | None = None


class ObjectClient:
    """A client that uses the plain methods of an fsspec file system. Its errors are not translated.

    Args:
        url: protocol, bucket and prefix.
        options: arguments of the file system's constructor.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.protocol = url.partition("://")[0]
        self._fs, self.root = open_filesystem(url, options)
        endpoint = options.get("endpoint_url") or options.get("client_kwargs", {}).get("endpoint_url") or ""
        # Not by urlsplit: a password may contain a slash, which urlsplit would treat as the end of the host.
        self.host = str(endpoint).partition("://")[2].rpartition("@")[2].partition("/")[0]

    def path(self, name: str) -> str:
        """The path of an object for fsspec: without the protocol."""
        return f"{self.root}/{name}"

    def fetch(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[bytes]:
        """The bytes of each range; shorter if the object ends before."""
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
            FileNotFoundError: it does not exist.
        """
        info = self._fs.info(self.path(name))
        if info["type"] != "file":
            raise FileNotFoundError(self.path(name))
        return int(info["size"])

    def times(self, name: str) -> ObjectTimes:
        """When an object was created.

        Raises:
            FileNotFoundError: it does not exist.
        """
        info = self._fs.info(self.path(name))
        found = (info.get(key) for key in _CREATED)
        return ObjectTimes(next((t for t in found if isinstance(t, datetime) and t.tzinfo is not None), None))

    def create(self, name: str, body: memoryview) -> None:
        """Create an object if it does not exist; sent once."""
        self._fs.pipe_file(self.path(name), body, mode="create")

    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""
        try:
            self._fs.rm_file(self.path(name))
        except FileNotFoundError:
            return

    def remove_all(self, names: Iterable[str]) -> None:
        """Remove those of the objects that exist."""
        for name in names:
            self.remove(name)

    def close(self) -> None:
        """Close connections."""


class MemoryClient(ObjectClient):
    """fsspec's memory file system: one dict of files for the whole process, which is not thread-safe."""

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

    def times(self, name: str) -> ObjectTimes:
        with self._one_at_a_time:
            return super().times(name)._replace(now=datetime.now(UTC))

    def create(self, name: str, body: memoryview) -> None:
        with self._one_at_a_time:
            super().create(name, body)

    def remove(self, name: str) -> None:
        with self._one_at_a_time:
            super().remove(name)


def open_store(url: str, options: Mapping[str, Any]) -> ObjectClient:
    """The client for a URL, except S3; it does not connect yet.

    Raises:
        ImportError: the package for the protocol is missing; the message says how to install it.
        ValueError: the protocol is not known, or the URL names no bucket.
    """
    return (MemoryClient if url.startswith("memory://") else ObjectClient)(url, options)


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """A new file system without caches, and the path of the URL in it. Raises as `open_store` does."""
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
