"""Forks while saves run: DataLoader workers, and children that use or drop what they inherited."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.leaks import at_rest, nothing_left
from torch.utils.data import DataLoader, TensorDataset

import tierstate as ts

pytestmark = pytest.mark.slow

MIB = 1 << 20


def job() -> dict[str, object]:
    """A model of 8 MiB and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 1024)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "step": 0}


def bits(state) -> dict[str, object]:
    """The bytes of all that is in the state, or in what was loaded of it."""
    model, optimizer = (getattr(state[n], "state_dict", lambda n=n: state[n])() for n in ("model", "optimizer"))
    tensors = {**model, **{f"{i}.{k}": v for i, row in optimizer["state"].items() for k, v in row.items()}}
    return {"step": state["step"], **{name: v.detach().numpy().tobytes() for name, v in tensors.items()}}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine with one core
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_workers_of_a_data_loader_and_saves_do_not_meet(world, place, lazy):
    state, truths = job(), {}
    data = TensorDataset(torch.randn(16, 1024))
    with nothing_left(place), ts.Checkpointer(world.policy(place / "ckpt"), "run") as ckpt:
        if lazy:
            ckpt.guard(state["optimizer"])
        for _ in range(2):
            # Each epoch forks its workers anew, with a save of the last step still under way.
            loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork", timeout=60)
            for (batch,) in loader:
                state["model"](batch).square().mean().backward()
                state["optimizer"].step()
                state["optimizer"].zero_grad()
                state["step"] += 1
                ckpt.save(state, step=state["step"])
                truths[state["step"]] = bits(state)
        ckpt.save(state, step=100).wait()
        # Its last batch lies in shared memory.
        del loader, batch
        for step, right in truths.items():
            assert bits(ckpt.load(step=step)) == right
        assert at_rest(ckpt)
        world.check(ckpt)


SCRIPT = """
import gc, os, sys, time
import numpy as np, torch
import tierstate as ts

text = '''
version: 1
chunk: {}
arena: {{size: 64MiB}}
tiers:
  nvme: {{type: nvme, path: "{}", io: {}}}
'''.format(sys.argv[3], sys.argv[1], sys.argv[2])

def child(ckpt, way):
    # As a user's child would: no os._exit, so that what the interpreter does at its end is done.
    mine = [np.full(15 << 20, i, "u1") for i in range(5)]
    try:
        ckpt.save({"w": torch.ones(5)}, step=9)
    except ts.CaptureError as error:
        assert "another process" in str(error)
    else:
        os._exit(1)
    if way == "close":
        ckpt.close()
    if way == "drop":
        ckpt._arena._free.clear()
        ckpt._arena._out.clear()
        gc.collect()
    assert all((array == i).all() for i, array in enumerate(mine))
    sys.exit(7)

state = {"w": torch.arange(5 << 20)}
with ts.Checkpointer(ts.Policy.parse(text), "run") as ckpt:
    ckpt.save(state, step=0).wait()
    for step, way in enumerate(("exit", "close", "drop"), 1):
        state["w"] += 1
        save = ckpt.save(state, step=step)
        pid = os.fork()
        if pid == 0:
            child(ckpt, way)
        end = time.monotonic() + 60
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:
            assert time.monotonic() < end, "the child hangs"
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(found[1]) == 7, (way, os.waitstatus_to_exitcode(found[1]))
        save.wait()
        assert torch.equal(ckpt.load()["w"], state["w"])
    assert [v.step for v in ckpt.versions()] == [0, 1, 2, 3]
    assert ckpt.verify(deep=True).ok
print("done")
"""


def test_children_that_exit_close_or_drop_harm_neither_the_save_nor_themselves(io: str, place: Path):
    # Slabs of 1 MiB are shared with the child, those of 4 MiB are private on most systems.
    chunk = "1MiB" if io == "threads" else "4MiB"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, str(place), io, chunk]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


READER = """
import os, sys
import torch
import tierstate as ts

text = '''
version: 1
chunk: {}
arena: {{size: 32MiB}}
tiers:
  nvme: {{type: nvme, path: "{}", codec: fast}}
'''.format(sys.argv[2], sys.argv[1])
torch.set_num_threads(1)  # a forked child has none of OpenMP's
state = {"w": torch.zeros(2_000_000)}
ckpt = ts.Checkpointer(ts.Policy.parse(text), run="run")
ckpt.save(state, step=0).wait()
pid = os.fork()
if pid == 0:
    code = 1
    try:
        for _ in range(30):
            assert not ckpt.load(step=0)["w"].any()
        ckpt.close()
        code = 7
    finally:
        os._exit(code)
step = 0
while not (found := os.waitpid(pid, os.WNOHANG))[0]:
    step += 1
    state["w"] += 1
    ckpt.save(state, step=step).wait()
assert os.waitstatus_to_exitcode(found[1]) == 7
assert ckpt.verify(deep=True).ok
ckpt.close()
print("done")
"""


@pytest.mark.parametrize("chunk", ["1MiB", "4MiB"])  # as above
def test_a_child_that_reads_harms_no_save_of_its_parent(place: Path, chunk: str):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", READER, str(place), chunk]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


EARLY_READER = """
import os, signal, sys, threading
import torch
import tierstate as ts
from tierstate.engine.store import identity

parent, begun, gate, read = os.getpid(), threading.Event(), threading.Event(), identity.read_marker

def slow(tier):
    if os.getpid() == parent:
        begun.set()
        gate.wait()
    return read(tier)

policy = ts.Policy.default(sys.argv[1])
state = {"w": torch.arange(1000)}
with ts.Checkpointer(policy, "run") as ckpt:
    ckpt.save(state, step=0).wait()
identity.read_marker = slow
with ts.Checkpointer(policy, "run") as ckpt:
    save = ckpt.save(state, step=1)
    begun.wait()  # a thread looks whether the tier is the expected one, and has a lock meanwhile
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # it hangs
        assert torch.equal(ckpt.load()["w"], state["w"])
        assert [version.step for version in ckpt.versions()] == [0]
        os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    gate.set()
    save.wait()
    assert code == 7, code
print("done")
"""


def test_a_child_reads_that_was_forked_while_its_parent_began_to_save(place: Path):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", EARLY_READER, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
