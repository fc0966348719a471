"""The tier around a tier that encrypts what it stores."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.chunk import empty_buffer, to_bytes
from tierstate.manifest.errors import Oversized, TierUnavailable, Unauthentic
from tierstate.tiers.base import Range, Tier, layer_of
from tierstate.tiers.keys import SecretKey
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.memory.pages import map_pages
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.testing import Fault, Faulty, TierContract, random_bytes
from tierstate.tiers.wrappers import encrypt
from tierstate.tiers.wrappers.encrypt import BLOCK, Encrypted, plain_length, stored_length
from tierstate.tiers.wrappers.keyring import RING_PREFIX, read_ring
from tierstate.tiers.wrappers.measure import Measured

KEYS = [SecretKey(bytes([n]) * 32) for n in range(3)]
LENGTHS = [0, 1, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7]


class TestContract(TierContract):
    def make(self, tmp_path: Path) -> Tier:
        return Encrypted(Nvme(path=tmp_path), KEYS)

    def reopen(self, tier: Tier) -> Tier:
        assert isinstance(tier, Encrypted)
        assert isinstance(tier.inner, Nvme)
        return Encrypted(Nvme(path=tier.inner.path), KEYS)


def stored(tier: Tier, key: str) -> bytes:
    return to_bytes(tier.inner.get(key)) if tier.inner is not None else b""


def replace(tier: Tier, key: str, data: bytes) -> None:
    assert tier.inner is not None
    tier.inner.delete(key)
    tier.inner.put(key, torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else empty_buffer(0))


@given(st.integers(0, 1 << 50))
def test_lengths_are_told_from_lengths(nbytes: int) -> None:
    assert plain_length(stored_length(nbytes)) == nbytes
    assert plain_length(stored_length(nbytes) + 1) in (None, nbytes + 1)


@given(st.integers(-100, 10 * BLOCK))
def test_a_length_that_no_object_has_is_none(stored: int) -> None:
    found = plain_length(stored)
    assert found is None or stored_length(found) == stored


@given(
    nbytes=st.sampled_from(LENGTHS) | st.integers(0, 4 * BLOCK),
    cuts=st.lists(st.integers(0, 4 * BLOCK), max_size=6),
    ranges=st.lists(st.tuples(st.integers(0, 4 * BLOCK), st.integers(0, 4 * BLOCK)), max_size=40),
    put=st.booleans(),
)
def test_every_range_is_what_was_written(
    nbytes: int, cuts: list[int], ranges: list[tuple[int, int]], put: bool
) -> None:
    tier, data = Encrypted(Memory(), KEYS), random_bytes(nbytes, 1)
    if put:
        tier.put("a", data)
    else:
        edges = [0, *sorted(cut for cut in cuts if cut <= nbytes), nbytes]
        released: list[int] = []

        def reuse(piece: torch.Tensor) -> None:
            released.append(piece.fill_(7).numel())

        with tier.writer("a", nbytes) as writer:
            for start, end in pairwise(edges):
                piece = data[start:end].clone()
                writer.append(piece, partial(reuse, piece))
        assert sum(released) == nbytes
        assert len(released) == len(edges) - 1
    assert tier.size("a") == nbytes
    assert torch.equal(tier.get("a"), data)
    inside = [(a, b) for a, b in ranges if a <= b <= nbytes]
    out = [Range(a, empty_buffer(b - a)) for a, b in inside]
    tier.read("a", out)
    for (a, b), found in zip(inside, out, strict=True):
        assert torch.equal(found.out, data[a:b])


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_any_changed_byte_and_any_other_length_is_noticed(nbytes: int) -> None:
    tier = Encrypted(Memory(), KEYS)
    tier.put("a", random_bytes(nbytes, 1))
    right = stored(tier, "a")
    spots = {*range(0, len(right), max(1, len(right) // 7)), *range(max(0, len(right) - 100), len(right), 3)}
    flipped = [right[:spot] + bytes([right[spot] ^ 4]) + right[spot + 1 :] for spot in sorted(spots)]
    cut = [b"", right[:-1], right[1:], right + b"\0", right[:-64], right[:-80]]
    cut += [right[: nbytes // 2] + right[nbytes:], right[:nbytes] + right[nbytes + 16 :] if nbytes else b""]
    for wrong in (one for one in flipped + cut if one != right):
        replace(tier, "a", wrong)
        with pytest.raises(Unauthentic):
            Encrypted(tier.inner, KEYS).get("a")
    replace(tier, "a", right)
    assert torch.equal(tier.get("a"), random_bytes(nbytes, 1))


def test_blocks_and_objects_cannot_be_exchanged() -> None:
    tier, data = Encrypted(Memory(), KEYS), random_bytes(2 * BLOCK, 1)
    for key in ("a", "b"):
        tier.put(key, data)
    one, two = stored(tier, "a"), stored(tier, "b")
    tags = 2 * BLOCK
    swapped = one[BLOCK:tags] + one[:BLOCK] + one[tags + 16 : tags + 32] + one[tags : tags + 16] + one[tags + 32 :]
    for wrong in (two, two[:tags] + one[tags:], one[:tags] + two[tags:], swapped):
        replace(tier, "a", wrong)
        with pytest.raises(Unauthentic, match="a: "):
            Encrypted(tier.inner, KEYS).get("a")


def test_equal_bytes_are_never_stored_alike() -> None:
    tier, data = Encrypted(Memory(), KEYS), torch.zeros(2 * BLOCK, dtype=torch.uint8)
    blocks = set()
    for key in ("a", "b"):
        for _ in range(2):
            tier.delete(key)
            tier.put(key, data)
            found = stored(tier, key)
            blocks |= {found[:BLOCK], found[BLOCK : 2 * BLOCK]}
    assert len(blocks) == 8
    assert all(sum(block) for block in blocks)


def test_no_nonce_is_used_twice_under_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of every object, put or written in pieces, with its trailer."""
    used: set[tuple[bytes, bytes]] = set()

    class Watched:
        def __init__(self, key: bytes) -> None:
            self.key, self.inner = key, right(key)

        def _note(self, nonce: bytes) -> None:
            assert (self.key, bytes(nonce)) not in used
            used.add((self.key, bytes(nonce)))

        def encrypt(self, nonce: bytes, *given: object) -> bytes:
            self._note(nonce)
            return bytes(self.inner.encrypt(nonce, *given))

        def encrypt_into(self, nonce: bytes, *given: object) -> None:
            self._note(nonce)
            self.inner.encrypt_into(nonce, *given)

    right = encrypt.new_cipher
    monkeypatch.setattr(encrypt, "new_cipher", Watched)
    tier = Encrypted(Memory(), KEYS)
    for _ in range(3):
        for key in ("a", "b"):
            tier.delete(key)
            tier.put(key, random_bytes(3 * BLOCK + 5, 1))
        tier.delete("c")
        with tier.writer("c") as writer:
            for nbytes in (5, BLOCK, 2 * BLOCK - 3):
                writer.append(random_bytes(nbytes, 2))
    assert len(used) == 3 * (5 + 5 + 5)


