"""Capture: every byte once, in slabs, under its digest; and providers held to their contract."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import memmove
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.outcomes import until

from tierstate.engine.capture import capture as capture_module
from tierstate.engine.capture.capture import Capture, CaptureSink
from tierstate.engine.capture.plan import CapturePlan, CaptureSource, LastCapture
from tierstate.engine.packs.slab_layout import BIG, GRAIN, SlabChunks, alignment_classes, capture_order, fill_slabs
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Buffer, Chunk, as_buffer, spans, to_bytes
from tierstate.manifest.digest import digest_function
from tierstate.manifest.errors import CaptureError, Unsafe
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.pages import HUGE, PAGE

DIGEST = digest_function("xxh3-128")


def chunks_of(data: bytes) -> Callable[[int], Iterator[Chunk]]:
    """What a provider of these bytes yields."""

    def fill(start: int, out: Buffer) -> None:
        out.copy_(as_buffer(data[start : start + len(out)]))

    def chunks(size: int) -> Iterator[Chunk]:
        for start, n in spans(len(data), size):
            yield Chunk(start, n, partial(fill, start))

    return chunks


def plan_of(
    values: list[bytes],
    shown: Sequence[bool] = (False,) * 99,
    guarded: Sequence[bool] = (False,) * 99,
    fences: Sequence[Any] = (),
) -> CapturePlan:
    leaves = tuple(Leaf((f"leaf{i}",), Spec("bytes", shape=(len(v),))) for i, v in enumerate(values))
    sources = [source(i, v, shown[i], guarded[i]) for i, v in enumerate(values)]
    return CapturePlan.of(leaves, sources, fences)


def source(leaf: int, value: bytes, shown: bool, guarded: bool) -> CaptureSource:
    """The bytes, as chunks or where they lie in memory."""
    memory = as_buffer(bytearray(value)) if shown else None
    return CaptureSource(leaf, Box.whole((len(value),)), len(value), chunks_of(value), guarded, memory)


def broken(nbytes: int, chunks: Callable[[int], Any]) -> CapturePlan:
    """A sound leaf, and one whose provider does something else."""
    names = [("sound",), ("model", "bad")]
    leaves = [Leaf(name, Spec("bytes", shape=(n,))) for name, n in zip(names, (5, nbytes), strict=True)]
    bad = CaptureSource(1, Box.whole((nbytes,)), nbytes, chunks)
    return CapturePlan.of(leaves, [source(0, b"sound", False, False), bad])


def capture(
    plan: CapturePlan,
    arena: Arena,
    take: Callable[[SlabChunks], None],
    chunk: int = PAGE,
    before: LastCapture | None = None,
) -> LastCapture:
    return Capture(plan, chunk, arena, DIGEST, CaptureSink(take), lambda: before).run()


VALUES = st.lists(
    st.tuples(
        st.tuples(st.binary(max_size=40), st.integers(1, 400)).map(lambda v: v[0] * v[1]), st.booleans(), st.booleans()
    ),
    max_size=8,
)


@given(values=VALUES, chunk=st.sampled_from([4096, 4112, 16_384]), slots=st.integers(2, 5))
@example(values=[(bytes([n]) * 9000, False, False) for n in range(1, 6)], chunk=16_384, slots=2)
def test_every_byte_goes_into_one_slab_under_its_digest(
    values: list[tuple[bytes, bool, bool]], chunk: int, slots: int
) -> None:
    arena, found = Arena(slots * 5 * PAGE, 16_400), {}
    data, shown, guarded = ([v[i] for v in values] for i in range(3))
    plan = plan_of(data, shown, guarded)  # type: ignore[arg-type]

    def take(batch: SlabChunks) -> None:
        end = 0
        for row, at, n, digest in zip(batch.rows.tolist(), batch.at, batch.nbytes, batch.digests, strict=True):
            assert at >= end, "chunks of a slab do not overlap"
            assert at % GRAIN == 0
            assert not batch.slab.buffer[end:at].any(), "what lies between is zeros"
            end = at + n
            assert row not in found
            found[row] = to_bytes(batch.slab.buffer[at:end])
            assert digest.tobytes() == DIGEST(as_buffer(found[row]))
        assert not batch.slab.buffer[end : -(-end // PAGE) * PAGE].any()
        batch.slab.buffer.fill_(7)
        batch.slab.release()

    standing = capture(plan, arena, take, chunk)
    expected = [v[start : start + n] for v in data for start, n in spans(len(v), chunk)]  # type: ignore[arg-type]
    assert [found[row] for row in range(len(found))] == expected
    assert [d.tobytes() for d in standing.digests] == [DIGEST(as_buffer(piece)) for piece in expected]
    assert plan.row_leaves(chunk).tolist() == [i for i, v in enumerate(data) for _ in spans(len(v), chunk)]  # type: ignore[arg-type]
    assert arena.in_flight == 0
    assert plan.total == sum(map(len, data))


SIZES = st.lists(st.one_of(st.integers(0, 5000), st.integers(0, 5 << 20)), max_size=30)


@given(SIZES, st.sampled_from([1 << 20, 3 << 19, 4 << 20]), st.sampled_from([4 << 20, 5 << 20]))
def test_packing_places_every_chunk_once_and_apart(sizes: list[int], chunk: int, slab: int) -> None:
    numbers, found = np.arange(len(sizes)) + 7, []
    for slabful in fill_slabs(numbers, np.array(sizes, "i8"), chunk, slab):
        ends = slabful.at + slabful.nbytes
        assert len(ends)
        assert slabful.at[0] == 0
        assert ends[-1] <= slab
        assert (slabful.at[1:] >= ends[:-1]).all()
        big = slabful.nbytes >= BIG
        assert not (slabful.at[big] % PAGE).any()
        assert not (slabful.at % GRAIN).any()
        assert (slabful.at[1:] - ends[:-1] < PAGE).all()
        of_big = np.array(sizes)[slabful.source - 7] >= BIG
        assert not (np.diff(of_big.astype(int)) > 0).any(), "no big leaf comes behind a small one in a slab"
        columns = slabful.source, slabful.start, slabful.nbytes
        found += list(zip(*(column.tolist() for column in columns), strict=True))
    expected = [(i + 7, start, n) for i, size in enumerate(sizes) for start, n in spans(size, chunk)]
    assert found == expected


@given(SIZES, st.sampled_from([1, 2, 4, 8]))
def test_leaves_in_order_follow_each_other_without_a_gap_and_aligned(sizes: list[int], itemsize: int) -> None:
    widths = [itemsize if i % 3 else 1 for i in range(len(sizes))]
    nbytes = np.array([n // w * w for n, w in zip(sizes, widths, strict=True)], "i8")
    order = capture_order(nbytes, widths.__getitem__)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    ends = np.cumsum(nbytes[order])
    starts = ends - nbytes[order]
    kinds = alignment_classes(nbytes[order])
    first = starts[np.flatnonzero(kinds > 0)[0]] if (kinds > 0).any() else 0
    assert not ((starts[kinds == 1] - first) % PAGE).any()
    assert all((start - first) % widths[i] == 0 for start, i in zip(starts.tolist(), order.tolist(), strict=True))
    assert capture_order(nbytes[order], lambda i: widths[order[i]]).tolist() == list(range(len(sizes)))


class Moment:
    """A fence that notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def synchronize(self) -> None:
        self.asked.append("host")

    def follow(self) -> None:
        self.asked.append("device")


