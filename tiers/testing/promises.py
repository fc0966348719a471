"""The promises of the tier contract, each as a function that tests it on a live tier; `PROMISES` lists all.

Writing: whole or absent, create-only, leases released once. Reading: exact ranges, never short. Listing, deleting,
ages, keys and traits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import Protocol

import torch

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import AlreadyExists, Damaged, NotFound, Oversized, TierUnavailable
from tierstate.tiers.base import Range, Tier

BAD_KEYS = ("", "/abs", "../up", "a/../b", "a//b", "a/", ".hidden", "a/.hidden", "a b", "a\nb", "\xe4", "k" * 513)


COARSE = 2.0
"""Seconds by which an age may be wrong: some stores count whole seconds."""


BIG_OBJECT = (5 << 20) + 3
"""Bytes of a big object: longer than the smallest part of an S3 multipart upload, and not a round number."""


RACERS, RACES = 8, 3


class PromiseBroken(AssertionError):
    """A tier violates its contract; the message says what was found."""


class Check(Protocol):
    """Tests one promise, with objects under ``prefix`` (a key that nothing else uses), and deletes them.

    ``other`` is a second handle on the same place, if there can be one.

    Raises:
        PromiseBroken: the tier does not keep it.
        TierError: the tier failed in a way that the contract does not expect here.
    """

    def __call__(self, tier: Tier, prefix: str, other: Tier | None = None) -> None: ...


class Lease:
    """A buffer that counts its releases. After a release the caller owns it again, and overwrites it at once."""

    def __init__(self, data: Buffer) -> None:
        self.buffer = data.clone()
        self.releases = 0

    def release(self) -> None:
        """Called by the tier when it does not need the buffer any more."""
        self.releases += 1
        self.buffer.fill_(0xEE)


def random_bytes(nbytes: int, seed: int = 0) -> Buffer:
    """A buffer of random bytes, determined by the seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8, device="cpu")


def must(holds: bool, found: str) -> None:
    """Raise `PromiseBroken` with what was found, unless ``holds``."""
    if not holds:
        raise PromiseBroken(found)


def must_raise(kind: type[Exception], call: Callable[[], object], what: str) -> None:
    """Raise `PromiseBroken` unless the call raises that kind of error."""
    try:
        call()
    except kind:
        return
    except Exception as error:
        raise PromiseBroken(f"{what}: raised {type(error).__name__} ({error}), not {kind.__name__}") from error
    raise PromiseBroken(f"{what}: raised nothing, not {kind.__name__}")


def must_hold(tier: Tier, key: str, data: Buffer) -> None:
    """Raise `PromiseBroken` unless the object exists and has exactly these bytes."""
    must(tier.size(key) == data.numel(), f"{key}: size is {tier.size(key)}, not {data.numel()}")
    must(torch.equal(tier.get(key), data), f"{key}: the bytes read are not those written")
    must(list(tier.list(key)).count(key) == 1, f"{key}: is not listed once")


def must_lack(tier: Tier, key: str) -> None:
    """Raise `PromiseBroken` if the object can be read, listed, or asked for its size."""
    must_raise(NotFound, lambda: tier.size(key), f"{key}: size of an absent object")
    must_raise(NotFound, lambda: tier.read(key, [Range(0, empty_buffer(1))]), f"{key}: read of an absent object")
    must(key not in tier.list(key), f"{key}: is listed, but absent")


def write_object(tier: Tier, key: str, pieces: Sequence[Buffer]) -> None:
    """Write an object piece by piece, without leases."""
    with tier.writer(key) as writer:
        for piece in pieces:
            writer.append(piece)


