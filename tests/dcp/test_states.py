"""One process saves and loads through torch.distributed.checkpoint, and natively."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import opened, policy, tier, wrapped
from support.dcp_jobs import same
from support.equality import difference
from support.meshes import mesh_at, pretended
from support.storage_sites import sites
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as FsdpShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nested import nested_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader

import tierstate as ts
from tierstate.dcp import TierReader, TierStager, TierWriter, close, staging
from tierstate.dcp.engine import engine_of
from tierstate.dcp.read import TensorPart, VersionLoad, choose_version, read_alone
from tierstate.dcp.step import step_of
from tierstate.engine.ranks.save.messages import PartialCommit
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.boxes import Box
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import ShardRow, Version
from tierstate.manifest.history.log import Log
from tierstate.tiers.registry import open_tier


def text(place: Path, more: str = "") -> str:
    return (
        "version: 1\nchunk: 4KiB\narena: {size: 1MiB}\n"
        f"tiers:\n  nvme: {{type: nvme, path: {place}/nvme, keep: {{last: 3}}}}\n{more}"
    )


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "model": {"up.weight": torch.randn(70, 33, generator=generator), "half": torch.randn(5).bfloat16()},
        "optim": {
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["up.weight"]}, {"lr": 0.2}],
            "state": {"up.weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(70, 33).t()}},
        },
        "mixed": {"pair": (torch.arange(4), 1), "empty": torch.empty(0, 3), "flag": torch.tensor(True)},
        "plain": {"none": None, "text": "x", "bytes": b"\0a", "numbers": [1, 2.5], "nested": [[1], [2]]},
    }


def fresh(value: Any) -> Any:
    """A state of the same structure with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: fresh(item) for key, item in value.items()}
    # As DCP has it: items of lists that hold dicts are filled one by one, all else is replaced.
    parted = isinstance(value, list) and any(isinstance(item, (dict, torch.Tensor)) for item in value)
    return [fresh(item) for item in value] if parted else 0


def test_what_dcp_saves_is_restored_natively_and_the_other_way_round(place: Path) -> None:
    policy, saved = text(place), state()
    dcp.save(saved, checkpoint_id="out/step-7", storage_writer=TierWriter(policy, "run", metadata={"loss": 2}))
    with ts.Checkpointer(ts.Policy.parse(policy), "run") as ckpt:
        same(ckpt.load(), saved)
        into = state()
        into["model"]["up.weight"].zero_()
        same(ckpt.restore(into), saved)
        assert ckpt.info().metadata == {"loss": 2}
        native = state() | {"odd": OrderedDict(a=torch.ones(2)), "list": [{"a": 1}, {"b": [torch.ones(1)]}]}
        tied = native["model"]["up.weight"]
        native["model"] |= {"tied": tied, "rows": tied[3:9], "turned": tied.t()}
        ckpt.save(native, step=8).wait()
        assert ckpt.versions()[-1].parent == ckpt.versions()[0].id
    for step, right in ((7, saved), (None, native)):
        into = fresh(right)
        dcp.load(into, checkpoint_id=step, storage_reader=TierReader(policy, "run"))
        same(into, {**right, "odd": dict(right["odd"])} if "odd" in right else right)
    without = _load_state_dict_from_keys({"model"}, storage_reader=TierReader(policy, "run", step=7))
    same(without, {"model": saved["model"]})


