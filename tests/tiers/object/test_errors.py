"""What a client library says becomes an error of ours, of the right class and without secrets."""

import errno
import ssl
from typing import Any

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    MetadataRetrievalError,
    NoCredentialsError,
    ReadTimeoutError,
)
from fsspec.exceptions import FSTimeoutError
from hypothesis import assume, given
from hypothesis import strategies as st
from s3fs.errors import translate_boto_error

from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    Damaged,
    NotFound,
    TierError,
    TierFull,
    TierUnavailable,
)
from tierstate.tiers.object.filesystem import store_error_class, store_errors_translated
from tierstate.tiers.object.s3.retry import GaveUp
from tierstate.tiers.secrets import scrub, secrets_in

PUBLIC_PARTS = {"endpoint_url": "http://host:1", "client_kwargs": {"region_name": "eu-west-1"}}


def answer(code: str, status: int = 0) -> ClientError:
    metadata = {"ResponseMetadata": {"HTTPStatusCode": status}} if status else {}
    return ClientError({"Error": {"Code": code, "Message": "told so"}, **metadata}, "PutObject")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (answer("PreconditionFailed", 412), AlreadyExists),
        (answer("412"), AlreadyExists),
        (answer("ConditionalRequestConflict", 409), TierUnavailable),
        (answer("NoSuchKey", 404), NotFound),
        (answer("NoSuchBucket", 404), NotFound),
        (answer("404"), NotFound),
        (answer("AccessDenied", 403), AccessDenied),
        (answer("SignatureDoesNotMatch", 403), AccessDenied),
        (answer("ExpiredToken", 400), AccessDenied),
        (answer("SlowDown", 503), TierUnavailable),
        (answer("InternalError", 500), TierUnavailable),
        (answer("SomethingNew", 502), TierUnavailable),
        (answer("RequestTimeout", 400), TierUnavailable),
        (answer("QuotaExceeded", 403), TierFull),
        (answer("InvalidArgument", 400), TierError),
        (answer("SomethingNew", 400), TierError),
    ],
)
def test_answers_of_a_store(error: ClientError, wanted: type[TierError]) -> None:
    assert store_error_class(error) is wanted
    # s3fs turns them into errors of Python, and several into the same.
    assert store_error_class(translate_boto_error(error)) is wanted


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (EndpointConnectionError(endpoint_url="http://h"), TierUnavailable),
        (ConnectTimeoutError(endpoint_url="http://h"), TierUnavailable),
        (ReadTimeoutError(endpoint_url="http://h"), TierUnavailable),
        (NoCredentialsError(), AccessDenied),
        (CredentialRetrievalError(provider="container-role", error_msg="no answer"), TierUnavailable),
        (MetadataRetrievalError(error_msg="no answer"), TierUnavailable),
        (FSTimeoutError(), TierUnavailable),
        (TimeoutError(), TierUnavailable),
        (ConnectionResetError(errno.ECONNRESET, "reset"), TierUnavailable),
        (FileNotFoundError("x"), NotFound),
        (FileExistsError("x"), AlreadyExists),
        (PermissionError("x"), AccessDenied),
        (OSError(errno.ENOSPC, "x"), TierFull),
        (OSError(errno.EINVAL, "x"), TierError),
        (RuntimeError("x"), TierError),
    ],
)
def test_errors_of_clients(error: Exception, wanted: type[TierError]) -> None:
    assert store_error_class(error) is wanted
    with (
        pytest.raises(wanted, match=r"^s3: a: cannot read s3://b/a: ") as found,
        store_errors_translated("read", "s3", "a", "s3://b/a", frozenset()),
    ):
        raise error
    assert (type(found.value), found.value.__cause__) == (wanted, error)
    assert (found.value.tier, found.value.key) == ("s3", "a")


def test_credentials_that_cannot_be_looked_up_have_a_remedy_of_their_own() -> None:
    """Also once it was tried again and again."""
    given_up = GaveUp("the last of 2 attempts")
    given_up.__cause__ = CredentialRetrievalError(provider="container-role", error_msg="no answer")
    with (
        pytest.raises(TierUnavailable, match=r"; see whether what gives the credentials answers"),
        store_errors_translated("read", "s3", "a", "s3://b/a", frozenset()),
    ):
        raise given_up


def test_an_archived_object_is_no_matter_of_credentials() -> None:
    with (
        pytest.raises(AccessDenied, match=r"; the store has archived the object: have it restored there") as found,
        store_errors_translated("read", "s3", "a", "s3://b/a", frozenset()),
    ):
        raise answer("InvalidObjectState", 403)
    assert "credentials" not in str(found.value)


def raised_from(name: str, cause: Exception | None = None, **attributes: object) -> Exception:
    """An error of a library that is not installed here, with the cause that it has."""
    error: Exception = type(name, (Exception,), attributes)("told so")
    error.__cause__ = cause
    return error


NOT_TRUSTED = ssl.SSLCertVerificationError("self-signed certificate")


