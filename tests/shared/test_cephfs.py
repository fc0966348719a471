"""The tier of shared folders on a real shared file system, by one mount and by two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import alike, policy, tensors

import tierstate as ts
from tierstate.tiers.base import Tier
from tierstate.tiers.posix.lustre import Lustre
from tierstate.tiers.testing import TierContract, random_bytes

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


class TestOneMount(TierContract):
    examples = 5

    @pytest.fixture(autouse=True)
    def _place(self, mounts) -> None:
        self.here = self.there = mounts.here

    def make(self, tmp_path: Path) -> Tier:
        return Lustre(path=self.here, stripe_count=4)

    def reopen(self, tier: Tier) -> Tier:
        return Lustre(path=self.there, stripe_count=4)


class TestTwoMounts(TestOneMount):
    """Every second look at an object, and every second racer, is by the other mount."""

    @pytest.fixture(autouse=True)
    def _place(self, mounts) -> None:
        self.here, self.there = mounts.here, mounts.there


@pytest.mark.parametrize("io", ["uring", "threads", "buffered"])
def test_long_objects_are_seen_whole_by_the_other_mount(mounts, io):
    data = random_bytes((32 << 20) + 5)
    here, there = Lustre(path=mounts.here, io=io), Lustre(path=mounts.there, io=io)
    for i in range(3):
        with here.writer(f"a{i}") as writer:
            for start in range(0, len(data), 5 << 20):
                writer.append(data[start : start + (5 << 20)])
        assert torch.equal(there.get(f"a{i}"), data)
    assert there.traits.notes == here.traits.notes == ()
    here.close()
    there.close()


def test_a_run_goes_on_on_another_host(mounts):
    def by(path: Path) -> ts.Policy:
        return policy({"shared": {"type": "lustre", "path": str(path)}}, chunk="1MiB", arena={"size": "8MiB"})

    states = [tensors(9 << 20, 3000, seed=step) for step in range(6)]
    for step, state in enumerate(states):
        with ts.Checkpointer(by((mounts.here, mounts.there)[step % 2]), "run") as ckpt:
            if step:
                assert alike(ckpt.load(), states[step - 1])
            ckpt.save(state, step=step).wait()
    with ts.Checkpointer(by(mounts.here), "run") as ckpt:
        assert [version.step for version in ckpt.versions()] == list(range(6))
        assert ckpt.verify(deep=True).ok


WRITER = """
    import sys, torch
    from pathlib import Path
    from tierstate.tiers.posix.lustre import Lustre
    writer = Lustre(path=Path(sys.argv[1])).writer("run/half")
    writer.append(torch.ones(1_000_000, dtype=torch.uint8))
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_what_a_dead_writer_left_is_removed_by_the_other_mount(mounts):
    """Not as long as it lives, however old its file is, since its lock is seen there too."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(mounts.here)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        (left,) = mounts.here.rglob(".tmp*")
        os.utime(left, (1, 1))
        Lustre(path=mounts.there).put("a", random_bytes(1))
        assert left.exists(), "its writer lives"
        child.send_signal(signal.SIGKILL)
    Lustre(path=mounts.there).put("b", random_bytes(1))
    assert not left.exists()
    assert list(Lustre(path=mounts.here).list("")) == ["a", "b"]
