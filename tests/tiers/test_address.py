"""The address by which other hosts reach this one, by IPv4 and IPv6."""

import socket
from pathlib import Path

import pytest

from tierstate.tiers import address
from tierstate.tiers.address import own_address

TABLE = """\
fe800000000000000000000000000001 05 40 20 80 ib0
20010db8000000000000000000000003 05 40 00 20 ib0
20010db8000000000000000000000007 05 40 00 80 ib0
20010db8000000000000000000000009 06 40 00 80 ib1
"""


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TIERSTATE_ADDRESS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "table").write_text(TABLE)
    monkeypatch.setattr(address, "IPV6_ADDRESSES", tmp_path / "table")


def test_an_interface_of_ipv6_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that is neither of the link alone nor deprecated."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert own_address(hosts=2) == "2001:db8::7"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib1,ib0")
    assert own_address(hosts=2) == "2001:db8::9"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo,ib0")
    assert own_address(hosts=2) == "127.0.0.1", "IPv4 where there is any"


def test_a_master_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv("MASTER_ADDR", "::1")
    assert own_address(hosts=1) == "::1"
    assert own_address(hosts=2) != "::1"


def test_a_master_that_cannot_be_found_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    assert own_address(hosts=1) == "127.0.0.1"
