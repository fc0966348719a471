"""The contract suite itself: every promise is broken by a tier that does not keep it, and by nothing else."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import rule, run_state_machine_as_test
from support.checkpointer_worlds import scratch, tier
from support.outcomes import until

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import AlreadyExists, Damaged, NotFound
from tierstate.tiers.base import ObjectWriter, Range, Release, Tier, Traits, check_key
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.registry import open_tier
from tierstate.tiers.testing import PROMISES, Fault, Faulty, PromiseBroken, TierContract, TierMachine, machine_of

pytestmark = pytest.mark.slow


class Dict(Tier):
    """The five methods and traits, as short as they can be: what an author begins with."""

    def __init__(self) -> None:
        self.objects: dict[str, Buffer] = {}

    @property
    def traits(self) -> Traits:
        return Traits(persistent=False, shared="process", failure_domain="dict")

    def put(self, key: str, data: Buffer) -> None:
        mine = data.clone()
        if self.objects.setdefault(check_key(key), mine) is not mine:
            raise AlreadyExists(key)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        data = self.find(key)
        for offset, out in ranges:
            if offset + out.numel() > data.numel():
                raise Damaged(key)
            out.copy_(data[offset : offset + out.numel()])

    def find(self, key: str) -> Buffer:
        try:
            return self.objects[check_key(key)]
        except KeyError:
            raise NotFound(key) from None

    def list(self, prefix: str) -> Iterator[str]:
        return iter(sorted(key for key in self.objects if key.startswith(prefix)))

    def size(self, key: str) -> int:
        return self.find(key).numel()

    def delete(self, key: str) -> None:
        self.objects.pop(check_key(key), None)


class TestFiveMethodsAreEnough(TierContract):
    def make(self, tmp_path: Path) -> Tier:
        return Dict()


class TestAHealthyWrapperKeepsThePromises(TierContract):
    examples = 5

    def make(self, tmp_path: Path) -> Tier:
        return Faulty(Memory())


# Tiers that break one promise each


class Overwrites(Dict):
    def put(self, key: str, data: Buffer) -> None:
        self.objects[check_key(key)] = data.clone()


class ChecksThenWrites(Dict):
    """Create-only in a row, not in a race."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[str] = []

    def put(self, key: str, data: Buffer) -> None:
        taken = check_key(key) in self.objects
        self.looks.append(key)
        if taken:
            raise AlreadyExists(key)
        until(lambda: len(self.looks) > 1)  # another one has looked before this one writes
        self.objects[key] = data.clone()


class KeepsReferences(Dict):
    def put(self, key: str, data: Buffer) -> None:
        if self.objects.setdefault(check_key(key), data) is not data:
            raise AlreadyExists(key)


class AnyKey(Dict):
    def find(self, key: str) -> Buffer:
        if key not in self.objects:
            raise NotFound(key)
        return self.objects[key]


class ReadsShort(Dict):
    def read(self, key: str, ranges: Sequence[Range]) -> None:
        data = self.find(key)
        for offset, out in ranges:
            got = data[offset : offset + out.numel()]
            out[: got.numel()].copy_(got)


class ReadsOnlyFirst(Dict):
    def read(self, key: str, ranges: Sequence[Range]) -> None:
        super().read(key, list(ranges)[:1])
        if any(offset + out.numel() > self.find(key).numel() for offset, out in ranges):
            raise Damaged(key)


class ListsInOrderOfArrival(Dict):
    def list(self, prefix: str) -> Iterator[str]:
        return iter([key for key in self.objects if key.startswith(prefix)])


class ListsWholeFolders(Dict):
    def list(self, prefix: str) -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        return super().list(f"{folder}/" if folder else "")


class DeletesByPrefix(Dict):
    def delete(self, key: str) -> None:
        for one in [k for k in self.objects if k.startswith(check_key(key))]:
            del self.objects[one]


class DeletesOnlyOnce(Dict):
    def delete(self, key: str) -> None:
        self.find(key)
        del self.objects[key]


class DeletesTheFirstOnly(Dict):
    def discard(self, keys: Iterable[str]) -> None:
        super().discard(list(keys)[:1])


class IsBornTomorrow(Dict):
    def age(self, key: str) -> float | None:
        self.find(key)
        return -86_400.0


class IsOfAllAges(Dict):
    def age(self, key: str) -> float | None:
        return 86_400.0


class TellsNonsense(Dict):
    @property
    def traits(self) -> Traits:
        return Traits(persistent=True, shared="process", failure_domain="")


class WritesInPlace(Dict):
    """The object is there from the first byte on."""

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        self.put(key, empty_buffer(0))
        return InPlace(self, key)


class InPlace(ObjectWriter):
    def __init__(self, tier: Dict, key: str) -> None:
        self.tier, self.key = tier, key

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        self.tier.objects[self.key] = torch.cat([self.tier.objects[self.key], buffer])
        if release is not None:
            release()

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


class Leased(Dict):
    """Writers that do something else with their leases."""

    times = 0
    early = False

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        if check_key(key) in self.objects:
            raise AlreadyExists(key)
        return LeasedWriter(self, key)


class LeasedWriter(ObjectWriter):
    def __init__(self, tier: Leased, key: str) -> None:
        self.tier, self.key = tier, key
        self.pieces: list[Buffer] = []
        self.open = True

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        self.pieces.append(buffer if self.tier.early else buffer.clone())
        for _ in range(self.tier.times if release else 0):
            release()  # type: ignore[misc]

    def close(self) -> None:
        if self.open:
            self.open = False
            self.tier.put(self.key, torch.cat([empty_buffer(0), *self.pieces]))

    def abort(self) -> None:
        self.open = False


