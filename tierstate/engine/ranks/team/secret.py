"""Agreement of the ranks on the secret of their job, which is never told to the job's key-value store.

The store of `torch.distributed` answers everybody who reaches its port. So the secret comes another way, by the
policy's ``ranks.trust``:

* ``{file: …}``, ``{env: …}``: each rank reads it there;
* ``auto``: from the environment of the ranks, if the launcher has set it there; else, if all ranks run on one host, one
  of them draws it and hands it to the others over a Unix socket; else by MUNGE, if all hosts have it; else there is
  none, and the job is refused;
* ``network``: it does pass through the store, and keeps nobody out.

What the ranks say of it in the store: where each has it from, and a number that is derived from it, by which they see
whether all have the same.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tierstate.manifest.errors import PolicyError, format_ranks
from tierstate.tiers.connections.distribution import (
    SecretServer,
    has_munge,
    munge,
    receive_secret,
    unmunge,
)
from tierstate.tiers.connections.secret import (
    FILE_VARIABLE,
    VARIABLE,
    JobSecret,
    SecretError,
    read_secret_file,
    secret_of_environment,
    secret_of_variable,
)
from tierstate.tiers.policy.models import SecretPlace

SECONDS = 30.0
"""Timeout in seconds for receiving the secret from another rank of the host."""


NO_SECRET = (
    "ranks.trust: this job has ranks on {hosts} hosts and no secret by which they know each other, so whoever reaches "
    f"their network could read and change what they send. Give all ranks the same secret: set {VARIABLE} in their "
    f"environment (made by: openssl rand -hex 32), or {FILE_VARIABLE} to a file of mode 0600 that all hosts see, or "
    "name it in the policy, 'ranks: {{trust: {{file: /path}}}}'. On a network that nobody else can reach, write "
    "'ranks: {{trust: network}}'"
)


_drawn: dict[str, JobSecret] = {}
"""By ``ranks.trust``, the secret that the ranks of this process's job have drawn. All teams of a job use the same one:
its peer memory is the same too."""


class Gathering(Protocol):
    """The part of `Team` that the agreement uses."""

    rank: int
    size: int
    hosts: tuple[int, ...]

    def gather(self, topic: str, data: bytes) -> list[bytes]: ...


def agree_on_secret(team: Gathering, trust: str | SecretPlace) -> JobSecret:
    """The secret of the job, the same on all ranks. Every rank calls this, and waits for all.

    Args:
        trust: the policy's ``ranks.trust``.

    Raises:
        PolicyError: there is none, it is not safe, or not all ranks have the same; on every rank.
        RankFailed: a rank is dead or late.
    """
    return SecretAgreement(team, trust).agree()


class SecretAgreement:
    """One rank's part in the agreement.

    Args:
        team: the ranks.
        trust: the policy's ``ranks.trust``.
    """

    def __init__(self, team: Gathering, trust: str | SecretPlace) -> None:
        self._team, self._trust = team, trust

    def agree(self) -> JobSecret:
        """As `agree_on_secret`."""
        own, trouble = self._own()
        drawn = _drawn.get(_kind(self._trust))
        can_munge = self._may_munge(own) and has_munge()
        mine = {"trust": _kind(self._trust), "check": _check_of(own), "trouble": trouble, "munge": can_munge}
        said = self._gather("secret", mine | {"drawn": _check_of(drawn)})
        _raise_troubles(said)
        self._compare("trust", said, "the policy's ranks.trust")
        self._compare("check", said, "the secret of the job")
        if own is not None:
            return own
        if drawn is None or any(one["drawn"] != _check_of(drawn) for one in said):
            drawn = _drawn[_kind(self._trust)] = self._distribute(all(one["munge"] for one in said))
        return drawn

    def _own(self) -> tuple[JobSecret | None, str]:
        """The secret that this rank was given, if any; and what is wrong with it."""
        try:
            if isinstance(self._trust, SecretPlace):
                if self._trust.env is not None:
                    return secret_of_variable(self._trust.env), ""
                return read_secret_file(Path(self._trust.file or "").expanduser()), ""
            return (secret_of_environment() if self._trust == "auto" else None), ""
        except SecretError as error:
            return None, f"ranks.trust: {error}"

    def _may_munge(self, own: JobSecret | None) -> bool:
        return own is None and self._trust == "auto" and len(set(self._team.hosts)) > 1

    def _compare(self, key: str, said: Sequence[dict[str, Any]], what: str) -> None:
        others = [rank for rank, one in enumerate(said) if one[key] != said[0][key]]
        if others:
            raise PolicyError(
                f"{what} of {format_ranks(others)} is not that of rank 0; right is the same for all: "
                f"{_source(said, 0)} and {_source(said, others[0])}"
            )

    # Without a secret that was given

    def _distribute(self, munged: bool) -> JobSecret:
        hosts = len(set(self._team.hosts))
        if self._trust == "network":
            return self._by_store()
        if hosts == 1:
            return self._by_socket()
        if munged:
            return self._by_munge()
        raise PolicyError(NO_SECRET.format(hosts=hosts))

    def _by_store(self) -> JobSecret:
        first = self._team.gather("secret/open", os.urandom(32) if self._team.rank == 0 else b"")[0]
        return JobSecret(first, authenticated=False)

    def _by_socket(self) -> JobSecret:
        """Rank 0 draws the secret and serves it until all have it."""
        if self._team.rank:
            path = self._first("secret/socket", {})["path"]
            return self._received(lambda: receive_secret(Path(path), SECONDS))
        secret = JobSecret.random()
        try:
            server = SecretServer(secret)
        except SecretError as error:
            self._first("secret/socket", {"trouble": f"ranks.trust: {error}"})
            raise
        with server:
            self._first("secret/socket", {"path": str(server.path)})
            return self._received(lambda: secret)

    def _by_munge(self) -> JobSecret:
        secret, mine = JobSecret.random(), {}
        if self._team.rank == 0:
            try:
                mine = {"credential": munge(base64.b64encode(secret.reveal())).decode("ascii", "replace")}
            except SecretError as error:
                mine = {"trouble": f"ranks.trust: {error}"}
        credential = self._first("secret/munge", mine).get("credential", "")
        if self._team.rank == 0:
            return self._received(lambda: secret)
        return self._received(lambda: JobSecret(base64.b64decode(unmunge(credential.encode()))))

    def _first(self, topic: str, mine: dict[str, Any]) -> dict[str, Any]:
        """What rank 0 says."""
        said = self._gather(topic, mine)
        _raise_troubles(said)
        return said[0]

    def _received(self, receive: Any) -> JobSecret:
        """The secret, once all ranks have the same."""
        found, trouble = None, ""
        try:
            found = receive()
        except (SecretError, ValueError) as error:
            trouble = f"ranks.trust: {error}. A secret in {VARIABLE} takes the place of this"
        said = self._gather("secret/received", {"trouble": trouble, "check": _check_of(found)})
        _raise_troubles(said)
        self._compare("check", said, "the secret of the job")
        assert isinstance(found, JobSecret)
        return found

    def _gather(self, topic: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(data) for data in self._team.gather(topic, json.dumps(mine).encode())]


def _kind(trust: str | SecretPlace) -> str:
    return trust if isinstance(trust, str) else "file" if trust.file is not None else f"env {trust.env}"


def _check_of(secret: JobSecret | None) -> str:
    """A number that is the same for equal secrets, and from which a secret of enough random bits cannot be found."""
    return "" if secret is None else secret.derive("comparison of secrets").hex()


def _source(said: Sequence[dict[str, Any]], rank: int) -> str:
    found = "has a secret" if said[rank]["check"] else "has none"
    return f"rank {rank} ({said[rank].get('trust', 'the same')}) {found}"


def _raise_troubles(said: Sequence[dict[str, Any]]) -> None:
    ranks = [rank for rank, one in enumerate(said) if one.get("trouble")]
    if ranks:
        raise PolicyError(f"{format_ranks(ranks)}: {said[ranks[0]]['trouble']}")
