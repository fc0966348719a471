"""Keepers of peer memory under attack: by strangers on their port, by readers of the job's store, and by old jobs."""

import math
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from support.peer_hosts import SECRET, Hosts, meet
from support.thread_teams import together

from tierstate.engine.ranks.restore.exchange import PeerListener
from tierstate.engine.ranks.team.secret import agree_on_secret
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import AccessDenied, TierUnavailable
from tierstate.tiers.connections.channel import ChannelError, connect
from tierstate.tiers.connections.secret import KEY, JobSecret
from tierstate.tiers.peer.client import RemoteMemory
from tierstate.tiers.peer.host import HostMemory, reap
from tierstate.tiers.peer.local import LocalMemory, keeper_lives, make_folder
from tierstate.tiers.peer.members import Member, read_member, write_secret
from tierstate.tiers.peer.server import THREADS, strangers_limit
from tierstate.tiers.peer.tier import Peer
from tierstate.tiers.testing import random_bytes

KEEPERS = SECRET.child("peer memory")


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTATE_ADDRESS", "127.0.0.1")


class Keeper:
    """A keeper as a process, in the foreground.

    Args:
        root: the folder of its memory.
        files: the limit of its file descriptors (`ulimit -n`); None for this process's.
    """

    def __init__(self, root: Path, files: int | None = None, idle: float = 600.0) -> None:
        make_folder(root, "test")
        write_secret(root, KEEPERS)

        def limit() -> None:
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        command = [sys.executable, "-m", "tierstate.tiers.peer.server", "--foreground", "--path", str(root)]
        self.process = subprocess.Popen([*command, "--idle", str(idle)], preexec_fn=limit, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while (found := read_member(root)) is None:
            assert self.process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        self.member: Member = found

    def memory(self, secret: JobSecret = KEEPERS, seconds: float = 20.0) -> RemoteMemory:
        """Its memory, for a process that knows a secret; with no connection yet."""
        return RemoteMemory(self.member, lambda: secret, seconds, lambda: "test")

    def answers(self) -> bool:
        """Whether it answers a request over a new connection."""
        with closing(self.memory()) as memory:
            try:
                return memory.status()["pid"] == self.process.pid
            except TierUnavailable:
                return False

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


FLOOD = """
import resource, socket, sys
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
for number in range(int(sys.argv[2])):
    wire = socket.socket()
    wire.settimeout(20)
    wire.connect(("127.0.0.1", int(sys.argv[1])))
    held.append(wire)
    if number % 500 == 0:
        print("begun", flush=True)
print("all", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_5000_silent_connections_and_256_file_descriptors(place: Path) -> None:
    """The owner's requests are answered, over new connections, while they come and when they are all there."""
    count = min(5000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 100)
    with Keeper(place / "memory", files=256) as keeper:
        command = [sys.executable, "-c", FLOOD, str(keeper.member.port), str(count)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
            assert flood.stdout is not None
            assert flood.stdout.readline() == "begun\n"
            answered = sum(keeper.answers() for _ in range(50))
            while flood.stdout.readline() != "all\n":
                pass
            answered += sum(keeper.answers() for _ in range(50))
            flood.communicate("")
        assert answered >= 95
        data = secrets.token_bytes(1 << 20)
        with closing(keeper.memory()) as memory:
            staging = memory.stage("a", len(data))
            staging.send(memoryview(data))
            staging.commit()
            staging.close()
            assert memory.size("a") == len(data)


@pytest.mark.slow
def test_it_survives_without_file_descriptors_and_threads_and_is_small(place: Path) -> None:
    with Keeper(place / "memory") as keeper:
        pid = keeper.process.pid
        assert keeper.answers()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), hard))
        with ExitStack() as opened:
            for _ in range(50):
                opened.enter_context(socket.create_connection(("127.0.0.1", keeper.member.port), 20))
            keeper.answers()
            assert keeper.process.poll() is None
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert keeper.answers()
        status = Path(f"/proc/{pid}/status").read_text()
        (resident,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")]
        assert resident < 40 << 10


@pytest.mark.parametrize("real", [False, True], ids=["simulated", "ulimit -u"])
@pytest.mark.slow
def test_without_more_threads_all_connections_are_served_in_turn(
    place: Path, real: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as opened:
        if real:
            if os.geteuid() == 0:
                pytest.skip("the limit of threads is not one for root")
            keeper = opened.enter_context(Keeper(place / "memory"))
            member = keeper.member
            while len(os.listdir(f"/proc/{keeper.process.pid}/task")) <= THREADS:
                time.sleep(0.01)
            resource.prlimit(keeper.process.pid, resource.RLIMIT_NPROC, (1, 1))
        else:
            opened.enter_context(Hosts(place, 1))
            found = read_member(place / "host0")
            assert found is not None
            member, start = found, threading.Thread.start

            def refuse(thread: threading.Thread) -> None:
                if thread.name == "tierstate-keeper":
                    raise RuntimeError("can't start new thread")
                start(thread)

            monkeypatch.setattr(threading.Thread, "start", refuse)
        # Each holds its connection open after its request, as jobs do.
        memories = [RemoteMemory(member, lambda: KEEPERS, 20, lambda: "test") for _ in range(3 * THREADS)]
        for memory in memories:
            opened.enter_context(closing(memory))
            assert memory.list("") == []
        for memory in memories:
            assert memory.list("") == []


@pytest.mark.slow
def test_strangers_do_not_keep_it_alive(place: Path) -> None:
    with Keeper(place / "memory", idle=1.0) as keeper, ExitStack() as opened:
        end = time.monotonic() + 60
        while keeper.process.poll() is None and time.monotonic() < end:
            with suppress(OSError):
                opened.enter_context(socket.create_connection(("127.0.0.1", keeper.member.port), 20))
            with suppress(TierUnavailable):
                keeper.memory(JobSecret.random(), 1.0).connect()
            time.sleep(0.05)
        assert keeper.process.poll() == 0
        assert not (place / "memory").exists()


@pytest.mark.parametrize("argument", [("--idle", "inf"), ("--idle", "nan"), ("--capacity", "0"), ("--capacity", "-5")])
@pytest.mark.slow
def test_numbers_that_are_none_are_refused(place: Path, argument: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "tierstate.tiers.peer.server", "--path", str(place / "memory"), *argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "right" in done.stderr


@pytest.mark.parametrize("keys", [{"idle": math.inf}, {"idle": 0.0}, {"capacity": 0}, {"capacity": 1 << 64}])
def test_numbers_of_a_policy_that_are_none_are_refused(place: Path, keys: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="right"):
        Peer(path=place, **keys)  # type: ignore[arg-type]


# Who reads the store


class Overheard:
    """A store, and everything that passes through it."""

    def __init__(self) -> None:
        self.store, self.values = dist.HashStore(), [b""]

    def clone(self) -> "Overheard":
        return self

    def __getattr__(self, name: str) -> object:
        call = getattr(self.store, name)

        def noted(*args: object) -> object:
            self.values += [
                arg.encode() if isinstance(arg, str) else arg for arg in args if isinstance(arg, str | bytes)
            ]
            return call(*args)

        return noted

    def candidates(self) -> set[bytes]:
        """Whatever could be a key in it: each run of 64 hexadecimal digits, and each 32 bytes, and what follows."""
        found = set()
        for value in self.values:
            for at in range(len(value)):
                found.add(value[at : at + KEY])
                with suppress(ValueError):
                    found.add(bytes.fromhex(value[at : at + 2 * KEY].decode("ascii", "replace")))
        return {key for key in found if len(key) == KEY}


@pytest.mark.slow
def test_who_reads_all_of_the_store_gets_nowhere(place: Path) -> None:
    """Neither with what it finds there, nor with what can be derived from that as the program derives keys."""
    store = Overheard()
    with Hosts(place, 1) as hosts, ExitStack() as opened:
        tiers = [hosts.tier(0), hosts.tier(0)]  # ranks of one host, which draw a secret

        def rank(team: Team) -> str:
            team._secret = agree_on_secret(team, "auto")
            tiers[team.rank].meet(team)
            listener = opened.enter_context(closing(PeerListener(1, team.secret)))
            team.gather("offer", listener.address.encode())
            return listener.address

        addresses = together(2, rank, hosts=[0, 0], store=store)
        assert all(isinstance(one, str) for one in addresses), addresses
        member = read_member(hosts.path(0))
        assert member is not None
        services = [(member.address, member.port, member.service)]
        services += [(host, int(port), name) for host, port, name in map(str.split, addresses)]
        assert all(name.encode() in b"".join(store.values) or name.startswith("peer/") for *_, name in services)
        keys = sorted(store.candidates())[:: max(1, len(store.candidates()) // 300)]
        assert len(keys) > 50
        for host, port, name in services:
            for key in keys:
                for secret in (JobSecret(key), JobSecret(key).child("peer memory")):
                    with pytest.raises(ChannelError, match="refuses this process"):
                        connect(host, port, secret, name, seconds=20.0)
        tiers[0].put("still", random_bytes(10))


def test_files_of_the_memory_and_logs_have_no_secret_of_the_job(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a keeper knows is derived from the job's secret, and is in one file of this user's alone."""
    with Hosts(place, 2) as hosts:
        hosts.tiers[0].put("a", random_bytes(10))
        shown = [SECRET.reveal(), SECRET.reveal().hex().encode()]
        for path in place.rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                assert not any(one in data for one in shown)
                assert (KEEPERS.reveal() in data) == (path.name == "secret")
                assert path.name != "secret" or path.stat().st_mode & 0o777 == 0o600
        assert not any(one.decode("latin-1") in caplog.text for one in shown)


# Secrets that are replaced


def test_a_new_job_shuts_the_old_one_out(place: Path) -> None:
    new = JobSecret.random()
    with Hosts(place, 2) as hosts:
        hosts.tiers[0].put("a", random_bytes(10))
        open_before = hosts.tiers[0]._peers.all[0]
        assert open_before.size("a") == 10
        after = [hosts.tier(0), hosts.tier(1)]
        assert meet(after, secret=new) == [None, None]
        with pytest.raises(TierUnavailable, match="another secret"):
            open_before.size("a")
        after[0].put("b", random_bytes(10))
        assert sorted(after[1].list("")) == ["a", "b"]
        hosts.die(1)
        hosts.start(1)  # what it takes after a restart is what the newest job has brought
        with pytest.raises(TierUnavailable, match="another secret"):
            open_before.size("a")
        assert after[0]._peers.all[0].size("a") == 10


@pytest.mark.slow
def test_open_connections_of_the_old_job_are_closed(place: Path) -> None:
    with Keeper(place / "memory") as keeper, closing(keeper.memory()) as memory, memory.connect() as line:
        write_secret(place / "memory", JobSecret.random())
        assert not line.channel.wait(20)
        assert line.channel.ended


def test_a_secret_in_the_folder_that_others_can_read_lets_nobody_in(place: Path) -> None:
    with Hosts(place, 1) as hosts:
        member = read_member(hosts.path(0))
        assert member is not None
        (hosts.path(0) / "secret").chmod(0o644)
        os.utime(hosts.path(0) / "secret")
        with pytest.raises(ChannelError, match="refuses"):
            connect(member.address, member.port, KEEPERS, member.service, seconds=20.0)


# What is left


@pytest.fixture
def left(place: Path) -> Iterator[Path]:
    """The memory of a job whose processes are dead, and whose keeper was killed."""
    with Keeper(place / "memory") as keeper:
        LocalMemory(place / "memory").put("a", bytes(1000))
        os.kill(keeper.process.pid, signal.SIGKILL)
        keeper.process.wait()
        yield place / "memory"


@pytest.mark.slow
def test_what_dead_jobs_left_is_reaped(left: Path) -> None:
    remains = left.with_name(f".{left.name}.123")
    remains.mkdir()
    assert reap(left) == "freed"
    assert not left.exists()
    assert not remains.exists()
    assert reap(left) == "nothing is there"


@pytest.mark.slow
def test_what_is_used_or_served_is_not_reaped(place: Path) -> None:
    with Keeper(place / "memory") as keeper:
        assert keeper_lives(place / "memory")
        assert reap(place / "memory").startswith("its keeper lives")
        home = HostMemory(LocalMemory(place / "memory"))
        home.enter()
        assert reap(place / "memory", keepers=True).startswith("its keeper lives")
        home.release()
        assert keeper.answers()
        assert reap(place / "memory", keepers=True) == "freed"
        assert keeper.process.wait(120) == 0


def test_foreign_folders_are_not_reaped(place: Path) -> None:
    thesis = place / "thesis"
    thesis.mkdir(mode=0o700)
    (thesis / "chapter.tex").write_text("all of it")
    with pytest.raises(AccessDenied, match="used for something else"):
        reap(thesis)
    (thesis / "chapter.tex").rename(place / "chapter.tex")
    (place / "link").symlink_to(thesis)
    with pytest.raises(AccessDenied, match="not a folder of this user's alone"):
        reap(place / "link")
    thesis.chmod(0o755)
    with pytest.raises(AccessDenied, match="not a folder of this user's alone"):
        reap(thesis)
    assert thesis.exists()


def test_a_job_that_never_had_a_keeper_frees_its_memory_at_the_end(place: Path) -> None:
    one, other = Peer(path=place / "memory"), Peer(path=place / "memory")
    one.put("a", random_bytes(10))
    assert list(other.list("")) == ["a"]
    other.put("b", random_bytes(10))
    other.close()
    assert (place / "memory").exists(), "it has not made it"
    one.close()
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_what_a_crash_has_left_is_not_freed_by_who_looks_at_it(left: Path) -> None:
    for _ in range(2):
        reader = Peer(path=left)
        assert list(reader.list("")) == ["a"]
        reader.close()
    assert LocalMemory(left).size("a") == 1000


@pytest.mark.slow
def test_a_job_whose_keeper_has_died_leaves_a_keeper_that_frees_the_memory(place: Path) -> None:
    tier = Peer(path=place / "memory", idle=1.0)
    assert meet([tier]) == [None]
    tier.put("a", random_bytes(10))
    said = tier.members()[0][1]
    assert isinstance(said, dict)
    os.kill(said["pid"], signal.SIGKILL)
    while keeper_lives(place / "memory"):
        time.sleep(0.01)
    tier.close()
    assert keeper_lives(place / "memory") or not (place / "memory").exists()
    end = time.monotonic() + 60
    while list(place.iterdir()) and time.monotonic() < end:
        time.sleep(0.05)
    assert list(place.iterdir()) == []


def test_the_room_of_strangers_follows_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, total in [(resource.RLIM_INFINITY, 64), (1 << 20, 64), (256, 32), (16, 8)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _what, soft=soft: (soft, soft))
        assert strangers_limit().total == total