OPAQUE = st.recursive(
    st.builds(lambda n: np.arange(float(n)), st.integers(0, 3)) | st.just(None) | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
"""Values that DCP does not look into: in lists it looks for dicts and tensors."""


@given(OPAQUE, st.booleans(), st.booleans())
@settings(max_examples=40)
def test_what_dcp_does_not_look_into_comes_back_as_it_is(
    tmp_path_factory: Any, value: Any, tensor: bool, end: bool
) -> None:
    policy = text(tmp_path_factory.mktemp("place"))
    value = (value, torch.ones(2)) if tensor else value
    one, two, three = (copy.deepcopy(value) for _ in range(3))
    saved = {"alone": one, "in": {"tuple": ([two], 1), "split": [three, {"a": 1}, *([{}] if end else [])]}}
    dcp.save(saved, checkpoint_id=1, storage_writer=TierWriter(policy, "run"))
    try:
        with ts.Checkpointer(ts.Policy.parse(policy), "run") as ckpt:
            found = ckpt.load()
        into = {"alone": 0, "in": {"tuple": 0, "split": [0, {"a": 0}]}}
        dcp.load(into, checkpoint_id=1, storage_reader=TierReader(policy, "run"))
    finally:
        close()
    saved["in"]["split"] = saved["in"]["split"][:2]  # DCP has no key for an empty dict at the end
    assert difference(found, saved) == ""
    assert difference(into, saved) == ""


def test_a_version_that_cannot_be_read_back_is_saved_and_gets_no_tag(place: Path) -> None:
    policy = text(place)
    dcp.save({"n": torch.tensor([1])}, checkpoint_id=1, storage_writer=TierWriter(policy, "run"))
    (place / "nvme/versions").rename(place / "elsewhere")
    (place / "nvme/versions").symlink_to(place / "elsewhere")  # which the tier refuses to list
    with pytest.raises(ts.Unreadable, match="version 1 is saved, and did not get the tag 'best'"):
        engine_of(ts.Policy.parse(policy), "run").tag("best", 1)
    close()


def test_versions_are_found_by_step_id_and_tag(place: Path) -> None:
    policy = text(place)
    for step in (10, None, None):
        dcp.save({"n": torch.tensor([step or 0])}, checkpoint_id=step, storage_writer=TierWriter(policy, "run"))
    dcp.save({"n": torch.tensor([99])}, storage_writer=TierWriter(policy, "run", step=99))
    with ts.Checkpointer(ts.Policy.parse(policy), "run") as ckpt:
        assert [v.step for v in ckpt.versions()] == [11, 12, 99]  # `keep: {last: 3}`
        ckpt.tag("best", 12)
        found = ckpt.info(step=99).id
    for more, right in (({"tag": "best"}, 0), ({"version": found[:8]}, 99), ({}, 99), ({"step": 12}, 0)):
        into = {"n": torch.tensor([5])}
        dcp.load(into, storage_reader=TierReader(policy, "run", **more))
        assert into["n"].item() == right
    with pytest.raises(ts.NotFound, match="no version with step 10 in nvme"):
        TierReader(policy, "run", step=10).read_metadata()


class Odd:
    """No plain value."""

    def __init__(self) -> None:
        self.x = 3


def test_generators_and_loaders_at_the_top_of_a_state_go_on(place: Path) -> None:
    def loader() -> ts.Loader:
        return ts.Loader(DataLoader(list(range(20)), batch_size=2, shuffle=True))  # type: ignore[arg-type]

    saved, spec = loader(), text(place)
    batches = iter(saved)
    for _ in range(3):
        next(batches)
    dcp.save({"rng-0": ts.Rng(), "loader-0": saved}, checkpoint_id=1, storage_writer=TierWriter(spec, "run"))
    wanted = torch.rand(3), next(batches)
    fresh = loader()
    dcp.load({"rng-0": ts.Rng(), "loader-0": fresh}, storage_reader=TierReader(spec, "run"))
    found = torch.rand(3), next(iter(fresh))
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_names_of_leaves_are_changed_as_by_load(place: Path) -> None:
    model = torch.nn.DataParallel(torch.nn.Linear(3, 2))
    saved = {"model": dict(model.state_dict()), "old": {"lr": 0.1, "moment": torch.ones(5)}, "step": 7}
    with ts.Checkpointer(ts.Policy.parse(text(place)), "run") as ckpt:
        ckpt.save(saved, step=7).wait()
        rename = [ts.unwrapped, {"old": "new.inner"}]
        there = ckpt.load(rename=rename)
    into: dict[str, Any] = {
        "model": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)},
        "new": {"inner": {"lr": 0.0, "moment": torch.zeros(5)}},
        "step": 0,
    }
    dcp.load(into, storage_reader=TierReader(text(place), "run", rename=rename))
    same(into, there)
    assert torch.equal(into["model"]["weight"], model.module.weight)
    found = _load_state_dict_from_keys({"new"}, storage_reader=TierReader(text(place), "run", rename=rename))
    same(found, {"new": there["new"]})
    with pytest.raises(CheckpointException, match="after `rename` several leaves of the version have one name"):
        dcp.load(into, storage_reader=TierReader(text(place), "run", rename=lambda path: ("one",)))


