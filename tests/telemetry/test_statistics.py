"""Statistics of leaves and alarms: in every version that is saved, by one process, by ranks and by an agent."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.agents import own_agents
from support.agents import policy_text as agent_policy
from support.checkpointer_worlds import policy, scratch, tier
from support.processes import Gang
from support.slow_values import Fill
from support.thread_ranks import Cluster

import tierstate as ts
from tierstate.engine.events import Event


def world(place: Path, action: str = "warn", **alarms: Any) -> ts.Policy:
    """Chunks of 4 KiB in two tiers, and statistics."""
    tiers = {"nvme": tier("nvme", place), "lustre": tier("lustre", place)}
    return policy(tiers, statistics=True, alarms={"action": action, **alarms})


def check(ckpt: ts.Checkpointer, step: int, leaves: dict[str, torch.Tensor]) -> None:
    found = ckpt.statistics(step=step)
    assert found.keys() == leaves.keys()
    for name, tensor in leaves.items():
        one, finite = found[name], tensor[torch.isfinite(tensor)].double()
        assert (one.count, one.nan) == (tensor.numel(), int(torch.isnan(tensor).sum()))
        assert one.infinite == int(torch.isinf(tensor).sum())
        assert one.finite == bool(torch.isfinite(tensor).all())
        if len(finite):
            assert (one.min, one.max) == (float(finite.min()), float(finite.max()))
            assert one.norm == pytest.approx(float(finite.norm()), rel=1e-5)
            assert one.rms == pytest.approx(float(finite.square().mean().sqrt()), rel=1e-5)


changes = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 8999),
        st.sampled_from([float("nan"), float("inf"), 0.0, 2.5, -7.0]),
    ),
    max_size=3,
)


@pytest.mark.slow
@given(st.lists(changes, min_size=1, max_size=4), st.booleans())
def test_each_version_has_those_of_its_own_values(history: list[Any], many: bool) -> None:
    """Also of chunks that did not change, and were not read again, and after a restart."""
    generator = torch.Generator().manual_seed(1)
    # Chunks of 1 MiB and more are compared before they are copied.
    size, chunk = (700_000, "1MiB") if many else (9000, "4KiB")
    state = {name: torch.randn(size, generator=generator) for name in "abc"}
    truth = []
    with scratch() as place:
        spec = policy(
            {"nvme": tier("nvme", place)}, statistics=True, alarms={"action": "off"}, chunk=chunk,
            arena={"size": "16MiB"},
        )  # fmt: skip
        with ts.Checkpointer(spec, "run") as ckpt:
            for step, each in enumerate(history):
                for name, where, value in each:
                    state[name][where] = value
                ckpt.save(state, step=step).wait()
                truth.append({name: tensor.clone() for name, tensor in state.items()})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(state, step=len(truth)).wait()
            for step, leaves in enumerate([*truth, truth[-1]]):
                check(ckpt, step, leaves)
            layers = ckpt.layers()
            assert layers.steps == list(range(len(truth) + 1))
            assert (layers.changed[:, -1] == 0).all()


@pytest.mark.parametrize("slabs", [2, 3, 4, 9])
def test_an_arena_of_few_slabs_is_enough(place: Path, slabs: int) -> None:
    keys: dict[str, Any] = {"statistics": True, "arena": {"size": slabs * 4096}}
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, **keys), "run") as ckpt:
        for step in range(3):
            state = {name: torch.full((5000,), float(step)) for name in "abcd"}
            ckpt.save(state, step=step)
        ckpt.save(state, step=9).wait(timeout=60)
        check(ckpt, 1, {name: torch.ones(5000) for name in "abcd"})


@pytest.mark.slow
def test_ranks_and_agents_keep_them(place: Path) -> None:
    with Gang(2, "support.saving_jobs:save", place, "statistics") as gang:
        gang.wait()
    spec = policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        state = ckpt.load()
        found = ckpt.statistics()
        for rank in range(2):
            own = found[f"own.{rank}"]
            assert (own.min, own.max, own.count) == (rank + 4.0, rank + 4.0, 3000)
        assert found["model.weight"].norm == pytest.approx(float(state["model"]["weight"].norm()), rel=1e-5)
    by_agent = ts.Policy.parse(agent_policy(place) + "statistics: true\n")
    with own_agents(place / "sockets"), ts.Checkpointer(by_agent, "handed") as ckpt:
        leaves = {"a": torch.arange(300.0), "b": torch.tensor([float("nan"), 1.0])}
        ckpt.save(leaves, step=1).wait("slow")
        check(ckpt, 1, leaves)


def train(ckpt: ts.Checkpointer, steps: int, wrong: dict[int, Any]) -> None:
    """Layers that all move a little at each step; ``wrong``: by step, a function that spoils the state."""
    generator = torch.Generator().manual_seed(0)
    layers = {f"layers.{i}": torch.randn(500, generator=generator) for i in range(6)}
    state = {"model": layers, "mask": torch.full((10,), -float("inf")), "seen": 0}
    for step in range(steps):
        if step not in wrong or not wrong[step](layers):
            for tensor in layers.values():
                tensor += 0.01 * torch.randn(500, generator=generator)
        ckpt.save(state, step=step).wait()


def spoil(name: str, value: float) -> Any:
    return lambda layers: layers[name].__setitem__(77, value)


def test_what_goes_wrong_is_named_at_once_with_layer_and_step(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    found: list[Event] = []
    with caplog.at_level(logging.WARNING, "tierstate"), ts.Checkpointer(world(place), "run") as ckpt:
        ckpt.on("alarm", found.append)
        train(
            ckpt, 12,
            {4: spoil("layers.2", float("nan")), 6: lambda layers: layers["layers.1"].mul_(100) is None,
             8: lambda layers: [layers[f"layers.{i}"].add_(1) for i in (0, 1, 2, 4, 5)]},
        )  # fmt: skip
    # -inf in a mask is no alarm, and a NaN that stays is told once.
    assert [(event.step, event.reason.split()[:2]) for event in found] == [
        (4, ["nonfinite:", 'model."layers.2"']),
        (6, ["jump:", 'model."layers.1"']),
        (8, ["frozen:", 'model."layers.3"']),
    ]
    said = [record.message for record in caplog.records]
    assert said[0].startswith('step 4: model."layers.2" is not finite: 1 NaN and 0 infinite of 500 elements')


@pytest.mark.parametrize("which", ["nonfinite", "frozen"])
def test_each_kind_can_be_switched_off(place: Path, which: str) -> None:
    found: list[Event] = []
    with ts.Checkpointer(world(place, **{which: False}, jump=None), "run") as ckpt:
        ckpt.on("alarm", found.append)
        train(ckpt, 9, {4: spoil("layers.2", float("nan")), 7: lambda _: True})
    assert {event.reason.split(":")[0] for event in found} == {"nonfinite", "frozen"} - {which}


def test_an_alarm_is_raised_at_the_next_save_or_at_the_end(place: Path) -> None:
    ckpt = ts.Checkpointer(world(place, "raise"), "run")
    with pytest.raises(ts.StateAlarm, match=r"step 1 was saved, but .*layers\.2"):
        train(ckpt, 3, {1: spoil("layers.2", float("nan"))})
    ckpt.save({"layers.0": torch.ones(3)}, step=2).wait()
    ckpt.save({"layers.0": torch.tensor([1.0, float("inf"), float("nan")])}, step=3).wait()
    with pytest.raises(ts.StateAlarm, match=r"step 3 was saved, but .*layers\.0"):
        ckpt.close()
    with ts.Checkpointer(world(place), "run") as ckpt:
        assert [version.step for version in ckpt.versions()] == [0, 1, 2, 3]


def test_an_alarm_of_one_rank_is_no_save_of_all_and_the_next_ones_are_in_step(place: Path) -> None:
    def told(ckpt: ts.Checkpointer, rank: int) -> list[str]:
        found = []
        for step in range(4):
            own = torch.full((3,), float("nan") if (rank, step) == (1, 1) else 1.0)
            try:
                ckpt.save({"own": ts.PerRank(own)}, step=step).wait()
                found.append("")
            except ts.TierstateError as error:
                found.append(type(error).__name__)
        return found

    cluster = Cluster(place, [0, 0], statistics=True, alarms={"action": "raise"})
    failed = ["", "", "RankFailed", ""]
    assert cluster.together(told) == [failed, ["", "", "StateAlarm", ""]]


def test_an_alarming_version_is_tagged(place: Path) -> None:
    with ts.Checkpointer(world(place, "tag"), "run") as ckpt:
        train(ckpt, 4, {2: spoil("layers.2", float("nan"))})
    with ts.Checkpointer(world(place), "run") as ckpt:
        assert {tag: info.step for tag, info in ckpt.tags().items()} == {"alarm-step-2": 2}


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_an_alarming_version_of_many_ranks_is_tagged_whichever_rank_it_alarms(place: Path, hosts: list[int]) -> None:
    def told(ckpt: ts.Checkpointer, rank: int) -> list[Event]:
        found: list[Event] = []
        ckpt.on("committed", found.append)
        for step in range(3):
            own = torch.full((3,), float("nan") if (rank, step) == (1, 1) else 1.0)
            ckpt.save({"own": ts.PerRank(own), "step": step}, step=step).wait("site")
        ckpt.close()
        return found

    cluster = Cluster(place, hosts, {}, statistics=True, alarms={"action": "tag"})
    events = cluster.together(told)
    with ts.Checkpointer(cluster.policy(hosts[1]), "run") as ckpt:
        assert ckpt.load(tag="alarm-step-1", only=["step"])["step"] == 1
        assert ckpt.tags().keys() == {"alarm-step-1"}
        assert {one.version for rank in events for one in rank} - {""} <= {one.id for one in ckpt.versions()}


def test_without_statistics_there_are_none(place: Path) -> None:
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save({"a": torch.ones(10)}, step=1).wait()
        assert ckpt.statistics() == {}
        (version,) = ckpt.history()
        assert (version.step, version.statistics, version.changed) == (1, {}, {})
        for ask in (ckpt.history, ckpt.layers):
            with pytest.raises(ValueError, match="last -1: write how many of the newest versions"):
                ask(last=-1)
    with pytest.raises(ts.PolicyError, match="alarms: watch the statistics of saves"):
        policy({"nvme": tier("nvme", place)}, alarms={"action": "warn"})


def test_a_capture_that_fails_frees_its_memory(place: Path) -> None:
    def fail(_out: object) -> None:
        raise RuntimeError("planted")

    state = {"a": torch.ones(20_000)[::2], "b": Fill(5000, fail)}
    with ts.Checkpointer(world(place), "run") as ckpt:
        for step in range(20):  # each has taken a part of the arena when it fails
            with pytest.raises(ts.CaptureError, match="planted"):
                ckpt.save(state, step=step)
        ckpt.save({"a": torch.ones(30_000)}, step=99).wait(timeout=60)
        assert ckpt.statistics()["a"].norm == pytest.approx(30_000**0.5)