@pytest.mark.parametrize(
    ("error", "wanted", "told"),
    [
        # google-auth, when the metadata server does not answer, and what gcsfs makes of it.
        (raised_from("RefreshError", raised_from("TransportError")), TierUnavailable, "what gives the credentials"),
        (
            raised_from("HttpError", raised_from("RefreshError", raised_from("TransportError")), code=401),
            TierUnavailable,
            "what gives the credentials",
        ),
        (raised_from("RefreshError", retryable=True), TierUnavailable, "what gives the credentials"),
        (raised_from("RefreshError", retryable=False), AccessDenied, "check the credentials"),
        (raised_from("HttpError", raised_from("RefreshError"), code=401), AccessDenied, "check the credentials"),
        (raised_from("HttpError", code=401), AccessDenied, "check the credentials"),
        # azure-identity wraps whatever its request has met.
        (
            raised_from("ClientAuthenticationError", raised_from("ServiceRequestError")),
            TierUnavailable,
            "what gives the credentials",
        ),
        (raised_from("ClientAuthenticationError"), AccessDenied, "check the credentials"),
        # A certificate that is not trusted stays so, though it is an error of the connection.
        (
            aiohttp.ClientConnectorCertificateError(ConnectionKey("h", 443, True, True, None, None, None), NOT_TRUSTED),
            AccessDenied,
            "SSL_CERT_FILE",
        ),
        (raised_from("ServiceRequestError", NOT_TRUSTED), AccessDenied, "SSL_CERT_FILE"),
    ],
)
def test_not_now_is_no_denial_and_a_denial_is_not_tried_again(
    error: Exception, wanted: type[TierError], told: str
) -> None:
    with (
        pytest.raises(wanted, match=told) as found,
        store_errors_translated("read", "store", "a", "gs://b/a", frozenset()),
    ):
        raise error
    assert type(found.value) is wanted


def test_a_range_that_the_store_refuses() -> None:
    with (
        pytest.raises(Damaged, match="ends before the range"),
        store_errors_translated("read", "s3", "a", "s3://b/a", frozenset()),
    ):
        raise translate_boto_error(answer("InvalidRange", 416))


def test_errors_of_ours_pass() -> None:
    with pytest.raises(Damaged, match=r"^mine$"), store_errors_translated("read", "s3", "a", "s3://b/a", frozenset()):
        raise Damaged("mine")


def test_an_error_that_is_its_own_cause_is_told_once() -> None:
    error = RuntimeError("x")
    error.__cause__ = RuntimeError("y")
    error.__cause__.__cause__ = error
    assert store_error_class(error) is TierError
    with (
        pytest.raises(TierError, match="x"),
        store_errors_translated("read", "s3", "a", "s3://b/a", frozenset({"secret"})),
    ):
        raise error


@given(
    st.text("abcdefXYZ0189+/=", min_size=4, max_size=40),
    st.sampled_from(["options", "nested", "url", "endpoint", "cause"]),
)
def test_secrets_are_in_no_text(secret: str, place: str) -> None:
    """Wherever a secret was given, neither the message nor what it was raised from shows it."""
    options: dict[str, Any] = {**PUBLIC_PARTS, "secret": secret}
    url = "s3://bucket/ckpt"
    if place == "nested":
        options = {"client_kwargs": {"aws_secret_access_key": secret}}
    elif place == "url":
        options, url = {}, f"ftp://me:{secret}@host/ckpt"
    elif place == "endpoint":
        options = {"endpoint_url": f"http://{secret}:pass@host"}
    shown = "cannot read the object a of s3 at s3://bucket/a: RuntimeError: *** is bad; inner told so OSError none"
    assume(secret not in shown and "/" not in secret)
    secrets = secrets_in(url, options)

    def fail() -> None:
        if place == "cause":
            raise RuntimeError("is bad") from OSError(f"inner {secret}")
        raise RuntimeError(f"{secret} is bad")

    with pytest.raises(TierError) as found, store_errors_translated("read", "s3", "a", "s3://bucket/a", secrets):
        fail()
    error: BaseException | None = found.value
    while error is not None:
        assert secret not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_what_is_public_stays_readable() -> None:
    assert secrets_in("s3://bucket/ckpt", PUBLIC_PARTS) == frozenset()


@pytest.mark.parametrize("password", ["pa/ss", "pa#ss", "pa?ss", "p@ss", "/#?@", "pa%2Fss"])
def test_passwords_of_any_characters_are_secret(password: str) -> None:
    """In a sound URL they are escaped; in one that somebody typed they are secret all the same."""
    for secrets in (
        secrets_in(f"ftp://me-too:{password}@host/ckpt", {}),
        secrets_in("s3://b/x", {"endpoint_url": f"http://me-too:{password}@host:9"}),
        secrets_in("s3://b/x", {"passwords": [password]}),
    ):
        assert password not in scrub(f"who is {password}?", secrets)