def test_objects_are_pickled_only_where_a_rule_says_so(place: Path) -> None:
    with pytest.raises(CheckpointException, match=r"CaptureError: plain\.odd: a .*Odd has no provider; allow pickle"):
        dcp.save({"plain": {"odd": Odd()}}, checkpoint_id=1, storage_writer=TierWriter(text(place), "run"))
    policy = text(place, 'rules: [{match: "plain.odd", pickle: true}]\n')
    dcp.save({"plain": {"odd": Odd()}}, checkpoint_id=1, storage_writer=TierWriter(policy, "run"))
    into: dict[str, Any] = {"plain": {"odd": 0}}
    dcp.load(into, storage_reader=TierReader(policy, "run"))
    assert into["plain"]["odd"].x == 3
    with pytest.raises(CheckpointException, match=r"Unsafe: plain\.odd is a pickle"):
        dcp.load(into, storage_reader=TierReader(text(place), "run"))


LOSSY = 'rules: [{match: "exp_avg", lossy: bf16}]\n'
REFUSED = r"Unsafe: exp_avg was saved with fewer bits; .*allow_lossy=True"


def test_what_was_saved_with_fewer_bits_is_refused(place: Path) -> None:
    """DCP cannot be told to take it: neither as a tensor, nor as a value of another kind, nor by its name alone."""
    state = {"w": torch.randn(70), "exp_avg": torch.randn(70), "list": [1, (ts.Lossy(torch.randn(9), "bf16"),)]}
    with ts.Checkpointer(ts.Policy.parse(text(place, LOSSY)), "run") as ckpt:
        ckpt.save(state, step=1).wait()
        assert ckpt.versions()[-1].lossy == ("bf16",)
    for into in ({"exp_avg": torch.zeros(70)}, {"exp_avg": 0}, {"w": torch.zeros(70), "exp_avg": torch.zeros(70)}):
        with pytest.raises(CheckpointException, match=REFUSED):
            dcp.load(into, storage_reader=TierReader(text(place), "run"))
        assert not torch.as_tensor(into["exp_avg"]).any()
    with pytest.raises(CheckpointException, match=REFUSED):
        _load_state_dict_from_keys({"exp_avg"}, storage_reader=TierReader(text(place), "run"))
    with pytest.raises(CheckpointException, match=r"Unsafe: list\.1\.0 was saved with fewer bits"):
        dcp.load({"list": 0}, storage_reader=TierReader(text(place), "run"))
    exact = {"w": torch.zeros(70)}
    dcp.load(exact, storage_reader=TierReader(text(place), "run"))
    same(exact, {"w": state["w"]})


def test_a_truncated_pack_is_told(place: Path) -> None:
    policy = text(place)
    dcp.save(state(), checkpoint_id=1, storage_writer=TierWriter(policy, "run"))
    pack = max((place / "nvme" / "packs" / "run").iterdir(), key=lambda path: path.stat().st_size)
    with pack.open("r+b") as file:
        file.truncate(5000)
    close()
    with pytest.raises(CheckpointException, match=r"is whole in no tier that .*: .* the object has 5000"):
        dcp.load(fresh(state()), storage_reader=TierReader(policy, "run"))


