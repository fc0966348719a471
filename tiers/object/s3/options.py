"""The options of an S3 tier, by the names that s3fs has for them, as arguments of a botocore session and client."""

from __future__ import annotations

import base64
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tierstate.tiers.secrets import secrets_in

CONNECT_TIMEOUT, READ_TIMEOUT = 5.0, 30.0
"""Default timeouts in seconds of connecting, and of waiting for a response or for part of a body. They are shorter than
the deadline, so that a request can be repeated after a dead connection."""


CONNECTIONS = 32
"""Idle connections that are kept, unless 'config_kwargs: {max_pool_connections: ...}' says another number."""


_CREDENTIALS = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token"}


_USED = (
    *_CREDENTIALS, "username", "password", "endpoint_url", "use_ssl", "anon", "profile", "requester_pays",
    "fixed_upload_size",
)  # fmt: skip


_MAPPINGS = ("client_kwargs", "config_kwargs", "s3_additional_kwargs")


_OF_FILES = frozenset(
    {
        "asynchronous", "cache_regions", "default_block_size", "default_cache_type", "default_fill_cache",
        "listings_expiry_time", "local_expiry_check", "loop", "max_concurrency", "max_paths", "skip_instance_cache",
        "use_listings_cache", "version_aware",
    }
)  # fmt: skip
"""Options of s3fs about files, caches and event loops, which nothing here has."""


_OF_AIOBOTOCORE = ("connector_args", "http_session_cls")
"""Settings that only aiobotocore has."""


_CLIENT = ("api_version", "aws_account_id", "endpoint_url", "region_name", "use_ssl", "verify", *_CREDENTIALS.values())


_ARN = re.compile(
    r"(arn:aws[^:]*:(?:s3:[^:]*:\d{12}:accesspoint[:/][^/]+"
    r"|s3-outposts:[^:]+:\d{12}:outpost[/:][\w-]+[/:](?:bucket|accesspoint)[/:][\w-]+"
    r"|s3-object-lambda:[^:]+:\d{12}:accesspoint[/:][\w-]+))(?:/(.*))?"
)
"""An access point in the place of a bucket, and the key."""


@dataclass(frozen=True)
class S3Options:
    """Arguments for botocore.

    Attributes:
        profile: the profile of the shared configuration; None for the usual one.
        client: arguments of ``create_client``, without its configuration.
        config: arguments of ``botocore.config.Config``.
        extra: parameters of every operation that has them.
        fixed: whether the options have the credentials, which are never looked up again then.
        fixed_parts: whether all parts of an upload but the last have one length; None: where the endpoint is R2's.
    """

    profile: str | None
    client: Mapping[str, Any] = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    extra: Mapping[str, Any] = field(repr=False)
    fixed: bool
    fixed_parts: bool | None = None

    @property
    def secrets(self) -> frozenset[str]:
        """What of them no log may show."""
        return (
            secrets_in(self.endpoint, self.client)
            | secrets_in("", self.extra)
            | encoded_secrets({"s3_additional_kwargs": self.extra})
        )

    @property
    def silence(self) -> float:
        """Seconds for which one request waits for a server that does not answer, at most."""
        timeouts = (self.config[name] for name in ("connect_timeout", "read_timeout"))
        return sum(float("inf") if seconds is None else float(seconds) for seconds in timeouts)

    @property
    def endpoint(self) -> str:
        """The endpoint of the options; empty if botocore chooses it."""
        return str(self.client.get("endpoint_url") or "")