def test_another_key_is_refused_by_its_id() -> None:
    inner = Memory()
    Encrypted(inner, KEYS[:1]).put("a", random_bytes(10, 1))
    with pytest.raises(Unauthentic, match=f"key {KEYS[0].id}; the policy has {KEYS[1].id}") as caught:
        Encrypted(inner, KEYS[1:2]).get("a")
    assert caught.value.key_id == KEYS[0].id
    with pytest.raises(Unauthentic, match=f"key {KEYS[0].id}"):
        Encrypted(inner, KEYS[1:2]).put("b", random_bytes(10, 1))
    assert [*inner.list("")] == ["a", *inner.list(RING_PREFIX)], "nothing is written that nobody could read"


def test_the_key_of_a_tier_is_replaced_without_touching_an_object() -> None:
    inner = Memory()
    old, both, new = (Encrypted(inner, keys) for keys in (KEYS[:1], [KEYS[1], KEYS[0]], KEYS[1:2]))
    old.put("a", random_bytes(1000, 1))
    before = to_bytes(inner.get("a"))
    running = Encrypted(inner, KEYS[:1])
    assert torch.equal(running.get("a"), random_bytes(1000, 1))
    ring = both.replace_key()
    assert (ring.number, len(ring.keys)) == (2, 2)
    assert to_bytes(inner.get("a")) == before
    new.put("b", random_bytes(1000, 2))
    running.put("c", random_bytes(1000, 3))  # a job that runs on with the ring that it has read
    for number, key in enumerate("abc", 1):
        assert torch.equal(Encrypted(inner, KEYS[1:2]).get(key), random_bytes(1000, number))
    with pytest.raises(Unauthentic, match=f"key {KEYS[1].id}"):
        Encrypted(inner, KEYS[:1]).get("a")
    with pytest.raises(Unauthentic, match=f"key {KEYS[1].id}"):
        running.get("b")  # a data key that the old key never wrapped
    assert torch.equal(running.get("a"), random_bytes(1000, 1))
    assert {*inner.list(RING_PREFIX)} == {"keys/000002.0", "keys/000002.1"}


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize("operation", ["put", "delete"])
def test_a_replacement_that_is_interrupted_leaves_a_ring(operation: str, at: int) -> None:
    inner = Memory()
    Encrypted(inner, KEYS[:1]).put("a", random_bytes(1000, 1))
    broken = Faulty(inner, Fault(operation, at, TierUnavailable("gone")))  # type: ignore[arg-type]
    both = [KEYS[1], KEYS[0]]
    try:
        Encrypted(broken, both).replace_key()
    except TierUnavailable:
        assert torch.equal(Encrypted(inner, both).get("a"), random_bytes(1000, 1))
        Encrypted(inner, both).replace_key()
    assert torch.equal(Encrypted(inner, KEYS[1:2]).get("a"), random_bytes(1000, 1))
    assert len({key.partition(".")[0] for key in inner.list(RING_PREFIX)}) == 1