def test_a_version_whose_shards_are_not_the_whole_fills_nothing(place: Path) -> None:
    policy, into = ts.Policy.parse(text(place)), {"w": torch.full((4, 3), 7.0)}
    dcp.save({"w": torch.ones(2, 3)}, checkpoint_id=1, storage_writer=TierWriter(policy, "run"))
    tier_run = engine_of(policy, "run").tier_run("nvme")
    good = tier_run.newest()
    assert good is not None
    leaves = [
        leaf._replace(spec=replace(leaf.spec, shape=(4, 3))) if leaf.path else leaf for leaf in good.version.leaves
    ]
    head = replace(good.version.head, seq=2)
    bad = Version.build(head, leaves, [ShardRow(1, 0, Box((0, 0), (2, 3)))], good.version.digests)
    tier_run.publish(Record(bad, good.layout, good.commit))
    with pytest.raises(CheckpointException, match=r"FormatError: version 2 .* does not hold every element once of w"):
        dcp.load(into, storage_reader=TierReader(policy, "run"))
    assert (into["w"] == 7).all()


def test_memory_of_the_process_serves_loads_of_that_process(place: Path) -> None:
    policy = text(place, f"  far: {{type: lustre, path: {place}/far}}\n  mem: {{type: memory, capacity: 1MiB}}\n")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=1, storage_writer=TierWriter(policy, "run"))
    engine = engine_of(ts.Policy.parse(policy), "run")
    assert "mem" in engine.checkpointer.info().tiers
    close()
    with ts.Checkpointer(ts.Policy.parse(policy), "run") as ckpt:
        assert ckpt.info().tiers == ("nvme", "far")


@pytest.mark.slow
def test_slower_tiers_get_a_save_after_it_has_returned(place: Path) -> None:
    """It returns when the durable tier has it; the engine brings what is owed, at the latest when it is closed."""
    far, begin = open_tier("far", "nvme", {"path": str(place / "far")}), threading.Event()
    put = far.put

    def late(key: str, data: Any) -> Any:
        assert begin.wait(60)
        return put(key, data)

    far.put = late  # type: ignore[method-assign]
    with wrapped(far) as keys:
        spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "far": {**keys, "keep": {"last": 2}}})
        writer = TierWriter(spec, "run")
        for step in range(3):
            dcp.save({"w": torch.full((9,), float(step))}, checkpoint_id=step, storage_writer=writer)
        nvme = Log(opened(spec, "nvme"), "run")
        assert nvme.read(nvme.seqs()[-1]).version.head.step == 2
        assert not list((place / "far").rglob("*.record"))
        assert engine_of(spec, "run").checkpointer.stats().tiers["far"].saves == 0
        begin.set()
        close()
        steps = [Log(at, "run").read(seq).version.head.step for at in (far,) for seq in Log(far, "run").seqs()]
        assert steps[-1] == 2
        assert len(nvme.seqs()) == 1  # versions that were kept for the slower tier are dropped in the end


def test_every_save_goes_to_the_durable_tier(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place, every=10), "far": tier("lustre", place, every=2)})
    writer = TierWriter(spec, "run")
    for step in (10, 11, 12):
        dcp.save({"w": torch.full((3,), step)}, checkpoint_id=step, storage_writer=writer)
    close()
    with ts.Checkpointer(spec, "run") as ckpt:
        assert [(v.step, v.tiers) for v in ckpt.versions()] == [
            (10, ("nvme", "far")),
            (11, ("nvme",)),
            (12, ("nvme", "far")),
        ]


def test_a_writer_saves_by_the_ranks_that_dcp_saves_by(place: Path) -> None:
    writer = TierWriter(text(place), "run")
    plan = writer.prepare_local_plan(dcp.SavePlan([]))
    with pytest.raises(ts.PolicyError, match="DCP saves by 2 ranks, and this writer by 1: give TierWriter the same"):
        writer.prepare_global_plan([plan, plan])


def test_writers_are_pickled_without_what_they_opened(place: Path) -> None:
    writer = TierWriter(text(place), "run", step=4)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    dcp.save({"w": torch.zeros(3)}, storage_writer=pickle.loads(pickle.dumps(writer)))
    with ts.Checkpointer(ts.Policy.parse(text(place)), "run") as ckpt:
        assert [v.step for v in ckpt.versions()] == [4, 4]
        assert ckpt.load()["w"].sum() == 0


