"""Find this host's agent for a policy, or start one: where its socket is, and which policies share an agent.

One agent serves all trainers of a user and a policy on a host. Its socket is in the user's runtime folder, under a name
that is derived from the policy's text, the working directory, the variables in the text, and the credentials in the
environment: what differs in one of these gets an agent of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from tierstate.manifest.errors import TierstateError, TierUnavailable
from tierstate.tiers.connections.distribution import runtime_folder
from tierstate.tiers.connections.secret import SecretError
from tierstate.tiers.interpreter import same_modules, same_python
from tierstate.tiers.policy.policy import Policy

from .messages import ConnectionLost, Message, MessageSocket, decode_error
from .version import agent_version, check_up_to_date

STARTING = 120.0
"""Seconds until an agent that was started must listen."""


GREETING = 10.0
"""Seconds until an agent must have answered a greeting."""


_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)")
_CREDENTIALS = re.compile(r"(AWS|S3|GOOGLE|GCP|GCS|AZURE|FSSPEC)_")


def policy_text(policy: Policy) -> str:
    """The text that an agent parses, with variables as they are written.

    Raises:
        PolicyError: the policy was not made of a text.
    """
    return policy.dump(secrets=True)


def agent_name(text: str, environ: Mapping[str, str]) -> str:
    """The name of the agent for a policy: 16 hexadecimal digits."""
    named = {"TIERSTATE_HOST", *_VARIABLE.findall(text), *filter(_CREDENTIALS.match, environ)}
    parts = [text, os.getcwd(), *(f"{name}={environ.get(name, '')}" for name in sorted(named))]
    return hashlib.blake2s("\0".join(parts).encode(), digest_size=8).hexdigest()


def socket_path(name: str) -> Path:
    """Where the agent with this name listens.

    Raises:
        TierUnavailable: there is no folder of this user's alone for it.
    """
    try:
        return runtime_folder() / f"agent-{name}"
    except SecretError as error:
        raise TierUnavailable(f"no agent can be had: {error}") from error


def agents_of_user() -> Iterator[Path]:
    """The sockets of this user's agents on this host; some may be left by agents that were killed."""
    yield from (p for p in sorted(runtime_folder().glob("agent-*")) if not p.suffix)


def greet(
    path: Path, hello: Mapping[str, object], descriptors: tuple[int, ...] = (), seconds: float = GREETING
) -> tuple[MessageSocket, Message]:
    """Connect to an agent. Returns the connection and the agent's first answer.

    Args:
        descriptors: open files to hand over; they stay open here.
        seconds: until it must have answered.

    Raises:
        ConnectionLost: there is none, or it does not answer.
        TierstateError: it refuses; the message says why.
    """
    link = MessageSocket.connect(path)
    try:
        link.limit(seconds)
        link.send({"version": agent_version(), "pid": os.getpid(), **hello}, (), descriptors)
        answer = link.receive()
        if answer.kind == "refused":
            raise decode_error(answer.head["error"])
        link.limit(0.0)
        return link, answer
    except ConnectionLost as error:
        link.close()
        raise ConnectionLost(f"{path}: {error}") from error
    except BaseException:
        link.close()
        raise


def start_agent(policy: Policy, path: Path) -> None:
    """Start an agent, and return when it listens. Does nothing if one does already.

    Raises:
        TierstateError: it could not be started; the message has what it said.
    """
    check_up_to_date()
    command = same_python("-m", "tierstate.agent.server", str(path))
    try:
        ran = subprocess.run(
            command, input=policy_text(policy), capture_output=True, text=True, timeout=STARTING,
            env=same_modules(), check=False, start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TierUnavailable(f"the agent could not be started: {error}") from error
    if ran.returncode:
        raise TierstateError(f"the agent could not be started: {ran.stderr.strip()[-2000:]}")


def ask_agent(path: Path, kind: str) -> Message:
    """Ask an agent for its ``status``, or to ``stop``.

    Raises:
        TierstateError: it does not answer.
    """
    link, answer = greet(path, {"kind": kind})
    link.close()
    return answer
