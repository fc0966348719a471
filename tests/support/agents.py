"""Agents of a test's own: their sockets are in a folder of the test, and all are ended after it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from support.forked import TESTS, path_with_tests
from support.rank_jobs import check_versions

import tierstate as ts
from tierstate.agent.launch import agent_name, agents_of_user, ask_agent, socket_path, start_agent
from tierstate.agent.launch import policy_text as text_of
from tierstate.agent.messages import MessageSocket
from tierstate.agent.pipeline import AgentPipeline
from tierstate.agent.server import LOG
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.format.marker import MARKER_KEY
from tierstate.tiers.connections.distribution import runtime_folder

PATIENCE = 90.0


@contextmanager
def own_agents(folder: Path) -> Iterator[Path]:
    """Agents that this process and its children start in the block have their sockets in a folder."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    folder.mkdir(exist_ok=True)
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    try:
        yield folder
    finally:
        while pids := pids_below(folder):  # also those that were stopped, and do not answer
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os.environ.pop("XDG_RUNTIME_DIR")
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


def pids_below(folder: Path) -> list[int]:
    """The agents whose sockets are in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"tierstate.agent.server" in words and any(w.startswith(bytes(folder)) for w in words):
                found.append(int(process.name))
    return found


HOLD = """
import os, sys, time

def hold(event, args):
    if event == "os.link" and os.fspath(args[1]).startswith({folders!r}) and not str(args[1]).endswith({marker!r}):
        while os.path.exists({gate!r}):
            time.sleep(0.02)

sys.addaudithook(hold)
"""
"""Run by an agent as it starts: before a file gets its name in one of these folders, it waits for the gate to go."""


FAIL_ONCE = """
import errno, os, sys

def fail(event, args):
    if event == "os.link" and os.fspath(args[1]).startswith({prefix!r}) and os.path.exists({gate!r}):
        os.unlink({gate!r})
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), os.fspath(args[1]))

sys.addaudithook(fail)
"""
"""Run by an agent as it starts: as long as the gate is there, the next file with this prefix does not get its name, and
the gate goes."""


@contextmanager
def held(spec: ts.Policy, place: Path, *tiers: str) -> Iterator[None]:
    """The agent of a policy is there from now on, and until the end of the block nothing comes to be in these tiers.

    What a test does while saves are under way, it does then on a machine of any speed.
    """
    folders = tuple(f"{place}/{tier}/" for tier in tiers)
    with tempfile.NamedTemporaryFile() as gate:
        start_with(spec, HOLD.format(folders=folders, marker=MARKER_KEY, gate=gate.name))
        yield


def start_with(spec: ts.Policy, script: str) -> None:
    """Start the agent of a policy; its process runs this script first."""
    with tempfile.TemporaryDirectory() as site:
        (Path(site) / "sitecustomize.py").write_text(script)
        sys.path.insert(0, site)
        try:
            start_agent(spec, socket_path(agent_name(text_of(spec), os.environ)))
        finally:
            sys.path.remove(site)


def statuses() -> list[dict[str, Any]]:
    """What each agent says of itself."""
    found = []
    for path in agents_of_user():
        with suppress(TierstateError):
            found.append(dict(ask_agent(path, "status").head["status"]))
    return found


def policy_text(
    place: Path,
    *,
    slow: str = "",
    fast: str = "",
    agent: str = "mode: required, idle: 10min, memory: 256MiB",
    ram: str = "",
    every: str = "1",
    keep: str = "",
) -> str:
    """Two tiers: a fast one, and a slow one that gets everything later.

    Args:
        slow, fast: their rates, if limited.
        ram: what a host tier before them has, if there is one.
        every: of the two.
        keep: of the fast one.
    """
    limit, fast_limit = (f", every: {every}" + (f", bandwidth: {rate}" if rate else "") for rate in (slow, fast))
    fast_limit += f", keep: {{{keep}}}" if keep else ""
    first = f"  ram: {{type: host, {ram}}}\n" if ram else ""
    return (
        "version: 1\nchunk: 64KiB\narena: {size: 4MiB}\n"
        f"agent: {{{agent}}}\n"
        f"tiers:\n{first}"
        f'  fast: {{type: nvme, path: "{place}/fast"{fast_limit}}}\n'
        f'  slow: {{type: nvme, path: "{place}/slow"{limit}}}\n'
    )


def hosts_policy(place: Path, *, peer: str = "", idle: str = "10min", ram: str = "") -> ts.Policy:
    """A tier of each host (`TIERSTATE_HOST`), and one that all share.

    Args:
        peer: if it is not empty, the first tier is memory of the host and its peers, with this idle time.
        idle: of the agent.
        ram: what a host tier before all others has, if there is one.
    """
    first = f"  ram: {{type: host, {ram}}}\n" if ram else ""
    kind = f"peer, capacity: 256MiB, idle: {peer}" if peer else "nvme"
    return ts.Policy.parse(
        "version: 1\nchunk: 64KiB\narena: {size: 4MiB}\n"
        f"agent: {{mode: required, idle: {idle}, memory: 256MiB}}\n"
        "ranks: {timeout: 60s, silence: 5s}\n"
        f"tiers:\n{first}"
        f'  fast: {{type: {kind}, path: "{place}/${{TIERSTATE_HOST}}"}}\n'
        f'  slow: {{type: lustre, path: "{place}/all", bandwidth: 5MiB/s}}\n'
    )


def policy(place: Path, **options: Any) -> ts.Policy:
    """The policy of `policy_text`."""
    return ts.Policy.parse(policy_text(place, **options))


def without_agent(place: Path, *tiers: str) -> ts.Policy:
    """A policy with these tiers alone, which reads what is there without an agent."""
    lines = [f'  {name}: {{type: nvme, path: "{place}/{name}"}}' for name in tiers]
    return ts.Policy.parse("\n".join(["version: 1", "chunk: 64KiB", "arena: {size: 4MiB}", "tiers:", *lines]))


def state_of(step: int, mib: float = 1.0) -> dict[str, Any]:
    """A state that differs from step to step; one tensor does not."""
    generator = torch.Generator().manual_seed(step)
    n = int(mib * (1 << 18))
    return {
        "w": torch.randn(n, generator=generator),
        "frozen": torch.arange(1 << 16, dtype=torch.float32),
        "small": [torch.full((7,), float(step)), step, "text"],
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two such states are equal to the bit."""
    return (
        torch.equal(one["w"], other["w"])
        and torch.equal(one["frozen"], other["frozen"])
        and torch.equal(one["small"][0], other["small"][0])
        and one["small"][1:] == other["small"][1:]
    )