def check_put(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """What was put can be read on every handle; the caller may change its buffer after the put."""
    data = random_bytes(1000)
    given = data.clone()
    tier.put(f"{prefix}/a", given)
    given.zero_()
    must_hold(tier, f"{prefix}/a", data)
    must_hold(other or tier, f"{prefix}/a", data)
    for most in (1000, 4000):
        must(torch.equal(tier.get_within(f"{prefix}/a", most, "an object"), data), "get_within: other bytes")
    must_raise(Oversized, lambda: tier.get_within(f"{prefix}/a", 999, "an object"), "get_within of a longer object")
    must_raise(NotFound, lambda: tier.get_within(f"{prefix}/b", 999, "an object"), "get_within of an absent object")


def check_sizes(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """Objects of zero bytes, of one, and big ones are read back exactly, whether put or written."""
    for nbytes in (0, 1, 4096, BIG_OBJECT):
        data = random_bytes(nbytes)
        tier.put(f"{prefix}/put-{nbytes}", data)
        must_hold(tier, f"{prefix}/put-{nbytes}", data)
        write_object(tier, f"{prefix}/written-{nbytes}", [data[: nbytes // 3], data[nbytes // 3 :]])
        must_hold(other or tier, f"{prefix}/written-{nbytes}", data)
    write_object(tier, f"{prefix}/nothing", [])
    must_hold(tier, f"{prefix}/nothing", empty_buffer(0))


def check_many_pieces(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """Hundreds of pieces of odd lengths are written in order; pieces may be parts of a longer buffer."""
    slab = random_bytes(300_000)
    cuts = [0]
    while cuts[-1] < slab.numel():
        cuts.append(min(slab.numel(), cuts[-1] + (len(cuts) * 389) % 1931))
    write_object(tier, f"{prefix}/a", [slab[a:b] for a, b in pairwise(cuts)])
    must_hold(tier, f"{prefix}/a", slab)
    tier.put(f"{prefix}/b", slab[777:1234])
    must_hold(tier, f"{prefix}/b", slab[777:1234])


def check_absent_until_closed(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """No handle sees an object that is being written, nor a part of it."""
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
    """An aborted object, or one whose ``with`` block raised, leaves nothing, and its key is free."""
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
    """Each buffer is released exactly once: on success (at the latest by the delete), on abort, on failure."""
    data = random_bytes(50_000)
    leases = [Lease(data), Lease(data[:10]), Lease(data)]
    with tier.writer(f"{prefix}/a") as writer:
        for lease in leases:
            writer.append(lease.buffer, lease.release)
    # Released buffers are overwritten by now; the tier may still read the others.
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
    """An existing object is never changed: not by a put, a writer, or a writer that was opened before it existed."""
    key, data, newer = f"{prefix}/a", random_bytes(3000, 1), random_bytes(4000, 2)
    early = tier.writer(key)
    early.append(newer)
    tier.put(key, data)
    must_raise(AlreadyExists, lambda: (other or tier).put(key, newer), f"{key}: a second put")
    must_raise(AlreadyExists, lambda: tier.put(key, data), f"{key}: a second put of the same bytes")
    must_raise(AlreadyExists, lambda: write_object(tier, key, [newer]), f"{key}: a writer of an existing object")
    must_raise(AlreadyExists, early.close, f"{key}: close on a key that was taken meanwhile")
    must_hold(tier, key, data)
    must_hold(other or tier, key, data)


def check_race(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """Of concurrent creates of one key exactly one succeeds, unless the traits say otherwise; bytes are never mixed."""
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
                write_object(tier, key, [datas[i]])
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


def check_range_reads(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """Ranges are filled exactly: in any order, overlapping, empty, and into parts of longer buffers."""
    data, key = random_bytes(200_001), f"{prefix}/a"
    write_object(tier, key, [data[:70_000], data[70_000:70_001], data[70_001:]])
    wanted = [
        (150_000, 50_001),
        (0, 1),
        (69_999, 3),
        (0, 200_001),
        (100, 0),
        (200_001, 0),
        (4095, 4098),
        (60_000, 90_000),
    ]
    slab = torch.zeros(sum(n for _, n in wanted) + len(wanted), dtype=torch.uint8, device="cpu")
    ranges, at = [], 0
    for offset, nbytes in wanted:
        ranges.append(Range(offset, slab[at : at + nbytes]))
        at += nbytes + 1
    (other or tier).read(key, ranges)
    for offset, out in ranges:
        must(torch.equal(out, data[offset : offset + out.numel()]), f"{key}: {out.numel()} bytes at {offset} are wrong")
    gaps = [int(r.out.storage_offset()) + r.out.numel() for r in ranges]
    must(not slab[gaps].any(), f"{key}: a read wrote beyond its buffer")
    tier.read(key, [])


def check_beyond_end(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """A range beyond the object's end raises `Damaged`, never a short read; an absent object raises `NotFound`."""
    key = f"{prefix}/a"
    tier.put(key, random_bytes(1000))
    tier.put(f"{prefix}/empty", empty_buffer(0))
    for offset, nbytes in ((999, 2), (0, 1001), (1000, 1), (1001, 0), (1 << 40, 1)):
        wanted = [Range(0, empty_buffer(10)), Range(offset, empty_buffer(nbytes))]
        must_raise(Damaged, partial(tier.read, key, wanted), f"{key}: {nbytes} bytes at {offset} of 1000")
    must_raise(Damaged, lambda: tier.read(f"{prefix}/empty", [Range(0, empty_buffer(1))]), "a byte of an empty object")
    must_lack(tier, f"{prefix}/absent")
    must_lack(tier, f"{key}/below")
    must_lack(tier, prefix)
    must_raise(NotFound, lambda: tier.get(f"{prefix}/absent"), "get of an absent object")
    must_raise(NotFound, lambda: tier.read(f"{prefix}/absent", [Range(0, empty_buffer(0))]), "nothing of an absent one")


def check_list(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """All keys with a prefix are listed, any prefix, in order of their code points; and no others."""
    names = ["a", "a-b/c", "a.b", "a0/b/c", "a0/b-c", "B", "b/=1", "b/x.y", "b/x/y", "b_/z", "1"]
    keys = sorted(f"{prefix}/{name}" for name in names)
    for key in reversed(keys):
        tier.put(key, random_bytes(3))
    for stem in (
        "",
        "/",
        "/a",
        "/a0",
        "/a0/",
        "/a0/b",
        "/b/x",
        "/b/",
        "/c",
        "/cc/1",
        "/zzz",
        "/a/zzz",
        "//",
        "/.",
        "/..",
    ):
        found, wanted = list((other or tier).list(prefix + stem)), [k for k in keys if k.startswith(prefix + stem)]
        must(found == wanted, f"list({prefix + stem!r}) gave {found}, not {wanted}")
    for stem in ("../", "/", "//", "./", prefix[:1] + "/../", f"/{prefix}"):
        must(not list(tier.list(stem)), f"list({stem!r}) gave something, though no key begins so")
    mine = [key for key in tier.list("") if key.startswith(prefix)]
    must(mine == keys, f"list('') gave {mine}, not {keys}")


def check_delete(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """A deleted object is absent, deleting again is no error, others stay, and the key can be used again."""
    data, newer = random_bytes(5000, 1), random_bytes(6000, 2)
    for name in ("a", "ab", "b/c", "b/d"):
        tier.put(f"{prefix}/{name}", data)
    for key in (f"{prefix}/a", f"{prefix}/b/c", f"{prefix}/a", f"{prefix}/never", f"{prefix}/b", f"{prefix}/ab/below"):
        (other or tier).delete(key)
    must_lack(tier, f"{prefix}/a")
    found = list(tier.list(f"{prefix}/"))
    must(found == [f"{prefix}/ab", f"{prefix}/b/d"], f"after deleting two of four objects {found} are left")
    tier.put(f"{prefix}/a", newer)
    for name, bytes_ in (("a", newer), ("ab", data), ("b/d", data)):
        must_hold(tier, f"{prefix}/{name}", bytes_)


def check_discard(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """One call deletes many objects, some of them absent; others stay."""
    data = random_bytes(100)
    kept, gone = ([f"{prefix}/{folder}/{i}" for folder in ("a", "b") for i in some] for some in (range(3), range(3, 9)))
    for key in kept + gone:
        tier.put(key, data)
    (other or tier).discard(iter([*gone, f"{prefix}/never", gone[0]]))
    found = list(tier.list(f"{prefix}/"))
    must(found == kept, f"after {len(gone)} of {len(kept + gone)} objects were deleted {found} are left, not {kept}")
    must_lack(tier, gone[-1])
    tier.discard([])


def check_age(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """An age, if the tier knows it, begins near zero and does not fall; an absent object raises `NotFound`."""
    key, start = f"{prefix}/a", time.monotonic()
    tier.put(key, random_bytes(10))
    ages = [one.age(key) for one in (tier, other or tier, tier)]
    most = time.monotonic() - start + COARSE
    known = [age for age in ages if age is not None]
    must(len(known) in (0, len(ages)), f"{key}: its age is told now and then: {ages}")
    must(all(0 <= age <= most for age in known), f"{key}: is {known} s old, {most:.1f} s at most after it was begun")
    must(not known or known[-1] >= known[0] - COARSE, f"{key}: grew younger: {known}")
    if known:
        must_raise(NotFound, lambda: tier.age(f"{prefix}/absent"), "the age of an absent object")


def check_delete_while_read(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """A read during a delete gives all of the object's bytes, or raises `NotFound`."""
    data, key = random_bytes(1 << 20), f"{prefix}/a"
    lease = Lease(data)
    with tier.writer(key) as writer:
        writer.append(lease.buffer, lease.release)
    seen: list[str] = []
    started = threading.Event()

    def read() -> None:
        for _ in range(200):
            out = torch.zeros_like(data)
            try:
                tier.read(key, [Range(0, out)])
            except NotFound:
                seen.append("")
                return
            except Exception as error:
                seen.append(f"raised {type(error).__name__} ({error})")
                return
            finally:
                started.set()
            if not torch.equal(out, data):
                seen.append("gave other bytes")
                return

    thread = threading.Thread(target=read)
    thread.start()
    started.wait()
    tier.delete(key)
    thread.join()
    must(not any(seen), f"{key}: a read {''.join(seen)} while the object was deleted")
    must(lease.releases == 1, f"{key}: its lease was released {lease.releases} times")


def check_keys(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """Every method refuses an invalid key with a ValueError, before it does anything."""
    for bad in BAD_KEYS:
        for name, call in (
            ("put", lambda bad=bad: tier.put(bad, empty_buffer(1))),
            ("writer", lambda bad=bad: tier.writer(bad)),
            ("read", lambda bad=bad: tier.read(bad, [Range(0, empty_buffer(1))])),
            ("size", lambda bad=bad: tier.size(bad)),
            ("delete", lambda bad=bad: tier.delete(bad)),
        ):
            must_raise(ValueError, call, f"{name}({bad[:20]!r})")
    longest = "/".join(["k" * 100] * 5)[: 512 - len(prefix) - 1].rstrip("/")
    tier.put(f"{prefix}/{longest}", random_bytes(7))
    must_hold(tier, f"{prefix}/{longest}", random_bytes(7))


def check_traits(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """The traits are valid, and do not contradict the class's ``persistent``."""
    tier.put(f"{prefix}/a", empty_buffer(1))
    traits = tier.traits
    must(traits.shared in ("process", "host", "site"), f"traits.shared is {traits.shared!r}")
    must(bool(traits.failure_domain), "traits.failure_domain is empty")
    for name in ("alignment", "part_size", "parallelism"):
        must(getattr(traits, name) >= 1, f"traits.{name} is {getattr(traits, name)}")
    known = getattr(type(tier), "persistent", traits.persistent)
    must(known or not traits.persistent, "the traits say persistent, the class denies it")


def _deleting_all(check: Check) -> Check:
    @wraps(check)
    def run(tier: Tier, prefix: str, other: Tier | None = None) -> None:
        try:
            check(tier, prefix, other)
        finally:
            for key in list(tier.list(f"{prefix}/")):
                tier.delete(key)

    return run


PROMISES: tuple[tuple[str, Check], ...] = tuple(
    (name, _deleting_all(check))
    for name, check in (
        ("what is put is read", check_put),
        ("objects of every size", check_sizes),
        ("many pieces, and parts of longer buffers", check_many_pieces),
        ("absent until closed", check_absent_until_closed),
        ("aborted objects leave nothing", check_abort),
        ("leases are released once", check_leases),
        ("create only", check_create_only),
        ("one winner of a race", check_race),
        ("ranges are filled exactly", check_range_reads),
        ("no read beyond the end", check_beyond_end),
        ("lists are whole and in order", check_list),
        ("deletes", check_delete),
        ("deletes while reading", check_delete_while_read),
        ("ages rise", check_age),
        ("many are deleted at once", check_discard),
        ("keys that are none are refused", check_keys),
        ("traits are sane", check_traits),
    )
)
