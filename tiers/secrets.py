"""Secrets of a policy: which names and values are secret, and how they are kept out of messages and logs.

Three rules hold together. A variable with the name of a credential goes only into a key that is named like one, never
into a place such as a URL or path (`tierstate.tiers.policy.yaml`). Texts from variables are shown as they were written
(`ExpandedText`). What is in ``options`` is removed from every message of a tier (`scrub`).
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self
from urllib.parse import quote, quote_plus, unquote

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


_CREDENTIAL_WORDS = frozenset({"auth", "authorization", "bearer", "cookie", "jwt", "pass", "sas", "signature"})


_CREDENTIAL_ENDS = ("key", "keys", "token", "tokens")


_CREDENTIAL_PARTS = ("secret", "password", "passwd", "passphrase", "credential", "connection_string")


_USERS = frozenset({"user", "username", "login", "account_name", "client_id"})
"""Keys that are no secrets, and that belong to a credential all the same."""


_ADDRESSES = frozenset({"url", "uri", "endpoint", "host", "hostname", "proxy", "proxies"})


_PUBLIC = frozenset({"endpoint_url", "region_name", "profile", "protocol", "signature_version", "addressing_style"})


_PLACES = ("url", "path", "mode", "group", "io", "pool", "checksum", "domain", "device")
"""Options of tiers that say where, or how, and are shown; of a URL its user and password are not."""


SHORTEST_SECRET = 4
"""Shorter texts are no secrets: to remove them would make every message unreadable."""


_SHORTEST_VARIABLE = 8
"""The same for variables of the environment that no policy names."""


HIDDEN = "***"


def is_credential_name(name: str) -> bool:
    """Whether a key or variable has the name of a credential, as ``AWS_SECRET_ACCESS_KEY``, ``accountKey``, ``sas``."""
    if any(part in name.lower().replace("-", "_") for part in _CREDENTIAL_PARTS):
        return True
    words = [word.lower() for word in _WORD.findall(name)]
    return any(word in _CREDENTIAL_WORDS or word.endswith(_CREDENTIAL_ENDS) for word in words)


def takes_credentials(keys: tuple[str | int, ...]) -> bool:
    """Whether a value at this place of a policy may come from a credential: one of the keys is named like one, and the
    last one is no address, which may be anybody's."""
    names = [key for key in (keys[2:] if keys[:1] == ("tiers",) else keys) if isinstance(key, str)]
    if names and _ADDRESSES & {word.lower() for word in _WORD.findall(names[-1])}:
        return False
    return any(is_credential_name(name) or name.lower() in _USERS for name in names)


class ExpandedText(str):
    """Text into which variables were put; its repr shows the text as it was written, without their values."""

    __slots__ = ("written",)

    written: str

    def __new__(cls, text: str, written: str) -> Self:
        made = super().__new__(cls, text)
        made.written = written
        return made

    def __repr__(self) -> str:
        return repr(self.written)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.written)


def secrets_of(options: Mapping[str, Any]) -> frozenset[str]:
    """All secrets in the options of a tier, of any type: everything but what says where it is."""
    rest = {key: value for key, value in options.items() if key not in _PLACES}
    return secrets_in(str(options.get("url", "")), rest)


def secrets_in(url: str, options: Mapping[str, Any]) -> frozenset[str]:
    """All secrets, which no message may show: users and passwords in URLs, option values, environment variables.

    In each form in which libraries show them, as quoted for URLs, and their parts.
    """
    plain = _user_of(url) | set(_values(options)) | set(credentials_in(os.environ).values())
    return frozenset(form for text in plain if len(text) >= SHORTEST_SECRET for form in _forms(text))


def credentials_in(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables with the name and the look of a credential: client libraries find them by themselves.

    Paths lead to credentials and are none.
    """
    found = ((name, value) for name, value in environ.items() if is_credential_name(name))
    return {name: value for name, value in found if len(value) >= _SHORTEST_VARIABLE and not value.startswith("/")}


def _values(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _values(value)
        elif isinstance(value, list | tuple):
            for item in value:
                yield from _values(item if isinstance(item, Mapping) else {key: item})
        elif isinstance(value, str):
            yield from _user_of(value) if key in _PUBLIC else _parts(str(value))
        elif isinstance(value, int | float) and not isinstance(value, bool) and is_credential_name(str(key)):
            yield str(value)
        elif isinstance(value, bytes):
            yield value.decode("latin-1")


def _parts(text: str) -> Iterator[str]:
    """A secret and what is secret of it alone: the key in a connection string, the token after ``Bearer``."""
    yield text
    yield from _user_of(text)
    for part in re.split(r"[;&]", text):
        name, equals, value = part.partition("=")
        if equals and is_credential_name(name):
            yield value
    words = text.split()
    yield from (word for word in words[1:] if len(word) >= _SHORTEST_VARIABLE)


def _forms(text: str) -> Iterator[str]:
    yield text
    yield from (quote(text, safe=""), quote(text), quote_plus(text))
    yield from (repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])


def _user_of(url: str) -> set[str]:
    # All up to the last "@", since a password may have characters that are not allowed in a URL.
    user, at, _ = url.partition("://")[2].rpartition("@")
    return {part for text in (user, unquote(user)) for part in (text, *text.split(":"))} if at else set()


def scrub(text: str, secrets: frozenset[str]) -> str:
    """The text without the secrets; longer ones first, since one may be part of another."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def shows(error: BaseException, secrets: frozenset[str]) -> bool:
    """Whether an error, or one that it was raised from, has a secret in its message."""
    chain = linked(error, lambda one: one.__cause__ or one.__context__)
    return any(secret in str(one) for one in chain for secret in secrets)


def linked(error: BaseException, following: Callable[[BaseException], BaseException | None]) -> Iterator[BaseException]:
    """An error and those that it leads to, each once: an error that was raised from itself makes a cycle."""
    one: BaseException | None = error
    met: set[int] = set()
    while one is not None and id(one) not in met:
        met.add(id(one))
        yield one
        one = following(one)


def without_literals(value: Any, keys: tuple[str | int, ...] = ()) -> Any:
    """The data of a policy file with a variable that nobody has set in place of each credential that it has as text."""
    if isinstance(value, dict):
        return {key: without_literals(item, (*keys, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [without_literals(item, (*keys, i)) for i, item in enumerate(value)]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or "$" in str(value):
        return value
    last = [str(key) for key in keys if isinstance(key, str)][2:]
    if any(is_credential_name(key) for key in last) and len(str(value)) >= SHORTEST_SECRET:
        return "${HIDDEN}"
    return _without_user(value) if isinstance(value, str) else value


def _without_user(url: str) -> str:
    protocol, found, rest = url.partition("://")
    user, at, place = rest.rpartition("@")
    return f"{protocol}://${{HIDDEN}}@{place}" if found and at and user else url


class LogScrubber(logging.Filter):
    """Removes secrets from records of loggers that it is added to; it learns more of them as tiers are opened."""

    def __init__(self) -> None:
        super().__init__()
        self._secrets: frozenset[str] = frozenset()

    def learn(self, secrets: frozenset[str]) -> None:
        """Remove these, too, from now on."""
        self._secrets |= secrets

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if (told := scrub(text, self._secrets)) != text:
            record.msg, record.args = told, ()
        if record.exc_info or record.exc_text:
            self._scrub_trace(record)
        return True

    def _scrub_trace(self, record: logging.LogRecord) -> None:
        # Formatters take this text in place of the exception.
        text = record.exc_text or logging.Formatter().formatException(record.exc_info)  # type: ignore[arg-type]
        record.exc_text, record.exc_info = scrub(text, self._secrets), None
