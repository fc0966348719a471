"""Codecs: what is encoded comes back, and what is not an encoding ends in Damaged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstate.engine.codecs.codecs import (
    BLOSC,
    CODECS,
    LONGEST,
    PAYS_BELOW,
    SAMPLE,
    compress,
    compressed_size,
    decompress,
    take_sample,
)
from tierstate.manifest.chunk import Buffer, as_buffer, to_bytes
from tierstate.manifest.errors import Damaged

ITEMSIZES = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 24, 200, 255, 256, 300, 65_535])


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Bytes of every sort: short ones, long runs, noise, and floats that resemble each other; also past the sample."""
    kind = draw(st.sampled_from(["any", "run", "noise", "floats", "specials"]))
    n = draw(st.sampled_from([0, 1, 15, 16, 17, 4096, 65_537, 2 * SAMPLE, 2 * SAMPLE + 1, 700_001]))
    chance = np.random.default_rng(draw(st.integers(0, 99)))
    if kind == "any":
        return draw(st.binary(max_size=300))
    if kind == "run":
        return bytes([draw(st.integers(0, 255))]) * n
    if kind == "noise":
        return chance.bytes(n)
    if kind == "specials":
        # NaNs of every payload and sign, infinities, -0.0 and denormals, as bits.
        bits = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 1], "<u4")
        return (chance.choice(bits, n // 4) ^ chance.integers(0, 2, n // 4, "u4")).astype("<u4").tobytes()
    return chance.normal(size=n // 4).astype("<f4").tobytes()


@given(data=contents(), itemsize=ITEMSIZES, codec=st.sampled_from(CODECS))
def test_what_is_encoded_comes_back(data: bytes, itemsize: int, codec: str) -> None:
    buffer = as_buffer(data)
    name, stored = compress(codec, buffer, itemsize)
    assert to_bytes(decompress(name, stored, len(data))) == data
    assert to_bytes(buffer) == data
    if name == "raw":
        assert stored is buffer, "raw bytes are not copied"
    else:
        assert len(stored) <= PAYS_BELOW * len(data)
    if codec == "raw":
        assert name == "raw"


def test_compressing_pays_where_it_can() -> None:
    weights = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).bfloat16().view(torch.uint8)
    zeros = torch.zeros(1 << 20, dtype=torch.uint8)
    for codec in ("fast", "small", "auto"):
        assert compress(codec, zeros, 4)[0] == BLOSC
        assert len(compress(codec, zeros, 4)[1]) < 50_000
        name, stored = compress(codec, weights, 2)
        assert name == BLOSC
        assert len(stored) < 0.85 * len(weights)
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    assert compress("small", noise, 4) == ("raw", noise)


@pytest.mark.parametrize("itemsize", [2, 3, 4, 5, 7, 8, 12, 16, 24, 100, LONGEST])
def test_small_takes_elements_of_any_width_apart_into_planes(itemsize: int) -> None:
    """Every other byte of an element is noise, the same in no two of them: only byte by byte is there anything to save,
    and then nearly all of it, for the planes that are constant."""
    chance, elements = np.random.default_rng(0), (2 << 20) // itemsize
    rows = np.zeros((elements, itemsize), "u1")
    rows[:, 0] = chance.integers(0, 256, elements)
    raw = as_buffer(rows.tobytes())
    apart, together = compressed_size("small", raw, itemsize), compressed_size("small", raw, 1)
    assert apart < 1.1 * elements + 4096
    assert itemsize > 100 or apart < together


@given(n=st.integers(0, 3 * SAMPLE), itemsize=ITEMSIZES, wanted=st.sampled_from([4096, 65_536, SAMPLE]))
def test_a_sample_is_whole_elements_from_all_over(n: int, itemsize: int, wanted: int) -> None:
    # Each byte says where it lies: in which element, and where in it.
    unit = itemsize if itemsize <= LONGEST else 1
    where = torch.arange(n) % unit
    data = where.to(torch.uint8)
    sample = take_sample(data, wanted, itemsize)
    assert len(sample) <= max(wanted, unit)
    if n <= wanted:
        assert sample is data
        return
    assert torch.equal(sample, (torch.arange(len(sample)) % unit).to(torch.uint8)), "an element was cut"
    thirds = torch.arange(n).float().div(n / 3).to(torch.uint8)
    assert set(take_sample(thirds, wanted, itemsize).unique().tolist()) >= {0, 1, 2}


def test_what_only_the_middle_of_a_chunk_is_like_does_not_decide() -> None:
    noise, zeros = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
    compressible = torch.cat([zeros, zeros, noise, zeros, zeros])
    assert compress("fast", compressible, 4)[0] == BLOSC
    assert len(compress("fast", compressible, 4)[1]) < 0.25 * len(compressible)


@given(stored=st.binary(max_size=400), nbytes=st.integers(0, 1 << 20), codec=st.sampled_from(["raw", BLOSC, "lzma"]))
def test_any_bytes_are_decoded_or_damaged(stored: bytes, nbytes: int, codec: str) -> None:
    check(codec, as_buffer(stored), nbytes)


@given(
    data=contents(),
    codec=st.sampled_from(["fast", "small"]),
    at=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    cut=st.integers(-20, 20),
)
def test_an_encoding_that_was_changed_is_decoded_or_damaged(
    data: bytes, codec: str, at: float, bit: int, cut: int
) -> None:
    name, stored = compress(codec, as_buffer(data), 4)
    changed = bytearray(to_bytes(stored))
    if changed:
        changed[int(at * len(changed))] ^= 1 << bit
    check(name, as_buffer(bytes(changed[:cut] if cut < 0 else changed + bytes(cut))), len(data))


@given(header=st.binary(min_size=4, max_size=4), rest=st.binary(max_size=200), blocksize=st.integers(0, (1 << 32) - 1))
def test_a_hostile_header_with_right_lengths_is_decoded_or_damaged(header: bytes, rest: bytes, blocksize: int) -> None:
    total = 16 + len(rest)
    for nbytes in (0, 1, 4096, 100_000):
        lengths = nbytes.to_bytes(4, "little") + blocksize.to_bytes(4, "little") + total.to_bytes(4, "little")
        check(BLOSC, as_buffer(header + lengths + rest), nbytes)


def check(codec: str, stored: Buffer, nbytes: int) -> None:
    """Decoding gives a buffer of the right length, or `Damaged`."""
    try:
        raw = decompress(codec, stored, nbytes)
    except Damaged:
        return
    assert len(raw) == nbytes


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(Damaged, match="3 raw bytes where 4 are right"):
        decompress("raw", as_buffer(b"abc"), 4)
    with pytest.raises(Damaged, match="'lzma', which this program does not know"):
        decompress("lzma", as_buffer(b"abc"), 3)
    with pytest.raises(Damaged, match=r"\(5000, 12\) are right"):
        decompress(BLOSC, as_buffer(bytes(12)), 5000)
