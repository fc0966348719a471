"""Engines and streams: every byte arrives where it should, whatever the kernel does on the way."""

import errno
import fcntl
import gc
import os
import queue
import random
import threading
from contextlib import closing, contextmanager, suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import has_uring

import tierstate as ts
from tierstate.manifest.chunk import empty_buffer
from tierstate.tiers.memory.pages import PAGE, fault_in, map_pages
from tierstate.tiers.posix import direct as stream_room
from tierstate.tiers.posix import io_engine
from tierstate.tiers.posix import io_engine as engine_room
from tierstate.tiers.posix.direct import BOUNCE_SIZE, AppendStream, preallocate, supports_direct_io
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.posix.files import BufferedFile
from tierstate.tiers.posix.io_engine import Engine, ThreadEngine, Transfer, UringEngine
from tierstate.tiers.posix.lustre import Lustre
from tierstate.tiers.testing import Lease, random_bytes

ENGINES = [
    pytest.param(ThreadEngine, id="threads"),
    pytest.param(
        UringEngine, id="uring", marks=pytest.mark.skipif(not has_uring(), reason="io_uring is forbidden here")
    ),
]


@pytest.fixture(params=ENGINES)
def engine(request):
    before = set(threading.enumerate())
    made = request.param(depth=3)
    with closing(made):
        yield made
    assert set(threading.enumerate()) <= before, "no thread is left"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    with closing(BufferedFile(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), path)) as made:
        yield made


