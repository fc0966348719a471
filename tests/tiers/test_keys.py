"""Secret keys: which texts and files are one, and that none of them is shown."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.errors import PolicyError
from tierstate.tiers.keys import parse_key, read_key

SECRET = bytes(range(40, 72))


@given(st.binary(min_size=32, max_size=64))
def test_a_key_is_the_same_in_each_spelling(secret: bytes) -> None:
    found = parse_key(f" {secret.hex()}\n")
    assert found.secret == secret
    # Text of base64 that is also hexadecimal is taken for that: it is read the same way every time.
    text = base64.b64encode(secret).decode()
    if not re.fullmatch("(?:[0-9a-fA-F]{2})+", text):
        assert parse_key(text) == found
    assert found.id == parse_key(secret.hex().upper()).id
    assert re.fullmatch("[0-9a-f]{16}", found.id)


def test_keys_for_different_purposes_are_different() -> None:
    key = parse_key(SECRET.hex())
    tier = key.for_tier()
    assert len({key.secret, key.for_seals.key, tier.secret, tier.for_seals.key}) == 4
    assert len({key.id, tier.id}) == 2
    assert key.for_seals.id == key.id


def test_no_repr_shows_a_key() -> None:
    key = parse_key(SECRET.hex())
    for shown in (repr(key), str(key), repr(key.for_seals), repr(key.for_tier())):
        assert SECRET.hex() not in shown
        assert repr(SECRET)[2:-1] not in shown
        assert key.for_seals.key.hex() not in shown


@pytest.mark.parametrize("text", ["", "ab", "00" * 31, "z!" * 40, "é" * 64, "00" * 32 + "0"])
def test_what_is_no_key_is_said_without_showing_it(text: str) -> None:
    with pytest.raises(ValueError, match="which is not shown") as caught:
        parse_key(text)
    assert len(text) < 2 or text not in str(caught.value)
    assert caught.value.__cause__ is None


def key_at(path: Path, mode: int = 0o600, text: str = SECRET.hex()) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_file_is_read(mode: int, tmp_path: Path) -> None:
    assert read_key(key_at(tmp_path / "key", mode)).secret == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666, 0o610])
def test_a_file_that_others_may_use_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=f"mode {mode:04o}.*chmod 600"):
        read_key(key_at(tmp_path / "key", mode))


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    key = key_at(tmp_path / "key")
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(key)
    os.mkfifo(pipe, 0o600)
    for path, match in [(link, "not a link"), (pipe, "is a pipe"), (tmp_path, "key"), (tmp_path / "no", "No such")]:
        with pytest.raises(PolicyError, match=match):
            read_key(path)


def test_a_file_without_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="key: the key, which is not shown, has 4 bytes"):
        read_key(key_at(tmp_path / "key", text="deadbeef"))
    with pytest.raises(PolicyError, match="neither hexadecimal nor base64"):
        read_key(key_at(tmp_path / "key", text="0!" * 2048))
    with pytest.raises(PolicyError, match="longer than 4096 bytes, the most that a key has"):
        read_key(key_at(tmp_path / "key", text="00" * 2048 + "\n"))


@pytest.mark.root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(key_at(tmp_path / "key"), 65534, 65534)
    with pytest.raises(PolicyError, match=r"belongs to user 65534; a key is read from a regular file of user \d+"):
        read_key(tmp_path / "key")
