"""Evidence: how a promise is tried, and what is said when it is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import NotFound

from .base import Range, Tier


class PromiseBroken(AssertionError):
    """A tier does not do what the contract says; the message says what was found."""


class Check(Protocol):
    """Tries one promise, with objects under ``prefix`` (a key that nothing else uses), and leaves none.

    ``other`` is a second handle on the same place, where there can be one.

    Raises:
        PromiseBroken
        TierError: the tier failed in a way that the contract does not expect here.
    """

    def __call__(self, tier: Tier, prefix: str, other: Tier | None = None) -> None: ...


class Lease:
    """A buffer with a count of its releases. Once released it belongs to the caller, who overwrites it at once."""

    def __init__(self, data: Buffer) -> None:
        self.buffer = data.clone()
        self.releases = 0

    def release(self) -> None:
        """What the tier calls."""
        self.releases += 1
        self.buffer.fill_(0xEE)


def random_bytes(nbytes: int, seed: int = 0) -> Buffer:
    """A buffer of bytes that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)


def must(holds: bool, found: str) -> None:
    """Raise `PromiseBroken` with what was found, unless it holds."""
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
    """Raise `PromiseBroken` unless the object is there with exactly these bytes."""
    must(tier.size(key) == data.numel(), f"{key}: size is {tier.size(key)}, not {data.numel()}")
    must(torch.equal(tier.get(key), data), f"{key}: the bytes read are not those written")
    must(list(tier.list(key)).count(key) == 1, f"{key}: is not listed once")


def must_lack(tier: Tier, key: str) -> None:
    """Raise `PromiseBroken` if any sign of the object can be seen."""
    must_raise(NotFound, lambda: tier.size(key), f"{key}: size of an absent object")
    must_raise(NotFound, lambda: tier.read(key, [Range(0, empty_buffer(1))]), f"{key}: read of an absent object")
    must(key not in tier.list(key), f"{key}: is listed, but absent")


def write(tier: Tier, key: str, pieces: Sequence[Buffer]) -> None:
    """Write an object piece by piece, without leases."""
    with tier.writer(key) as writer:
        for piece in pieces:
            writer.append(piece)
