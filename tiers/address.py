"""The address by which other hosts of a job reach this host, for servers of peer memory and for chunk exchange.

It may be one of IPv4 or IPv6. Where there are both, it is the one of IPv4.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

ADDRESS = "TIERSTATE_ADDRESS"
"""The variable that names the address itself."""


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which jobs name the network interface between their hosts."""


NOWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of no host (RFC 5737, RFC 3849): the kernel's route to them goes through the interface of the default
route."""


IPV6_ADDRESSES = Path("/proc/net/if_inet6")
"""The IPv6 addresses of this host: address, number of the interface, length of the prefix, scope, flags, interface."""


_GLOBAL, _UNUSABLE = 0x00, 0x68
"""The scope of addresses that other hosts can reach; flags of those that are deprecated, tentative, or duplicates."""


_SIOCGIFADDR = 0x8915


def own_address(hosts: int | None = None, *, strict: bool = True) -> str:
    """The address by which other hosts of the job reach this one.

    It is ``TIERSTATE_ADDRESS``; else that of an interface that ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names;
    else the one from which this host reaches ``MASTER_ADDR``; else that of the default route; else the loopback's.

    Args:
        hosts: how many hosts the job has. With one, the default route is not asked; with more, the loopback's address
            is not taken from ``MASTER_ADDR``. None: not known.
        strict: whether an interface of ``GLOO_SOCKET_IFNAME`` must exist.

    Raises:
        OSError: the interface does not exist.
    """
    if found := os.environ.get(ADDRESS):
        return found
    for variable in INTERFACES:
        if found := _of_interfaces(variable, strict and variable == INTERFACES[0]):
            return found
    targets = [os.environ.get("MASTER_ADDR", ""), *(() if hosts == 1 else NOWHERE)]
    sources = [source for target in targets if target and (source := _source_for(target))]
    fitting = [source for source in sources if hosts in (None, 1) or not is_loopback(source)]
    return fitting[0] if fitting else "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Whether an address is one that no other host reaches."""
    return address.startswith("127.") or address == "::1"


def _of_interfaces(variable: str, must_exist: bool) -> str:
    """The address of the first interface of a variable's list that exists; empty if none does."""
    names = os.environ.get(variable, "")
    if not names or names.startswith("^"):  # a list of interfaces that are not to be used
        return ""
    listed = [name.removeprefix("=").strip() for name in names.split(",")]
    if found := next(filter(None, map(_of_interface, listed)), ""):
        return found
    if must_exist:
        raise OSError(errno.ENODEV, f"{variable}: {os.strerror(errno.ENODEV)}", names)
    return ""


def _of_interface(name: str) -> str:
    """An interface's address, of IPv4 if it has one; empty if there is no such interface."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return _ipv6_of_interface(name)
    return socket.inet_ntoa(found[20:24])


def _ipv6_of_interface(name: str) -> str:
    """An interface's first IPv6 address that other hosts can reach; empty if it has none."""
    with suppress(OSError):
        for line in IPV6_ADDRESSES.read_text().splitlines():
            address, _, _, scope, flags, interface = line.split()
            if interface == name and int(scope, 16) == _GLOBAL and not int(flags, 16) & _UNUSABLE:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    return ""


def _source_for(target: str) -> str:
    """The address from which this host would reach another; empty if there is no route. No packet is sent."""
    try:
        found = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return ""
    for family, kind, _, _, address in sorted(found, key=lambda one: one[0] != socket.AF_INET):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    return ""
