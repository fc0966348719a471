"""Capture: every byte once, in slabs, under its digest; and providers held to their contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.box import Box
from tierstate.manifest.chunk import Buffer, Chunk, as_buffer, spans, to_bytes
from tierstate.manifest.digest import algorithm
from tierstate.manifest.errors import CaptureError, Unsafe
from tierstate.manifest.leaf import Leaf, Spec
from tierstate.tiers.arena import PAGE, Arena
from tierstate.tiers.capture import Batch, Capture, Plan, Source

DIGEST = algorithm("xxh3-128")


def chunks_of(data: bytes) -> Callable[[int], Iterator[Chunk]]:
    """What a provider of these bytes yields."""

    def fill(start: int, out: Buffer) -> None:
        out.copy_(as_buffer(data[start : start + len(out)]))

    def chunks(size: int) -> Iterator[Chunk]:
        for start, n in spans(len(data), size):
            yield Chunk(start, n, partial(fill, start))

    return chunks


def plan_of(values: list[bytes]) -> Plan:
    leaves = tuple(Leaf((f"leaf{i}",), Spec("bytes", shape=(len(v),))) for i, v in enumerate(values))
    sources = tuple(Source(i, Box.whole((len(v),)), len(v), chunks_of(v)) for i, v in enumerate(values))
    return Plan(leaves, sources)


def broken(nbytes: int, chunks: Callable[[int], Any]) -> Plan:
    """A sound leaf, and one whose provider does something else."""
    plan = plan_of([b"sound"])
    leaf = Leaf(("model", "bad"), Spec("bytes", shape=(nbytes,)))
    return Plan((*plan.leaves, leaf), (*plan.sources, Source(1, Box.whole((nbytes,)), nbytes, chunks)))


def capture(plan: Plan, arena: Arena, take: Callable[[Batch], None], chunk: int = PAGE) -> np.ndarray:
    return Capture(plan, chunk, arena, DIGEST, take, lambda: False).run()


@given(
    values=st.lists(st.tuples(st.binary(max_size=40), st.integers(1, 400)).map(lambda v: v[0] * v[1]), max_size=8),
    chunk=st.sampled_from([4096, 4112, 16_384]),
    slots=st.integers(2, 5),
)
def test_every_byte_goes_into_one_slab_under_its_digest(values: list[bytes], chunk: int, slots: int) -> None:
    arena, found = Arena(slots * 5 * PAGE, 16_400), {}
    plan = plan_of(values)

    def take(batch: Batch) -> None:
        end = 0
        for row, at, n, digest in zip(batch.rows, batch.at, batch.nbytes, batch.digests, strict=True):
            assert at >= end, "chunks of a slab do not overlap"
            assert at % 64 == 0
            end = at + n
            assert row not in found
            found[row] = to_bytes(batch.slab.buffer[at:end])
            assert digest == DIGEST(as_buffer(found[row]))
        batch.slab.release()

    digests = capture(plan, arena, take, chunk)
    expected = [v[start : start + n] for v in values for start, n in spans(len(v), chunk)]
    assert [found[row] for row in range(len(found))] == expected
    assert [d.tobytes() for d in digests] == [DIGEST(as_buffer(piece)) for piece in expected]
    assert plan.row_leaves(chunk).tolist() == [i for i, v in enumerate(values) for _ in spans(len(v), chunk)]
    assert arena.in_flight == 0
    assert plan.nbytes == sum(map(len, values))


def fill(out: Buffer) -> None:
    out.zero_()


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: object) -> Any:
        raise error

    return call


def after_one(error: Exception) -> Callable[[int], Iterator[Chunk]]:
    def chunks(size: int) -> Iterator[Chunk]:
        yield Chunk(0, size, fill)
        raise error

    return chunks


class LateError:
    def synchronize(self) -> None:
        raise RuntimeError("the copy failed on the device")


N = PAGE + 100
WRONG: dict[str, tuple[Callable[[int], Any], str]] = {
    "nothing": (lambda size: iter(()), f"gave 0 of {N} bytes"),
    "too little": (lambda size: iter([Chunk(0, size, fill)]), f"gave {PAGE} of {N} bytes"),
    "too much": (
        lambda size: iter([Chunk(0, size, fill), Chunk(size, 100, fill), Chunk(N, 1, fill)]),
        f"gave 1 bytes at {N}; right are 0",
    ),
    "a gap": (lambda size: iter([Chunk(0, size, fill), Chunk(size + 1, 99, fill)]), "right are 100 at 4096"),
    "again": (lambda size: iter([Chunk(0, size, fill)] * 2), "gave 4096 bytes at 0; right are 100"),
    "too short": (lambda size: iter([Chunk(0, size - 1, fill)]), "gave 4095 bytes at 0"),
    "too long": (lambda size: iter([Chunk(0, N, fill)]), f"gave {N} bytes at 0"),
    "empty": (lambda size: iter([Chunk(0, 0, fill)]), "gave 0 bytes at 0"),
    "no chunks": (lambda size: iter([(1, 2)]), "its provider failed: TypeError"),
    "no iterator": (lambda size: None, "its provider failed: TypeError"),
    "an error at once": (raising(OSError("lost")), r"its provider failed: OSError\('lost'\)"),
    "an error later": (after_one(KeyError("k")), "its provider failed: KeyError"),
    "a fill that fails": (lambda size: iter([Chunk(0, size, raising(ValueError("odd")))]), "could not be read: odd"),
    "an event that fails": (
        lambda size: iter([Chunk(0, size, lambda out: LateError())]),
        "could not be read: the copy failed on the device",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_provider_that_breaks_its_contract_is_named(name: str) -> None:
    chunks, message = WRONG[name]
    arena, batches = Arena(8 * PAGE, PAGE), []
    with pytest.raises(CaptureError, match=rf"leaf model\.bad.*{message}"):
        capture(broken(N, chunks), arena, batches.append)
    for batch in batches:
        batch.slab.release()
    assert arena.in_flight == 0


def test_an_error_of_ours_stays_what_it_is() -> None:
    arena = Arena(8 * PAGE, PAGE)
    with pytest.raises(Unsafe, match="no pickles"):
        capture(broken(5, raising(Unsafe("no pickles"))), arena, lambda batch: batch.slab.release())
    assert arena.in_flight == 0


def test_a_capture_that_is_stopped_gives_its_slabs_back() -> None:
    arena, stop = Arena(8 * PAGE, PAGE), []

    def take(batch: Batch) -> None:
        stop.append(1)
        batch.slab.release()

    with pytest.raises(CaptureError, match="cancelled"):
        Capture(plan_of([bytes(9 * PAGE)]), PAGE, arena, DIGEST, take, lambda: len(stop) >= 3).run()
    assert len(stop) == 3
    assert arena.in_flight == 0
