"""The address by which other hosts of a job reach this host, for servers of peer memory and for chunk exchange."""

from __future__ import annotations

import errno
import os
import socket
import struct

ADDRESS = "TIERSTATE_ADDRESS"
"""The variable that names the address itself."""


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which jobs name the network interface between their hosts."""


NOWHERE = "192.0.2.1"
"""An address of no host (RFC 5737): the kernel's route to it goes through the interface of the default route."""


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
    targets = [os.environ.get("MASTER_ADDR", ""), "" if hosts == 1 else NOWHERE]
    sources = [source for target in targets if target and (source := _source_for(target))]
    fitting = [source for source in sources if hosts in (None, 1) or not source.startswith("127.")]
    return fitting[0] if fitting else "127.0.0.1"


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
    """An interface's IPv4 address; empty if there is no such interface."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


def _source_for(target: str) -> str:
    """The address from which this host would reach another; empty if there is no route. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])
