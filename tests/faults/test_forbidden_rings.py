"""io_uring forbidden by the kernel, as in many containers: threads take over, or the policy's wish is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FORBID = """
import ctypes, errno, struct, sys

def forbid():
    # A filter of four instructions: is it io_uring_setup (425 everywhere)? Then EPERM, else go on.
    code = b"".join(struct.pack("HBBI", *line) for line in (
        (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)))
    memory = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(memory)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if libc.prctl(22, 2, program, 0, 0) != 0:
        print("no filters here:", errno.errorcode[ctypes.get_errno()])
        sys.exit(77)
    assert libc.syscall(425, 2, None) == -1 and ctypes.get_errno() == errno.EPERM

forbid()
import torch
import tierstate as ts

text = '''
version: 1
chunk: 1MiB
arena: {{size: 8MiB}}
tiers:
  nvme: {{type: nvme, path: "{}", io: {}}}
'''.format(sys.argv[1], sys.argv[2])
state = {"w": torch.arange(1 << 20), "b": torch.ones(3)}
"""

SAVES = """
with ts.Checkpointer(ts.Policy.parse(text), "run") as ckpt:
    ckpt.save(state, step=1).wait()
    found = ckpt.load()
    assert torch.equal(found["w"], state["w"]) and torch.equal(found["b"], state["b"])
    assert ckpt.verify(deep=True).ok
    print(ckpt._tier_runs[0].tier.traits.io)
"""

REFUSED = """
with ts.Checkpointer(ts.Policy.parse(text), "run") as ckpt:
    try:
        ckpt.save(state, step=1).wait()
    except ts.TierstateError as error:
        print(type(error).__name__, error)
    assert ckpt.versions() == []
"""


def run(body: str, place: Path, io: str) -> str:
    """What a process without io_uring prints."""
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", FORBID + body, str(place), io]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_auto_goes_by_threads_and_says_why(place):
    told = run(SAVES, place, "auto")
    assert told.startswith("direct, by threads, since ")
    assert "io_uring" in told


def test_what_does_not_need_it_does_not_miss_it(place):
    assert run(SAVES, place, "threads") == "direct, by threads, as the policy says"


def test_a_policy_that_insists_is_refused(place):
    told = run(REFUSED, place, "uring")
    assert "nvme: " in told
    assert "io_uring is not to be had here" in told
    assert list(place.rglob(".tmp*")) == []