def leased(times: int, early: bool) -> Callable[[], Tier]:
    def make() -> Tier:
        tier = Leased()
        tier.times, tier.early = times, early
        return tier

    return make


def lying(*faults: Fault) -> Callable[[], Tier]:
    return lambda: Faulty(Memory(), *faults)


BROKEN: list[tuple[str, Callable[[], Tier]]] = [
    ("what is put is read", KeepsReferences),
    ("what is put is read", lying(Fault("put", 0, damage="flip", where=500))),
    ("what is put is read", lying(Fault("put", 0, damage="drop"))),
    ("objects of every size", lying(Fault("put", 0, damage="truncate", where=4096))),
    ("many pieces, and parts of longer buffers", lying(Fault("append", 200, damage="drop"))),
    ("absent until closed", WritesInPlace),
    ("aborted objects leave nothing", WritesInPlace),
    ("leases are released once", leased(times=0, early=False)),
    ("leases are released once", leased(times=2, early=False)),
    ("leases are released once", leased(times=1, early=True)),
    ("create only", Overwrites),
    ("one winner of a race", Overwrites),
    ("one winner of a race", ChecksThenWrites),
    ("ranges are filled exactly", ReadsOnlyFirst),
    ("ranges are filled exactly", lying(Fault("read", 0, damage="truncate", where=50_000))),
    ("no read beyond the end", ReadsShort),
    ("lists are whole and in order", ListsInOrderOfArrival),
    ("lists are whole and in order", ListsWholeFolders),
    ("deletes", DeletesByPrefix),
    ("deletes", DeletesOnlyOnce),
    ("deletes while reading", lying(Fault("read", 1, damage="truncate", where=1000))),
    ("ages rise", IsBornTomorrow),
    ("ages rise", IsOfAllAges),
    ("many are deleted at once", DeletesTheFirstOnly),
    ("keys that are none are refused", AnyKey),
    ("traits are sane", TellsNonsense),
]


@pytest.mark.parametrize(("name", "make"), BROKEN, ids=lambda x: x if isinstance(x, str) else "")
def test_each_promise_can_be_broken(name: str, make: Callable[[], Tier]) -> None:
    tier = make()
    with pytest.raises((PromiseBroken, AlreadyExists, NotFound)):
        dict(PROMISES)[name](tier, "scratch/0")


def test_every_promise_is_in_the_list_of_broken_ones() -> None:
    assert {name for name, _ in BROKEN} == {name for name, _ in PROMISES}


@pytest.mark.parametrize(
    "make",
    [
        Overwrites,
        ReadsOnlyFirst,
        ReadsShort,
        ListsInOrderOfArrival,
        DeletesOnlyOnce,
        WritesInPlace,
        leased(times=0, early=False),
        leased(times=1, early=True),
        lying(Fault("append", 0, damage="flip")),
        lying(Fault("close", 0, damage="drop")),
    ],
)
def test_a_history_finds_them_too(make: Callable[[], Tier]) -> None:
    # Finding is enough here; making the shortest history of it takes most of the time.
    quick = settings(max_examples=2000, stateful_step_count=25, deadline=None, phases=[Phase.generate], database=None)
    with pytest.raises((AssertionError, AlreadyExists, NotFound, Damaged)):
        run_state_machine_as_test(machine_of(make()), settings=quick)


def test_promises_leave_nothing_even_when_broken() -> None:
    tier = KeepsReferences()
    with pytest.raises(PromiseBroken):
        dict(PROMISES)["what is put is read"](tier, "scratch/0")
    assert not tier.objects


class Closing(Overwrites):
    """Says when it is closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_check_of_histories_tells_what_is_wrong_and_closes_what_it_opened() -> None:
    tier, other = Closing(), Closing()
    other.objects = tier.objects
    with pytest.raises(PromiseBroken, match="raised nothing, not AlreadyExists"):
        TierMachine.check(lambda: tier, lambda _tier: other, steps=20)
    assert (tier.closed, other.closed) == (1, 1)


class Rooms(TierMachine):
    """A rule of its own."""

    asked = 0

    @rule()
    def room(self) -> None:
        Rooms.asked += 1
        assert self.handle.room() is None


def test_a_machine_may_have_rules_of_its_own() -> None:
    Rooms.check(Memory, examples=50, steps=10)  # chosen at random: in five, its rule may never be
    assert Rooms.asked > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["memory", "nvme", "file", "bucket"])
def test_long_histories(kind: str) -> None:
    with scratch() as place:
        keys = tier(kind, place)
        kind = keys.pop("type")
        another = None if kind == "memory" else lambda _tier: open_tier("other", kind, keys)
        TierMachine.check(lambda: open_tier("only", kind, keys), another or (lambda _: None), examples=500, steps=50)


def test_without_pytest_and_hypothesis() -> None:
    """A live tier can be checked where neither is installed; only `TierContract` needs them."""
    code = """
        import sys
        sys.modules["pytest"] = sys.modules["hypothesis"] = None
        from tierstate.tiers.memory.host import Memory
        from tierstate.tiers import testing
        for name, check in testing.PROMISES:
            check(Memory(), "scratch/0")
        try:
            testing.TierContract
        except ImportError as error:
            assert "pytest" in str(error), error
        else:
            raise SystemExit("TierContract came without pytest")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
