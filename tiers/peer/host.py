"""This host's part in peer memory: its folder, its server process (the keeper), and the agreement on the members.

One rank per host starts the keeper if none runs. Then all hosts of a job agree on the membership, from which each
computes its partners.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Protocol

from tierstate.manifest.errors import FormatError, NotFound, TierError, TierstateError, TierUnavailable
from tierstate.tiers.base import RankGroup
from tierstate.tiers.connections.secret import NOT_AUTHENTICATED, JobSecret, SecretError
from tierstate.tiers.posix.files import BufferedFile

from .client import RemoteMemory
from .launch import KeeperSettings, start_process
from .local import (
    START_LOCK,
    USE_LOCK,
    LocalMemory,
    check_folder,
    keeper_lives,
    lock_file,
    make_folder,
    remove_memory,
    removed_memories,
    wait_until,
)
from .members import (
    SECRET,
    HostReport,
    Member,
    Membership,
    SecretFile,
    is_stale,
    merge_memberships,
    read_member,
    read_membership,
    write_membership,
    write_secret,
)

TAKING_OVER = 10.0
"""Seconds until a keeper whose place is taken must have ended."""


log = logging.getLogger("tierstate")


def default_path() -> Path:
    """The folder of this host's memory, if the policy names none: one per user."""
    return Path(f"/dev/shm/tierstate-{os.geteuid()}-peer")


class KeeperPlace(Protocol):
    """Where this process starts keepers, if not as processes of their own; implemented by `KeeperThreads`."""

    def start(self, root: Path, settings: KeeperSettings) -> None:
        """Start a keeper; returns when it listens."""

    def serves(self, root: Path) -> bool:
        """Whether the keeper of a memory runs there."""


