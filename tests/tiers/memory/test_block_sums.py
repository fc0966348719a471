"""Checksums of memory: what they are, what they notice, and how little memory they need."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from tierstate.tiers.memory import block_sums as module
from tierstate.tiers.memory.block_sums import SUM_BLOCK, SUM_PART, block_sums
from tierstate.tiers.testing import random_bytes


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.integers(0, 9))
@example(0, 1, 1, 0)
@example(12, 2, 3, 0)
def test_the_sums_are_what_they_are_said_to_be_in_parts_of_any_length(
    blocks: int, part: int, parts: int, seed: int
) -> None:
    memory = random_bytes(blocks * SUM_BLOCK, seed)
    words = memory.numpy().view("<i4").reshape(blocks, SUM_BLOCK // 4).astype("i8")
    with mock.patch.multiple(module, SUM_PART=part * SUM_BLOCK, SUM_GROUP=parts * part * SUM_BLOCK):
        sums = block_sums(memory)
    place = np.arange(SUM_BLOCK // 4)
    assert sums.dtype == torch.int64
    assert sums.tolist() == np.stack([words.sum(1), (words * place).sum(1)], 1).tolist()


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_sums_of_the_extreme_words_are_exact_and_nothing_overflows(byte: int) -> None:
    memory = torch.full((SUM_BLOCK,), byte, dtype=torch.uint8)
    word, count = int(memory[:4].view(torch.int32)), SUM_BLOCK // 4
    assert block_sums(memory).tolist() == [[word * count, word * count * (count - 1) // 2]]


def test_memory_that_is_no_whole_number_of_blocks_is_refused() -> None:
    for nbytes in (4, SUM_BLOCK - 4, SUM_BLOCK + 4, SUM_BLOCK + 1):
        with pytest.raises(RuntimeError):
            block_sums(torch.zeros(nbytes, dtype=torch.uint8))


def temporary(memory: torch.Tensor) -> int:
    """The most bytes that torch's allocator had given out at once while the sums were made."""
    held = most = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        sums = block_sums(memory)
    assert seen.profiler is not None
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert most >= sums.nbytes, "the allocator was seen at work"
    return most


@pytest.mark.slow
def test_sums_of_any_length_need_less_than_40_mib() -> None:
    """Also those of many parts, with one more block; a copy in 64 bits would be 512 MiB."""
    memory = torch.zeros(16 * SUM_PART + SUM_BLOCK, dtype=torch.uint8)
    assert temporary(memory) < 40 << 20
    assert temporary(memory[:SUM_BLOCK]) < 1 << 20


WORD = st.integers(-(1 << 31), (1 << 31) - 1)
PLACE = st.integers(0, SUM_BLOCK // 4 - 1)


@given(st.lists(st.tuples(PLACE, WORD), min_size=1, max_size=2, unique_by=lambda change: change[0]))
def test_a_change_of_one_word_or_two_shows_in_the_sums(changes: list[tuple[int, int]]) -> None:
    memory = random_bytes(2 * SUM_BLOCK, 3)
    words, before = memory.view(torch.int32), block_sums(memory)
    changed = False
    for place, word in changes:
        changed |= int(words[place]) != word
        words[place] = word
    now = block_sums(memory)
    assert torch.equal(now[0], before[0]) is not changed
    assert torch.equal(now[1], before[1])


@given(PLACE, PLACE, st.integers(0, 31))
def test_bits_flipped_against_each_other_and_exchanged_words_show(one: int, other: int, bit: int) -> None:
    memory = torch.zeros(SUM_BLOCK, dtype=torch.uint8)
    words = memory.view(torch.int32)
    words[one] = 1 << bit if bit < 31 else -(1 << 31)
    before = block_sums(memory)
    words[one], words[other] = 0, int(words[one])
    assert torch.equal(block_sums(memory), before) is (one == other)
