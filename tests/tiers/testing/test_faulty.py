"""The tier around a tier that fails, lies or forgets."""

from typing import Any

import pytest
import torch

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import TierUnavailable
from tierstate.tiers.base import Range
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault, Faulty, Lease, random_bytes


def test_an_error_before_and_after() -> None:
    for after, stored in ((False, []), (True, ["b"])):
        tier = Faulty(Memory(), Fault("put", 2, TierUnavailable("lost"), after=after))
        tier.put("a", empty_buffer(1))
        with pytest.raises(TierUnavailable, match="lost"):
            tier.put("b", empty_buffer(1))
        tier.put("c", empty_buffer(1))
        assert list(tier.list("")) == sorted(["a", "c", *stored])
        assert tier.calls["put"] == 3


@pytest.mark.parametrize("after", [False, True])
def test_what_a_caller_notes_on_an_error_stays_with_that_call(after: bool) -> None:
    given = TierUnavailable("down", tier="far", key="a")
    tier = Faulty(Memory(), Fault("put", 0, given, after=after))
    for key in "ab":
        with pytest.raises(TierUnavailable) as caught:
            tier.put(key, empty_buffer(1))
        assert (str(caught.value), caught.value.tier, caught.value.key) == ("down", "far", "a")
        assert not hasattr(caught.value, "__notes__")
        caught.value.add_note(f"this was {key}")
    assert (given.__traceback__, hasattr(given, "__notes__")) == (None, False)


def test_an_error_of_a_class_that_cannot_be_copied_is_raised_too() -> None:
    class Full(Exception):
        def __init__(self, needed: int, free: int) -> None:
            super().__init__(f"{needed} > {free}")

    tier = Faulty(Memory(), Fault("put", 0, Full(2, 1)))
    for key in "ab":
        with pytest.raises(Full, match="2 > 1"):
            tier.put(key, empty_buffer(1))


@pytest.mark.parametrize("operation", ["put", "read", "list", "size", "delete", "writer", "append", "close"])
def test_every_operation_can_fail(operation: Any) -> None:
    tier = Faulty(Memory())
    tier.put("a", random_bytes(10))
    tier.add(Fault(operation, error=TierUnavailable("down")))
    lease = Lease(random_bytes(10))

    def everything() -> None:
        tier.put("b", empty_buffer(1))
        tier.get("a")
        list(tier.list(""))
        tier.delete("b")
        with tier.writer("c") as writer:
            writer.append(lease.buffer, lease.release)

    with pytest.raises(TierUnavailable, match="down"):
        everything()
    if operation in ("append", "close"):
        assert lease.releases == 1
    assert "c" not in list(tier.list(""))
    tier.heal()
    tier.delete("b")
    lease.releases = 0
    everything()
    assert torch.equal(tier.get("c"), lease.buffer) or lease.releases == 1


@pytest.mark.parametrize("after", [False, True])
def test_a_failed_append_or_close_is_not_forgotten(after: bool) -> None:
    for operation in ("append", "close"):
        tier = Faulty(Memory(), Fault(operation, 1, TierUnavailable("down"), after=after))  # type: ignore[arg-type]
        lease = Lease(random_bytes(10))
        writer = tier.writer("a")
        for step in (lambda w=writer, x=lease: w.append(x.buffer, x.release), writer.close, writer.close):
            if not (operation == "close" and lease.releases == 0):
                with pytest.raises(TierUnavailable):
                    step()
            else:
                step()
        assert lease.releases == 1
        assert (list(tier.list("")) == ["a"]) == (operation == "close" and after)


def test_bytes_are_flipped_cut_and_dropped() -> None:
    data = random_bytes(100)
    flipped = data.clone()
    flipped[7] ^= 1
    for operation in ("put", "append", "read"):
        for damage, wanted in (("flip", flipped), ("truncate", data[:7])):
            fault = Fault(operation, 0, damage=damage, where=7)  # type: ignore[arg-type]
            tier = Faulty(Memory(), fault)
            lease = Lease(data)
            if operation == "append":
                with tier.writer("a") as writer:
                    writer.append(lease.buffer, lease.release)
                assert lease.releases == 1
            else:
                tier.put("a", data)
            out = torch.zeros(tier.size("a"), dtype=torch.uint8)
            tier.read("a", [Range(0, out)])
            assert torch.equal(out[: wanted.numel()], wanted)
            assert not out[wanted.numel() :].any()
    for operation in ("put", "delete", "close"):
        tier = Faulty(Memory(), Fault(operation, 1, damage="drop"))  # type: ignore[arg-type]
        tier.put("a", data)
        tier.delete("a")
        with tier.writer("b") as writer:
            writer.append(data)
        assert list(tier.list("")) == {"put": ["b"], "delete": ["a", "b"], "close": []}[operation]
