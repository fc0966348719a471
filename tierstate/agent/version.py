"""The version of this package that a process runs, by which a trainer and an agent know whether they go together."""

from __future__ import annotations

import importlib.metadata

from tierstate.manifest.errors import TierUnavailable

from .messages import PROTOCOL


def installed_version() -> str:
    """The version that is installed now; empty while there is none, as in the middle of an upgrade."""
    try:
        return importlib.metadata.version("tierstate")
    except importlib.metadata.PackageNotFoundError:
        return ""


# Of when this process began: an upgrade in place changes what is installed, and not the code that is running.
_running = installed_version()


def agent_version() -> str:
    """What two processes must have in common to work together."""
    return f"{_running}/{PROTOCOL}"


def check_up_to_date() -> None:
    """Check that an agent which this process starts would be of its own version.

    Raises:
        TierUnavailable: another version was installed since this process began.
    """
    if (found := installed_version()) != _running:
        raise TierUnavailable(
            f"this process runs tierstate {_running}, and {found or 'none'} is installed by now, of which a new agent "
            "would be: start this process again to have one"
        )