def with_configuration(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, and those of fsspec's configuration (``FSSPEC_S3_...``) that they leave open."""
    from fsspec.config import conf

    return {**conf.get("s3", {}), **options}


def read_options(options: Mapping[str, Any], deadline: float) -> S3Options:
    """Check options and translate them.

    Raises:
        ValueError: an option is not known, not supported here, or has a wrong value.
    """
    _check(options)
    client = dict(options.get("client_kwargs") or {})
    names = {"username": "key", "password": "secret"}
    given = {names.get(name, name): value for name, value in options.items() if value is not None}
    client |= {theirs: given[ours] for ours, theirs in _CREDENTIALS.items() if ours in given}
    client |= {"endpoint_url": given["endpoint_url"]} if "endpoint_url" in given else {}
    client.setdefault("use_ssl", given.get("use_ssl", True))
    config = _config(options.get("config_kwargs") or {}, deadline)
    if options.get("anon"):
        from botocore import UNSIGNED

        config["signature_version"] = UNSIGNED
        client = {name: value for name, value in client.items() if name not in _CREDENTIALS.values()}
    extra = dict(options.get("s3_additional_kwargs") or {})
    if options.get("requester_pays"):
        extra.setdefault("RequestPayer", "requester")
    fixed = bool(options.get("anon")) or "aws_access_key_id" in client
    return S3Options(given.get("profile"), client, config, extra, fixed, given.get("fixed_upload_size"))


def _check(options: Mapping[str, Any]) -> None:
    if options.get("session") is not None:
        raise ValueError("options: a 'session' cannot be used here; give key and secret, or a profile")
    fixed = options.get("fixed_upload_size")
    if not isinstance(fixed, bool | None):
        raise ValueError(f"options: fixed_upload_size: {fixed!r} is neither true nor false")
    for name in _MAPPINGS:
        if not isinstance(options.get(name) or {}, Mapping):
            raise ValueError(f"options: {name}: is no mapping; write names and values, as in '{name}: {{name: value}}'")
    _check_names(options, (*_USED, *_MAPPINGS, *_OF_FILES, "session"), "options")
    _check_names(options.get("client_kwargs") or {}, _CLIENT, "options: client_kwargs")


def _check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    known = sorted(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"{where}: {name!r} is not known; {hint}")


def _config(given: Mapping[str, Any], deadline: float) -> dict[str, Any]:
    """Arguments of botocore's configuration: the user's override our defaults; this client does the retries."""
    from botocore.config import Config

    if "retries" in given:
        raise ValueError(
            "options: config_kwargs: 'retries' is not taken; the tier's 'deadline' says how long requests are tried"
        )
    config = {
        # botocore's own checksums are not supported by every store; the tier chooses its own (`choose_checksum`).
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "connect_timeout": min(CONNECT_TIMEOUT, deadline),
        "read_timeout": min(READ_TIMEOUT, deadline),
        "max_pool_connections": CONNECTIONS,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        **{name: value for name, value in given.items() if name not in _OF_AIOBOTOCORE},
    }
    config["s3"] = {"payload_signing_enabled": False, **(config.get("s3") or {})}
    for name in ("connect_timeout", "read_timeout"):
        _check_seconds(name, config[name])
    if str(config.get("signature_version")).endswith("-query"):
        raise ValueError(
            "options: config_kwargs: signature_version: would put credentials into the URLs of requests, which servers "
            "log; leave it out, and requests are signed in a header"
        )
    try:
        Config(**config)
    except Exception as error:
        raise ValueError(f"options: config_kwargs: {error}") from None
    return config


def _check_seconds(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and value > 0):
        raise ValueError(f"options: config_kwargs: {name}: {value!r} is no time; write seconds, or null for no limit")


def split_path(path: str) -> tuple[str, str]:
    """Bucket (or the name of an access point) and key of a path."""
    if found := _ARN.fullmatch(path):
        return found[1], found[2] or ""
    bucket, _, key = path.partition("/")
    return bucket, key


def encoded_secrets(options: Mapping[str, Any]) -> set[str]:
    """Keys of customers for encryption as they are sent, which no message may show either."""
    extra = options.get("s3_additional_kwargs") or {}
    keys = [value for name, value in extra.items() if name.endswith("CustomerKey")]
    raw = [key.encode() if isinstance(key, str) else bytes(key) for key in keys]
    return {base64.b64encode(key).decode() for key in raw}
