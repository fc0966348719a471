"""The server of a report: this host only, reading only, and up to date."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.agents import wait_until
from support.checkpointer_worlds import policy, tier

import tierstate as ts
from tierstate.report import serve
from tierstate.report.collect import collect_runs
from tierstate.report.data import ReportData
from tierstate.report.serve import ReportServer, loopback


@contextmanager
def served(spec: ts.Policy, run: str) -> Iterator[ReportServer]:
    with ReportServer(lambda: collect_runs(spec, [run])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: ReportServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_a_run_under_way_is_shown_and_not_touched(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "REFRESH", 0.001)
    spec = policy({"nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt, served(spec, "run") as server:
        ckpt.save({"w": torch.zeros(2000)}, 1).wait()
        before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
        status, headers, page = ask(server, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "connect-src 'self'" in page
        assert '"newest":1,' in ask(server, "/report.json")[2]
        assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before
        ckpt.save({"w": torch.ones(2000)}, 2).wait()
        # A report that takes long to make is not made at each request.
        wait_until(lambda: '"newest":2,' in ask(server, "/report.json")[2], "the report of step 2")


def test_what_has_not_changed_is_not_sent_again(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place)})
    with served(spec, "run") as server:
        _, headers, body = ask(server, "/body.html")
        assert ask(server, "/body.html", If_None_Match=headers["ETag"])[::2] == (304, "")
        assert ask(server, "/body.html", If_None_Match='"other"')[::2] == (200, body)
        assert ask(server, "/", "HEAD")[::2] == (200, "")


def test_only_this_host_is_answered_and_only_reading(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place)})
    with served(spec, "run") as server:
        port = server.server_port
        for host in (
            f"evil.example:{port}",
            "127.0.0.1",
            "",
            f"127.0.0.1:{port + 1}",
            f"localhost.evil.example:{port}",
        ):
            assert ask(server, "/report.json", Host=host)[0] == 421, host
        for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
            assert ask(server, "/report.json", Host=host)[0] == 200
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(server, "/", method)[0] == 501
        for path in ("/../policy.yaml", "/etc/passwd", "/report.json?x=1", "/."):
            assert ask(server, path)[0] == 404
        assert server.server_address[0] == "127.0.0.1"


def test_other_addresses_are_refused() -> None:
    for address in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(ValueError, match="loopback"):
            loopback(address)
    assert [loopback(one) for one in ("localhost", "127.0.0.1", "::1", "[::1]")] == [
        "127.0.0.1",
        "127.0.0.1",
        "::1",
        "::1",
    ]


def test_a_port_that_is_taken_is_named() -> None:
    def nothing() -> ReportData:
        raise AssertionError("nobody asks")

    with (
        ReportServer(nothing) as first,
        pytest.raises(OSError, match=rf"Address already in use: '127\.0\.0\.1:{first.server_port}'"),
    ):
        ReportServer(nothing, port=first.server_port)


def test_a_run_that_cannot_be_read_is_told() -> None:
    def fail() -> None:
        raise ts.TierUnavailable("the disk is away")

    with ReportServer(fail) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        assert ask(server, "/")[::2] == (503, "the disk is away\n")
        server.shutdown()
        thread.join()
