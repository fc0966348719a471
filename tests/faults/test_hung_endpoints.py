"""S3 endpoints that hang, for real: connections are accepted, and no request is ever answered."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpointer_worlds import policy, tensors
from support.outcomes import tried, until
from support.ports import free_port
from support.web_filesystem import Web

import tierstate as ts

pytestmark = pytest.mark.slow

DEADLINE = 1.0


class Endpoint:
    """Accepts connections and never answers. ``requests`` counts the connections on which anything came."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.requests, self._open = 0, list[socket.socket]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._open.append(connection)
            self.requests += 1

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()
        for connection in self._open:
            connection.close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.close()


def spec(place: Path, endpoint: Endpoint, *, near: bool = True) -> ts.Policy:
    options = {"endpoint_url": endpoint.url, "key": "key-of-a-test", "secret": "secret-of-a-test"}
    s3 = {"type": "object", "url": "s3://bucket/ckpt", "deadline": DEADLINE, "options": options}
    local = {"near": {"type": "nvme", "path": str(place / "near")}} if near else {}
    return policy({**local, "s3": s3})


def test_twelve_owed_saves_wait_for_one_deadline_together(place: Path, endpoint: Endpoint, caplog) -> None:
    ckpt = ts.Checkpointer(spec(place, endpoint), "run")
    for step in range(1, 13):
        ckpt.save(tensors(3000, seed=step), step=step).wait("near")
    assert ckpt.stats().tiers["s3"].hung.startswith("hangs since ")
    before = endpoint.requests
    with pytest.raises(ts.TierUnavailable, match="hangs since") as caught:
        ckpt.close()
    # Each request that is not answered takes a deadline; there were twelve before there was a breaker.
    assert endpoint.requests - before <= 1
    steps = ", ".join(map(str, range(1, 13)))
    owed = f"s3: step {steps} (a faster tier has it, from which the next process that saves this run copies it)"
    assert caught.value.__notes__[-1] == f"still owed: {owed}"
    assert f"closed while still owed, which the next process looks for: {owed}" in [r.message for r in caplog.records]
    assert next(r.message for r in caplog.records if "hangs since" in r.message).startswith("s3: hangs since ")


def test_saves_that_only_the_hung_tier_should_have_are_lost_and_told(place: Path, endpoint: Endpoint) -> None:
    ckpt = ts.Checkpointer(spec(place, endpoint, near=False), "run")
    with pytest.raises(ts.TierUnavailable, match="cannot"):
        ckpt.save(tensors(3000), step=1).wait()
    before = endpoint.requests
    save = ckpt.save(tensors(3000), step=2)
    with pytest.raises(ts.TierUnavailable, match="hangs since"):
        save.wait()
    ckpt.close()
    assert endpoint.requests - before <= 1


def test_ls_says_what_hangs(place: Path, endpoint: Endpoint) -> None:
    file = place / "policy.yaml"
    made = spec(place, endpoint)
    file.write_text(made.dump(secrets=True))
    with pytest.raises(ts.TierUnavailable), ts.Checkpointer(made, "run") as ckpt:
        ckpt.save(tensors(3000), step=1).wait("near")
    listing = [sys.executable, "-m", "tierstate.cli", "ls", "-p", str(file), "-r", "run"]
    found = subprocess.run(listing, capture_output=True, text=True, check=False, env={**os.environ})
    assert found.returncode == 1
    assert "s3 hangs since " in found.stderr
    assert " 1 " in found.stdout
    found = subprocess.run([*listing[:-1], "other"], capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "whether run 'other' has versions is not known: s3 cannot be asked now" in found.stderr + found.stdout


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_server_that_is_stopped_and_goes_on_is_used_again(place: Path) -> None:
    """A plain HTTP server as a store; stopped by SIGSTOP, its tier is left alone, then used again."""
    from tierstate.manifest.chunk import view
    from tierstate.tiers.object.tier import ObjectStore

    Web.register()
    (place / "a").write_bytes(b"data")
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(place)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tier = ObjectStore(url=f"web://127.0.0.1:{port}/", deadline=0.5)
    tier.name = "web"
    try:
        until(lambda: tried(lambda: tier.get("a")) is None)
        server.send_signal(signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(ts.TierUnavailable, match="web: hangs since"):
                tier.get("a")
        assert tier.trouble
        server.send_signal(signal.SIGCONT)
        found = []
        until(lambda: tried(lambda: found.append(tier.get("a"))) is None)
        assert bytes(view(found[0])) == b"data"
        assert tier.trouble == ""
    finally:
        server.kill()
        server.wait()
        tier.close()
