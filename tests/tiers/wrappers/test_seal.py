"""The tier around a tier that seals what it stores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tierstate.manifest.errors import Unauthentic
from tierstate.manifest.seal import SealKey
from tierstate.tiers.base import Range, Tier, layer_of
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.testing import TierContract, random_bytes
from tierstate.tiers.wrappers.seal import Sealed

KEYS = [SealKey.of(bytes([n]) * 32) for n in range(3)]


class TestContract(TierContract):
    def make(self, tmp_path: Path) -> Tier:
        return Sealed(Nvme(path=tmp_path), KEYS)


def test_what_is_bare_is_stored_as_it_is() -> None:
    inner = Memory()
    tier = Sealed(inner, KEYS, bare=lambda key: key.startswith("packs/"))
    data = random_bytes(1000, 1)
    for key in ("packs/a", "b"):
        tier.put(key, data)
        with tier.writer(f"{key}-written") as writer:
            writer.append(data)
    assert torch.equal(inner.get("packs/a"), data)
    assert torch.equal(inner.get("packs/a-written"), data)
    assert inner.size("b") == inner.size("b-written") == 1064
    for key in ("packs/a", "b", "packs/a-written", "b-written"):
        assert tier.size(key) == 1000
        out = torch.zeros(10, dtype=torch.uint8)
        tier.read(key, [Range(7, out)])
        assert torch.equal(out, data[7:17])
    assert layer_of(tier, Sealed) is tier
    assert layer_of(inner, Sealed) is None


def test_a_range_of_a_changed_object_is_refused() -> None:
    inner = Memory()
    tier = Sealed(inner, KEYS)
    tier.put("a", random_bytes(1000, 1))
    stored = inner.get("a").clone()
    stored[-1] ^= 1
    inner.delete("a")
    inner.put("a", stored)
    with pytest.raises(Unauthentic, match="changed, or moved"):
        tier.read("a", [Range(0, torch.zeros(10, dtype=torch.uint8))])


def test_the_first_key_seals_and_all_are_trusted() -> None:
    inner = Memory()
    Sealed(inner, KEYS[2:]).put("a", random_bytes(10, 1))
    assert torch.equal(Sealed(inner, KEYS).get("a"), random_bytes(10, 1))
    with pytest.raises(Unauthentic, match=KEYS[2].id) as caught:
        Sealed(inner, KEYS[:2]).get("a")
    assert caught.value.key_id == KEYS[2].id
