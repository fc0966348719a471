"""Where other threads are, asked for while they come and go, and garbage is collected."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from functools import partial

import pytest
from support.outcomes import until

from tierstate.tiers import thread_stacks as module
from tierstate.tiers.thread_stacks import thread_stacks

SECONDS = 8
"""So long it looks; without what makes it safe, CPython 3.11 crashes within a few."""

GARBAGE = f"""
import gc, os, random, sys, threading, time
from tierstate.tiers.thread_stacks import thread_stacks

class Cycle:
    '''Garbage that lets another thread run while it is collected.'''
    alive = 0
    def __init__(self):
        self.me = self
        Cycle.alive += 1
    def __del__(self):
        Cycle.alive -= 1
        time.sleep(0.00005)

gc.collect()
gc.freeze()
gc.set_threshold(2)
sys.setswitchinterval(1e-5)
order = random.Random(1)

def function(size):
    '''A frame of this size: what one has left is read in the middle of others.'''
    variables = "; ".join(f"v{{i}} = {{i}}" for i in range(size + 1))
    known = {{}}
    exec(f'''
def call(depth, *args, **named):
    {{variables}}
    if Cycle.alive < 3:
        Cycle()
    if depth:
        order.choice(functions)(depth - 1, 1, 2, named=3)
''', globals(), known)
    return known["call"]

functions = [function(size) for size in range(40)]

def work():
    while True:
        order.choice(functions)(order.randrange(14))

threading.Thread(target=work, daemon=True).start()
end = time.monotonic() + {SECONDS}
while time.monotonic() < end:
    for at in thread_stacks(16).values():
        for code, instruction in at:
            assert 0 <= instruction < len(code.co_code)
print("looked", flush=True)
os._exit(0)
"""


def here(ident: int) -> list[str]:
    return [code.co_name for code, _ in thread_stacks(3)[ident]]


def test_the_innermost_functions_of_each_thread() -> None:
    begun, over = threading.Event(), threading.Event()

    def outer() -> None:
        inner()

    def inner() -> None:
        begun.set()
        over.wait()

    thread = threading.Thread(target=outer)
    thread.start()
    try:
        begun.wait()
        assert thread.ident is not None
        ident = thread.ident
        until(lambda: here(ident) == ["wait", "wait", "inner"])
        assert [code.co_name for code, _ in thread_stacks(99)[thread.ident]][2:4] == ["inner", "outer"]
    finally:
        over.set()
        thread.join()
    assert not any(code is inner.__code__ for stack in thread_stacks(99).values() for code, _ in stack)
    assert thread_stacks.__code__ in [code for code, _ in thread_stacks(3)[threading.get_ident()]]


@pytest.mark.slow
def test_garbage_that_is_collected_meanwhile_crashes_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", GARBAGE], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "looked\n"), done.stderr[-2000:]


@pytest.mark.slow
def test_collection_is_as_others_switch_it() -> None:
    wrong: list[bool] = []
    over, interval = threading.Event(), sys.getswitchinterval()

    def switch() -> None:
        while not over.is_set():
            gc.disable()
            wrong.append(gc.isenabled())
            gc.enable()
            wrong.append(not gc.isenabled())

    def look() -> None:
        for _ in range(20_000):
            thread_stacks(4)

    threads = [threading.Thread(target=look) for _ in range(2)]
    switching = threading.Thread(target=switch)
    sys.setswitchinterval(1e-6)
    try:
        for thread in (*threads, switching):
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        over.set()
        switching.join()
    assert wrong
    assert not any(wrong)
    assert gc.isenabled()


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_call_that_fails_leaves_collection_as_it_was(
    collects: bool, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COLLECTS_WITHIN", collects)
    try:
        module._SWITCHES[enabled]()
        with pytest.raises(ValueError, match="invalid literal"):
            module._uncollected(partial(int, "none"))
        assert gc.isenabled() is enabled
        assert module._uncollected(gc.isenabled) is (enabled and not collects)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
