"""Options of s3fs, as the tier takes them: what is understood, and what is an error before anything is sent."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.tiers.object.s3.options import encoded_secrets, read_options, split_path, with_configuration
from tierstate.tiers.object.tier import ObjectStore

ARN = "arn:aws:s3:us-west-2:123456789012:accesspoint/mine"


def test_names_of_s3fs_become_those_of_botocore() -> None:
    options = {"key": "k", "secret": "s", "token": "t", "endpoint_url": "http://h", "profile": "p", "use_ssl": False}
    found = read_options({**options, "client_kwargs": {"region_name": "r"}, "requester_pays": True}, 60)
    assert found.client == {
        "aws_access_key_id": "k",
        "aws_secret_access_key": "s",
        "aws_session_token": "t",
        "endpoint_url": "http://h",
        "use_ssl": False,
        "region_name": "r",
    }
    assert (found.profile, found.extra, found.fixed) == ("p", {"RequestPayer": "requester"}, True)
    assert read_options({"username": "k", "password": "s"}, 60).client["aws_secret_access_key"] == "s"
    assert read_options({}, 60).fixed is False


def test_anonymous_requests_have_no_keys() -> None:
    found = read_options({"anon": True, "key": "k", "secret": "s"}, 60)
    assert "aws_access_key_id" not in found.client
    assert found.fixed


def test_what_is_about_files_and_caches_means_nothing() -> None:
    given = {"default_block_size": 5, "use_listings_cache": True, "config_kwargs": {"connector_args": {"a": 1}}}
    assert read_options(given, 60) == read_options({}, 60)


def test_the_configuration_of_fsspec_is_used_where_the_options_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", {"endpoint_url": "http://h", "key": "theirs"})
    assert with_configuration({"key": "mine"}) == {"endpoint_url": "http://h", "key": "mine"}
    assert ObjectStore(url="s3://b/c").traits.failure_domain == "s3:h:b"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"endpoint": "http://h"}, "options: 'endpoint' is not known; did you mean 'endpoint_url'"),
        (
            {"client_kwargs": {"regionname": "r"}},
            "client_kwargs: 'regionname' is not known; did you mean 'region_name'",
        ),
        ({"client_kwargs": "r"}, "client_kwargs: is no mapping"),
        ({"config_kwargs": {"read_timeouts": 3}}, "config_kwargs: .*read_timeouts"),
        ({"config_kwargs": {"read_timeout": "3"}}, "read_timeout: '3' is no time; write seconds, or null"),
        ({"config_kwargs": {"connect_timeout": 0}}, "connect_timeout: 0 is no time"),
        ({"config_kwargs": {"s3": {"addressing_style": "round"}}}, "config_kwargs: .*addressing style"),
        ({"config_kwargs": {"retries": {"mode": "legacy"}}}, "'retries' is not taken; the tier's 'deadline'"),
        ({"fixed_upload_size": "yes"}, "fixed_upload_size: 'yes' is neither true nor false"),
        ({"session": object()}, "a 'session' cannot be used here"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_sent(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ObjectStore(url="s3://b/c", options=options)


@given(
    st.dictionaries(st.sampled_from(["client_kwargs", "config_kwargs", "key", "anon", "odd"]), st.none() | st.text())
)
def test_no_options_are_any_other_error(options: dict[str, Any]) -> None:
    error = None
    try:
        ObjectStore(url="s3://b/c", options=options)
    except ValueError as found:
        error = str(found)
    assert error is None or error.startswith("options: ")


@pytest.mark.parametrize("name", ["connect_timeout", "read_timeout"])
def test_no_timeout_is_the_deadline(name: str) -> None:
    assert read_options({"config_kwargs": {name: None}}, 60).config[name] is None


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("bucket", ("bucket", "")),
        ("bucket/a/b", ("bucket", "a/b")),
        (ARN, (ARN, "")),
        (f"{ARN}/a/b", (ARN, "a/b")),
        (
            "arn:aws-us-gov:s3-outposts:us-gov-west-1:123456789012:outpost/op-1/accesspoint/ap/a",
            ("arn:aws-us-gov:s3-outposts:us-gov-west-1:123456789012:outpost/op-1/accesspoint/ap", "a"),
        ),
    ],
)
def test_access_points_are_buckets(path: str, parts: tuple[str, str]) -> None:
    assert split_path(path) == parts


def test_keys_of_customers_are_secret_as_they_are_sent_too() -> None:
    assert encoded_secrets({"s3_additional_kwargs": {"SSECustomerKey": "hidden" * 4}}) == {
        "aGlkZGVuaGlkZGVuaGlkZGVuaGlkZGVu"
    }
