"""Secrets of jobs: which are taken, how ranks come to the same one, and that nothing shows them."""

import json
import os
import pickle
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.thread_teams import together

from tierstate.engine.ranks.team import secret as agreement
from tierstate.engine.ranks.team.secret import agree_on_secret
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import PolicyError
from tierstate.tiers.connections import distribution
from tierstate.tiers.connections.distribution import SecretServer, receive_secret, runtime_folder, short_path
from tierstate.tiers.connections.secret import (
    FILE_VARIABLE,
    KEY,
    VARIABLE,
    JobSecret,
    SecretError,
    read_secret_file,
    secret_of_environment,
)
from tierstate.tiers.policy.models import SecretPlace

GOOD = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (VARIABLE, FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(agreement, "_drawn", {})


def written(path: Path, text: str = GOOD, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


# What is taken


@given(st.text(max_size=40))
def test_a_secret_that_is_too_short_is_refused_without_being_shown(text: str) -> None:
    if len(text.strip()) >= 32:
        assert JobSecret.of_text(text, "here") == JobSecret.of_text(f" {text}\n", "there")
        return
    with pytest.raises(SecretError, match=r"here: a secret of \d+ characters; right are 32") as caught:
        JobSecret.of_text(text, "here")
    assert len(text) < 8 or text not in str(caught.value)


def test_a_file_of_this_user_alone_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "secret", GOOD + "\n")
    assert read_secret_file(path) == JobSecret.of_text(GOOD, "")
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    assert secret_of_environment() == JobSecret.of_text(GOOD, "")
    monkeypatch.setenv(VARIABLE, GOOD[::-1])
    assert secret_of_environment() == JobSecret.of_text(GOOD[::-1], "")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o601])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(
        SecretError, match=rf"mode {mode:04o}\); the secret of a job is read .* 0600: chmod 600"
    ) as caught:
        read_secret_file(written(tmp_path / "secret", mode=mode))
    assert GOOD not in str(caught.value)


def test_links_folders_pipes_and_long_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(written(tmp_path / "secret"))
    os.mkfifo(tmp_path / "pipe", 0o600)
    written(tmp_path / "long", GOOD * 100)
    for name in ("link", "pipe", "long", ".", "absent"):
        with pytest.raises(SecretError):
            read_secret_file(tmp_path / name)


@pytest.mark.root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("two users need root")
    path = written(tmp_path / "secret")
    os.chown(path, 65534, -1)
    with pytest.raises(SecretError, match="it belongs to user 65534"):
        read_secret_file(path)


def test_nothing_shows_a_secret() -> None:
    secret = JobSecret.of_text(GOOD, "here")
    shown = f"{secret!r} {secret} {secret:}"
    assert GOOD not in shown
    assert secret.reveal().hex() not in shown
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secret)
    with pytest.raises(TypeError, match="unhashable"):
        hash(secret)


@given(st.text(max_size=5), st.binary(max_size=5), st.text(max_size=5), st.binary(max_size=5))
def test_keys_of_two_purposes_are_two(one: str, context: bytes, two: str, other: bytes) -> None:
    secret = JobSecret(bytes(KEY))
    same = (one, context) == (two, other)
    assert (secret.derive(one, context) == secret.derive(two, other)) == same
    assert secret.derive(one, context) != secret.derive(one, context, b"")


# Handed round on one host


def test_a_secret_goes_over_a_socket_of_this_user() -> None:
    secret = JobSecret.random()
    with SecretServer(secret) as server:
        folder = server.path.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert receive_secret(server.path, 5.0) == secret
    assert list(folder.iterdir()) == []
    with pytest.raises(SecretError, match="no rank gives the secret there"):
        receive_secret(server.path, 5.0)


def test_a_secret_is_given_when_there_are_file_descriptors_again(caplog: pytest.LogCaptureFixture) -> None:
    secret = JobSecret.random()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    first, wire = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with SecretServer(secret) as server, first, wire, short_path(server.path) as path:
        wire.settimeout(30)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
            first.connect(path)  # the call that waits for it has had its descriptor since before
            while not any("no connection can be accepted for now" in one.message for one in caplog.records):
                time.sleep(0.001)
            wire.connect(path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert wire.recv(KEY) == secret.reveal()


def test_the_folder_of_sockets_has_to_be_of_this_user_alone(tmp_path: Path) -> None:
    folder = runtime_folder()
    folder.chmod(0o755)
    with pytest.raises(SecretError, match=r"is not a folder of this user's alone .*mode 0755"):
        SecretServer(JobSecret.random())
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(SecretError, match="is not a folder"):
        runtime_folder()


@pytest.mark.root
@pytest.mark.slow
def test_another_user_gets_no_secret_over_the_socket(tmp_path: Path) -> None:
    """Even if it could open the folder: the kernel tells who asks."""
    if os.geteuid():
        pytest.skip("two users need root")
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("no Python that another user may run")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        with SecretServer(JobSecret.random()) as server:
            for path in (Path(folder), server.path.parent, server.path):
                path.chmod(0o777)
            code = (
                f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(server.path)!r}); print(s.recv(9))"
            )
            done = subprocess.run([python, "-I", "-c", code], user=65534, cwd="/", capture_output=True, text=True)
    assert done.stdout == "b''\n", done.stderr


