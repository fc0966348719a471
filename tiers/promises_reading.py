"""The promises of a tier about reading, listing, deleting and keys, each as a function that tries it on a live one."""

from __future__ import annotations

import threading
import time
from functools import partial

import torch

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import Damaged, NotFound

from .base import Range, Tier
from .evidence import Lease, must, must_hold, must_lack, must_raise, random_bytes, write

BAD_KEYS = ("", "/abs", "../up", "a/../b", "a//b", "a/", ".hidden", "a/.hidden", "a b", "a\nb", "\xe4", "k" * 513)

COARSE = 2.0
"""Seconds by which a store may be wrong about an age: some tell whole ones."""


def check_ranges(tier: Tier, prefix: str, other: Tier | None = None) -> None:
    """Ranges come in any order, overlap, may be empty, and are filled exactly, into parts of longer buffers too."""
    data, key = random_bytes(200_001), f"{prefix}/a"
    write(tier, key, [data[:70_000], data[70_000:70_001], data[70_001:]])
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
    slab = torch.zeros(sum(n for _, n in wanted) + len(wanted), dtype=torch.uint8)
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
    """A range that ends behind the object's end is `Damaged`, never a short read; an absent object is `NotFound`."""
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
    """Keys are listed in order of their code points, by any prefix, whole; nothing is listed for nothing."""
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
    """A deleted object is gone, deleting again is no error, others are untouched, and the key can be used anew."""
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
    """Many objects are deleted by one call, absent ones among them; others are untouched."""
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
    """Where an age is told, it begins near zero and does not fall; an absent object has none."""
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
    """A read that meets a delete gives the object's bytes or `NotFound`, nothing in between."""
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
    """What is no key is refused with a ValueError by every method, before anything happens."""
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
    """What a tier says of itself is sane, and does not deny what is known of its class."""
    tier.put(f"{prefix}/a", empty_buffer(1))
    traits = tier.traits
    must(traits.shared in ("process", "host", "site"), f"traits.shared is {traits.shared!r}")
    must(bool(traits.failure_domain), "traits.failure_domain is empty")
    for name in ("alignment", "part_size", "parallelism"):
        must(getattr(traits, name) >= 1, f"traits.{name} is {getattr(traits, name)}")
    known = getattr(type(tier), "persistent", traits.persistent)
    must(known or not traits.persistent, "the traits say persistent, the class denies it")