@pytest.mark.parametrize("name", [100, "100", "step-100", "out/step-100", Path("a/b.c/epoch_3-step100"), "step-100/"])
def test_a_checkpoint_id_says_the_step(name: Any) -> None:
    assert step_of(name) == 100
    assert TierWriter.validate_checkpoint_id(name)
    assert TierReader.validate_checkpoint_id(name)


@pytest.mark.parametrize("name", ["", "latest", "step-100x", -1, True, None, 1.5, "9" * 30])
def test_what_says_no_step_is_refused(name: Any) -> None:
    assert not TierWriter.validate_checkpoint_id(name)
    with pytest.raises(ValueError, match="names no step; give the step as a number"):
        step_of(name)


def test_a_stager_copies_everything_and_uses_its_memory_again() -> None:
    stager, live = TierStager(), state()
    live["tied"] = live["model"]["up.weight"]
    right = {key: value for key, value in pickle.loads(pickle.dumps(live)).items()}
    first = stager.stage(live)
    for tensor in (live["model"]["up.weight"], live["mixed"]["pair"][0]):
        tensor.zero_()
    live["plain"]["numbers"].append(7)
    same(dict(first), right)
    assert first["tied"] is first["model"]["up.weight"]
    where = first["model"]["up.weight"].data_ptr()
    second = stager.stage(live)  # the first is still in use
    assert second["model"]["up.weight"].data_ptr() != where
    same(dict(first), right)
    del first
    assert stager.stage(live)["model"]["up.weight"].data_ptr() == where
    stager.close()


def test_a_stager_copies_each_view_of_the_same_memory_as_it_is() -> None:
    square = torch.arange(9.0).view(3, 3)
    live = {"square": square, "turned": square.t(), "bits": square.view(torch.int32), "row": square[0]}
    staged = TierStager().stage(live)
    same(dict(staged), live)


def test_what_another_thread_adds_while_tensors_are_copied_is_not_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    live = {"w": torch.ones(3), "seen": {"a": torch.ones(1)}, "history": [torch.ones(2)], "n": {"losses": deque([1])}}
    right, tensors = copy.deepcopy(live), staging._Tensors.copy

    def copied(self: Any, *given: Any) -> None:
        tensors(self, *given)
        live["seen"]["b"] = torch.zeros(1)
        live["history"].append(torch.zeros(2))
        live["n"]["losses"].append(2)

    monkeypatch.setattr(staging._Tensors, "copy", copied)
    assert difference(dict(TierStager().stage(live)), right) == ""


class Named(dict[str, Any]):
    """A dict that is made of something else than its items."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)


def test_a_stager_copies_every_kind_of_dict_as_it_is() -> None:
    """The state of torch's MultiStepLR has its milestones in a Counter, for example."""
    weight = torch.nn.Parameter(torch.ones(2))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([weight], lr=0.1), [30, 80])
    live = {
        "scheduler": scheduler.state_dict(),
        "lists": defaultdict(list, {"a": [weight.detach()]}),
        "named": Named("x"),
        "ordered": OrderedDict(b=weight.detach(), a=1),
    }
    staged = TierStager().stage(live)
    same(dict(staged), live)
    assert staged["lists"].default_factory is list
    assert staged["scheduler"]["milestones"] is not live["scheduler"]["milestones"]
    assert staged["lists"]["a"][0] is not live["lists"]["a"][0]


def test_what_a_scheduler_has_is_the_same_after_an_asynchronous_save(place: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([weight], lr=0.1), [30, 80])
    writer, live = TierWriter(text(place), "run"), {"scheduler": scheduler.state_dict()}
    dcp.async_save(live, checkpoint_id=1, storage_writer=writer, async_stager=TierStager()).result()
    with ts.Checkpointer(ts.Policy.parse(text(place)), "run") as ckpt:
        assert ckpt.load()["scheduler"]["milestones"] == {"30": 1, "80": 1}  # DCP makes texts of keys


