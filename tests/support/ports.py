"""Loopback ports for servers that a test starts; no two workers of a test run get the same port, nor do two runs."""

from __future__ import annotations

import os
import random
import socket

_FIRST, _EACH, _WORKERS = 10_000, 1_000, 20
"""Below the ports that the kernel gives to outgoing connections, so that none of those takes one first."""

_given: set[int] = set()

_HELD = 64
"""Ports given last that no other run of tests gets, though no server may listen there yet."""

_held: list[int] = []
"""Sockets of UDP at these ports, by which other runs see that: TCP has ports of its own."""


def _range() -> range:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    first = _FIRST + int(worker) % _WORKERS * _EACH
    return range(first, first + _EACH)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, and that this process was not given before."""
    mine = list(_range())
    random.SystemRandom().shuffle(mine)
    found: list[int] = []
    for port in mine:
        if len(found) == count:
            break
        if port not in _given and _is_free(port):
            found.append(port)
    if len(found) < count:  # hundreds of tests later: those given first are free again
        _given.clear()
        return free_ports(count)
    _given.update(found)
    return found


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
        try:
            mine.bind(("127.0.0.1", port))
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            return False
        _held.append(mine.detach())
    for old in _held[:-_HELD]:
        os.close(old)
    del _held[:-_HELD]
    return True
