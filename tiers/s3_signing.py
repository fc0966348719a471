"""Signing: S3 requests whose URL carries the signature, so that nobody has to read a body before it is sent."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

LASTING = 3600
"""Seconds that a signature holds: for the request it is made for, however slowly its body travels."""

_NOT_OURS = ("connector_args", "http_session_cls")
"""Settings of aiobotocore alone."""

_CREDENTIALS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")


class Signed(NamedTuple):
    """A request that a server will take as ours. Its URL is a secret."""

    method: str
    url: SplitResult
    headers: Mapping[str, str]


class Signer:
    """Signs requests with the credentials and for the endpoint of an s3fs file system. Safe to use from many threads.

    Credentials that expire are fetched anew by botocore when they are about to.

    Args:
        fs: the file system, of which only what it was given is looked at.

    Raises:
        ValueError: options that this way of sending cannot honour.
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
        """Whom to believe: True for the usual authorities, False for everybody, or a file or folder of certificates."""
        given = self._fs.client_kwargs.get("verify")
        if given is None:
            given = self._client()[0].get_config_variable("ca_bundle")
        return True if given is None else given

    def sign(self, operation: str, params: Mapping[str, Any]) -> Signed:
        """A request: its operation as botocore's clients call it, and its parameters but for the body.

        Raises:
            botocore's NoCredentialsError and the like.
        """
        _, client = self._client()
        model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation])
        members = model.input_shape.members
        given = {**{name: value for name, value in self._extra.items() if name in members}, **params}
        url = client.generate_presigned_url(operation, given, LASTING)
        places = {name: members[name].serialization for name in given}
        headers = {p["name"]: str(given[name]) for name, p in places.items() if p.get("location") == "header"}
        return Signed(model.http["method"], urlsplit(url), headers)

    def _client(self) -> tuple[Any, Any]:
        with self._opening:
            if self._opened is None:
                self._opened = _open(self._fs)
            return self._opened


def share_models(session: Any) -> None:
    """Let a session of botocore's use what others have read of S3's description: that takes it most of its time."""
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))


@cache
def _loader(path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(path)


def _open(fs: Any) -> tuple[Any, Any]:
    """A session and a client of botocore's that are made of what s3fs would make its own of."""
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
