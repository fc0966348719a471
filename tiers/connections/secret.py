"""The secret of a job: where it is read from, what it must be, and the keys that are derived from it.

All keys of a job are derived from one secret that never passes through the job's key-value store, since that store
answers everybody who reaches its port. A secret is given to a job by an environment variable or by a file:

* ``TIERSTATE_JOB_SECRET``: the secret itself, set by the launcher;
* ``TIERSTATE_JOB_SECRET_FILE``: the path of a file of this user's alone (mode 0600) that every host sees.

Keys are derived by HKDF: from the secret one pseudorandom key, from that one key for each purpose.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path
from typing import NoReturn

from tierstate.manifest.hkdf import expand, extract
from tierstate.tiers.private_file import read_private_file

VARIABLE = "TIERSTATE_JOB_SECRET"
"""The environment variable with a job's secret."""


FILE_VARIABLE = "TIERSTATE_JOB_SECRET_FILE"
"""The environment variable with the path of a file that has a job's secret."""


MIN_SECRET = 32
"""Characters of a secret, at least: 16 random bytes in hexadecimal digits."""


MAX_SECRET = 4096
"""Characters of a secret, at most."""


KEY = 32
"""Bytes of a key."""


HOW_TO = "a good one is made by: openssl rand -hex 32"


NOT_AUTHENTICATED = (
    "ranks: {trust: network}: whoever reaches the network between the hosts can read and change what ranks send and "
    "what hosts keep for each other"
)
"""What is told where a policy trusts the network."""


_SALT = b"tierstate job secret, 1"


class SecretError(ValueError):
    """There is no secret, or one that is not safe; the text never has the secret itself."""


class JobSecret:
    """A secret that all processes of one job know, and no other process.

    It is in no repr, no error, and cannot be pickled.

    Args:
        key: the pseudorandom key, `KEY` bytes.
        authenticated: whether bytes over connections are authenticated. If not (``trust: network``), they carry a
            checksum only, and the key keeps apart jobs of one network, but no attacker out.
    """

    __slots__ = ("_key", "authenticated")

    def __init__(self, key: bytes, *, authenticated: bool = True) -> None:
        if len(key) != KEY:
            raise SecretError(f"a key of {len(key)} bytes; {KEY} are right")
        self._key, self.authenticated = bytes(key), authenticated

    @classmethod
    def random(cls, *, authenticated: bool = True) -> JobSecret:
        """A new one."""
        return cls(secrets.token_bytes(KEY), authenticated=authenticated)

    @classmethod
    def of_text(cls, text: str, source: str) -> JobSecret:
        """The one of a text that a user or a launcher gave.

        Args:
            source: where it is from, for errors.

        Raises:
            SecretError: it is too short or too long.
        """
        text = text.strip()
        if not MIN_SECRET <= len(text) <= MAX_SECRET:
            raise SecretError(
                f"{source}: a secret of {len(text)} characters; right are {MIN_SECRET} to {MAX_SECRET}, and {HOW_TO}"
            )
        return cls(extract(_SALT, text.encode("utf-8", "surrogateescape")))

    def derive(self, purpose: str, *context: bytes) -> bytes:
        """The key for one purpose and context, `KEY` bytes."""
        info = b"".join(len(part).to_bytes(4, "big") + part for part in (purpose.encode(), *context))
        return expand(self._key, info, KEY)

    def child(self, purpose: str) -> JobSecret:
        """The secret for one purpose: who has it learns nothing of this one."""
        return JobSecret(self.derive(purpose), authenticated=self.authenticated)

    def reveal(self) -> bytes:
        """The pseudorandom key itself, to hand it to another process of the job."""
        return self._key

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, JobSecret):
            return NotImplemented
        return hmac.compare_digest(self._key, other._key) and self.authenticated == other.authenticated

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<JobSecret{'' if self.authenticated else ', connections are not authenticated'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("the secret of a job is not pickled")


def read_secret_file(path: Path) -> JobSecret:
    """The secret in a file that only this user can read and write.

    Raises:
        SecretError: there is no such file, it is a link or open to other users, another user could replace it, or the
            secret in it is too short.
    """
    return JobSecret.of_text(read_private(path, MAX_SECRET + 2).decode("utf-8", "surrogateescape"), str(path))


def read_private(path: Path, limit: int) -> bytes:
    """The bytes of a regular file that belongs to this user, and that no other user can read, write or replace.

    Raises:
        SecretError: it is another file than that, or longer than ``limit`` bytes.
    """
    return read_private_file(path, limit, "the secret of a job", SecretError)


def secret_of_variable(name: str) -> JobSecret:
    """The secret in an environment variable.

    Raises:
        SecretError: it is not set, or the secret in it is too short.
    """
    if not (text := os.environ.get(name, "")):
        raise SecretError(f"the environment variable {name} is not set; it should have the secret, and {HOW_TO}")
    return JobSecret.of_text(text, f"the environment variable {name}")


def secret_of_environment() -> JobSecret | None:
    """The secret that the launcher gave to this process; None if it gave none.

    Raises:
        SecretError: it gave one that is not safe.
    """
    if os.environ.get(VARIABLE):
        return secret_of_variable(VARIABLE)
    if path := os.environ.get(FILE_VARIABLE):
        return read_secret_file(Path(path).expanduser())
    return None
