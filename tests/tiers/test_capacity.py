"""Capacities of tiers that several processes write to, and delete from."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import scratch

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import AlreadyExists, TierFull
from tierstate.tiers.base import ObjectWriter, Tier
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.posix.directory import Nvme

CAPACITY, KEYS = 1000, "abc"

Action = tuple[int, Literal["begin", "append", "close", "abort", "delete"], str, int]
"""Which of two processes does what with which key, and how many bytes."""

actions = st.tuples(
    st.integers(0, 1),
    st.sampled_from(["begin", "append", "append", "close", "close", "abort", "delete"]),
    st.sampled_from(KEYS),
    st.integers(0, 600),
)


class Process:
    """One that writes to a tier.

    Attributes:
        begun: the objects that it writes, and how long they are by now.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.begun: dict[str, tuple[ObjectWriter, int]] = {}

    def do(self, what: str, key: str, nbytes: int, objects: dict[str, int], *, alone: bool) -> None:
        """Do one thing. ``objects``: the lengths of all that are there; ``alone``: nobody else does anything."""
        if what == "delete":
            self.tier.delete(key)
            objects.pop(key, None)
        elif what == "begin":
            if key not in objects and key not in self.begun:
                self.begun[key] = self.tier.writer(key), 0
        elif key in self.begun and what == "append":
            self._append(key, nbytes, objects, alone=alone)
        elif key in self.begun:
            writer, length = self.begun.pop(key)
            with suppress(AlreadyExists):
                if what == "close":
                    writer.close()
                    objects[key] = length
            writer.abort()

    def _append(self, key: str, nbytes: int, objects: dict[str, int], *, alone: bool) -> None:
        used = sum(objects.values()) + sum(length for _, length in self.begun.values())
        writer, length = self.begun.pop(key)
        try:
            writer.append(empty_buffer(nbytes))
        except TierFull:
            assert used + nbytes > CAPACITY, "there was room"
            return
        assert not alone or used + nbytes <= CAPACITY
        self.begun[key] = writer, length + nbytes


def check(tiers: list[Tier], does: list[Action]) -> None:
    ours = [Process(tier) for tier in tiers]
    objects: dict[str, int] = {}
    for who, what, key, nbytes in does:
        ours[who % len(ours)].do(what, key, nbytes, objects, alone=len(ours) == 1)
    for one in ours:
        for writer, _ in one.begun.values():
            writer.abort()


@pytest.mark.slow
@given(st.lists(actions, max_size=30), st.integers(1, 2))
def test_a_folder_refuses_only_what_has_no_room(does: list[Action], processes: int) -> None:
    with scratch() as place:
        check([Nvme(path=place, capacity=CAPACITY) for _ in range(processes)], does)


@given(st.lists(actions, max_size=30), st.integers(1, 2))
def test_a_bucket_refuses_only_what_has_no_room(does: list[Action], processes: int) -> None:
    url = f"memory://{uuid.uuid4().hex}/ckpt"
    check([ObjectStore(url=url, capacity=CAPACITY) for _ in range(processes)], does)


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_what_another_process_deletes_makes_room(kind: str) -> None:
    """As where one rank drops old versions for all."""
    with scratch() as place:
        url = f"memory://{uuid.uuid4().hex}/ckpt"
        ours, other = (
            Nvme(path=place, capacity=100) if kind == "folder" else ObjectStore(url=url, capacity=100) for _ in range(2)
        )
        for n in range(5):
            ours.put(f"run/{n}", empty_buffer(60))
            other.delete(f"run/{n}")
        ours.put("run/last", empty_buffer(60))
        with pytest.raises(TierFull, match="60B of the capacity of 100B are in use"):
            ours.put("run/more", empty_buffer(60))
