"""Hand a secret that one rank has drawn to the other ranks of the same user, on one host or by MUNGE across hosts.

On one host it goes over a Unix socket in a folder of this user's alone. The kernel tells each side which user the other
is (``SO_PEERCRED``); other users are refused. Across hosts it goes as a credential of MUNGE, if the cluster has it:
MUNGE encrypts the credential and decodes it only for the user for which it was made, so that it may pass through the
job's store.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import stat
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from .listener import PAUSE
from .secret import KEY, JobSecret, SecretError

log = logging.getLogger("tierstate")


MUNGE_SECONDS = 10.0
"""Timeout in seconds for a command of MUNGE."""


_REPLAYED = 17
"""Exit status of ``unmunge`` for a credential that was decoded on this host before, as by another rank; it still gives
the data, and only to the user for which they are."""


_CREDENTIALS = struct.Struct("3i")


def runtime_folder() -> Path:
    """The folder of this user's sockets: below ``XDG_RUNTIME_DIR``, or else ``/tmp/tierstate-UID``; made if needed.

    Raises:
        SecretError: it is there, and is not a folder of this user's alone.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(base) / "tierstate" if base and os.access(base, os.W_OK) else Path(f"/tmp/tierstate-{os.geteuid()}")
    try:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
    except OSError as error:
        raise SecretError(f"{folder}: the folder for sockets of this user cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise SecretError(
            f"{folder} is not a folder of this user's alone (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}): remove it, or give XDG_RUNTIME_DIR or a secret of your own"
        )
    return folder


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A path of the same file that is short enough for a socket's name (107 bytes)."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def user_of(wire: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket, as the kernel has it."""
    return _peer(wire)[1]


def process_of(wire: socket.socket) -> int:
    """The number of the process at the other end of a Unix socket when it was connected, as the kernel has it."""
    return _peer(wire)[0]


def _peer(wire: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end of a Unix socket."""
    pid, user, group = _CREDENTIALS.unpack(wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user, group


class SecretServer:
    """Gives a secret to processes of this user on this host, over a Unix socket, until `close`.

    Args:
        secret: the secret.

    Attributes:
        path: of the socket, for `receive_secret`.

    Raises:
        SecretError: there is no folder for the socket.
    """

    def __init__(self, secret: JobSecret) -> None:
        self._secret = secret
        self.path = runtime_folder() / f"secret-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(self.path) as short:
                self._socket.bind(short)
            self._socket.listen(socket.SOMAXCONN)
        except OSError as error:
            self._socket.close()
            raise SecretError(f"{self.path}: no socket can be made there: {error.strerror}") from error
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="tierstate-secret", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        told = False
        while not self._closed:
            try:
                wire, _ = self._socket.accept()
            except OSError as error:  # `close` has ended it, or no file descriptor is left: the connection waits on
                if not (told or self._closed):
                    log.warning("%s: no connection can be accepted for now: %s", self.path, error)
                    told = True
                time.sleep(PAUSE)
                continue
            with wire, suppress(OSError):
                if user_of(wire) == os.geteuid():
                    wire.sendall(self._secret.reveal())
                else:
                    log.warning("%s: a process of user %d was refused", self.path, user_of(wire))

    def close(self) -> None:
        """Give it to nobody any more, and remove the socket."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        with suppress(OSError):
            os.unlink(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def receive_secret(path: Path, seconds: float) -> JobSecret:
    """The secret that a `SecretServer` of this user gives.

    Raises:
        SecretError: no server is there, or it is of another user.
    """
    end = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
        wire.settimeout(seconds)
        try:
            with short_path(path) as short:
                wire.connect(short)
            if (user := user_of(wire)) != os.geteuid():
                raise SecretError(f"{path}: the rank that gives the secret runs as user {user}, not {os.geteuid()}")
            data = b""
            while len(data) < KEY and time.monotonic() < end and (got := wire.recv(KEY - len(data))):
                data += got
        except OSError as error:
            raise SecretError(f"{path}: no rank gives the secret there: {error.strerror or error}") from error
    if len(data) != KEY:
        raise SecretError(f"{path}: the rank that gives the secret has closed the connection")
    return JobSecret(data)


def has_munge() -> bool:
    """Whether the commands of MUNGE are there, and its daemon answers."""
    if not (shutil.which("munge") and shutil.which("unmunge")):
        return False
    try:
        munge(b"?")
    except SecretError as error:
        log.info("MUNGE is installed, but cannot be used: %s", error)
        return False
    return True


def munge(data: bytes) -> bytes:
    """A credential with data that MUNGE decodes for this user only.

    Raises:
        SecretError: MUNGE does not make one.
    """
    return _run(["munge", f"--restrict-uid={os.geteuid()}"], data)


def unmunge(credential: bytes) -> bytes:
    """The data of a credential that a process of this user has made.

    Raises:
        SecretError: it is of another user, too old, or of another cluster.
    """
    found = _run(["unmunge", "--keys=UID,STATUS", "--numeric"], credential, _REPLAYED)
    head, blank, data = found.partition(b"\n\n")
    told = dict(line.split(b":", 1) for line in head.splitlines() if b":" in line)
    if not blank or told.get(b"UID", b"").strip() != str(os.geteuid()).encode():
        raise SecretError("a MUNGE credential of another user was posted by the rank that draws the secret")
    return data


def _run(command: list[str], data: bytes, *fine: int) -> bytes:
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=MUNGE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SecretError(f"{command[0]}: {error}") from error
    if done.returncode not in (0, *fine):
        raise SecretError(f"{command[0]}: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return done.stdout
