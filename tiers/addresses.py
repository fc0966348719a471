"""Addresses: where other ranks of the job reach this one."""

from __future__ import annotations

import os
import socket
import struct

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What jobs say about the network between their hosts already."""

SIOCGIFADDR = 0x8915
NOWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): asked for the way there, the kernel names the interface of its default
route."""


def own_address(hosts: int) -> str:
    """The address of this host that the ranks of others reach.

    It is that of the interface which the job names for gloo or NCCL; or that from which this host reaches MASTER_ADDR;
    or the loopback if all are on one host, and otherwise that of the default route.

    Args:
        hosts: how many hosts the ranks are on.
    """
    for name in INTERFACES:
        for interface in os.environ.get(name, "").split(","):
            if found := _address_of(interface.removeprefix("=").strip()):
                return found
    master = os.environ.get("MASTER_ADDR", "")
    ways = [_way_to(there) for there in (master, NOWHERE if hosts > 1 else "") if there]
    fitting = [way for way in ways if way and (hosts == 1 or not way.startswith("127."))]
    return fitting[0] if fitting else "127.0.0.1"


def _address_of(interface: str) -> str:
    """An interface's IPv4 address; empty where there is none of this name, or none is named."""
    if not interface or interface.startswith("^"):  # one that is not to be used
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


def _way_to(there: str) -> str:
    """From which address this host would reach another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((there, 9))
        except OSError:
            return ""
        return str(asking.getsockname()[0])
