"""The tier key `encrypt`: what it asks for, and that nothing shows a key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tierstate.manifest.errors import PolicyError
from tierstate.tiers.policy.policy import Policy, open_policy_tier
from tierstate.tiers.policy.schema import policy_schema
from tierstate.tiers.wrappers.encrypt import Encrypted
from tierstate.tiers.wrappers.seal import Sealed

SECRET = "5ec2e7" * 11


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIER_KEY", SECRET)
    monkeypatch.setenv("SHORT_KEY", "5ec2e7")


def parse(encrypt: str, top: str = "", more: str = "", type: str = "nvme") -> Policy:
    tier = f"{{type: {type}, {'' if type == 'host' else 'path: x,'} encrypt: {encrypt}{more}}}"
    return Policy.parse(f"tiers:\n  n: {tier}\n  other: {{type: nvme, path: y}}\n{top}", "p.yaml")


@pytest.mark.parametrize("encrypt", ["{key: '${TIER_KEY}'}", "{key: ['${TIER_KEY}']}", "true"])
def test_a_tier_is_encrypted_in_place_of_being_sealed(encrypt: str) -> None:
    policy = parse(encrypt, "seal: {key: '${TIER_KEY}'}")
    tier = open_policy_tier(policy.tier("n"))
    assert isinstance(tier, Encrypted)
    assert isinstance(open_policy_tier(policy.tier("other")), Sealed)
    for shown in (repr(policy), policy.dump(), policy.model_dump_json(), repr(tier)):
        assert SECRET not in shown
    assert Policy.parse(policy.dump()) == policy


def test_the_key_from_the_seal_is_another_one() -> None:
    tiers = [
        open_policy_tier(parse(encrypt, "seal: {key: '${TIER_KEY}'}").tier("n"))
        for encrypt in ("true", "{key: '${TIER_KEY}'}")
    ]
    assert len({tier.key_id for tier in tiers if isinstance(tier, Encrypted)}) == 2


def test_a_tier_without_it_is_as_it_was() -> None:
    assert not isinstance(open_policy_tier(parse("false").tier("n")), Encrypted)
    assert not isinstance(open_policy_tier(parse("{key: '${TIER_KEY}'}").tier("other")), (Encrypted, Sealed))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("true",), "true takes its key from 'seal', which the policy does not have; write 'file: PATH'"),
        (("{file: k}", "", ", format: hdf5"), "cannot be with 'format: hdf5', whose files other programs open"),
        (("{file: k}", "", ", format: safetensors"), "cannot be with 'format: safetensors'"),
        (("{file: k}", "", "", "host"), "what this tier keeps does not survive the host, so it is not encrypted"),
        (("{}",), "has no key; write either 'key: ${NAME}' or 'file: PATH'"),
        (("{key: '${SHORT_KEY}'}",), "the key, which is not shown, has 3 bytes"),
        ((f"{{key: '{SECRET}'}}",), "is written into the policy, which is no secret"),
        ((f"'{SECRET}'",), "the value, which is not shown as it may be secret,"),
        (("3",), "the value, which is not shown as it may be secret,"),
        (("{kee: k}",), "unknown key; did you mean 'key'?"),
    ],
)
def test_what_cannot_be(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(*given)
    assert "5ec2e7" not in str(caught.value)
    assert message in re.sub(r"^p\.yaml:\d+:\d+: ", "", str(caught.value), flags=re.MULTILINE)
    assert "tiers.n.encrypt" in str(caught.value)


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.chdir(tmp_path)
    tier = open_policy_tier(parse("{key: '${TIER_KEY}'}").tier("n"))
    from tierstate.manifest.chunk import empty_buffer

    with pytest.raises(ImportError, match=r"pip install 'tierstate\[encryption\]'"):
        tier.put("a", empty_buffer(3))
    assert not [*tmp_path.rglob("*")] or not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_schema_has_it() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(policy_schema())
    for encrypt, fits in [(True, True), ({"file": "k"}, True), ({"key": ["${K}"]}, True), ({}, False), (3, False)]:
        tiers = {"n": {"type": "nvme", "path": "x", "encrypt": encrypt}}
        assert validator.is_valid({"tiers": tiers}) is fits, encrypt
