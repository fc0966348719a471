"""Secrets: wherever a policy has one, no dump, repr, error, log or JSON shows it, and no request puts it into a URL."""

import io
import json
import logging
import os
import pickle
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.servers.scripted import options as scripted_options
from support.servers.scripted import serving
from support.web_filesystem import Web

from tierstate.cli import main
from tierstate.cluster.check import look_at_tiers
from tierstate.manifest.errors import PolicyError, TierstateError
from tierstate.tiers.object.filesystem import unsafe_connections
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.registry import open_tier
from tierstate.tiers.secrets import ExpandedText, is_credential_name, scrub, secrets_in, takes_credentials

MARK = "m4rk3r/S3cret+v4lue=="

NAMES = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "DB_PASSWORD", "MYSECRET", "GOOGLE_CREDENTIALS", "sas_token", "apiKey")


Web.register()


BASE: dict[str, Any] = {
    "chunk": "16MiB",
    "digest": "xxh3-128",
    "arena": {"size": "2GiB", "on_full": "block"},
    "durable": "nvme",
    "tiers": {
        "host": {"type": "host", "capacity": "8GiB", "keep": {"last": 2}},
        "nvme": {
            "type": "nvme",
            "path": "/nowhere/ckpt",
            "mode": "0600",
            "group": str(os.getgid()),
            "every": 10,
            "io": "auto",
        },
        "lustre": {"type": "lustre", "path": "/nowhere/lustre", "pool": "flash", "stripe_size": "1MiB"},
        "peer": {"type": "peer", "capacity": "1GiB", "domain": "rack"},
        "s3": {
            "type": "object",
            "url": "s3://bucket/ckpt",
            "deadline": "100ms",
            "checksum": "auto",
            "keep": {"best": {"metric": "loss", "mode": "min"}},
            "options": {
                "endpoint_url": "http://127.0.0.1:9",
                "key": "ada",
                "secret": "hidden-literal-value",
                "client_kwargs": {"region_name": "eu-west-7", "aws_session_token": "t0ken-of-a-session"},
                "config_kwargs": {"user_agent_extra": "x", "connect_timeout": 1},
            },
        },
        "web": {
            "type": "object",
            "url": "web://127.0.0.1:9/x",
            "deadline": "1s",
            "options": {
                "auth": ["me", "p4ss-word"],
                "headers": {"Authorization": "Bearer abcdefgh123"},
                "connection_string": "AccountName=me;AccountKey=abc123def==",
            },
        },
    },
    "rules": [{"match": "optimizer.**", "tiers": ["nvme"], "codec": "raw"}],
}


