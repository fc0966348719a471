"""Tests for GPUs run on real ones, and on fake ones wherever there is a C++ compiler (`test_under_fake`)."""

import gc
from collections.abc import Iterator

import pytest
from support import fake_cuda

# Tests of what only the fake can show, such as copies that end at the worst moment.
collect_ignore = ["test_under_fake.py"] if fake_cuda.is_installed() else ["fake"]


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    """Under the fake: devices start anew, and what a real one would have crashed with fails the test.

    Everywhere: tests measure device memory, so that what earlier ones have left in reference cycles goes first.
    """
    gc.collect()
    if not fake_cuda.is_installed():
        yield
        return
    fake = fake_cuda.fake()
    fake.reset()
    fake.faults()
    yield
    fake.synchronize()
    assert fake.faults() == []
    assert fake.device.peek_last_error() == 0, "an error of CUDA was left behind, and breaks the next kernel"
