"""Programs of the distribution that tests need, installed by apt-get where that was asked for."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ASKED = "TIERSTATE_TEST_INSTALL"
"""The environment variable that is 1 where the tests may install packages of the distribution."""

_INSTALL_SECONDS = 600


class NotInstallable(RuntimeError):
    """The packages are missing and cannot be installed here; the message says why."""


def install(what: str, programs: Mapping[str, str]) -> None:
    """Make sure that programs are there; by apt-get where one is missing and it was asked for.

    Args:
        what: they are, for messages.
        programs: the program of each of Debian's packages.

    Raises:
        NotInstallable
    """
    if not _missing(programs):
        return
    names = " ".join(_missing(programs))
    if os.environ.get(ASKED) != "1":
        raise NotInstallable(f"needs {what}: install {names}, or let the tests do it, as root, with {ASKED}=1")
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NotInstallable(f"needs {what}: install {names} (the tests do so with root and apt-get only)")
    with open(Path(tempfile.gettempdir()) / "tierstate-install-packages.lock", "w") as lock:
        # Several test processes may start at once; the first one installs.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if missing := _missing(programs):
            _apt_get(what, missing)


def _missing(programs: Mapping[str, str]) -> list[str]:
    return [package for package, program in programs.items() if shutil.which(program) is None]


def _apt_get(what: str, packages: Sequence[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    update = ["apt-get", "update"]
    for one in (update, command):
        done = subprocess.run(one, env=environment, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
    if done.returncode != 0:
        raise NotInstallable(f"needs {what}, and '{' '.join(command)}' failed: {done.stderr.strip()[-500:]}")