class HostMemory:
    """The folder of this host's memory, and its keeper, as the processes of this host use them.

    Args:
        kept: the objects in the folder.

    Attributes:
        met: the secret of the job of this process; None if it has met no other ranks.
        keepers: where this process starts the keepers of all memories; None: as processes of their own.
    """

    keepers: ClassVar[KeeperPlace | None] = None

    def __init__(self, kept: LocalMemory) -> None:
        self.kept, self.root = kept, kept.root
        self.met: JobSecret | None = None
        self._file = SecretFile(self.root)
        self._use_lock: BufferedFile | None = None
        self._using = threading.Lock()
        self._terms: tuple[str, int, float, float] | None = None
        self._handed = False

    @property
    def name(self) -> str:
        """The tier's name, for messages."""
        return self.kept.name

    def secret(self) -> JobSecret | None:
        """The secret by which the keepers of the job know each other: that of this process's job, or else that of the
        last job on this host; None if there is none.

        Raises:
            SecretError: the file in the folder is not of this user alone.
        """
        return self.met if self.met is not None else self._file.read()

    def notes(self) -> tuple[str, ...]:
        """Remarks about the connections, for `Traits.notes`."""
        with suppress(SecretError):
            if (secret := self.secret()) is not None and not secret.authenticated:
                return (NOT_AUTHENTICATED,)
        return ()

    def enter(self) -> None:
        """Hold a shared lock by which others see that a process uses the memory. Does nothing if there is no memory."""
        if self.kept.path.exists() or self.card() is not None:
            self._hold_use_lock()

    def _hold_use_lock(self) -> None:
        if self._use_lock is None:
            with self._using, suppress(FileNotFoundError):
                if self._use_lock is None:  # threads that begin to write at the same time share it
                    self._use_lock = lock_file(self.root / USE_LOCK, fcntl.LOCK_SH)

    def release(self) -> None:
        """Release the lock: this process does not use the memory any more."""
        with self._using:
            if self._use_lock is not None:
                self._use_lock.close()
                self._use_lock = None

    def leave(self) -> None:
        """Release the lock, and see to it that the memory is freed one day.

        A keeper does that after its idle time. So if the keeper of this process's job has died, it is started again;
        and if there never was one, as in a job of one process, the process that has made the memory frees it. What it
        finds there from before, as after a crash, stays: nobody frees what they may only have read.
        """
        self.release()
        unkept = self.kept.made and self.card() is None
        if (self._terms is None and not unkept) or not self.root.exists() or keeper_lives(self.root):
            return
        if self._terms is not None:
            try:
                self.keeper(*self._terms)
            except (TierstateError, OSError) as error:
                log.warning("%s: no keeper is there that would free the memory later: %s", self.name, error)
            self.release()
        self.free_if_unused()

    def free_if_unused(self, *, keepers: bool = False) -> bool:
        """Free the memory if no process uses it and no keeper lives; returns whether it did.

        Args:
            keepers: whether to free it although a keeper lives, which then ends.
        """
        with suppress(FileNotFoundError, BlockingIOError), ExitStack() as held:
            for name in (START_LOCK, USE_LOCK):
                held.enter_context(closing(lock_file(self.root / name, fcntl.LOCK_EX | fcntl.LOCK_NB)))
            if keepers or not keeper_lives(self.root):
                remove_memory(self.root)
                return True
        return False

    def group(self) -> Membership:
        """The membership in this host's file.

        Raises:
            TierError: the file is damaged.
        """
        try:
            return read_membership(self.root)
        except FormatError as error:
            raise TierError(
                f"{self.name}: {self.root}: {error}; 'tierstate peer stop' removes it", tier=self.name
            ) from (error)

    def remember(self, group: Membership) -> None:
        """Write the membership to this host's file."""
        write_membership(self.root, "group", group)

    def card(self) -> Member | None:
        """This host as a member, as its keeper wrote it when it was last started; None if there is no valid file."""
        try:
            return read_member(self.root)
        except FormatError:
            return None

    def keeper(self, address: str, port: int, idle: float, seconds: float) -> Member:
        """Start the keeper if none runs; returns this host as a member.

        Args:
            address, port: where a new keeper listens; port 0 for any.
            idle: seconds without use after which it ends.
            seconds: timeout for its response.

        Raises:
            AccessDenied: the folder belongs to another user, or is used for something else.
            TierUnavailable: no keeper can be started.
        """
        make_folder(self.root, self.name)
        self._terms = address, port, idle, seconds
        with closing(lock_file(self.root / START_LOCK, fcntl.LOCK_EX)):
            self._hold_use_lock()
            member = self.card()
            self._hand_over_secret()
            if member is None or not self._is_served(member, seconds, idle):
                settings = KeeperSettings(address, port, idle, self.kept.capacity)
                if self.keepers is None:
                    start_process(self.root, settings, self.name)
                else:
                    self.keepers.start(self.root, settings)
                member = read_member(self.root)
            assert member is not None
            return member

    def _hand_over_secret(self) -> None:
        """Write the job's secret to the folder, once; the keeper reads it there, and closes other jobs' connections."""
        if self.met is not None and (not self._handed or not (self.root / SECRET).exists()):
            found = None
            with suppress(SecretError):  # one that others could read is replaced
                found = self._file.read()
            if found != self.met:
                write_secret(self.root, self.met)
            self._handed = True

    @property
    def starts_keeper(self) -> bool:
        """Whether this process is the one of its host that starts the keeper."""
        return self._terms is not None

    def watch(self) -> None:
        """Start the keeper again if it has died. Does nothing in a process that has never called `keeper`.

        The new keeper listens on the same port as before, if that is free, so that the other hosts find it again.

        Raises: as `keeper`.
        """
        if self._terms is not None and self.card() is not None:
            self.keeper(*self._terms)

    def _is_served(self, member: Member, seconds: float, idle: float) -> bool:
        """Whether a keeper runs and answers, and is where it should be: one that is elsewhere is asked to end."""
        if not keeper_lives(self.root):
            return False
        with closing(RemoteMemory(member, self.secret, seconds, lambda: self.name)) as far:
            if not far.runs(self.kept.capacity, idle):
                return False
            if self.keepers is None or self.keepers.serves(self.root):
                return True
            try:
                far.hand_over()
            except TierError as error:
                log.debug("%s: the keeper stays where it is: %s", self.name, error)
                return True
        return not wait_until(lambda: not keeper_lives(self.root), TAKING_OVER)


def wait_gone(root: Path, seconds: float) -> bool:
    """Wait until a memory is freed to the last page; returns whether it was within ``seconds``."""
    return wait_until(lambda: not root.exists() and not any(removed_memories(root)), seconds)


def memories_of_user() -> list[Path]:
    """The folders of this user's memories on this host, at their usual places."""
    return sorted(Path("/dev/shm").glob(f"tierstate-{os.geteuid()}-*"))


