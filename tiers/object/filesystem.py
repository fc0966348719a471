"""The client of fsspec file systems for the object tier, and the translation of store errors into tier errors.

`ObjectClient` is the small set of calls that a bucket needs. `store_errors_translated` maps errors of fsspec, botocore
and aiohttp by code, status or class, adds a remedy, and removes credentials from every message.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

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
from tierstate.manifest.printable import escape_controls
from tierstate.tiers.base import Range
from tierstate.tiers.posix.files import errno_class
from tierstate.tiers.secrets import linked, scrub, shows

READ_PART = 16 << 20
"""Most bytes that one request reads."""


PARALLEL_READS = 8
"""Range requests of one read in flight."""


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
    "IllegalLocationConstraintException": AccessDenied,
    "TemporaryRedirect": TierUnavailable,
    # The data was damaged in transit.
    "BadDigest": TierUnavailable,
    "IncompleteBody": TierUnavailable,
    "TooManyRequests": TierUnavailable,
    "NoSuchUpload": TierUnavailable,
    "NotImplemented": TierError,
}


_STATUS: dict[int, type[TierError]] = {
    301: AccessDenied,
    # Where botocore could not follow: a new bucket that moves to its region, or the login page of a network.
    302: TierUnavailable,
    303: TierUnavailable,
    307: TierUnavailable,
    308: TierUnavailable,
    401: AccessDenied,
    403: AccessDenied,
    404: NotFound,
    408: TierUnavailable,
    412: AlreadyExists,
    429: TierUnavailable,
    501: TierError,
    507: TierFull,
}


# By name, so that no client library has to be imported to recognise its errors.
_NAMES: dict[str, type[TierError]] = {
    "NoCredentialsError": AccessDenied,
    "PartialCredentialsError": AccessDenied,
    # What gives them (a metadata server, a program) does not answer now: nothing is denied.
    "CredentialRetrievalError": TierUnavailable,
    "MetadataRetrievalError": TierUnavailable,
    "ProfileNotFound": AccessDenied,
    "TokenRetrievalError": AccessDenied,
    "SSOError": AccessDenied,
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
    # Of urllib3.
    "HTTPError": TierUnavailable,
    "ClientConnectionError": TierUnavailable,
    "ClientPayloadError": TierUnavailable,
    "ResponseParserError": TierUnavailable,
    "IncompleteReadError": TierUnavailable,
    "IncompleteRead": TierUnavailable,
    # Of Azure's library; its other errors have a status.
    "ResourceExistsError": AlreadyExists,
    "ResourceNotFoundError": NotFound,
    "ClientAuthenticationError": AccessDenied,
    "ServiceRequestError": TierUnavailable,
    "ServiceResponseError": TierUnavailable,
    # Of gcsfs and what it uses.
    "DefaultCredentialsError": AccessDenied,
    "RefreshError": AccessDenied,
    "TransportError": TierUnavailable,
    "RequestException": TierUnavailable,
    "ChecksumError": TierUnavailable,
}


_CREDENTIALS = frozenset({"RefreshError", "ClientAuthenticationError"})
"""What Google's and Azure's libraries raise when they have no credentials: denied for good, or not to be had now."""


_STATUS_NAMES = ("status_code", "status", "code")
"""Names under which errors of Azure's library, aiohttp and gcsfs have the HTTP status."""


_REMEDIES: dict[type[TierError], str] = {
    AlreadyExists: "nothing was changed",
    NotFound: "there is no such object, or no such bucket",
    AccessDenied: "check the credentials in the environment or in the tier's 'options', and what they allow",
    TierUnavailable: "see whether the store can be reached from this host; a longer 'deadline' bridges longer outages",
    TierFull: "make room in the store, raise its quota, or let the tier keep fewer versions ('keep')",
    TierError: "see whether the store supports this request, and whether 'url' and 'options' of the tier are right",
}


_THROTTLED = "the store asks for fewer requests; let fewer processes write at once, or raise the tier's 'deadline'"


_NO_CREDENTIALS = "see whether what gives the credentials answers: a metadata server, or a program of the profile"


