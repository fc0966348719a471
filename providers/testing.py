"""The contract of a state provider as a test suite, for authors of custom providers.

Subclass `ProviderContract` under a name that pytest collects, and say which values to try::

    from tierstate.providers.testing import ProviderContract

    class TestReplayProvider(ProviderContract):
        def values(self):
            return [Replay(3, 0), Replay(3, 2500)]

        def provider(self, value):
            return ReplayProvider(value)

        def empty(self, value):
            return Replay(value.width, value.length)

Every test runs over all values. Partitions and orders are drawn from fixed seeds; nothing but a test runner is needed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch

from tierstate.manifest.chunk import Buffer, Chunk, Event, empty_buffer, to_bytes
from tierstate.manifest.format.leaf import Spec

from .base import Provider, memory_of

_GUARD = 64
"""Guard bytes before and after a filled buffer, which must stay unchanged."""


_BESIDE_BYTES = (0x00, 0xFF)
"""Initial contents of a buffer before it is filled: a byte that is not written differs in one of the two."""


class ContractBroken(AssertionError):
    """A provider violates the contract; the message says how."""


class ProviderContract:
    """Tests every promise of a state provider (`tierstate.providers.base`) with values that the author gives.

    Attributes:
        sizes: chunk sizes in bytes, multiples of 16.
        seeds: each draws another partition and order for fills and loads.
        checks_bounds: ``load`` raises an error for bytes beyond the end of the value. The engine never gives such
            bytes, so a provider may do without the check.
        allow_pickle: globs of leaves that the `Checkpointer` of the round trip may pickle.
    """

    sizes: ClassVar[Sequence[int]] = (16, 48, 4096, 1 << 20)
    seeds: ClassVar[Sequence[int]] = range(4)
    checks_bounds: ClassVar[bool] = True
    allow_pickle: ClassVar[Sequence[str]] = ()

    def values(self) -> Sequence[Any]:
        """The values to test, created again for each test. Include an empty one, and one of more than 4096 bytes."""
        raise NotImplementedError("say which values to try: def values(self): return [MyValue(...), ...]")

    def provider(self, value: Any) -> Provider:
        """A provider of a value, as the registry makes it."""
        raise NotImplementedError("say how a provider is made: def provider(self, value): return MyProvider(value)")

    def empty(self, value: Any) -> Any:
        """A value into which this one can be restored: with the same spec and other bytes."""
        raise NotImplementedError("say what a restore fills: def empty(self, value): return MyValue(value.length)")

    def fresh(self, spec: Spec, provider: Provider) -> Provider | None:
        """A provider that creates a value from a saved spec; None if this kind is only restored in place."""
        return type(provider).fresh(spec)

    # How values are saved

    def test_chunks_cover_the_value_in_order(self) -> None:
        """Chunks begin at 0, follow each other without gaps, and end with the value, for any chunk size."""
        for value, size in self._cases():
            provider, at = self.provider(value), 0
            for chunk in provider.chunks(size):
                right = (at, min(size, provider.spec.nbytes - at))
                _check(
                    (chunk.start, chunk.nbytes) == right, f"a chunk is {chunk[:2]}; right is {right}", provider, size
                )
                at += chunk.nbytes
            _check(at == provider.spec.nbytes, f"the chunks end at {at}, not {provider.spec.nbytes}", provider, size)

    def test_fill_writes_its_bytes_and_no_others(self) -> None:
        """``fill`` writes every byte of its buffer, and nothing before or after it, at any address."""
        for value, size in self._cases():
            provider = self.provider(value)
            for chunk in provider.chunks(size):
                found = [_filled_between_guards(chunk, byte, shift) for byte in _BESIDE_BYTES for shift in (0, 7)]
                _check(None not in found, f"the fill of {chunk[:2]} wrote outside of its buffer", provider, size)
                _check(len(set(found)) == 1, f"the fill of {chunk[:2]} did not write all its bytes", provider, size)

    def test_bytes_are_the_same_for_every_chunk_size(self) -> None:
        """A value has the same bytes for every chunk size and every provider object: digests depend on them."""
        for value in self.values():
            found = {stream(self.provider(value), size) for size in self.sizes}
            _check(len(found) == 1, "the bytes depend on the chunk size", self.provider(value))

    def test_fills_come_in_any_order_and_again(self) -> None:
        """Chunks can be filled in any order, and more than once."""
        for value, size in self._cases():
            provider = self.provider(value)
            whole = stream(provider, size)
            for seed in self.seeds:
                chunks = [*provider.chunks(size)] * 2
                random.Random(seed).shuffle(chunks)
                for chunk in chunks:
                    right = whole[chunk.start : chunk.start + chunk.nbytes]
                    _check(_filled(chunk) == right, f"{chunk[:2]} has other bytes out of order", provider, size)

    def test_spec_is_stable_and_plain(self) -> None:
        """The spec does not change while the value is read, and is the same after encoding as JSON and back."""
        for value in self.values():
            provider = self.provider(value)
            spec = provider.spec
            stream(provider, self.sizes[0])
            _check(spec == provider.spec == self.provider(value).spec, "the spec changes", provider)
            attrs = json.loads(json.dumps(dict(spec.attrs)))
            _check(attrs == dict(spec.attrs), f"attributes {spec.attrs} come back from JSON as {attrs}", provider)
            _check(spec.kind == type(provider).kind, f"the spec is of kind {spec.kind}", provider)

    def test_memory_is_the_bytes_that_chunks_give(self) -> None:
        """If ``memory`` returns the value's memory, its bytes are those of the chunks."""
        for value in self.values():
            provider = self.provider(value)
            memory = memory_of(provider, provider.spec.nbytes)
            if memory is not None:
                _check(to_bytes(memory) == stream(provider), "memory() has other bytes than the chunks", provider)

    def test_what_was_filled_stays_when_the_value_changes(self) -> None:
        """A filled buffer is a copy: a change of the value, here by a load in place, does not change it."""
        for value in self.values():
            provider, other = self.provider(value), stream(self.provider(self.empty(value)))
            chunks = [*provider.chunks(self.sizes[0])]
            buffers = [empty_buffer(chunk.nbytes) for chunk in chunks]
            for chunk, out in zip(chunks, buffers, strict=True):
                _wait(chunk.fill(out))
            before = [to_bytes(out) for out in buffers]
            load(provider.receiver(provider.spec), other)
            _check([to_bytes(out) for out in buffers] == before, "filled buffers changed with the value", provider)

    # How values are restored

    def test_load_restores_a_fresh_value(self) -> None:
        """A new value takes the bytes in any order and any partition, and has them all after ``done``."""
        self._check_loads(lambda provider: self.fresh(provider.spec, provider))

    def test_load_restores_in_place(self) -> None:
        """A value of the same spec takes the bytes in any order and any partition."""

        def receiver(provider: Provider, value: Any) -> Provider:
            target = self.provider(self.empty(value))
            reason = target.mismatch(provider.spec)
            _check(not reason, f"empty(value) does not take the value: it {reason}", provider)
            return target.receiver(provider.spec)

        for value in self.values():
            self._check_loads(partial(receiver, value=value), [value])

    def test_load_through_memory(self) -> None:
        """If ``memory`` is given, bytes written to it are the value after ``done``."""
        for value in self.values():
            provider = self.provider(value)
            target = self.provider(self.empty(value)).receiver(provider.spec)
            memory = memory_of(target, provider.spec.nbytes)
            if memory is not None:
                memory.copy_(_buffer(stream(provider)))
                self._check_same(target.done(), provider)

    def test_bytes_beyond_the_end_are_refused(self) -> None:
        """``load`` raises an error if the data ends after the value's end, instead of dropping bytes."""
        for value in self.values() if self.checks_bounds else ():
            provider = self.provider(value)
            nbytes = provider.spec.nbytes
            for start, length in ((nbytes, 32), (max(nbytes - 1, 0), 33)):
                target = self.provider(self.empty(value)).receiver(provider.spec)
                try:
                    _wait(target.load(start, torch.zeros(length, dtype=torch.uint8, device="cpu")))
                except Exception as error:
                    _check(bool(str(error)), f"load at {start} raised {error!r}, which says nothing", provider)
                else:
                    _check(False, f"load took {length} bytes at {start} of {nbytes}", provider)

    def test_round_trip_through_a_checkpointer(self, tmp_path: Path) -> None:
        """A saved value is restored bit-exactly, in place and without a template, through a tier on a directory."""
        # By name, since the package of providers must not import the packages above it.
        ts = import_module("tierstate")
        tier = {"type": "nvme", "path": str(tmp_path / "tier"), "io": "buffered"}
        policy = ts.Policy.parse(json.dumps({"version": 1, "arena": {"size": "64MiB"}, "tiers": {"disk": tier}}))
        with ts.Checkpointer(policy, "contract", allow_pickle=self.allow_pickle) as ckpt:
            for step, value in enumerate(self.values(), 1):
                provider = self.provider(value)
                ckpt.save({"value": value}, step=step).wait()
                into = {"value": self.empty(value)}
                self._check_same(ckpt.restore(into=into, step=step)["value"], provider)
                if self.fresh(provider.spec, provider) is not None:
                    self._check_same(ckpt.load(step=step)["value"], provider)

    # How that is checked

    def _cases(self) -> Iterator[tuple[Any, int]]:
        return ((value, size) for value in self.values() for size in self.sizes)

    def _check_loads(self, target: Callable[[Provider], Provider | None], values: Sequence[Any] | None = None) -> None:
        for value in self.values() if values is None else values:
            provider = self.provider(value)
            data = stream(provider)
            for seed in self.seeds:
                into = target(provider)
                if into is not None:
                    load(into, data, seed)
                    self._check_same(into.done(), provider)

    def _check_same(self, found: Any, right: Provider) -> None:
        """Raise unless a restored value has the spec and bytes of the one that was saved."""
        provider = self.provider(found)
        _check(provider.spec == right.spec, f"the restored value is {provider.spec}, not {right.spec}", right)
        _check(stream(provider) == stream(right), "the restored value has other bytes", right)


