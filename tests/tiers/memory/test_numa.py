"""NUMA: the node of a device is found in sysfs; memory and threads are placed there, within what is allowed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstate.tiers.memory import arena as arena_room
from tierstate.tiers.memory import numa
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.numa import NumaNode, node_at, node_of_device, nodes, running_on
from tierstate.tiers.memory.pages import PAGE, SharedPages, fault_in, map_pages

MIB = 1 << 20
ALLOWED = frozenset(os.sched_getaffinity(0))
ELSEWHERE = frozenset({max(ALLOWED) + 1000})


def machine(root: Path, devices: dict[str, str], cpus: dict[int, str], memory: str | None = None) -> Path:
    """A sysfs of this many nodes, and devices with what their ``numa_node`` says."""
    for place, node in devices.items():
        folder = root / "bus/pci/devices" / place
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for number, listed in cpus.items():
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{listed}\n")
    (root / "devices/system/node").mkdir(parents=True, exist_ok=True)
    (root / "devices/system/node/online").write_text(f"0-{max(cpus, default=0)}\n")
    if memory is not None:
        (root / "devices/system/node/has_memory").write_text(f"{memory}\n")
    return root


TWO = {0: "0-3,8-11", 1: "4-7,12-15"}


def test_the_node_of_a_device_and_its_cpus_are_found(tmp_path: Path) -> None:
    system = machine(tmp_path, {"0000:3b:00.0": "0", "0001:d8:00.0": "1"}, TWO)
    assert nodes(system) == [0, 1]
    assert node_at("0000:3b:00.0", system) == NumaNode(0, frozenset({0, 1, 2, 3, 8, 9, 10, 11}))
    assert node_at("0001:d8:00.0", system) == NumaNode(1, frozenset({4, 5, 6, 7, 12, 13, 14, 15}))


@pytest.mark.parametrize("said", ["-1", "2", "", "none"])
def test_a_device_whose_node_is_not_known_has_none(tmp_path: Path, said: str) -> None:
    system = machine(tmp_path, {"0000:3b:00.0": said}, TWO)
    assert node_at("0000:3b:00.0", system) is None
    assert node_at("0000:ff:00.0", system) is None


@pytest.mark.parametrize("memory", [None, "0"])
def test_a_machine_with_one_node_has_none(tmp_path: Path, memory: str | None) -> None:
    cpus = {0: "0-3"} if memory is None else {0: "0-3", 1: ""}
    system = machine(tmp_path, {"0000:3b:00.0": "0"}, cpus, memory)
    assert node_at("0000:3b:00.0", system) is None


def test_memory_of_a_device_that_is_a_node_is_never_taken(tmp_path: Path) -> None:
    system = machine(tmp_path, {"0000:3b:00.0": "1"}, {0: "0-3", 1: ""}, "0-1")
    assert node_at("0000:3b:00.0", system) is None


def test_no_sysfs_is_no_node(tmp_path: Path) -> None:
    assert nodes(tmp_path) == []
    assert node_at("0000:3b:00.0", tmp_path) is None


@given(listed=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5)), max_size=6))
def test_lists_of_the_kernel_are_read_exactly(
    tmp_path_factory: pytest.TempPathFactory, listed: list[tuple[int, int]]
) -> None:
    file = tmp_path_factory.mktemp("lists") / "online"
    file.write_text(",".join(f"{first}-{first + more}" if more else str(first) for first, more in listed) + "\n")
    assert numa._listed(file) == [n for first, more in listed for n in range(first, first + more + 1)]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A machine with two nodes, and the devices that were asked for their place."""
    found: list[int] = []

    def properties(device: int) -> SimpleNamespace:
        found.append(device)
        return SimpleNamespace(pci_domain_id=0x10, pci_bus_id=0x3B + device, pci_device_id=0x1F)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(numa, "SYSTEM", machine(tmp_path, {"0010:3b:1f.0": "1", "0010:3c:1f.0": "0"}, TWO))
    yield found
    numa._node_of_device.cache_clear()


def test_a_device_is_asked_once_for_its_place_on_the_bus(asked: list[int]) -> None:
    for _ in range(3):
        assert node_of_device(0) == node_at("0010:3b:1f.0", numa.SYSTEM)
        assert node_of_device(1) == node_at("0010:3c:1f.0", numa.SYSTEM)
        assert node_of_device(2) is None
        assert node_of_device(None) is None
    assert asked == [0, 1, 2]


def test_a_torch_that_does_not_tell_the_place_is_no_error(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="old"))
    assert node_of_device(0) is None


def test_devices_are_not_asked_where_there_is_one_node(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "SYSTEM", machine(tmp_path / "one", {}, {0: "0-3"}))
    assert node_of_device(0) is None
    assert asked == []