def wait_until(done: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Wait until this returns something true."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not within {seconds} s: {what}\n{agent_logs()}"
        time.sleep(0.2)


def agent_logs(lines: int = 200) -> str:
    """The end of what each agent has logged, to be read where a test has failed."""
    paths = sorted(runtime_folder().glob(f"agent-*{LOG}"))  # also of those that have ended
    said = ["\n".join([str(path), *path.read_text(errors="replace").splitlines()[-lines:]]) for path in paths]
    return "\n".join([*said, *map(str, statuses())])


def steps_in(place: Path, tier: str, run: str = "run") -> list[int]:
    """The steps whose versions a tier has, read by a Checkpointer without an agent."""
    with ts.Checkpointer(without_agent(place, tier), run) as ckpt:
        return [info.step for info in ckpt.versions()]


def load(place: Path, tier: str, step: int, run: str = "run") -> dict[str, Any]:
    """A version from one tier alone."""
    with ts.Checkpointer(without_agent(place, tier), run) as ckpt:
        found: dict[str, Any] = ckpt.load(step=step)
        return found


def whole(place: Path, tier: str, steps: list[int], ranks: int = 2) -> None:
    """A tier has these steps, each exact for every rank."""
    assert (found := steps_in(place, tier)) == steps, f"{tier} has {found}, and not {steps}"
    with ts.Checkpointer(without_agent(place, tier), "run") as ckpt:
        check_versions(ckpt, steps)


def of_hosts(*names: str) -> list[dict[str, str]]:
    """What the environment of each rank has, which takes itself for one of the host with this name."""
    return [{"TIERSTATE_HOST": name} for name in names]


def whole_on_all_hosts(place: Path, steps: list[int]) -> None:
    """Every tier of two hosts has these steps: each exact in the shared one."""
    shared = f'tiers: {{slow: {{type: lustre, path: "{place}/all"}}}}'
    with ts.Checkpointer(
        ts.Policy.parse(f"version: 1\nchunk: 64KiB\narena: {{size: 4MiB}}\n{shared}\n"), "run"
    ) as ckpt:
        assert [info.step for info in ckpt.versions()] == steps
        assert not ckpt.verify(deep=True).problems
    for name in ("a", "b"):
        with ts.Checkpointer(without_agent(place, name), "run") as ckpt:
            assert [info.step for info in ckpt.versions()] == steps


def pipeline(ckpt: ts.Checkpointer) -> AgentPipeline:
    found = ckpt._pipeline
    assert isinstance(found, AgentPipeline)
    return found


def trainers(function: str, *args: object) -> list[str]:
    """Run a function of `support.agent_trainers` in a process of its own; the lines that it has printed."""
    command = [sys.executable, "-u", str(TESTS / "support/processes.py"), f"support.agent_trainers:{function}"]
    environ = os.environ | {"PYTHONPATH": path_with_tests()}
    # A file and not a pipe: a child that goes on would keep it open.
    with tempfile.TemporaryFile("w+") as said:
        subprocess.run([*command, *map(str, args)], stdout=said, stderr=said, env=environ, timeout=300, check=False)
        said.seek(0)
        return said.read().splitlines()


def pair() -> tuple[MessageSocket, MessageSocket]:
    """Both ends of a connection between a trainer and an agent."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return MessageSocket(one), MessageSocket(other)
