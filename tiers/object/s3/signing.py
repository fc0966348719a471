"""Signed S3 requests, and the checksums that are sent with a body.

The signature is in the URL (presigned, by botocore), so that a body need not be read before it is sent. The function
`choose_checksum` finds out which checksum a server verifies by sending wrong ones.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias
from urllib.parse import SplitResult, urlsplit

ChecksumChoice: TypeAlias = Literal["auto", "crc32", "md5", "none"]


_SCRATCH = memoryview(b"tierstate looks which checksums are verified here")


ChecksumProbe: TypeAlias = Callable[[memoryview, Mapping[str, str]], str]
"""Sends a test object with that body and those parameters. Returns the error code; empty if it was accepted."""


SIGNATURE_SECONDS = 3600
"""Seconds for which a signature is valid: long enough for one request with a slow body."""


_NOT_OURS = ("connector_args", "http_session_cls")
"""Settings that only aiobotocore has."""


_CREDENTIALS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")


class Checksum(ABC):
    """A checksum of a body that is sent with the request.

    Attributes:
        name: its name in a policy.
        algorithm: its name in S3, if the start of an upload must declare it.
    """

    name: ClassVar[str]
    algorithm: ClassVar[str] = ""

    @abstractmethod
    def of(self, body: Sequence[memoryview]) -> dict[str, str]:
        """The checksum parameters of a request with that body."""

    def named(self, sums: Mapping[str, str]) -> dict[str, str]:
        """The checksum parameters that completing an upload must repeat."""
        return {}


class Unsummed(Checksum):
    """No checksum."""

    name = "none"

    def of(self, body: Sequence[memoryview]) -> dict[str, str]:
        return {}


class Crc32(Checksum):
    """CRC-32, 2 GB/s on one core; AWS and OpenStack Swift verify it."""

    name, algorithm = "crc32", "CRC32"

    def of(self, body: Sequence[memoryview]) -> dict[str, str]:
        total = 0
        for piece in body:
            total = zlib.crc32(piece, total)
        return {"ChecksumCRC32": base64.b64encode(total.to_bytes(4, "big")).decode()}

    def named(self, sums: Mapping[str, str]) -> dict[str, str]:
        return dict(sums)


class Md5(Checksum):
    """MD5, 0.6 GB/s on one core; every server verifies it."""

    name = "md5"

    def of(self, body: Sequence[memoryview]) -> dict[str, str]:
        total = hashlib.md5(usedforsecurity=False)
        for piece in body:
            total.update(piece)
        return {"ContentMD5": base64.b64encode(total.digest()).decode()}


CHECKSUMS: dict[str, Checksum] = {one.name: one for one in (Crc32(), Md5(), Unsummed())}


def choose_checksum(choice: ChecksumChoice, against: ChecksumProbe) -> tuple[Checksum, str]:
    """The checksum to send, and a note for users that says why.

    Sends wrong checksums to the server, cheapest first, to find out which ones it verifies.
    """
    if choice != "auto":
        return CHECKSUMS[choice], f"checksum of what is sent: {choice}, by the policy"
    passed: list[str] = []
    for name in ("crc32", "md5"):
        one = CHECKSUMS[name]
        wrong, right = one.of([_SCRATCH[1:]]), one.of([_SCRATCH])
        said = against(_SCRATCH, wrong)
        # Any other error may mean that the server does not know this checksum.
        if said == "BadDigest" or (said and not against(_SCRATCH, right)):
            also = f"; it does not verify {passed[0]}" if passed else ""
            return one, f"checksum of what is sent: {name}, a wrong one is refused{also}"
        passed.append(name)
    return CHECKSUMS["none"], (
        "checksum of what is sent: none, since the store verifies neither crc32 nor md5; "
        "what is damaged on its way there is found when it is read"
    )


class Signed(NamedTuple):
    """A request with a presigned URL. The URL is a secret."""

    method: str
    url: SplitResult
    headers: Mapping[str, str]


class Signer:
    """Signs requests with the credentials and for the endpoint of an s3fs file system. Thread-safe.

    botocore refreshes temporary credentials before they expire.

    Args:
        fs: the file system; only its arguments are used.

    Raises:
        ValueError: options that this client does not support.
    """

    def __init__(self, fs: Any) -> None:
        if fs.session is not None:
            raise ValueError("options: a 'session' cannot be used here; give key and secret, or a profile")
        self._extra = {**fs.s3_additional_kwargs, **fs.req_kw}
        if wrong := next((name for name in self._extra if "CustomerKey" in name), None):
            raise ValueError(
                f"options: s3_additional_kwargs: {wrong} is not supported; encrypt by the bucket's own key"
            )
        self._fs = fs
        self._opening = threading.Lock()
        self._opened: tuple[Any, Any] | None = None

    @property
    def trusted(self) -> bool | str:
        """TLS verification: True for the usual authorities, False for none, or a file or folder of certificates."""
        given = self._fs.client_kwargs.get("verify")
        if given is None:
            given = self._client()[0].get_config_variable("ca_bundle")
        return True if given is None else given

    def sign(self, operation: str, params: Mapping[str, Any]) -> Signed:
        """Sign a request.

        Args:
            operation: the name of the operation in botocore.
            params: its parameters without the body.

        Raises:
            NoCredentialsError or another error of botocore.
        """
        _, client = self._client()
        model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation])
        members = model.input_shape.members
        given = {**{name: value for name, value in self._extra.items() if name in members}, **params}
        url = client.generate_presigned_url(operation, given, SIGNATURE_SECONDS)
        places = {name: members[name].serialization for name in given}
        headers = {p["name"]: str(given[name]) for name, p in places.items() if p.get("location") == "header"}
        return Signed(model.http["method"], urlsplit(url), headers)

    def _client(self) -> tuple[Any, Any]:
        with self._opening:
            if self._opened is None:
                self._opened = _open(self._fs)
            return self._opened


def share_models(session: Any) -> None:
    """Let a botocore session share the parsed API description of S3, as parsing it takes most of the start time."""
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))


@cache
def _loader(path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(path)


def _open(fs: Any) -> tuple[Any, Any]:
    """A botocore session and client with the same arguments that s3fs uses for its own."""
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config

    config = {"signature_version": "s3v4", **fs.config_kwargs}
    known = dict(zip(_CREDENTIALS, (fs.key, fs.secret, fs.token), strict=True))
    known |= {"endpoint_url": fs.endpoint_url, "use_ssl": fs.use_ssl}
    given = {**{name: value for name, value in known.items() if value is not None}, **fs.client_kwargs}
    if fs.anon:
        config["signature_version"] = UNSIGNED
        given = {name: value for name, value in given.items() if name not in _CREDENTIALS}
    session = botocore.session.Session(**fs.kwargs)
    share_models(session)
    clean = {name: value for name, value in config.items() if name not in _NOT_OURS}
    return session, session.create_client("s3", config=Config(**clean), **given)