def test_a_socket_of_another_user_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    with SecretServer(JobSecret.random()) as server:
        monkeypatch.setattr(distribution, "user_of", lambda _wire: os.geteuid() + 1)
        with pytest.raises(SecretError, match="runs as user"):
            receive_secret(server.path, 5.0)


# The ranks agree


def agreed(team: Team, trust: object = "auto") -> JobSecret:
    return agree_on_secret(team, trust)  # type: ignore[arg-type]


def told(found: list[object]) -> str:
    assert [type(one) for one in found] == [PolicyError] * len(found), found
    assert len({str(one) for one in found}) == 1
    return str(found[0])


def test_ranks_of_one_host_draw_one_and_the_store_never_has_it() -> None:
    store = dist.HashStore()
    secrets = together(3, agreed, store=store)
    assert all(isinstance(one, JobSecret) for one in secrets), secrets
    assert secrets[0] == secrets[1] == secrets[2]
    assert secrets[0].authenticated
    again = together(3, agreed, store=dist.HashStore())
    assert again[0] == secrets[0], "teams of one job have one secret"


class Spy:
    """A store, and all that was ever written there."""

    def __init__(self) -> None:
        self.store, self.written = dist.HashStore(), []

    def clone(self) -> "Spy":
        return self

    def __getattr__(self, name: str) -> object:
        call = getattr(self.store, name)

        def noted(*args: object) -> object:
            self.written.append(repr(args))
            return call(*args)

        return noted


def test_the_store_never_has_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for given_one in (False, True):
        if given_one:
            monkeypatch.setenv(VARIABLE, GOOD)
        spy = Spy()
        secret = together(2, agreed, store=spy)[0]
        for shown in (repr(secret.reveal())[2:-1], secret.reveal().hex(), GOOD):
            assert not any(shown in one for one in spy.written)
        assert any("secret" in one for one in spy.written)


def test_several_hosts_without_a_secret_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "has_munge", lambda: False)
    text = told(together(2, agreed, hosts=[0, 1]))
    for word in ("2 hosts", VARIABLE, FILE_VARIABLE, "trust: {file: /path}", "trust: network"):
        assert word in text


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_a_secret_of_the_launcher_is_taken(hosts: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = JobSecret.of_text(GOOD, "")
    monkeypatch.setenv("MINE", GOOD)
    place = SecretPlace(env="MINE"), SecretPlace(file=written(tmp_path / "secret"))
    for trust in place:
        assert together(2, lambda team, trust=trust: agreed(team, trust), hosts=hosts) == [right] * 2
    monkeypatch.setenv(VARIABLE, GOOD)
    assert together(2, agreed, hosts=hosts) == [right] * 2


def test_secrets_that_differ_are_told_on_all(tmp_path: Path) -> None:
    paths = [written(tmp_path / "0"), written(tmp_path / "1", GOOD[::-1])]
    text = told(together(2, lambda team: agreed(team, SecretPlace(file=paths[team.rank]))))
    assert "the secret of the job of rank 1 is not that of rank 0" in text
    assert GOOD not in text


def test_one_that_is_not_safe_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    paths = [written(tmp_path / "0"), written(tmp_path / "1", mode=0o644)]
    assert "rank 1: ranks.trust: " in told(together(2, lambda team: agreed(team, SecretPlace(file=paths[team.rank]))))


def test_a_network_that_is_trusted_needs_none() -> None:
    found = together(2, lambda team: agreed(team, "network"), hosts=[0, 1])
    assert found[0] == found[1]
    assert not found[0].authenticated
    text = told(together(2, lambda team: agreed(team, "network" if team.rank else "auto")))
    assert "ranks.trust of rank 1 is not that of rank 0" in text


FAKE = """#!{python}
import base64, json, os, sys
data = sys.stdin.buffer.read()
if "unmunge" in sys.argv[0]:
    told = json.loads(base64.b64decode(data))
    sys.stdout.write(f"STATUS:  0\\nUID:     {{told['uid']}}\\n\\n" + told["data"])
else:
    assert f"--restrict-uid={{os.geteuid()}}" in sys.argv
    told = {{"uid": os.geteuid(), "data": data.decode()}}
    sys.stdout.write(base64.b64encode(json.dumps(told).encode()).decode())
"""


@pytest.fixture
def munge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in place of MUNGE's; they encrypt nothing."""
    for name in ("munge", "unmunge"):
        written(tmp_path / name, FAKE.format(python=sys.executable), 0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.slow
@pytest.mark.usefixtures("munge")
def test_munge_hands_it_round_between_hosts() -> None:
    found = together(3, agreed, hosts=[0, 1, 1])
    assert all(isinstance(one, JobSecret) for one in found), found
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.usefixtures("munge")
def test_a_munge_credential_of_another_user_is_not_believed() -> None:
    import base64

    theirs = base64.b64encode(json.dumps({"uid": os.geteuid() + 1, "data": "x"}).encode())
    with pytest.raises(SecretError, match="of another user"):
        distribution.unmunge(theirs)


@pytest.mark.slow
def test_real_munge_where_it_is() -> None:
    if shutil.which("munge") is None or not distribution.has_munge():
        pytest.skip("MUNGE is not installed here, or its daemon does not run")
    found = together(3, agreed, hosts=[0, 1, 1])
    assert found[0] == found[1] == found[2]