def policy_at(address: int) -> str:
    """The memory policy of a mapping, from /proc/self/numa_maps: the one that starts nearest at or below it."""
    try:
        lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    except OSError:
        pytest.skip("the kernel does not tell where memory lies")
    below = [(int(line[0], 16), line[1]) for line in lines if int(line[0], 16) <= address]
    return max(below)[1]


def test_memory_gets_its_policy_before_it_is_faulted_in() -> None:
    memory = map_pages(4 * MIB)
    if not NumaNode(0, ALLOWED).place(memory):
        pytest.skip("the kernel refuses mbind")
    assert policy_at(memory.data_ptr()) == "prefer:0"
    fault_in(memory)
    assert policy_at(memory.data_ptr()) == "prefer:0"
    assert not memory.any()


def test_shared_memory_gets_its_policy_too() -> None:
    pages = SharedPages(PAGE)
    memory, _ = pages.map()
    if not NumaNode(0, ALLOWED).place(memory):
        pytest.skip("the kernel refuses mbind")
    assert policy_at(memory.data_ptr()) == "prefer:0"
    pages.close()


@pytest.mark.parametrize("number", [63, 64, 1000])
def test_a_node_that_is_not_there_is_no_error(number: int) -> None:
    memory = map_pages(PAGE)
    assert not NumaNode(number, ALLOWED).place(memory)
    memory.fill_(1)


def test_a_machine_whose_system_call_is_not_known_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.platform, "machine", lambda: "abacus")
    assert not NumaNode(0, ALLOWED).place(map_pages(PAGE))


@given(cpus=st.sets(st.sampled_from(sorted(ALLOWED | ELSEWHERE))))
def test_a_thread_and_what_it_starts_run_there_within_what_is_allowed(cpus: set[int]) -> None:
    expected, seen = (set(cpus) & ALLOWED) or set(ALLOWED), []
    with running_on(NumaNode(0, frozenset(cpus))):
        seen.append(os.sched_getaffinity(0))
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert seen == [expected, expected]
    assert os.sched_getaffinity(0) == ALLOWED


def test_a_thread_is_bound_to_less_than_it_may_use_and_never_to_more() -> None:
    if len(ALLOWED) < 2:
        pytest.skip("needs two CPUs")
    one = {min(ALLOWED)}
    os.sched_setaffinity(0, one)
    try:
        with running_on(NumaNode(0, ALLOWED)):
            assert os.sched_getaffinity(0) == one
        with running_on(NumaNode(0, ALLOWED - one)):
            assert os.sched_getaffinity(0) == one
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, ALLOWED)


def test_who_moves_the_thread_meanwhile_is_obeyed() -> None:
    if len(ALLOWED) < 2:
        pytest.skip("needs two CPUs")
    first, *_, last = sorted(ALLOWED)
    try:
        with running_on(NumaNode(0, frozenset({first}))):
            os.sched_setaffinity(0, {last})
        assert os.sched_getaffinity(0) == {last}
    finally:
        os.sched_setaffinity(0, ALLOWED)


def test_no_node_is_no_system_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> set[int]:
        raise AssertionError

    monkeypatch.setattr(os, "sched_getaffinity", never)
    monkeypatch.setattr(os, "sched_setaffinity", never)
    with running_on(None):
        pass


def test_an_error_in_the_block_leaves_the_thread_as_it_was() -> None:
    with pytest.raises(KeyError), running_on(NumaNode(0, frozenset({min(ALLOWED)}))):
        raise KeyError
    assert os.sched_getaffinity(0) == ALLOWED


@pytest.mark.parametrize("prepared", [False, True])
def test_slabs_are_placed_before_their_memory_is_faulted_in(monkeypatch: pytest.MonkeyPatch, prepared: bool) -> None:
    done: list[str] = []
    monkeypatch.setattr(arena_room, "node_of_device", lambda device: NumaNode(0, ALLOWED))
    monkeypatch.setattr(NumaNode, "place", lambda self, buffer: done.append("place"))
    monkeypatch.setattr(arena_room, "fault_in", lambda buffer: done.append("fault"))
    arena = Arena(4 * PAGE, PAGE)
    if prepared:
        arena.prepare(2 * PAGE)
        for thread in threading.enumerate():
            if thread.name == "tierstate-arena":
                thread.join(60)
        assert done == ["place", "fault", "place", "fault"]
    arena.acquire(last=not prepared).release()  # as a read does, which takes memory as it is
    assert done[:1] == ["place"]
    assert done.count("place") == (2 if prepared else 1)
    arena.close()
