"""The promises of a tier about writing, each as a function that tries it on a live one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

import torch

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import AlreadyExists, TierUnavailable

from .base import Tier
from .evidence import Lease, must, must_hold, must_lack, must_raise, random_bytes, write

BIG = (5 << 20) + 3
"""Bytes of a big object: longer than the least part of an S3 upload, and no multiple of anything."""

RACERS, RACES = 8, 3


def check_put(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """What was put is read, on every handle; the caller may change its buffer afterwards."""
    data = random_bytes(1000)
    given = data.clone()
    tier.put(f"{prefix}/a", given)
    given.zero_()
    must_hold(tier, f"{prefix}/a", data)
    must_hold(other or tier, f"{prefix}/a", data)


def check_sizes(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """Objects of no bytes, of one, and big ones come back as they are, put or written."""
    for nbytes in (0, 1, 4096, BIG):
        data = random_bytes(nbytes)
        tier.put(f"{prefix}/put-{nbytes}", data)
        must_hold(tier, f"{prefix}/put-{nbytes}", data)
        write(tier, f"{prefix}/written-{nbytes}", [data[: nbytes // 3], data[nbytes // 3 :]])
        must_hold(other or tier, f"{prefix}/written-{nbytes}", data)
    write(tier, f"{prefix}/nothing", [])
    must_hold(tier, f"{prefix}/nothing", empty_buffer(0))


def check_many_pieces(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """Hundreds of pieces of odd lengths follow each other in order; pieces may be parts of a longer buffer."""
    slab = random_bytes(300_000)
    cuts = [0]
    while cuts[-1] < slab.numel():
        cuts.append(min(slab.numel(), cuts[-1] + (len(cuts) * 389) % 1931))
    write(tier, f"{prefix}/a", [slab[a:b] for a, b in pairwise(cuts)])
    must_hold(tier, f"{prefix}/a", slab)
    tier.put(f"{prefix}/b", slab[777:1234])
    must_hold(tier, f"{prefix}/b", slab[777:1234])


def check_absent_until_closed(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """Nobody sees an object that is being written, nor any file or part of it."""
    key, data = f"{prefix}/a", random_bytes(100_000)
    writer = tier.writer(key, data.numel())
    for one in (tier, other or tier):
        must_lack(one, key)
    writer.append(data)
    for one in (tier, other or tier):
        must_lack(one, key)
        must(not list(one.list(f"{prefix}/")), f"{prefix}: something is listed while an object is being written")
    writer.close()
    must_hold(other or tier, key, data)
    writer.abort()
    must_hold(tier, key, data)


def check_abort(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """An aborted object, and one whose ``with`` block raised, leave nothing, and their key is free."""
    key, data = f"{prefix}/a", random_bytes(100_000)
    writer = tier.writer(key)
    writer.append(data)
    writer.abort()
    writer.abort()
    must_lack(tier, key)
    try:
        with tier.writer(key) as writer:
            writer.append(data)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        must_lack(other or tier, key)
    must(not list(tier.list(f"{prefix}/")), f"{prefix}: an aborted object left something")
    tier.put(key, data)
    must_hold(tier, key, data)


def check_leases(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """A buffer is released once: on success (at the latest when the object is deleted), on abort, on failure."""
    data = random_bytes(50_000)
    leases = [Lease(data), Lease(data[:10]), Lease(data)]
    with tier.writer(f"{prefix}/a") as writer:
        for lease in leases:
            writer.append(lease.buffer, lease.release)
    # What was released is overwritten by now, and what was not is still the tier's to read.
    must_hold(tier, f"{prefix}/a", torch.cat([data, data[:10], data]))
    tier.delete(f"{prefix}/a")
    _released_once(leases, "an object that was written and deleted")

    leases = [Lease(data), Lease(data)]
    writer = tier.writer(f"{prefix}/b")
    for lease in leases:
        writer.append(lease.buffer, lease.release)
    writer.abort()
    _released_once(leases, "an object that was aborted")

    leases = [Lease(data), Lease(data)]
    writer = tier.writer(f"{prefix}/c")
    for lease in leases:
        writer.append(lease.buffer, lease.release)
    tier.put(f"{prefix}/c", data)
    must_raise(AlreadyExists, writer.close, f"{prefix}/c: close on a key that was taken meanwhile")
    writer.abort()
    _released_once(leases, "an object whose close failed")


def _released_once(leases: Sequence[Lease], what: str) -> None:
    counts = [lease.releases for lease in leases]
    must(counts == [1] * len(leases), f"leases of {what} were released {counts} times")


def check_create_only(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """An existing object is never changed: not by put, not by a writer, not by one that began before it was there."""
    key, data, newer = f"{prefix}/a", random_bytes(3000, 1), random_bytes(4000, 2)
    early = tier.writer(key)
    early.append(newer)
    tier.put(key, data)
    must_raise(AlreadyExists, lambda: (other or tier).put(key, newer), f"{key}: a second put")
    must_raise(AlreadyExists, lambda: tier.put(key, data), f"{key}: a second put of the same bytes")
    must_raise(AlreadyExists, lambda: write(tier, key, [newer]), f"{key}: a writer of an existing object")
    must_raise(AlreadyExists, early.close, f"{key}: close on a key that was taken meanwhile")
    must_hold(tier, key, data)
    must_hold(other or tier, key, data)


def check_race(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """Of several creates of one key at once exactly one succeeds, where the traits do not deny it; none is mixed."""
    for n in range(RACES):
        key = f"{prefix}/{n}"
        datas = [random_bytes(70_000, seed) for seed in range(RACERS)]
        winners = _race(key, datas, (tier, other or tier))
        certain = tier.traits.conditional_create is not False
        must(len(winners) == 1 or (len(winners) > 1 and not certain), f"{key}: {len(winners)} of {RACERS} creates won")
        must(any(torch.equal(tier.get(key), datas[i]) for i in winners), f"{key}: holds no winner's bytes")


def _race(key: str, datas: Sequence[Buffer], tiers: Sequence[Tier]) -> list[int]:
    start, winners, wrong = threading.Barrier(len(datas)), [], []

    def run(i: int) -> None:
        tier = tiers[i % len(tiers)]
        start.wait()
        try:
            if i % 4 < 2:
                tier.put(key, datas[i])
            else:
                write(tier, key, [datas[i]])
            winners.append(i)
        except (AlreadyExists, TierUnavailable):
            return
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(datas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    must(not wrong, f"{key}: a create that lost raised {wrong[:1]!r}, not AlreadyExists")
    return winners