@pytest.mark.parametrize("copy", [0, 1])
def test_a_damaged_copy_of_the_ring_is_no_harm(copy: int) -> None:
    inner = Memory()
    Encrypted(inner, KEYS).put("a", random_bytes(10, 1))
    key = f"keys/000001.{copy}"
    data = to_bytes(inner.get(key))
    for wrong in (b"", b"{}", b"[1]", data[:-3], data.replace(b"0", b"1", 1)):
        inner.delete(key)
        inner.put(key, torch.frombuffer(bytearray(wrong or b"x"), dtype=torch.uint8))
        assert torch.equal(Encrypted(inner, KEYS).get("a"), random_bytes(10, 1))
    inner.delete(key)
    assert torch.equal(Encrypted(inner, KEYS).get("a"), random_bytes(10, 1))


def test_a_ring_is_bound_to_its_number() -> None:
    """An older ring cannot be put in the place of a newer one under the newer one's number."""
    inner = Memory()
    Encrypted(inner, KEYS[:1]).put("a", random_bytes(10, 1))
    old = inner.get("keys/000001.0").clone()
    Encrypted(inner, [KEYS[1], KEYS[0]]).replace_key()
    for copy in range(2):
        inner.delete(f"keys/000002.{copy}")
        inner.put(f"keys/000002.{copy}", old)
    with pytest.raises(Unauthentic, match="is not what was written with key"):
        Encrypted(inner, [KEYS[1], KEYS[0]]).get("a")


def test_two_that_begin_at_once_have_one_ring() -> None:
    inner = Memory()

    class Racing(Faulty):
        """Between the look and the put of one process another one makes the ring."""

        def list(self, prefix: str):  # type: ignore[no-untyped-def]
            found = [*super().list(prefix)]
            if not found and not racing:
                racing.append(1)
                Encrypted(inner, KEYS).put("b", random_bytes(10, 2))
            return iter(found)

    racing: list[int] = []
    tier = Encrypted(Racing(inner), KEYS)
    tier.put("a", random_bytes(10, 1))
    for number, key in enumerate("ab", 1):
        assert torch.equal(Encrypted(inner, KEYS).get(key), random_bytes(10, number))
    ring = read_ring(inner, KEYS)
    assert ring is not None
    assert len(ring.keys) == 1


@pytest.mark.parametrize("before", [0, 5, 2 * BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("after", [0, 5, 2 * BLOCK, 3 * BLOCK])
def test_an_object_that_another_process_has_made_anew_is_read(before: int, after: int) -> None:
    inner = Memory()
    tier, other = Encrypted(inner, KEYS), Encrypted(inner, KEYS)
    for seed, nbytes in enumerate((before, after)):
        other.delete("a")
        other.put("a", random_bytes(nbytes, seed))
        out = empty_buffer(nbytes)
        tier.read("a", [Range(0, out)])
        assert torch.equal(out, random_bytes(nbytes, seed))


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_a_whole_object_takes_two_requests(nbytes: int) -> None:
    """One for its length, and one for its bytes."""
    inner = Measured(Memory())
    tier = Encrypted(inner, KEYS)
    tier.put("a", random_bytes(nbytes, 1))
    Encrypted(inner, KEYS).get("a")
    for read in (tier.get, lambda key: tier.get_within(key, nbytes, "a thing")):
        before = {name: one.calls for name, one in inner.operations.items()}
        assert torch.equal(read("a"), random_bytes(nbytes, 1))
        made = {name: one.calls - before[name] for name, one in inner.operations.items()}
        assert {name: calls for name, calls in made.items() if calls} == {"size": 1, "read": 1}
    with pytest.raises(Oversized):
        tier.get_within("a", nbytes - 1, "a thing")


def test_the_ring_is_no_object_of_the_tier() -> None:
    inner = Memory()
    tier = Encrypted(inner, KEYS)
    tier.put("a", random_bytes(10, 1))
    assert [*tier.list("")] == ["a"]
    with pytest.raises(ValueError, match="keys of an encrypted tier"):
        tier.put("keys/000009.0", random_bytes(10, 1))
    assert layer_of(tier, Encrypted) is tier
    assert layer_of(inner, Encrypted) is None


def test_what_is_not_encrypted_is_refused() -> None:
    inner = Memory()
    for nbytes in (0, 10, 64, 100, 1 << 20):
        inner.put(f"plain-{nbytes}", random_bytes(nbytes, 1))
        with pytest.raises(Unauthentic, match="is not encrypted"):
            Encrypted(inner, KEYS).get(f"plain-{nbytes}")


def test_buffers_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a writer is bounded by what the tier inside has under way."""
    made = []
    monkeypatch.setattr(encrypt, "map_pages", lambda nbytes: made.append(nbytes) or map_pages(nbytes))
    tier, data = Encrypted(Nvme(path=tmp_path), KEYS), torch.zeros(encrypt.STAGE, dtype=torch.uint8)
    for key in "ab":
        with tier.writer(key) as writer:
            for _ in range(20):
                writer.append(data)
    assert 0 < len(made) < 40
    assert 0 < len(tier.stages) <= encrypt.STAGES_KEPT
