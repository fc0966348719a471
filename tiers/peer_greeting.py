"""The beginning of a connection between hosts: each side proves that it knows the keeper's token."""

from __future__ import annotations

import hmac
import secrets

from .peer_wire import MAGIC, NONCE, Foreign, Line


def admit(line: Line, token: bytes) -> bool:
    """The keeper's side of the beginning: whether the other one knows the token."""
    line.begin()
    mine = secrets.token_bytes(NONCE)
    line.send(MAGIC, mine)
    theirs, proof = line.take(NONCE), line.take(NONCE)
    if not hmac.compare_digest(proof, _proof(token, b"client", mine, theirs)):
        return False
    line.send(_proof(token, b"keeper", mine, theirs))
    return True


def introduce(line: Line, token: bytes) -> None:
    """The client's side of the beginning.

    Raises:
        Foreign: what listens there is no keeper, or does not know the token.
        OSError: there is no answer, or the connection was closed; perhaps our token is not liked.
    """
    line.begin()
    if line.take(len(MAGIC)) != MAGIC:
        raise Foreign("what listens there is no keeper, or one of another version of this program")
    theirs, mine = line.take(NONCE), secrets.token_bytes(NONCE)
    line.send(mine, _proof(token, b"client", theirs, mine))
    if not hmac.compare_digest(line.take(NONCE), _proof(token, b"keeper", theirs, mine)):
        raise Foreign("what listens there does not know the token")


def _proof(token: bytes, who: bytes, keepers: bytes, clients: bytes) -> bytes:
    return hmac.digest(token, who + keepers + clients, "sha256")