def aligned(data):
    """The same bytes at the start of a page."""
    pages = map_pages(-(-max(data.numel(), 1) // PAGE) * PAGE)
    pages[: data.numel()].copy_(data)
    return pages[: data.numel()]


def test_what_is_written_is_read_back(engine: Engine, file):
    data = random_bytes(300_001, 1)
    engine.run(Transfer(True, file.descriptor, data, 12))
    back = empty_buffer(300_001)
    engine.run(Transfer(False, file.descriptor, back, 12))
    assert torch.equal(back, data)


def test_many_transfers_at_once_all_arrive(engine: Engine, file):
    pieces = [random_bytes(10_000 + i, i) for i in range(50)]
    over = threading.Semaphore(0)
    errors = []

    def done(error):
        errors.append(error)
        over.release()

    for i, piece in enumerate(pieces):
        engine.submit(Transfer(True, file.descriptor, piece, i * 20_000, done))
    for _ in pieces:
        assert over.acquire(timeout=30)
    assert errors == [None] * 50
    for i, piece in enumerate(pieces):
        assert os.pread(file.descriptor, piece.numel(), i * 20_000) == piece.numpy().tobytes()


def test_long_transfers_go_in_several_calls(engine: Engine, file, monkeypatch):
    monkeypatch.setattr(engine_room, "MAX_TRANSFER", 7001)
    data = random_bytes(100_000, 2)
    engine.run(Transfer(True, file.descriptor, data, 5))
    back = empty_buffer(100_000)
    engine.run(Transfer(False, file.descriptor, back, 5))
    assert torch.equal(back, data)


def test_a_file_that_ends_early_is_an_error(engine: Engine, file):
    engine.run(Transfer(True, file.descriptor, random_bytes(100, 3), 0))
    with pytest.raises(OSError, match="the file ended"):
        engine.run(Transfer(False, file.descriptor, empty_buffer(101), 0))


def test_a_bad_descriptor_is_the_error_the_kernel_gives(engine: Engine):
    with pytest.raises(OSError, match="Bad file descriptor") as found:
        engine.run(Transfer(True, 9999, random_bytes(10, 4), 0))
    assert found.value.errno == errno.EBADF


def test_an_error_of_one_transfer_is_not_another_ones(engine: Engine, file):
    results = {}
    over = threading.Semaphore(0)

    def done_of(i):
        def done(error):
            results[i] = error
            over.release()

        return done

    for i in range(20):
        descriptor = 9999 if i % 3 == 0 else file.descriptor
        engine.submit(Transfer(True, descriptor, random_bytes(4096, i), i * 4096, done_of(i)))
    for _ in range(20):
        assert over.acquire(timeout=30)
    assert {i: r is None for i, r in results.items()} == {i: i % 3 != 0 for i in range(20)}


def test_a_lack_of_memory_ends_the_transfer_and_no_thread(file, monkeypatch):
    def no_memory(_buffer):
        raise MemoryError

    with closing(ThreadEngine(depth=1)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(io_engine, "view", no_memory)
            with pytest.raises(OSError, match="Cannot allocate memory"):
                engine.run(Transfer(True, file.descriptor, random_bytes(10, 4), 0))
        engine.run(Transfer(True, file.descriptor, random_bytes(10, 4), 0))
    assert file.status().st_size == 10


def test_nothing_is_done_at_once(engine: Engine):
    engine.run(Transfer(True, 9999, empty_buffer(0), 0))


def test_a_forked_child_is_refused(engine: Engine, file):
    # A fork beside threads is what is tried here; Python would warn of it.
    engine._pid += 1
    try:
        with pytest.raises(OSError, match="belongs to the process"):
            engine.submit(Transfer(True, file.descriptor, random_bytes(10, 5), 0))
    finally:
        engine._pid -= 1


def test_who_is_late_still_finishes(engine: Engine, file):
    engine.end()
    data = random_bytes(5000, 1)
    engine.run(Transfer(True, file.descriptor, data, 7))
    assert os.pread(file.descriptor, 6000, 7) == data.numpy().tobytes()
    assert engine.join(60)


def test_a_listener_that_fails_ends_no_thread(engine: Engine, file, caplog):
    def fail(error):
        raise RuntimeError("the listener is broken")

    for _ in range(10):
        engine.submit(Transfer(True, file.descriptor, random_bytes(10, 1), 0, fail))
    engine.run(Transfer(True, file.descriptor, random_bytes(10, 2), 0))
    assert "the listener is broken" in caplog.text


def test_close_finishes_what_was_begun(file):
    for make in (p.values[0] for p in ENGINES):
        if make is UringEngine and not has_uring():
            continue
        engine = make(depth=2)
        done = []
        pieces = [random_bytes(50_000, i) for i in range(10)]
        for i, piece in enumerate(pieces):
            engine.submit(Transfer(True, file.descriptor, piece, i * 50_000, done.append))
        engine.close()
        assert done == [None] * 10


@pytest.mark.slow
@pytest.mark.parametrize("io", ["threads", "auto"])
def test_a_tier_that_is_dropped_without_being_closed_leaves_no_thread(io, tmp_path):
    before = set(threading.enumerate())
    tier = Nvme(path=tmp_path, io=io)
    tier.put("a", random_bytes(2 << 20, 1))
    assert set(threading.enumerate()) - before  # of those before, some may have ended meanwhile
    assert tier.traits.io.startswith("direct")
    del tier
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before


@pytest.mark.skipif(not has_uring(), reason="io_uring is forbidden here")
class TestUring:
    """What pyuring leaves to its callers."""

    @pytest.fixture
    def troubled(self, monkeypatch):
        """Rings that are interrupted, and move less than they were asked to."""
        open_ring = io_engine._open_ring

        class Troubled:
            def __init__(self, depth):
                self._ring, self._dice = open_ring(depth), random.Random(7)

            def write_async_ptr(self, descriptor, address, nbytes, offset, number):
                return self._ring.write_async_ptr(descriptor, address, self._some(nbytes), offset, number)

            def read_async_ptr(self, descriptor, address, nbytes, offset, number):
                return self._ring.read_async_ptr(descriptor, address, self._some(nbytes), offset, number)

            def wait_completion(self):
                if self._dice.random() < 0.5:
                    raise InterruptedError(errno.EINTR, "a signal")
                return self._ring.wait_completion()

            def close(self):
                self._ring.close()

            def _some(self, nbytes):
                return self._dice.randint(1, nbytes)

        monkeypatch.setattr(io_engine, "_open_ring", Troubled)

    def test_short_transfers_and_signals_change_nothing(self, troubled, file):
        data = random_bytes(200_000, 6)
        with closing(UringEngine()) as engine:
            engine.run(Transfer(True, file.descriptor, data, 3))
            back = empty_buffer(200_000)
            engine.run(Transfer(False, file.descriptor, back, 3))
        assert torch.equal(back, data)

    def test_what_the_kernel_does_not_take_at_once_is_submitted_again(self, monkeypatch, file):
        """The call has queued the transfer all the same, so that its memory must not be given back."""
        open_ring = io_engine._open_ring
        fails = iter([True, True, False, True])

        def refusing(depth):
            ring = open_ring(depth)
            write = ring.write_async_ptr

            def write_async_ptr(*args):
                write(*args)
                if next(fails, False):
                    raise OSError(errno.EAGAIN, "not now")

            monkeypatch.setattr(ring, "write_async_ptr", write_async_ptr)
            return ring

        monkeypatch.setattr(io_engine, "_open_ring", refusing)
        with closing(UringEngine()) as engine:
            pieces = [random_bytes(5000, i) for i in range(6)]
            for i, piece in enumerate(pieces):
                engine.run(Transfer(True, file.descriptor, piece, i * 5000))
                piece.zero_()
        for i in range(6):
            assert os.pread(file.descriptor, 5000, i * 5000) == random_bytes(5000, i).numpy().tobytes()

    def test_a_wait_that_fails_is_tried_again(self, monkeypatch, file):
        open_ring = io_engine._open_ring

        def failing(depth):
            ring = open_ring(depth)
            wait, fails = ring.wait_completion, iter([True, True, True])

            def wait_completion():
                if next(fails, False):
                    raise OSError(errno.EBUSY, "busy")
                return wait()

            monkeypatch.setattr(ring, "wait_completion", wait_completion)
            return ring

        monkeypatch.setattr(io_engine, "_open_ring", failing)
        data = random_bytes(100, 8)
        with closing(UringEngine()) as engine:
            engine.run(Transfer(True, file.descriptor, data, 0))
        assert os.pread(file.descriptor, 200, 0) == data.numpy().tobytes()

    def test_without_a_ring_the_reason_is_told(self, monkeypatch):
        def forbidden(depth):
            raise OSError(errno.EOPNOTSUPP, "io_uring is not to be had here")

        monkeypatch.setattr(io_engine, "_open_ring", forbidden)
        with pytest.raises(OSError, match="not to be had"):
            UringEngine()


PIECES = st.lists(
    st.tuples(
        st.sampled_from(
            [
                0,
                1,
                100,
                4095,
                4096,
                4097,
                BOUNCE_SIZE - 1,
                BOUNCE_SIZE,
                BOUNCE_SIZE + PAGE,
                BOUNCE_SIZE + 5,
                2 * BOUNCE_SIZE,
            ]
        ),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
)


@pytest.mark.slow
@pytest.mark.parametrize("make", [*ENGINES, pytest.param(None, id="buffered")])
@settings(max_examples=25, deadline=None)
@given(pieces=PIECES)
def test_a_stream_writes_what_was_appended(make, pieces, tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "file"
    engine = make(depth=2) if make else None
    leases, whole = [], []
    with closing(BufferedFile(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), path)) as file:
        stream = AppendStream(file, lambda: engine)
        for i, (nbytes, at_page, leased) in enumerate(pieces):
            data = random_bytes(nbytes, i)
            whole.append(data.numpy().tobytes())
            lease = Lease(data)
            lease.buffer = aligned(data) if at_page else lease.buffer
            if leased:
                if not stream.append(lease.buffer, lease.release):
                    lease.release()
                leases.append(lease)
            else:
                stream.append(lease.buffer, None)
                lease.buffer.zero_()
        assert stream.length == sum(map(len, whole))
        stream.finish()
    assert all(lease.releases == 1 for lease in leases)
    assert path.read_bytes() == b"".join(whole)
    if engine is not None:
        engine.close()


@pytest.mark.parametrize("make", ENGINES)
def test_a_stream_tells_of_a_failed_transfer_and_lets_go(make, tmp_path):
    read_only = tmp_path / "file"
    read_only.touch()
    leases = [Lease(empty_buffer(0)) for i in range(3)]
    for i, lease in enumerate(leases):
        lease.buffer = aligned(random_bytes(2 * BOUNCE_SIZE, i))

    def append_all(stream):
        for lease in leases:
            if not stream.append(lease.buffer, lease.release):
                lease.release()
        stream.finish()

    with closing(make(depth=2)) as engine, closing(BufferedFile(os.open(read_only, os.O_RDONLY), read_only)) as file:
        stream = AppendStream(file, lambda: engine)
        with pytest.raises(OSError, match="Bad file descriptor"):
            append_all(stream)
        stream.give_up()
        assert all(lease.releases <= 1 for lease in leases)
        assert leases[0].releases == 1


@pytest.mark.parametrize("make", ENGINES)
def test_a_lease_is_let_go_once_if_there_is_no_memory_for_the_tail(make, tmp_path, monkeypatch):
    def none(nbytes):
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(stream_room, "map_pages", none)
    lease = Lease(empty_buffer(0))
    lease.buffer = aligned(random_bytes(3 * BOUNCE_SIZE + 100, 1))
    tier = Nvme(path=tmp_path, io="threads" if make is ThreadEngine else "uring")
    writer = tier.writer("a")
    with pytest.raises(ts.TierUnavailable, match="ENOMEM"):
        writer.append(lease.buffer, lease.release)
    writer.abort()
    tier.close()
    assert lease.releases == 1
    assert list(tier.list("")) == []


class Nowhere(Engine):
    """Writes nothing, and says that it has."""

    def _submit(self, transfer: Transfer) -> None:
        transfer.done(None)

    def _end(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> bool:
        return True


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8), most=st.sampled_from([1 << 20, 4 << 20, 256 << 20]))
def test_no_more_is_reserved_ahead_than_a_file_is_long(sizes, most, tmp_path_factory):
    """What many short files reserve at once would be room that the others need, and memory on tmpfs."""
    path, reserved, buffer = tmp_path_factory.mktemp("reserved") / "file", [(0, 0)], map_pages(6 * BOUNCE_SIZE)
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(BufferedFile(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), path)) as file,
    ):
        patch.setattr(stream_room, "PREALLOCATE", most)
        patch.setattr(stream_room, "preallocate", lambda _file, offset, nbytes: reserved.append((offset, nbytes)))
        stream = AppendStream(file, lambda: Nowhere(2))
        for size in sizes:
            stream.append(buffer[: size * BOUNCE_SIZE], lambda: None)
            start, nbytes = reserved[-1]
            assert stream.length <= start + nbytes <= stream.length + min(stream.length, most)
        stream.finish()
    assert all(a + n == b for (a, n), (b, _) in pairwise(reserved)), "all of the file, one piece after the other"


def test_reserving_and_probing_leave_a_file_as_it_is(file):
    file.write(0, random_bytes(10, 1))
    preallocate(file.descriptor, 0, 1 << 20)
    flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
    supports_direct_io(file.descriptor)
    assert file.status().st_size == 10
    assert fcntl.fcntl(file.descriptor, fcntl.F_GETFL) == flags


@pytest.mark.parametrize("nbytes", [PAGE, 1 << 20, 4 << 20])
def test_pages_are_aligned_zeroed_and_a_storage_of_their_own(nbytes):
    pages = map_pages(nbytes)
    assert pages.numel() == nbytes
    assert pages.data_ptr() % PAGE == 0
    assert pages.untyped_storage().data_ptr() == pages.data_ptr()
    fault_in(pages)
    assert not pages.any()
    pages.fill_(1)
    fault_in(pages)
    assert pages.all()


@contextmanager
def no_memory_at(step, *functions):
    """Raise a MemoryError before a line of these functions, in threads that are started in the block. Yields the
    number of lines so far."""
    seen, codes = [], {function.__code__ for function in functions}

    def trace(frame, event, _argument):
        if frame.f_code not in codes:
            return None
        if event == "line":
            seen.append(frame.f_lineno)
            if len(seen) == step:
                raise MemoryError
        return trace

    before = threading.gettrace()
    threading.settrace(trace)
    try:
        yield seen
    finally:
        threading.settrace(before)


@pytest.mark.parametrize(
    ("make", "functions"),
    [
        pytest.param(ThreadEngine, (io_engine._call, Transfer.advance), id="threads"),
        pytest.param(
            UringEngine,
            (UringEngine._start, Transfer.advance, Transfer.left.fget),
            id="uring",
            marks=pytest.mark.skipif(not has_uring(), reason="io_uring is forbidden here"),
        ),
    ],
)
def test_wherever_memory_lacks_every_transfer_ends_and_the_threads_go_on(make, functions, file):
    """If a thread ended, or lost a transfer, what waits for it would do so for ever, and its memory with it."""
    data = random_bytes(10_000, 1)
    step = 0
    while True:
        step += 1
        with no_memory_at(step, *functions) as seen:
            engine = make(depth=1)
        results = queue.SimpleQueue()
        for i in range(4):
            engine.submit(Transfer(True, file.descriptor, data, i * 20_000, results.put))
        errors = [results.get(timeout=30) for _ in range(4)]
        assert [error.errno for error in errors if error is not None] in ([], [errno.ENOMEM])
        assert engine.close(30)
        if len(seen) < step:
            break
    assert step > 6


@pytest.mark.parametrize("nth", range(5))
@pytest.mark.parametrize("make", ENGINES)
def test_a_transfer_that_cannot_be_started_for_lack_of_memory_is_waited_for_by_nobody(make, nth, tmp_path, monkeypatch):
    """Also not where transfers of the same buffer are under way: the lease is let go once, when they are over."""
    tier = Lustre(path=tmp_path, io="threads" if make is ThreadEngine else "uring", stripe_size=1 << 20)
    submit, calls = make.submit, iter(range(100))

    def fail(engine, transfer):
        if next(calls) == nth:
            raise MemoryError
        submit(engine, transfer)

    monkeypatch.setattr(make, "submit", fail)
    lease = Lease(empty_buffer(0))
    lease.buffer = aligned(random_bytes(3 * BOUNCE_SIZE + 100, 1))
    writer = tier.writer("a")
    writer.append(random_bytes(PAGE, 2))  # so that the lease's bytes are cut where stripes begin
    with suppress(MemoryError):
        writer.append(lease.buffer, lease.release)
    with pytest.raises((ts.TierUnavailable, MemoryError)):
        writer.close()
    writer.abort()
    tier.close()
    assert lease.releases == 1
    assert list(tier.list("")) == []