def test_devices_are_waited_for_before_anything_is_read() -> None:
    fence, arena = Moment(), Arena(8 * PAGE, PAGE)
    asked: list[list[str]] = []
    plan = plan_of([b"shown", b"pulled"], [True, False], fences=[fence])

    def take(batch: SlabChunks) -> None:
        asked.append(list(fence.asked))
        batch.slab.release()

    capture(plan, arena, take)
    assert asked == [["device"], ["device", "host"]]


def test_unchanged_chunks_are_not_copied_again() -> None:
    arena, batches = Arena(16 << 20, 2 << 20), []
    size = 2 << 20
    memory = as_buffer(bytearray(random.Random(0).randbytes(2 * size + 100)))
    leaf = Leaf(("x",), Spec("bytes", shape=(len(memory),)))
    plan = CapturePlan.of(
        [leaf], [CaptureSource(0, Box.whole((len(memory),)), len(memory), lambda _: iter(()), False, memory)]
    )

    def take(batch: SlabChunks) -> None:
        batches.append(batch.rows.tolist())
        batch.slab.release()

    def again(before: LastCapture, likely: list[bool]) -> tuple[LastCapture, list[int], list[int]]:
        batches.clear()
        kept: list[int] = []
        standing = dataclasses.replace(before, likely=np.array(likely))
        outlet = CaptureSink(take, lambda rows, digests: kept.extend(rows.tolist()))
        after = Capture(plan, size, arena, DIGEST, outlet, lambda: standing).run()
        assert [d.tobytes() for d in after.digests] == [
            DIGEST(memory[start : start + n]) for start, n in spans(len(memory), size)
        ]
        return after, sorted(kept), sorted(row for rows in batches for row in rows)

    first = capture(plan, arena, take, size)
    assert again(first, [True, True, True])[1:] == ([0, 1], [2]), "small chunks are copied in any case"
    assert again(first, [False, True, True])[1:] == ([1], [0, 2])
    memory[size // 2] ^= 1  # where the sample is taken
    after, kept, copied = again(first, [True, True, True])
    assert (kept, copied) == ([1], [0, 2])
    memory[10] ^= 1  # where it is not
    assert again(after, [True, True, True])[1:] == ([1], [0, 2])
    assert arena.in_flight == 0


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
        lambda size: iter([Chunk(0, size, lambda out: LateError()), Chunk(size, 100, fill)]),
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


@pytest.mark.parametrize("shown", [True, False])
def test_a_capture_that_is_stopped_gives_its_slabs_back(shown: bool) -> None:
    plan = plan_of([bytes(9 * PAGE)], [shown])
    arena, stop = Arena(8 * PAGE, PAGE), []

    def take(batch: SlabChunks) -> None:
        stop.append(1)
        batch.slab.release()

    with pytest.raises(CaptureError, match="cancelled"):
        Capture(plan, PAGE, arena, DIGEST, CaptureSink(take, stop=lambda: len(stop) >= 3)).run()
    assert len(stop) == 3
    assert arena.in_flight == 0


# Copies first, digests later


@given(VALUES, st.integers(4, 60))
def test_what_is_not_guarded_may_change_as_soon_as_it_is_copied(
    values: list[tuple[bytes, bool, bool]], slots: int
) -> None:
    """Also where digests of it are still to come, as with an arena that has room for all of it."""
    arena, found, said = Arena(slots * PAGE, PAGE), dict[int, bytes](), list[int]()
    memory = [as_buffer(bytearray(value)) for value, _, _ in values]
    leaves = tuple(Leaf((f"leaf{i}",), Spec("bytes", shape=(len(m),))) for i, m in enumerate(memory))
    plan = CapturePlan.of(
        leaves,
        [
            CaptureSource(i, Box.whole((len(m),)), len(m), chunks_of(value), guarded, m if shown else None)
            for i, (m, (value, shown, guarded)) in enumerate(zip(memory, values, strict=True))
        ],
    )

    def changes() -> None:
        said.append(len(found))
        for buffer, (_, _, guarded) in zip(memory, values, strict=True):
            if not guarded:
                buffer.fill_(99)

    def take(batch: SlabChunks) -> None:
        for row, at, n, digest in zip(batch.rows.tolist(), batch.at, batch.nbytes, batch.digests, strict=True):
            found[row] = to_bytes(batch.slab.buffer[at : at + n])
            assert digest.tobytes() == DIGEST(as_buffer(found[row]))
        batch.slab.release()

    Capture(plan, PAGE, arena, DIGEST, CaptureSink(take, unguarded_done=changes)).run()
    expected = [value[start : start + n] for value, _, _ in values for start, n in spans(len(value), PAGE)]
    assert [found[row] for row in range(len(found))] == expected
    assert len(said) == 1
    assert arena.in_flight == 0
    here = [len(value) for value, _, guarded in values if not guarded]
    if all(shown for _, shown, guarded in values if not guarded) and sum(-(-n // PAGE) for n in here) < slots:
        assert said == [0], "all copies come before the first digest"


def test_the_last_of_several_threads_says_that_all_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    done, said = list[int](), list[int]()

    def copy(to: int, start: int, nbytes: int) -> None:
        time.sleep(0.02 if len(done) % 3 else 0.0)
        memmove(to, start, nbytes)
        done.append(start)

    monkeypatch.setattr(capture_module, "memmove", copy)
    monkeypatch.setattr(capture_module, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(capture_module, "usable_cores", lambda: 4)
    plan = plan_of([bytes([n]) * PAGE for n in range(11)], (True,) * 11)
    arena = Arena(20 * PAGE, PAGE)
    sink = CaptureSink(lambda batch: batch.slab.release(), unguarded_done=lambda: said.append(len(done)))
    Capture(plan, PAGE, arena, DIGEST, sink).run()
    assert said == [11]
    assert arena.in_flight == 0


def test_memory_for_the_next_capture_is_prepared_although_a_fast_disk_needed_little_for_this_one() -> None:
    chunk = HUGE + PAGE
    plan = plan_of([bytes(chunk + PAGE)] * 4, (True,) * 4)  # each of them ends in a slab of its own
    arena = Arena(16 * chunk, chunk)
    Capture(plan, chunk, arena, DIGEST, CaptureSink(lambda batch: batch.slab.release())).run()
    until(lambda: arena.has_ready([chunk, PAGE] * 4))
    arena.close()


@pytest.mark.parametrize("fails", ["take", "digest", "stop"])
def test_a_failure_after_all_copies_gives_every_slab_back(fails: str) -> None:
    plan = plan_of([bytes([n]) * PAGE for n in range(6)], (True,) * 6)
    arena, copied = Arena(20 * PAGE, PAGE), list[int]()

    def digest(data: Any) -> bytes:
        if fails == "digest" and copied:
            raise MemoryError
        return DIGEST(data)

    def take(batch: SlabChunks) -> None:
        batch.slab.release()
        if fails == "take":
            raise OSError("planted")

    sink = CaptureSink(take, unguarded_done=lambda: copied.append(1), stop=lambda: fails == "stop" and bool(copied))
    with pytest.raises((MemoryError, OSError, CaptureError)):
        Capture(plan, PAGE, arena, digest, sink).run()
    assert copied == [1]
    assert arena.in_flight == 0
