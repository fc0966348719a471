"""HKDF: the test vectors of RFC 5869, and that keys of secrets in use never change."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.hkdf import HASH, MAX_LENGTH, expand, extract
from tierstate.manifest.seal import SealKey, derive
from tierstate.tiers.connections.secret import JobSecret
from tierstate.tiers.keys import SecretKey

SECRET = bytes(range(32))

VECTORS = {
    "A.1": (
        b"\x0b" * 22,
        bytes(range(0x0D)),
        bytes(range(0xF0, 0xFA)),
        "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    "A.2": (
        bytes(range(0x50)),
        bytes(range(0x60, 0xB0)),
        bytes(range(0xB0, 0x100)),
        "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09da3275600c2f09b8"
        "367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    "A.3": (
        b"\x0b" * 22,
        b"",
        b"",
        "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
}
"""Input keying material, salt, info; the pseudorandom key and the output."""


@pytest.mark.parametrize("name", list(VECTORS))
def test_the_vectors_of_the_rfc(name: str) -> None:
    secret, salt, info, key, output = VECTORS[name]
    assert extract(salt, secret).hex() == key
    assert expand(bytes.fromhex(key), info, len(output) // 2).hex() == output


@given(st.binary(max_size=80), st.binary(max_size=40), st.binary(max_size=40), st.integers(1, MAX_LENGTH))
def test_it_is_what_another_library_derives(secret: bytes, salt: bytes, info: bytes, length: int) -> None:
    assert expand(extract(salt, secret), info, length) == HKDF(SHA256(), length, salt, info).derive(secret)


@pytest.mark.parametrize("length", [-1, 0, MAX_LENGTH + 1])
def test_a_length_that_cannot_be_derived_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_LENGTH}"):
        expand(bytes(HASH), b"", length)


def test_keys_never_change() -> None:
    """What they seal and encrypt is stored, and processes of several releases may be in one job."""
    job = JobSecret(SECRET)
    found = [
        JobSecret.of_text("0123456789abcdef" * 4, "here").reveal(),
        job.derive(""),
        job.derive("comparison of secrets"),
        job.derive("a", b"b", b""),
        job.child("keeper").reveal(),
        derive(SECRET, b"tierstate key ring", bytes(range(16))),
        derive(b"x" * 100, b""),
        SealKey.of(SECRET).key,
        SecretKey(SECRET).for_tier().secret,
    ]
    assert [key.hex() for key in found] == [
        "b875f99eb5ab1809b18f3627f9be41f72ad0265c08e85b1fe9cc9136b7127ddb",
        "6f5decd8f2744254e5c76e06f8b3fbf21eacd400d4867c83d815c5a34ff5e666",
        "b859829defb60c7d1c241e5bb1d39a4e2aeea3f6c905aa8e4adb2f5c19ff2b03",
        "4d942a3df71c6aee247d4ced47597cb521a9b441c04ee713232e7ed14c4a2b6e",
        "f197d44e3e5cdcd032ea03850982dce009504dc49c42ceceea2a700ac8ddf79b",
        "576486364d49d20316df4eb9ac89aa60b77c04b5fc4586b1bd2b13574037150b",
        "da179535886237c555f8d42fb7634f771620a2709469e7324eb60314670e44c5",
        "d4a81586dd5dea8529d934f92ce2c661e34bd726ffdd72057407591526c52d98",
        "766c12f1470d5b5fa5a6dd2a1401f8846f3f3eebffa34e55867f02701178ea2e",
    ]
    assert (SealKey.of(SECRET).id, SecretKey(SECRET).for_tier().id) == ("57bed08e29bf8733", "6e07d358ca119ec2")
