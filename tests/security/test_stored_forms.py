"""What seals and encryption store, read by what `docs/reference/format.md` says alone."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from support.checkpointer_worlds import tensors
from support.secret_keys import STATE, encrypted, key_file, objects, sealed

import tierstate as ts
from tierstate.manifest.digest import digest_function
from tierstate.manifest.seal import SealKey, seal

BLOCK = 262_144
SECRET = bytes(range(32))


def hkdf(secret: bytes, info: bytes, salt: bytes | None = None) -> bytes:
    return HKDF(SHA256(), 32, salt, info).derive(secret)


def saved(spec: ts.Policy, path: str) -> bytes:
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(tensors(*STATE), step=1).wait()
        ckpt.tag("best", 1)
    return bytes.fromhex(Path(path).read_text())


def unsealed(secret: bytes, name: str, data: bytes) -> bytes:
    head, mac, rest = data[:32], data[32:64], data[64:]
    id = hkdf(secret, b"tierstate key id")[:8]
    assert head == bytes.fromhex("895453530d0a1a0a") + struct.pack("<II", 1, 0) + id + bytes(8)
    text = name.encode()
    what = b"tierstate seal 1\0" + head + struct.pack("<I", len(text)) + text + rest
    assert mac == hmac.digest(hkdf(secret, b"tierstate seal"), what, "sha256")
    return rest


def decrypted(ring: dict[str, str], name: str, data: bytes) -> bytes:
    fields, tag = data[-64:-16], data[-16:]
    magic, number, block, key_id, salt, nbytes = struct.unpack("<8sII8s16sQ", fields)
    assert (magic, number, block) == (bytes.fromhex("895453450d0a1a0a"), 1, BLOCK)
    aes = AESGCM(hkdf(bytes.fromhex(ring[key_id.hex()]), b"tierstate object\0" + name.encode(), salt))
    assert aes.decrypt(b"\xff" * 12, tag, fields) == b""
    blocks = -(-nbytes // BLOCK)
    assert len(data) == nbytes + 16 * blocks + 64
    found = b""
    for i in range(blocks):
        body = data[i * BLOCK : min((i + 1) * BLOCK, nbytes)]
        found += aes.decrypt(i.to_bytes(12, "big"), body + data[nbytes + 16 * i : nbytes + 16 * i + 16], None)
    return found


def test_seals_are_as_the_page_says(tmp_path: Path) -> None:
    key = key_file(tmp_path / "keys")
    secret = saved(sealed(tmp_path, key), key)
    for path in objects(tmp_path):
        name = path.relative_to(tmp_path / "disk").as_posix()
        if not name.startswith("packs/"):
            plain = unsealed(secret, name, path.read_bytes())
            assert plain.startswith(b"\x89TS" if name.startswith("versions/") else b"{")
            continue
        data = path.read_bytes()
        length = int.from_bytes(data[-28:-24], "little")
        at = data.index(bytes.fromhex("895453530d0a1a0a"))
        assert unsealed(secret, f"{name}#version", data[at : len(data) - 28 - length])


@pytest.mark.parametrize("derived", [False, True])
def test_encryption_is_as_the_page_says(derived: bool, tmp_path: Path) -> None:
    key = key_file(tmp_path / "keys")
    spec = encrypted(tmp_path, seal=key) if derived else encrypted(tmp_path, key)
    secret = saved(spec, key)
    secret = hkdf(secret, b"tierstate encrypt") if derived else secret
    rings = []
    for copy in range(2):
        name = f"keys/000001.{copy}"
        found = json.loads((tmp_path / "disk" / name).read_bytes())
        assert (found["format"], found["key"]) == (1, hkdf(secret, b"tierstate key id")[:8].hex())
        aes = AESGCM(hkdf(secret, b"tierstate key ring", bytes.fromhex(found["salt"])))
        rings.append(json.loads(aes.decrypt(bytes(12), bytes.fromhex(found["ring"]), name.encode())))
    assert rings[0] == rings[1]
    for path in objects(tmp_path):
        name = path.relative_to(tmp_path / "disk").as_posix()
        if not name.startswith("keys/"):
            assert decrypted(rings[0], name, path.read_bytes()).startswith(b"\x89TSR" if "versions/" in name else b"")


def test_what_was_sealed_once_is_known_for_ever() -> None:
    """A known answer: it must not change."""
    found = seal(SealKey.of(SECRET), "versions/run/000000000001", b"a record")
    assert unsealed(SECRET, "versions/run/000000000001", found) == b"a record"
    assert hashlib.sha256(found).hexdigest() == "b348ed25e4a262565e28ad0f54d660920335095c5e31f4de01501c22d835102a"


def test_digests_are_as_the_page_says() -> None:
    data = b"some bytes of a chunk"
    assert (
        digest_function("sha256")(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        == (hashlib.sha256(data).digest()[:16])
    )
