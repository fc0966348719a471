"""What an object store's client says, as errors of ours, with nothing secret in them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
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

from .posix import kind_of

_CODES: dict[str, type[TierError]] = {
    "PreconditionFailed": AlreadyExists,
    # Two writers at once, and the store does not say who won: ask again.
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
    # What arrived is not what was sent.
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
    # It is an OSError too, and no time heals it.
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


def secrets_in(url: str, options: Mapping[str, Any]) -> frozenset[str]:
    """Every text that no message may show: names and passwords in URLs, values of options, the usual variables."""
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
    # All up to the last "@", since a password may have characters in it that would end it in a sound URL.
    user, at, _ = url.partition("://")[2].rpartition("@")
    return {part for text in (user, unquote(user)) for part in (text, *text.split(":"))} if at else set()


def scrub(text: str, secrets: frozenset[str]) -> str:
    """The text without the secrets; longer ones first, since one may be part of another."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def kind(error: BaseException) -> type[TierError]:
    """The class of ours for an error of fsspec, botocore, aiohttp or the operating system."""
    response = _response(error)
    if response is not None:
        code = str(response.get("Error", {}).get("Code", ""))
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") or (int(code) if code.isdigit() else 0)
        found = _CODES.get(code) or _STATUS.get(status)
        return found or (TierUnavailable if status >= 500 else TierError)
    for base in type(error).__mro__:
        if base.__name__ in _NAMES:
            return _NAMES[base.__name__]
    return kind_of(error.errno) if isinstance(error, OSError) else TierError


def code_of(error: BaseException) -> str:
    """What the store calls an error, or else its class."""
    response = _response(error) or {}
    return str(response.get("Error", {}).get("Code") or type(error).__name__)


def is_beyond_end(error: BaseException) -> bool:
    """Whether the store refused a range because the object ends before it."""
    return code_of(error) in ("InvalidRange", "416")


def remedy(error: BaseException) -> str:
    """What would help, as far as the error tells; empty where it does not."""
    code, response = code_of(error), _response(error) or {}
    if code in _WRONG_REGION:
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = str(response.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region") or "")
        if _REGION.fullmatch(region):
            return f"the bucket is in region {region}: write 'client_kwargs: {{region_name: {region}}}' in 'options'"
    return _CODE_REMEDIES.get(code) or _REMEDIES.get(kind(error), "")


def _response(error: BaseException) -> Mapping[str, Any] | None:
    """The store's answer as botocore keeps it; translations of it have it as their cause."""
    for one in _linked(error, lambda one: one.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):
            return response
    return None


@contextmanager
def explained(doing: str, tier: str, key: str, place: str, secrets: frozenset[str]) -> Iterator[None]:
    """Turn an error of the client library into one of ours, raised from it unless that would show a secret."""
    try:
        yield
    except TierstateError:
        raise
    except Exception as error:
        where = ": ".join(filter(None, (tier, key)))
        if is_beyond_end(error):
            raise Damaged(f"{where}: the object ends before the range that is wanted") from None
        sort = kind(error)
        text = f"{where}: cannot {doing} {place}: {type(error).__name__}: {error}"
        text = "; ".join(filter(None, (scrub(text, secrets), remedy(error))))
        shows = any(secret in str(one) for one in _chain(error) for secret in secrets)
        raise sort(text, tier=tier, key=key) from (None if shows else error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    return _linked(error, lambda one: one.__cause__ or one.__context__)


def _linked(
    error: BaseException, following: Callable[[BaseException], BaseException | None]
) -> Iterator[BaseException]:
    """An error and those it came from, each once: an error that is raised from itself is in a circle."""
    one: BaseException | None = error
    met: set[int] = set()
    while one is not None and id(one) not in met:
        met.add(id(one))
        yield one
        one = following(one)
