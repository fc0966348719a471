"""This host's own part in peer memory: its folder, its keeper, started where none runs, and its address."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

from tierstate.manifest.errors import FormatError, TierError, TierUnavailable

from .files import BufferedFile
from .peer_client import Far
from .peer_members import Group, Member, read_card, read_group, remember
from .peer_memory import DOOR, START, Kept, leaving, lock, make_folder

ADDRESS, INTERFACE = "TIERSTATE_ADDRESS", "GLOO_SOCKET_IFNAME"
"""Variables that say by which address others reach this host, or by which interface."""

WATCH = 5.0
"""Seconds after which is looked again whether the keeper still runs."""

STARTING = 120.0
"""Seconds that a keeper may take to listen; nearly all of them go into importing torch."""

_SIOCGIFADDR = 0x8915


def default_path() -> Path:
    """Where peers keep objects on this host, unless a policy says otherwise."""
    return Path(f"/dev/shm/tierstate-{os.geteuid()}-peer")


class Home:
    """The memory of this host, as the processes of this host see it.

    Args:
        kept: the objects.
        name: the tier's, for messages.
    """

    def __init__(self, kept: Kept) -> None:
        self.kept, self.root = kept, kept.root
        self._door: BufferedFile | None = None
        self._terms: tuple[str, int, float, float] | None = None
        self._looked = 0.0

    @property
    def name(self) -> str:
        """The tier's."""
        return self.kept.name

    def enter(self) -> None:
        """From now on the keeper does not take this host for idle; nothing where none has ever run."""
        if self.card() is not None:
            self._hold_door()

    def _hold_door(self) -> None:
        if self._door is None:
            with suppress(FileNotFoundError):
                self._door = lock(self.root / DOOR, fcntl.LOCK_SH)

    def leave(self) -> None:
        """Nothing more is wanted of the memory."""
        if self._door is not None:
            self._door.close()
            self._door = None

    def group(self) -> Group:
        """The members that this host remembers."""
        try:
            return read_group(self.root)
        except FormatError as error:
            raise TierError(
                f"{self.name}: {self.root}: {error}; 'tierstate peer stop' removes it", tier=self.name
            ) from (error)

    def remember(self, group: Group) -> None:
        """Remember other members."""
        remember(self.root, "group", group)

    def card(self) -> Member | None:
        """The member that this host was when its keeper was last started."""
        try:
            return read_card(self.root)
        except FormatError:
            return None

    def keeper(self, address: str, port: int, idle: float, seconds: float) -> Member:
        """The member that this host is, whose keeper runs.

        Raises:
            AccessDenied: the folder is another's.
            TierUnavailable: no keeper can be started.
        """
        make_folder(self.root, self.name)
        self._terms, self._looked = (address, port, idle, seconds), time.monotonic()
        with closing(lock(self.root / START, fcntl.LOCK_EX)):
            self._hold_door()
            member = self.card()
            if member is None or not self._runs(member, seconds, idle):
                self._start(address, port, idle)
                member = read_card(self.root)
            assert member is not None
            return member

    def watch(self) -> None:
        """Start the keeper again where this process has had it running, and it has died; looked at now and then.

        It listens where it did before, if nobody else does meanwhile, and so the other hosts find it again.

        Raises: as `keeper`.
        """
        if self._terms and time.monotonic() - self._looked > WATCH and self.card() is not None:
            self.keeper(*self._terms)

    def _runs(self, member: Member, seconds: float, idle: float) -> bool:
        far = Far(member, seconds, lambda: self.name)
        with closing(far):
            try:
                far.terms(self.kept.capacity, idle)
            except TierUnavailable:
                return False
        return True

    def _start(self, address: str, port: int, idle: float) -> None:
        command = [sys.executable, "-m", "tierstate.tiers.peer_server", "--path", str(self.root), "--address", address]
        command += ["--port", str(port), "--idle", str(idle)]
        if self.kept.capacity is not None:
            command += ["--capacity", str(self.kept.capacity)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STARTING, check=False
            )
            trouble = done.stderr.strip()[-400:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            trouble = f"it did not listen within {STARTING:g} s"
        if trouble:
            raise TierUnavailable(
                f"{self.name}: no keeper could be started at {address}:{port} for {self.root}: {trouble}",
                tier=self.name,
            )


def wait_gone(root: Path, seconds: float) -> bool:
    """Whether a memory is given back, to the last page, within so many seconds."""
    end = time.monotonic() + seconds
    while (there := root.exists() or any(leaving(root))) and time.monotonic() < end:
        time.sleep(0.02)
    return not there


def own_address() -> str:
    """The address by which other hosts of the job reach this one.

    It is ``TIERSTATE_ADDRESS``; else that of the interface ``GLOO_SOCKET_IFNAME``; else the one from which this host
    reaches ``MASTER_ADDR``; else the one from which it reaches the world; else the loopback's.

    Raises:
        OSError: there is no such interface.
    """
    if found := os.environ.get(ADDRESS):
        return found
    if names := os.environ.get(INTERFACE):
        return _address_of(names.split(",")[0])
    for target in (os.environ.get("MASTER_ADDR"), "192.0.2.1"):  # the second is nobody's: no packet is sent
        if target:
            with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise OSError(error.errno, f"{INTERFACE}: {error.strerror}", interface) from error
    return socket.inet_ntoa(found[20:24])