def flat_parameter() -> torch.nn.Parameter:
    """As FSDP1 has them: one rank's piece of many parameters, which only the module itself can tell apart."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter._is_flat_param = True  # type: ignore[attr-defined]
    return parameter


def test_a_raw_flat_parameter_is_refused(place: Path) -> None:
    with pytest.raises(CheckpointException, match=r"CaptureError: model\.w: a flat parameter of FSDP1"):
        dcp.save({"model": {"w": flat_parameter()}}, checkpoint_id=1, storage_writer=TierWriter(text(place), "run"))


class Marked(torch.Tensor):
    """A tensor that is more than its elements."""


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: TwoTensor(torch.ones(4), torch.zeros(4)), "a tensor subclass .*TwoTensor is not known"),
        (lambda: torch.ones(4).as_subclass(Marked), "a tensor subclass .*Marked is not known"),
        (lambda: nested_tensor([torch.ones(2)], layout=torch.jagged), "a tensor subclass .*NestedTensor is not known"),
        (lambda: torch.eye(3).to_sparse(), "a tensor of layout torch.sparse_coo has no strides"),
        (lambda: torch.ones(3, device="meta"), "a meta tensor has no bytes"),
        (flat_parameter, "a flat parameter of FSDP1"),
    ],
)
def test_a_stager_refuses_what_is_more_than_its_memory(make: Any, why: str) -> None:
    """A tensor that wraps others has the address 0, from which nothing can be copied."""
    with pytest.raises(ts.CaptureError, match=rf"^model\.w: {why}"):
        TierStager().stage({"model": {"v": torch.ones(2), "w": make()}})


def test_a_stager_copies_the_shards_of_fsdp1_and_waits_for_a_result_under_way() -> None:
    with pretended():
        whole, own = torch.Size((4, 3)), ShardMetadata([0, 0], [2, 3], "rank:0/cpu")
        rest = ShardMetadata([2, 0], [2, 3], "rank:1/cpu")
        live = ShardedTensor._init_from_local_shards_and_global_metadata(
            [FsdpShard(torch.arange(6.0).view(2, 3), own)], ShardedTensorMetadata([own, rest], whole)
        )
        under_way = DTensor.from_local(torch.ones(3), mesh_at((1,), (0,)), [Replicate()], run_check=False)
        under_way._local_tensor = AsyncCollectiveTensor(torch.arange(3.0))
        staged = TierStager().stage({"w": live, "d": under_way})
        live.local_tensor().zero_()
        assert torch.equal(staged["w"].local_tensor(), torch.arange(6.0).view(2, 3))
        assert torch.equal(staged["d"]._local_tensor, torch.arange(3.0))


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    turned=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.bool]),
    kind=st.sampled_from(["cpu", "cuda"]),
)
def test_a_staged_dtensor_has_the_staged_host_memory_itself_as_its_local_part(
    shape: list[int], turned: bool, dtype: torch.dtype, kind: str
) -> None:
    """Also on a mesh of CUDA devices, where a build of torch without CUDA could copy nothing."""
    local = torch.randn(shape).to(dtype)
    local = local.movedim(0, -1) if turned else local
    with pretended():
        mesh = DeviceMesh(kind, torch.arange(4).view(2, 2), _init_backend=False)
        whole = torch.Size((local.shape[0] * 2, *local.shape[1:]))
        meta = TensorMeta(whole, torch.empty(whole, device="meta").stride(), dtype)
        live = DTensor(local, DTensorSpec(mesh, (Shard(0), Replicate()), meta), requires_grad=dtype.is_floating_point)
        staged = TierStager().stage({"w": live, "local": local})
        made = staged["w"]
        assert made._local_tensor is staged["local"]
        assert torch.equal(staged["local"], local)
        assert (made.device_mesh, made.placements) == (mesh, live.placements)
        assert (made.shape, made.stride(), made.dtype) == (live.shape, live.stride(), dtype)
        assert (made.requires_grad, made.device.type) == (False, "cpu")
        again = pickle.loads(ForkingPickler.dumps(made))
        assert torch.equal(again._local_tensor, local)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and some boxes in it."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=0, max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        boxes.append(Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    return shape, boxes


def test_any_region_of_a_shard_comes_to_any_place(place: Path) -> None:
    policy = ts.Policy.parse(text(place).replace(", keep: {last: 3}", ""))
    numbers = iter(range(10**6))

    @given(cuts(), st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.complex128]), st.booleans())
    def comes(cut: tuple[tuple[int, ...], list[Box]], dtype: torch.dtype, strided: bool) -> None:
        shape, boxes = cut
        whole = torch.randint(0, 255, shape).to(dtype)
        run = f"run-{next(numbers)}"
        dcp.save({"w": whole}, checkpoint_id=1, storage_writer=TierWriter(policy, run), no_dist=True)
        engine = engine_of(policy, run)
        entry = choose_version(engine, None, None, None)
        load = VersionLoad(entry.version, lambda path: False, read_alone(engine, entry))
        outs = [torch.zeros(box.shape[::-1], dtype=dtype).permute(list(range(len(shape)))[::-1]) for box in boxes]
        outs = outs if strided else [torch.zeros(box.shape, dtype=dtype) for box in boxes]
        leaf = load.view.tensors["w"]
        load.fill([leaf] * len(boxes), [TensorPart(out, box) for box, out in zip(boxes, outs, strict=True)])
        for box, out in zip(boxes, outs, strict=True):
            assert torch.equal(out, whole[box.slices()])
        close()

    comes()


def test_what_may_be_whole_in_a_tier_that_is_away_is_not_passed_over(place: Path) -> None:
    def state(step: int) -> dict[str, Any]:
        return {name: {"w": torch.full((3000,), float(step))} for name in ("model", "optimizer")}

    def at(**keys: Any) -> ts.Policy:
        return policy({name: site.keys() for name, site in there.items()}, durable="lustre", **keys)

    with sites(["nvme", "lustre"], place) as there:
        split = at(rules=[{"match": "optimizer.**", "tiers": ["lustre"]}])
        for step, where in ((1, at()), (2, split)):
            with ts.Checkpointer(where, "run") as ckpt:
                ckpt.save(state(step), step)
        there["lustre"].away = True
        for named in ({}, {"step": 2}):
            with pytest.raises(ts.Unreadable, match=r"\(step 2\).*it may be whole where .*lustre is away"):
                TierReader(split, "run", **named).read_metadata()
        found = state(0)
        dcp.load(found, storage_reader=TierReader(split, "run", step=1), no_dist=True)
        assert not difference(found, state(1))
        there["lustre"].away = False
        dcp.load(found, storage_reader=TierReader(split, "run"), no_dist=True)
        assert not difference(found, state(2))
        close()


def test_a_save_does_not_wait_for_its_retention(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, retire = threading.Event(), TierRun.retire

    def held(self: TierRun, *args: Any, **more: Any) -> Any:
        assert go.wait(60)
        return retire(self, *args, **more)

    spec = ts.Policy.parse(text(place).replace("{last: 3}", "{last: 1}"))
    dcp.save({"w": torch.ones(3)}, checkpoint_id=1, storage_writer=TierWriter(spec, "run"))
    close()
    monkeypatch.setattr(TierRun, "retire", held)
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=2, storage_writer=TierWriter(spec, "run"))
    log = Log(opened(spec, "nvme"), "run")
    assert len(log.seqs()) == 2
    go.set()
    close()
    assert len(log.seqs()) == 1


def test_the_errors_of_a_rank_can_be_sent_to_all() -> None:
    """DCP pickles them; one that could not be unpickled would end the other ranks by an error of its own."""

    def kinds(cls: type[BaseException]) -> Iterator[type[BaseException]]:
        yield cls
        for one in cls.__subclasses__():
            yield from kinds(one)

    found = {cls for cls in kinds(ts.TierstateError) if cls.__module__.startswith("tierstate")}
    assert PartialCommit in found
    for cls in found:
        error = cls("why")
        error.__dict__["ranks"] = (1,)
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back), back.ranks) == (cls, str(error), (1,))
    assert pickle.loads(pickle.dumps(PartialCommit("why", [1], [2]))).unsettled == (2,)
