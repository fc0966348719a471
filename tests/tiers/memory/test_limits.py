"""Limits of memory: what the system says of them, and what is told of an arena that is beyond them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.cluster.advice import advise_arena
from tierstate.tiers.memory.limits import MemoryLimits

GIB = 1 << 30


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, text in {"proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_limits_of_this_process_are_what_the_system_says() -> None:
    found = MemoryLimits.of_process()
    assert found.memlock in (None, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    assert found.free is not None
    assert 0 < found.free < 1 << 50
    assert "limit of locked memory: " in found.told()


def test_nothing_is_known_without_proc_and_sys(tmp_path: Path) -> None:
    assert MemoryLimits.of_process(tmp_path) == MemoryLimits(
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] >= 0 else None,
        None,
        None,
        None,
    )


def test_the_smallest_limit_of_the_groups_above_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job/step",
            "proc/meminfo": "MemTotal: 900 kB\nMemAvailable:    512 kB",
            "sys/fs/cgroup/memory.max": 9 * GIB,
            "sys/fs/cgroup/slurm/memory.max": "max",
            "sys/fs/cgroup/slurm/job/memory.max": 4 * GIB,
            "sys/fs/cgroup/slurm/job/memory.current": 3 * GIB,
            "sys/fs/cgroup/slurm/job/step/memory.max": 5 * GIB,
            "sys/fs/cgroup/slurm/job/step/memory.current": 1,
        },
    )
    found = MemoryLimits.of_process(root)
    assert (found.container, found.used, found.free) == (4 * GIB, 3 * GIB, 512 << 10)
    assert "memory limit of the container (cgroup): 4 GiB, of which 3 GiB are in use" in found.told()
    assert "free memory of the machine: 512 KiB" in found.told()


def test_limits_of_version_1_and_a_path_of_the_host_are_found(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GIB,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
    }
    found = MemoryLimits.of_process(tree(tmp_path, files))
    assert (found.container, found.used) == (2 * GIB, GIB)
    endless = tree(tmp_path, {**files, "sys/fs/cgroup/memory/memory.limit_in_bytes": (1 << 63) - 4096})
    assert MemoryLimits.of_process(endless).container is None


def test_a_process_that_may_lock_all_memory_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    assert MemoryLimits.of_process(tree(tmp_path, {})).memlock == 8 << 20
    able = tree(tmp_path, {"proc/self/status": "CapEff:\t0000000000004000"})
    assert MemoryLimits.of_process(able).memlock is None


SIZES = st.none() | st.integers(1, 1 << 42)


@given(size=st.integers(1, 1 << 42), memlock=SIZES, container=SIZES, devices=st.booleans())
def test_an_arena_beyond_a_limit_is_told_with_the_remedy(
    size: int, memlock: int | None, container: int | None, devices: bool
) -> None:
    said = advise_arena(size, MemoryLimits(memlock, container, None, None), devices)
    locked = devices and memlock is not None and memlock < size
    contained = container is not None and container < size
    assert len(said) == (locked or contained)
    assert ("RLIMIT_MEMLOCK" in "".join(said)) == locked
    assert ("(cgroup) is" in "".join(said)) == contained
    assert all("ulimit -l unlimited" in one and "smaller `arena: size`" in one for one in said)
