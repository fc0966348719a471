"""Which hosts keep the copies of what a host writes: a pure function of their failure domains."""

from __future__ import annotations

from collections.abc import Sequence


def partners(domains: Sequence[str], me: int, copies: int) -> tuple[int, ...]:
    """The hosts that keep the copies of one host's objects, the first ones to ask for them first.

    * They differ from each other and from ``me``, so that any ``copies`` hosts lost leave one; fewer only where there
      are not so many hosts.
    * Hosts of other domains come before those of the host's own, and for as many as there are, only they are taken.
    * Where no domain has more than half of the hosts, and ``copies`` is not too many for that, every host keeps copies
      of exactly so many others. Where one has, its hosts share the rest evenly.

    Args:
        domains: the failure domain of each host; those of equal domains are lost together.
        me: number of the host that writes.
        copies: how many others are wanted.
    """
    ring = sorted(range(len(domains)), key=lambda host: (domains[host], host))
    here, size = ring.index(me), len(ring)
    widest = max(domains.count(domain) for domain in set(domains))
    if 0 < copies <= size - 2 * widest + 1:
        # Turned by at least the widest domain, and by at most the ring without it, a domain never meets itself. As
        # every host's turns are the same, every host is met equally often.
        turns = [widest + n * (size - 2 * widest) // max(1, copies - 1) for n in range(copies)]
        return tuple(ring[(here + turn) % size] for turn in turns)
    after = ring[here + 1 :] + ring[:here]
    others = [host for host in after if domains[host] != domains[me]]
    mates = [host for host in after if domains[host] == domains[me]]
    number = sum(1 for host in ring[:here] if domains[host] == domains[me])
    far = _spread(others, copies, number)
    return far + _spread(mates, copies - len(far), 0)


def _spread(hosts: Sequence[int], wanted: int, turn: int) -> tuple[int, ...]:
    """So many of the hosts, at even distances, begun ``turn`` places on."""
    count = min(wanted, len(hosts))
    return tuple(hosts[(turn + n * len(hosts) // count) % len(hosts)] for n in range(count))