def places(value: Any, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where a policy has a value that is no mapping and no list."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*keys, key))
    if not isinstance(value, (dict, list)):
        yield keys


PLACES = list(places(BASE))


def replaced(keys: tuple[str | int, ...], text: str) -> str:
    data = json.loads(json.dumps(BASE))
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = text
    return yaml.safe_dump(data, sort_keys=False)


def everything_said(text: str, path: Path) -> str:
    """What is told to people and machines when a policy is loaded, shown, checked, and used without success."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.DEBUG)
    root.addHandler(handler)
    try:
        with redirect_stdout(said), redirect_stderr(said):
            _drive(text, path, said)
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
    return said.getvalue()


def _drive(text: str, path: Path, said: io.StringIO) -> None:
    path.write_text(text)
    for more in ([], ["--json"]):
        with pytest.MonkeyPatch.context() as patch, suppress(SystemExit):
            patch.setattr(sys, "argv", ["tierstate", "policy", "check", str(path), *more])
            main()
    try:
        policy = Policy.load(path)
    except PolicyError:
        said.write(traceback.format_exc())
        return
    said.write(f"{policy!r} {policy} {policy.dump()} {look_at_tiers(policy)}")
    for spec in policy.tiers:
        try:
            tier = open_tier(spec.name, spec.type, spec.options)
        except Exception:
            said.write(traceback.format_exc())
            continue
        if spec.type == "object":
            try:
                tier.put("a", torch.ones(9, dtype=torch.uint8))
            except Exception:
                said.write(traceback.format_exc())
        said.write(f"{tier!r} {tier.traits}")
        tier.close()


def is_shown(mark: str, said: str) -> bool:
    return any(form in said for form in (mark, repr(mark)[1:-1], json.dumps(mark)[1:-1]))


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(PLACES),
    st.sampled_from(NAMES),
    st.sampled_from(["{}", "x{}y", "https://evil/{}", "https://me:{}@host/b", "12{}"]),
    st.sampled_from([MARK, "quo'te\"and\\back", "line\nbreak-in-it", "ünïcode-secret", "s" * 200]),
)
@example(("tiers", "s3", "url"), "AWS_SECRET_ACCESS_KEY", "s3://b/{}", MARK)
@example(("tiers", "s3", "options", "endpoint_url"), "AWS_SECRET_ACCESS_KEY", "https://evil/{}", MARK)
@example(("tiers", "s3", "options", "config_kwargs", "user_agent_extra"), "AWS_SECRET_ACCESS_KEY", "{}", MARK)
@example(("tiers", "s3", "options", "config_kwargs", "connect_timeout"), "HF_TOKEN", "{}", MARK)
def test_a_credential_of_the_environment_is_shown_nowhere(
    tmp_path: Path, keys: tuple[str | int, ...], name: str, shape: str, mark: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, mark)
        said = everything_said(replaced(keys, shape.format(f"${{{name}}}")), tmp_path / "p.yaml")
    assert said
    assert not is_shown(mark, said)
    if not takes_credentials(keys):
        assert f"{name} is named like a credential" in said, "refused, and the value goes nowhere"


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([keys for keys in PLACES if takes_credentials(keys)]),
    st.sampled_from([MARK, "quo'te\"and\\back", "line\nbreak-in-it", "ünïcode-secret", "s" * 200]),
)
def test_a_credential_written_into_the_file_is_shown_nowhere(
    tmp_path: Path, keys: tuple[str | int, ...], mark: str
) -> None:
    text = replaced(keys, mark.replace("$", "$$"))
    said = everything_said(text, tmp_path / "p.yaml")
    assert said
    assert not is_shown(mark, said)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PLACES), st.sampled_from([MARK, "s" * 200, "quo'te\"and\\back"]))
def test_errors_show_any_variable_as_it_is_written(tmp_path: Path, keys: tuple[str | int, ...], mark: str) -> None:
    """Also one whose name says nothing of a credential."""
    told = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAIN", mark)
        try:
            Policy.parse(replaced(keys, "${PLAIN}"))
        except PolicyError:
            told = traceback.format_exc()
    assert not is_shown(mark, told)
    assert not told or "PLAIN" in told or "options" in told


def test_what_a_file_has_as_text_is_dumped_as_a_variable_that_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.parse(yaml.safe_dump(BASE))
    dumped = yaml.safe_load(policy.dump())["tiers"]
    assert dumped["s3"]["options"]["secret"] == "${HIDDEN}"
    assert dumped["s3"]["options"]["client_kwargs"] == {"region_name": "eu-west-7", "aws_session_token": "${HIDDEN}"}
    assert dumped["web"]["options"]["auth"] == ["me", "${HIDDEN}"]
    with pytest.raises(PolicyError, match="the variable HIDDEN is not set"):
        Policy.parse(policy.dump())
    assert Policy.parse(policy.dump(secrets=True)) == policy


def test_a_url_is_dumped_without_its_user() -> None:
    text = "tiers: {n: {type: object, url: 'webdav://me:hunter2@host/x'}}"
    assert yaml.safe_load(Policy.parse(text).dump())["tiers"]["n"]["url"] == "webdav://${HIDDEN}@host/x"


def test_expanded_text_is_its_text_and_shows_what_was_written() -> None:
    text = ExpandedText("hunter2", "${X}")
    assert text == "hunter2"
    assert repr(text) == "'${X}'"
    assert "hunter2" not in repr({"a": [text]})
    again = pickle.loads(pickle.dumps(text))
    assert (again, repr(again)) == ("hunter2", "'${X}'")


@pytest.mark.parametrize(
    "name", [*NAMES, "AWS_ACCESS_KEY_ID", "accountKey", "X-Api-Key", "Authorization", "GITHUBTOKEN"]
)
def test_names_of_credentials(name: str) -> None:
    assert is_credential_name(name)


@pytest.mark.parametrize(
    "name", ["HOME", "SCRATCH", "USER", "PWD", "TOKENIZERS_PARALLELISM", "KEYBOARD", "SLURM_JOB_ID", "TMPDIR", "HIDDEN"]
)
def test_names_of_other_things(name: str) -> None:
    assert not is_credential_name(name)


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        (("tiers", "s3", "options", "secret"), True),
        (("tiers", "s3", "options", "username"), True),
        (("tiers", "w", "options", "headers", "Authorization"), True),
        (("tiers", "w", "options", "auth", 1), True),
        (("seal", "key"), True),
        (("tiers", "s3", "url"), False),
        (("tiers", "key", "url"), False),
        (("tiers", "token", "path"), False),
        (("tiers", "w", "options", "auth_url"), False),
        (("tiers", "w", "options", "token", "endpoint_url"), False),
        (("tiers", "s3", "options", "config_kwargs", "user_agent_extra"), False),
    ],
)
def test_where_credentials_go(keys: tuple[str | int, ...], taken: bool) -> None:
    assert takes_credentials(keys) is taken


def test_parts_of_secrets_are_secret() -> None:
    options = {
        "connection_string": "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=abc123def==",
        "headers": {"Authorization": "Bearer abcdefgh123"},
        "password": 12345678,
    }
    secrets = secrets_in("", options)
    assert scrub("abc123def== abcdefgh123 12345678 https", secrets) == "*** *** *** https"


def test_variables_of_the_environment_that_libraries_read_are_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", MARK)
    assert MARK not in scrub(f"no {MARK}!", secrets_in("abfs://x", {}))


# Requests


@pytest.mark.slow
def test_no_request_has_a_credential_in_its_url_and_no_log_has_one(caplog: pytest.LogCaptureFixture) -> None:
    """Every kind of request, with all that botocore and urllib3 log."""
    caplog.set_level(logging.DEBUG)
    customer = "k3y-of-a-customer-32-bytes-long!"
    with serving() as server:
        given = scripted_options(
            server,
            token="t0ken-of-the-session",
            s3_additional_kwargs={"SSECustomerKey": customer, "SSECustomerAlgorithm": "AES256"},
        )
        tier = open_tier(
            "s3", "object", {"url": "s3://bucket/ckpt", "options": given, "deadline": 3.0, "checksum": "none"}
        )
        for call in (
            lambda: tier.put("a", torch.ones(9, dtype=torch.uint8)),
            lambda: tier.get("a"),
            lambda: list(tier.list("")),
            lambda: tier.size("a"),
            lambda: tier.delete("a"),
        ):
            with suppress(TierstateError):
                call()
        tier.close()
        asked = [path for _, path in server.asked]
    assert len(asked) > 4
    assert not [path for path in asked if re.search(r"(?i)signature|credential|security-token|accesskeyid", path)]
    said = caplog.text
    assert "botocore" in said
    for secret in ("t0ken-of-the-session", customer, given["secret"]):
        assert secret not in said


@pytest.mark.parametrize("version", ["s3v4-query", "s3-query"])
def test_signatures_in_urls_are_refused(version: str) -> None:
    with pytest.raises(ValueError, match="would put credentials into the URLs of requests"):
        open_tier("n", "object", {"url": "s3://b/x", "options": {"config_kwargs": {"signature_version": version}}})


# Connections that are not checked


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"client_kwargs": {"verify": False}}, "verify: false"),
        ({"use_ssl": False}, "use_ssl: false"),
        ({"client_kwargs": {"use_ssl": False}}, "use_ssl: false"),
        ({"endpoint_url": "http://store.example"}, "by http://"),
        ({"client_kwargs": {"endpoint_url": "HTTP://store.example:80"}}, "by http://"),
    ],
)
def test_connections_that_others_can_read_are_told(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    notes = unsafe_connections(options)
    assert len(notes) == 1
    assert said in notes[0]
    data = {"tiers": {"n": {"type": "object", "url": "s3://b/x", "options": options}}}
    spec = Policy.parse(yaml.safe_dump(data)).tiers[0]
    tier = open_tier(spec.name, spec.type, spec.options)
    assert tier.traits.notes == notes
    tier.close()
    assert said in everything_said(yaml.safe_dump(data), tmp_path / "p.yaml")


@pytest.mark.parametrize(
    "options",
    [{}, {"client_kwargs": {"verify": "/ca.pem"}}, {"endpoint_url": "http://127.0.0.1:9000"}, {"use_ssl": True}],
)
def test_other_connections_are_not(options: dict[str, Any]) -> None:
    assert unsafe_connections(options) == ()