def stream(provider: Provider, size: int = 1 << 20) -> bytes:
    """All bytes of a value, from chunks of ``size`` bytes in order."""
    return b"".join(map(_filled, provider.chunks(size)))


def load(provider: Provider, data: bytes, seed: int = 0) -> None:
    """Load all bytes, cut at random places and in random order."""
    draw = random.Random(seed)
    cuts = sorted({0, len(data), *(draw.randrange(len(data)) for _ in range(draw.randrange(9) if data else 0))})
    spans = [*pairwise(cuts)]
    draw.shuffle(spans)
    for start, stop in spans:
        _wait(provider.load(start, _buffer(data[start:stop])))


def _buffer(data: bytes) -> Buffer:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else empty_buffer(0)


def _filled(chunk: Chunk) -> bytes:
    out = empty_buffer(chunk.nbytes)
    _wait(chunk.fill(out))
    return to_bytes(out)


def _filled_between_guards(chunk: Chunk, byte: int, shift: int) -> bytes | None:
    """The bytes of a chunk, filled into the middle of a longer buffer; None if it wrote outside of that part."""
    first, last = _GUARD + shift, _GUARD + shift + chunk.nbytes
    whole = torch.full((last + _GUARD,), byte, dtype=torch.uint8, device="cpu")
    _wait(chunk.fill(whole[first:last]))
    beside = bool((whole[:first] == byte).all() and (whole[last:] == byte).all())
    return to_bytes(whole[first:last]) if beside else None


def _wait(event: Event | None) -> None:
    if event is not None:
        event.synchronize()


def _check(holds: bool, found: str, provider: Provider, size: int | None = None) -> None:
    if not holds:
        where = f"{type(provider).__qualname__} of {provider.spec}"
        raise ContractBroken(f"{where}, chunks of {size} bytes: {found}" if size else f"{where}: {found}")