_CODE_REMEDIES: dict[str, str] = {
    "NoSuchBucket": "there is no such bucket: create it, or correct the tier's 'url'",
    "SlowDown": _THROTTLED,
    "TooManyRequests": _THROTTLED,
    "429": _THROTTLED,
    "RequestTimeTooSkewed": "the clock of this host and that of the store differ: set it",
    "BadDigest": "the bytes were damaged on their way there",
    "InvalidObjectState": "the store has archived the object: have it restored there, and let no lifecycle rule move "
    "what lies under the tier's 'url' to an archive",
    "QuotaExceeded": "the quota of the bucket or of its user is used up: raise it, or let the tier keep fewer versions "
    "('keep')",
    "CredentialRetrievalError": _NO_CREDENTIALS,
    "MetadataRetrievalError": _NO_CREDENTIALS,
    "SSLCertVerificationError": "give the authority that signed the store's certificate: for s3:// by 'client_kwargs: "
    "{verify: /path/to/ca.pem}' in the tier's 'options', else by the environment variable SSL_CERT_FILE",
}


_ONE_ATTEMPT = " (reached max retries: 0)"
"""What botocore says, which sends every request once: repeating them is up to the tier."""


_REGION = re.compile(r"[a-z0-9-]{1,40}")


_WRONG_REGION = frozenset(
    {"301", "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)


_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""The package to install for a protocol, if its name differs from the missing module."""


_CHECKS = frozenset({"verify", "verify_ssl", "ssl_verify", "use_ssl", "ssl", "check_hostname"})
"""Names of options that, with the value false, turn off the check of certificates, or the encryption."""


_OWN_HOSTS = (None, "localhost", "127.0.0.1", "::1")


_CREATED = ("created", "LastModified", "last_modified", "mtime", "updated")
"""Names under which file systems report the creation time of an object; objects are written once."""


def store_error_class(error: BaseException) -> type[TierError]:
    """The error class of a tier for an error of fsspec, botocore, aiohttp or the operating system."""
    response = _response(error)
    if response is not None:
        status = error_status(error)
        found = _CODES.get(store_error_code(error)) or _STATUS.get(status)
        return found or (TierUnavailable if status >= 500 else TierError)
    causes = list(_causes(error))
    # aiohttp and Azure's library raise an error of the connection from it.
    if any("SSLCertVerificationError" in _names(one) for one in causes):
        return AccessDenied
    if _credentials_pending(causes):
        return TierUnavailable
    return next(filter(None, map(_class_of, causes)), TierError)


def _credentials_pending(causes: Sequence[BaseException]) -> bool:
    """Whether what gives the credentials (a metadata server) could not be asked; gcsfs makes a status 401 of that."""
    said = [one for one in causes if not _CREDENTIALS.isdisjoint(_names(one))]
    # Set by google-auth where the server that gives tokens had trouble.
    retryable = any(getattr(one, "retryable", False) is True for one in said)
    return retryable or (bool(said) and TierUnavailable in map(_class_of, causes))


def _names(error: BaseException) -> list[str]:
    """Of the class of an error, and of those that it is derived from, nearest first."""
    return [base.__name__ for base in type(error).__mro__]


def _class_of(error: BaseException) -> type[TierError] | None:
    """By the name of its class, its errno or its HTTP status; None if none of them says anything."""
    for name in _names(error):
        if name in _NAMES:
            return _NAMES[name]
    if isinstance(error, OSError) and error.errno is not None:
        return errno_class(error.errno)
    if status := _status_of(error):
        return _STATUS.get(status) or (TierUnavailable if status >= 500 else TierError)
    # What gcsfs says for the status 403.
    return AccessDenied if isinstance(error, OSError) and str(error).startswith("Forbidden: ") else None


def _status_of(error: BaseException) -> int:
    """The HTTP status of an error that has it as an attribute; 0 if it has none."""
    found = (str(getattr(error, name, "")) for name in _STATUS_NAMES)
    return next((int(text) for text in found if text.isdigit() and 300 <= int(text) <= 599), 0)


def store_error_code(error: BaseException) -> str:
    """The store's code for an error, or else the name of its class."""
    response = _response(error) or {}
    return str(response.get("Error", {}).get("Code") or type(error).__name__)


def error_status(error: BaseException) -> int:
    """The HTTP status of a store's error; 0 if it is none."""
    response = _response(error) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return int(status or (code if code.isdigit() else 0)) or next(filter(None, map(_status_of, _causes(error))), 0)


class BeyondEnd(Exception):
    """A range is not in the object, which ends before."""


def is_beyond_end(error: BaseException) -> bool:
    """Whether an object ends before a range of it that was asked for."""
    return isinstance(error, BeyondEnd) or store_error_code(error) == "InvalidRange" or error_status(error) == 416


def remedy(error: BaseException) -> str:
    """Advice for the user about an error."""
    code, response = store_error_code(error), _response(error)
    if response is not None and code in _WRONG_REGION:
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = str(response.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region") or "")
        if _REGION.fullmatch(region):
            return f"the bucket is in region {region}: write 'client_kwargs: {{region_name: {region}}}' in 'options'"
    causes = list(_causes(error))
    if response is None and _credentials_pending(causes):
        return _NO_CREDENTIALS
    named = (_CODE_REMEDIES.get(name) for name in (code, *(name for one in causes for name in _names(one))))
    return next(filter(None, named), _REMEDIES[store_error_class(error)])


def _response(error: BaseException) -> Mapping[str, Any] | None:
    """The store's response in an error of botocore, also if that is the cause of a translated error."""
    for one in _causes(error):
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
            raise Damaged(f"{where}: the object ends before the range that is wanted, in {place}") from None
        sort = store_error_class(error)
        said = escape_controls(str(error).replace(_ONE_ATTEMPT, ""))
        text = f"{where}: cannot {doing} {place}: {type(error).__name__}: {said}"
        text = "; ".join(filter(None, (scrub(text, secrets), remedy(error))))
        raise sort(text, tier=tier, key=key) from (None if shows(error, secrets) else error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    return linked(error, lambda one: one.__cause__)


class ObjectTimes(NamedTuple):
    """When an object was created, and the store's current time; None if the store does not report it."""

    created: datetime | None
    now: datetime | None = None


class ObjectClient(ABC):
    """What a bucket needs of a store. Errors are those of the library that is used, not translated.

    Args:
        protocol: of its URL.
        root: bucket and prefix.
        endpoint: the URL of the server, or its host; empty if not known.
    """

    def __init__(self, protocol: str, root: str, endpoint: str) -> None:
        self.protocol, self.root = protocol, root
        # Not by urlsplit: a password may contain a slash, which urlsplit would treat as the end of the host.
        self.host = endpoint.partition("://")[2].rpartition("@")[2].partition("/")[0]
        self._endpoint = endpoint

    @property
    def endpoint(self) -> str:
        """The URL of the server; empty if it is not known."""
        return self._endpoint

    def path(self, name: str) -> str:
        """Bucket and key of an object."""
        return f"{self.root}/{name}"

    @abstractmethod
    def fill(self, name: str, ranges: Sequence[Range]) -> None:
        """Fill every byte of every range from an object."""

    @abstractmethod
    def names(self, prefix: str) -> list[str]:
        """Names of all objects that start with ``prefix``, in no order; never from a cache."""

    @abstractmethod
    def total(self) -> int:
        """Bytes of all objects together, as the listing has it."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Length of an object in bytes. Raises an error that means `NotFound` if it does not exist."""

    @abstractmethod
    def times(self, name: str) -> ObjectTimes:
        """When an object was created. Raises as `size` does."""

    @abstractmethod
    def create(self, name: str, body: memoryview) -> None:
        """Create an object if it does not exist."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""

    def remove_all(self, names: Iterable[str]) -> None:
        """Remove those of the objects that exist."""
        for name in names:
            self.remove(name)

    def close(self) -> None:  # noqa: B027, since most have nothing to close
        """Close connections."""


class FsspecClient(ObjectClient):
    """A client that uses the plain methods of an fsspec file system.

    Args:
        url: protocol, bucket and prefix.
        options: arguments of the file system's constructor.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._fs, root = open_filesystem(url, options)
        endpoint = options.get("endpoint_url") or options.get("client_kwargs", {}).get("endpoint_url") or ""
        super().__init__(url.partition("://")[0], root, str(endpoint))

    @property
    def creates_by_files(self) -> bool:
        """Whether `create` writes through the files of `open_new`, as fsspec does where a store has no other way."""
        from fsspec.spec import AbstractFileSystem

        return getattr(self._fs.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file

    def fill(self, name: str, ranges: Sequence[Range]) -> None:
        pieces = [piece for wanted in ranges for piece in _split(wanted)]
        for i in range(0, len(pieces), PARALLEL_READS):
            self._fill(name, pieces[i : i + PARALLEL_READS])

    def _fill(self, name: str, pieces: Sequence[Range]) -> None:
        starts = [offset for offset, _ in pieces]
        ends = [offset + out.numel() for offset, out in pieces]
        answers = self._fs.cat_ranges([self.path(name)] * len(pieces), starts, ends, on_error="raise")
        for (offset, out), data in zip(pieces, answers, strict=True):
            if len(data) != out.numel():
                if offset + out.numel() > self.size(name):
                    raise BeyondEnd(f"{len(data)} bytes of {out.numel()} from {offset} are there")
                raise ConnectionError(f"the store sent {len(data)} bytes from {offset}, {out.numel()} were asked for")
            # NumPy releases the GIL meanwhile; assigning to a memoryview does not.
            np.copyto(out.numpy(), np.frombuffer(data, np.uint8))

    def names(self, prefix: str) -> list[str]:
        try:
            found: list[str] = self._fs.find(self.path(prefix.rpartition("/")[0]).rstrip("/"))
        except FileNotFoundError:
            return []
        start = f"{self.root}/"
        return [path[len(start) :] for path in found if path.startswith(start + prefix)]

    def total(self) -> int:
        try:
            found: dict[str, Any] = self._fs.find(self.root, detail=True)
        except FileNotFoundError:
            return 0
        return sum(int(info["size"] or 0) for info in found.values())

    def size(self, name: str) -> int:
        info = self._fs.info(self.path(name))
        if info["type"] != "file":
            raise FileNotFoundError(self.path(name))
        return int(info["size"])

    def times(self, name: str) -> ObjectTimes:
        info = self._fs.info(self.path(name))
        found = (info.get(key) for key in _CREATED)
        return ObjectTimes(next((t for t in found if isinstance(t, datetime) and t.tzinfo is not None), None))

    def create(self, name: str, body: memoryview) -> None:
        # As bytes: adlfs takes a memoryview for a list of numbers.
        self._fs.pipe_file(self.path(name), bytes(body), mode="create")

    def open_new(self, name: str, block: int) -> Any:
        """A file of fsspec for writing an object that does not exist; it sends blocks of so many bytes."""
        return self._fs.open(self.path(name), "xb", block_size=block)

    def remove(self, name: str) -> None:
        try:
            self._fs.rm_file(self.path(name))
        except FileNotFoundError:
            return


class MemoryClient(FsspecClient):
    """fsspec's memory file system: one dict of files for the whole process, which is not thread-safe."""

    _one_at_a_time = threading.RLock()

    def fill(self, name: str, ranges: Sequence[Range]) -> None:
        with self._one_at_a_time:
            super().fill(name, ranges)

    def names(self, prefix: str) -> list[str]:
        with self._one_at_a_time:
            return super().names(prefix)

    def total(self) -> int:
        with self._one_at_a_time:
            return super().total()

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


def open_store(url: str, options: Mapping[str, Any]) -> FsspecClient:
    """The client for a URL, except S3; it does not connect yet.

    Raises:
        ImportError: the package for the protocol is missing; the message says how to install it.
        ValueError: the protocol is not known, or the URL names no bucket.
    """
    return (MemoryClient if url.startswith("memory://") else FsspecClient)(url, options)


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


def unsafe_connections(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes for users about connections that others can read or answer, by what the options of a store say."""
    notes = []
    off = sorted(name for name, value in _leaves(options) if name.lower() in _CHECKS and value is False)
    if off:
        notes.append(
            f"{', '.join(off)}: false: certificates are not checked, or nothing is encrypted: whoever is between here "
            "and the store can read and change what is sent; give the authority's file by 'verify'"
        )
    plain = (value for name, value in _leaves(options) if name == "endpoint_url" and isinstance(value, str))
    hosts = [urlsplit(one).hostname for one in plain if one.lower().startswith("http://")]
    if any(host not in _OWN_HOSTS for host in hosts):
        notes.append("requests are sent by http://, not encrypted: whoever is in between can read and change them")
    return tuple(notes)


def _leaves(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield str(name), value


def _split(wanted: Range) -> Iterator[Range]:
    for at in range(0, wanted.out.numel(), READ_PART):
        yield Range(wanted.offset + at, wanted.out[at : at + READ_PART])