def reap(root: Path, *, keepers: bool = False) -> str:
    """Free a memory that dead jobs of this user have left on this host; returns what was done, as text.

    A memory that a process uses stays, and so does one whose keeper lives: the keeper frees it when it was not used for
    its idle time.

    Args:
        root: the memory's folder.
        keepers: whether to end keepers, too, whose memory no process uses.

    Raises:
        AccessDenied: the folder is of another user, open to others, or used for something else.
    """
    for left in removed_memories(root):
        shutil.rmtree(left, ignore_errors=True)
    try:
        check_folder(root, "peer")
    except NotFound:
        return "nothing is there"
    home = HostMemory(LocalMemory(root))
    if home.free_if_unused(keepers=keepers):
        return "freed"
    return "its keeper lives: it is freed when it was not used for long" if keeper_lives(root) else "in use"


def agree_on_members(team: RankGroup, topic: str, home: HostMemory, keeper: Callable[[], Member]) -> Membership:
    """Agree with all hosts on the membership, in two all-gathers; all ranks call it and get the same membership.

    First the leaders of the hosts report their members; then each writes the new membership to its file; when all have
    written it, it counts as confirmed. A host that missed an earlier agreement may still keep objects that the others
    have deleted or saved again under the same names. Its memory is emptied, with a warning: the other hosts have had
    copies of all its objects.

    Args:
        team: the ranks.
        topic: begins the topics of the all-gathers.
        home: this host's memory.
        keeper: starts this host's keeper and returns its member; called on one rank per host.

    Raises:
        TierUnavailable: a host has no keeper or cannot write its file, or its ranks see several memories; raised on
            every rank.
        RankFailed: a rank is dead or late.
    """
    leader = team.leads("host")
    mine = _introduce(home, keeper) if leader else None
    answers = team.gather(f"{topic} hosts", mine.encode() if mine else b"")
    by_host = sorted((team.hosts[rank], rank) for rank, data in enumerate(answers) if data)
    said = [HostReport.decode(answers[rank]) for _, rank in by_host]
    _check([one.trouble for one in said])
    group = merge_memberships(said)
    trouble = _write(home, mine, group) if mine else _see(home, group)
    _check([data.decode(errors="replace") for data in team.gather(f"{topic} written", trouble.encode())])
    group = replace(group, confirmed=group.written)
    if leader:
        home.remember(group)
    return group


def _introduce(home: HostMemory, keeper: Callable[[], Member]) -> HostReport:
    try:
        member = keeper()
        return HostReport(member, home.group())
    except (TierstateError, OSError) as error:
        return HostReport(trouble=_trouble(home, error))


def _write(home: HostMemory, mine: HostReport, group: Membership) -> str:
    """Write the membership to this host's file; returns an error text, empty if all is well."""
    try:
        if is_stale(mine, group.confirmed):
            log.warning(
                "%s: this host was away when the others last met, so what its memory kept may be out of date: emptied",
                home.name,
            )
            home.kept.clear()
        home.remember(group)
    except (TierstateError, OSError) as error:
        return _trouble(home, error)
    return ""


def _see(home: HostMemory, group: Membership) -> str:
    """Check that this rank sees the memory in which the first rank of its host has started the keeper; returns an error
    text, empty if it does. What it wrote elsewhere would have no copies, and nobody else would find it."""
    try:
        card = home.card()
    except OSError as error:
        return _trouble(home, error)
    if card is not None and card.id in {member.id for member in group.members}:
        return ""
    return (
        f"{socket.gethostname()}: {home.name}: {home.root} of this rank is another folder than that of the first rank "
        "of its host; give both one (ranks in containers: one /dev/shm), or set TIERSTATE_HOST to tell them apart"
    )


def _trouble(home: HostMemory, error: TierstateError | OSError) -> str:
    """An error for the ranks of all hosts: on which host it was, and with which memory."""
    place = f"{home.name}: {home.root}: " if isinstance(error, OSError) else ""
    return f"{socket.gethostname()}: {place}{error}"


def _check(troubles: list[str]) -> None:
    if found := [trouble for trouble in troubles if trouble]:
        raise TierUnavailable(f"peer memory: {len(found)} hosts or ranks cannot take part: {found[0]}")
