"""The policy key `seal`: what it asks for, and that nothing shows a key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tierstate.manifest.errors import PolicyError
from tierstate.tiers.base import Tier
from tierstate.tiers.policy import policy as policies
from tierstate.tiers.policy.policy import Policy, open_policy_tier
from tierstate.tiers.policy.schema import policy_schema
from tierstate.tiers.wrappers.seal import Sealed

SECRET = "5ec2e7" * 11
OTHER = "07e4" * 16
TIERS = "\ntiers: {n: {type: nvme, path: x, retries: 2}}\n"


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEAL_KEY", SECRET)
    monkeypatch.setenv("OTHER_KEY", OTHER)
    monkeypatch.setenv("SHORT_KEY", "5ec2e7")


def parse(text: str) -> Policy:
    return Policy.parse(text + TIERS, "p.yaml")


def refusal(text: str) -> str:
    with pytest.raises(PolicyError) as caught:
        parse(text)
    assert SECRET not in str(caught.value)
    assert "5ec2e7" not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None
    return str(caught.value)


def opened(policy: Policy) -> Tier:
    return open_policy_tier(policy.tier("n"))


@pytest.mark.parametrize("text", ["key: '${SEAL_KEY}'", "key: ['${SEAL_KEY}', '${OTHER_KEY}']"])
def test_keys_come_from_variables_and_are_shown_nowhere(text: str) -> None:
    policy = parse(f"seal: {{{text}}}")
    assert policy.seal is not None
    assert policy.seal.read()[0].secret.hex() == SECRET
    tier = opened(policy)
    assert isinstance(tier, Sealed)
    for shown in (
        repr(policy),
        str(policy),
        policy.dump(),
        repr(policy.model_dump()),
        policy.model_dump_json(),
        repr(tier),
    ):
        assert SECRET not in shown
        assert OTHER not in shown
    assert "${SEAL_KEY}" in policy.dump()
    assert Policy.parse(policy.dump()) == policy


def test_digests_under_a_seal_cannot_be_forged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("digest: blake3").seal is None
    assert parse("seal: {file: k}").digest == "blake3"
    assert parse("seal: {file: k}\ndigest: sha256").digest == "sha256"
    assert "digest: 'xxh3-128' can be forged" in refusal("seal: {file: k}\ndigest: xxh3-128")
    monkeypatch.setattr(policies, "find_spec", lambda _name: None)
    assert "seal: needs the package blake3: pip install 'tierstate[blake3]'" in refusal("seal: {file: k}")
    assert parse("seal: {file: k}\ndigest: sha256").seal is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seal: {}", "seal: has no key; write either 'key: ${NAME}' or 'file: PATH'"),
        ("seal: {key: '${SEAL_KEY}', file: k}", "seal: has no key; write either"),
        ("seal: {key: '${SHORT_KEY}'}", "seal.key: the key, which is not shown, has 3 bytes; 32 or more are one"),
        ("seal: {key: '${UNSET_KEY}'}", "seal.key: the variable UNSET_KEY is not set"),
        (f"seal: {{key: '{SECRET}'}}", "seal.key: is written into the policy, which is no secret; write '${NAME}'"),
        (f"seal: {{key: '${{X:-{SECRET}}}'}}", "seal.key: is written into the policy"),
        (f"seal: {{key: ['${{OTHER_KEY}}', '{SECRET}']}}", "seal.key: is written into the policy"),
        (f"seal: '{SECRET}'", "seal: the value, which is not shown as it may be secret, is not a mapping"),
        (f"seal: {{kee: '{SECRET}'}}", "seal.kee: unknown key; did you mean 'key'?"),
        ("seal: {key: {a: '${SEAL_KEY}'}}", "seal.key: the value, which is not shown as it may be secret,"),
        ("seal: {file: ~/key}", "seal.file: '~/key' starts with '~', which only shells know"),
    ],
)
def test_what_is_no_seal(text: str, message: str) -> None:
    found = re.sub(r"^p\.yaml:\d+:\d+: ", "", refusal(text), flags=re.MULTILINE)
    assert any(line.startswith(message) for line in found.splitlines()), found


def test_a_key_file_is_read_when_a_tier_is_opened(tmp_path: Path) -> None:
    policy = parse(f"seal: {{file: {tmp_path}/key}}")
    with pytest.raises(PolicyError, match="key: it cannot be opened"):
        opened(policy)
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_text(SECRET)
    assert isinstance(opened(policy), Sealed)


def test_other_keys_can_be_trusted_in_place_of_those_of_the_policy(tmp_path: Path) -> None:
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_text(OTHER)
    policy = parse("").trusting([str(tmp_path / "key")])
    assert policy.seal is not None
    assert [key.secret.hex() for key in policy.seal.read()] == [OTHER]
    assert isinstance(opened(policy), Sealed)


def test_the_schema_has_it() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(policy_schema())
    for seal, fits in [
        ({"key": "${K}"}, True),
        ({"key": ["${K}", "${L}"]}, True),
        ({"file": "k"}, True),
        ({}, False),
        ({"key": "${K}", "file": "k"}, False),
        ({"key": 3}, False),
        ("${K}", False),
    ]:
        document = {**yaml.safe_load(TIERS), "seal": seal}
        assert validator.is_valid(document) is fits, seal


def test_a_key_file_that_others_could_replace_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "key").touch(mode=0o600)
    (folder / "key").write_text(SECRET)
    folder.chmod(0o777)
    with pytest.raises(PolicyError, match=r"every user can write to .*/shared"):
        opened(parse(f"seal: {{file: {folder}/key}}"))
    folder.chmod(0o700)
    assert isinstance(opened(parse(f"seal: {{file: {folder}/key}}")), Sealed)
