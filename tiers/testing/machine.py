"""A stateful hypothesis test of a tier, with a dict as the model; import it from `tierstate.tiers.testing`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import AlreadyExists, Damaged, NotFound
from tierstate.tiers.base import ObjectWriter, Range, Tier

from .promises import Lease, must_hold, must_raise, random_bytes

# No name is both a folder and an object, since tiers may refuse that.
_NAMES = st.sampled_from(["a", "b", "b-", "c/x", "c/y.z", "c-/x", "d/e/f"])


_SIZES = st.one_of(st.integers(0, 64), st.sampled_from([4095, 4096, 65_537]))


class TierMachine(RuleBasedStateMachine):
    """Random histories of calls on a tier, compared with a dict that holds what the tier should hold.

    Objects are put, written in pieces by several writers at once, aborted, read, listed and deleted, through two
    handles. `check` tries many histories. For other uses, subclass it, perhaps with more rules, and set ``tier``,
    ``reopened`` (another handle on the same place, or the same one) and ``prefix`` (of this history's keys).
    """

    tier: Tier
    reopened: Tier
    prefix: str

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, Buffer] = {}
        self.writers: list[tuple[str, ObjectWriter, list[Buffer]]] = []
        self.leases: list[tuple[str, Lease]] = []
        self.seed = 0
        self.handle = self.tier

    @classmethod
    def check(
        cls,
        make: Callable[[], Tier],
        reopen: Callable[[Tier], Tier | None] = lambda _tier: None,
        *,
        examples: int = 100,
        steps: int = 30,
    ) -> None:
        """Try many histories on one tier, and show the shortest one that fails.

        Args:
            make: returns a tier on an empty place.
            reopen: returns another handle on a tier's place, as another process would have it; None if there is none.
            examples, steps: how many histories, and their greatest length.

        Raises:
            PromiseBroken, AssertionError: the tier did not do what a dict does.
        """
        tier = make()
        tier.name = tier.name or "machine"
        other = reopen(tier)
        if other is not None:
            other.name = other.name or "reopened"
        try:
            run_histories(machine_of(tier, other, cls), examples, steps)
        finally:
            for handle in filter(None, (other, tier)):
                handle.close()

    def data(self, nbytes: int) -> Buffer:
        """Bytes that no other object of this history has."""
        self.seed += 1
        return random_bytes(nbytes, self.seed)

    @rule(name=_NAMES, nbytes=_SIZES)
    def put(self, name: str, nbytes: int) -> None:
        """Put an object; where there is one, that is refused."""
        key, data = self.prefix + name, self.data(nbytes)
        if key in self.model:
            must_raise(AlreadyExists, lambda: self.handle.put(key, data), f"put({key})")
        else:
            self.handle.put(key, data)
            self.model[key] = data

    @rule(name=_NAMES)
    def begin(self, name: str) -> None:
        """Open a writer, of which several may be open at once."""
        key = self.prefix + name
        try:
            self.writers.append((key, self.handle.writer(key), []))
        except AlreadyExists:
            assert key in self.model, f"writer({key}) found the key taken, which is free"

    @precondition(lambda self: self.writers)
    @rule(which=st.integers(0), nbytes=_SIZES, leased=st.booleans())
    def append(self, which: int, nbytes: int, leased: bool) -> None:
        """Append to an open writer, with or without a lease."""
        key, writer, pieces = self.writers[which % len(self.writers)]
        data = self.data(nbytes)
        pieces.append(data)
        lease = Lease(data)
        writer.append(lease.buffer, lease.release if leased else None)
        if leased:
            self.leases.append((key, lease))

    @precondition(lambda self: self.writers)
    @rule(which=st.integers(0))
    def close(self, which: int) -> None:
        """Close a writer: its object is there then, unless another one has come before it."""
        key, writer, pieces = self.writers.pop(which % len(self.writers))
        if key in self.model:
            must_raise(AlreadyExists, writer.close, f"close({key})")
        else:
            writer.close()
            self.model[key] = torch.cat([empty_buffer(0), *pieces])

    @precondition(lambda self: self.writers)
    @rule(which=st.integers(0))
    def abort(self, which: int) -> None:
        """Abort a writer, which leaves nothing."""
        _, writer, _ = self.writers.pop(which % len(self.writers))
        writer.abort()

    @rule(name=_NAMES)
    def delete(self, name: str) -> None:
        """Delete an object, which may not be there."""
        self.handle.delete(self.prefix + name)
        self.model.pop(self.prefix + name, None)

    @rule(name=_NAMES, spans=st.lists(st.tuples(st.integers(0, 70_000), st.integers(0, 5000)), max_size=4))
    def read(self, name: str, spans: list[tuple[int, int]]) -> None:
        """Read ranges of an object; those that it does not have are refused."""
        key = self.prefix + name
        ranges = [Range(start, empty_buffer(n)) for start, n in spans]
        whole = self.model.get(key)
        if whole is None:
            must_raise(NotFound, lambda: self.handle.read(key, ranges), f"read({key})")
        elif any(start + n > whole.numel() for start, n in spans):
            must_raise(Damaged, lambda: self.handle.read(key, ranges), f"read({key}, {spans})")
        else:
            self.handle.read(key, ranges)
            for start, out in ranges:
                assert torch.equal(out, whole[start : start + out.numel()]), f"read({key}) gave other bytes"

    @rule()
    def reopen(self) -> None:
        """Go on with the other handle on the same place."""
        self.handle = self.reopened if self.handle is self.tier else self.tier

    @invariant()
    def lists_what_is_there(self) -> None:
        """The tier lists the keys of the model."""
        assert list(self.handle.list(self.prefix)) == sorted(self.model)

    def teardown(self) -> None:
        for key, data in self.model.items():
            must_hold(self.handle, key, data)
        for _, writer, _ in self.writers:
            writer.abort()
        for key in self.model:
            self.handle.delete(key)
        counts = [lease.releases for _, lease in self.leases]
        assert counts == [1] * len(counts), f"leases were released {counts} times"


def machine_of(tier: Tier, other: Tier | None = None, kind: type[TierMachine] = TierMachine) -> type[TierMachine]:
    """A machine class for one tier; each of its histories has its own keys."""
    count = 0

    class Machine(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            nonlocal count
            count += 1
            self.tier, self.reopened, self.prefix = tier, other or tier, f"history{count}/"
            super().__init__()

    return Machine


def run_histories(machine: type[TierMachine], examples: int, steps: int) -> None:
    """Try ``examples`` histories of at most ``steps`` steps each."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
