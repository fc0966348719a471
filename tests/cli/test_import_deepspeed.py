"""Folders of DeepSpeed's ZeRO, made as it partitions, are imported as whole parameters without DeepSpeed."""

from __future__ import annotations

import copy
import math
import shutil
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.cli_calls import Call

import tierstate as ts
from tierstate.files.importing import import_version

SHAPES = [{"in.weight": (53, 41), "out.weight": (3, 5)}, {"in.bias": (53,), "out.bias": (), "odd.bias": (7,)}]
"""Two groups; the first parameter has several chunks, and nothing divides by a number of ranks."""

FROZEN = {"frozen.weight": (5, 3)}
NAMES = [name for group in SHAPES for name in group]


@dataclass
class fragment_address:
    """DeepSpeed's class, by its name."""

    numel: int
    start: int


class LossScaler:
    """DeepSpeed's class, by its name."""


@pytest.fixture(autouse=True)
def _deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes, as pickles name them; nothing else of it."""
    for kind, name in (
        (fragment_address, "deepspeed.utils.tensor_fragment"),
        (LossScaler, "deepspeed.runtime.fp16.loss_scaler"),
    ):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        monkeypatch.setattr(sys.modules[name], kind.__name__, kind, raising=False)
        monkeypatch.setattr(kind, "__module__", name)


def values() -> dict[str, dict[str, torch.Tensor]]:
    """The weights and moments of each parameter."""
    random = torch.Generator().manual_seed(1)
    shapes = {name: shape for group in SHAPES for name, shape in group.items()}
    return {
        name: {key: torch.randn(shape, generator=random) for key in ("fp32", "exp_avg", "exp_avg_sq")}
        for name, shape in shapes.items()
    }


def module(stage: int) -> OrderedDict[str, torch.Tensor]:
    """What a model's file has of the module: in stage 3 empty parameters."""
    whole = OrderedDict((name, one["fp32"].bfloat16()) for name, one in values().items())
    whole["frozen.weight"] = torch.arange(15.0).reshape(5, 3)
    if stage == 3:
        whole = OrderedDict((name, torch.empty(0)) for name in whole)
    whole["out.tied"] = torch.empty(0) if stage == 3 else whole["out.weight"].clone()
    whole["running"] = torch.arange(4)
    whole["in._extra_state"] = {"amax": 1.5}  # as `get_extra_state` of a module gives it
    return whole


def scheduler() -> dict[str, Any]:
    """The state of torch's MultiStepLR has its milestones in a Counter."""
    return {"last_batch_iteration": 6, "milestones": Counter({3: 1, 9: 2})}


def model_file(stage: int, ranks: int, rank: int) -> dict[str, Any]:
    shares = {name: -(-math.prod(shape) // ranks) for name, shape in FROZEN.items()}
    padded = torch.cat([torch.arange(15.0), torch.zeros(ranks)])
    return {
        "module": module(stage), "buffer_names": ["running"], "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in SHAPES],
        "frozen_param_shapes": FROZEN if stage == 3 else None,
        "frozen_param_fragments": {n: padded[rank * s : (rank + 1) * s].clone() for n, s in shares.items()},
        "shared_params": {"out.tied": "out.weight"}, "lr_scheduler": scheduler(), "global_steps": 7,
        "dp_world_size": ranks, "extra": {"text": "ü", "pair": (1, 2.5)},
    }  # fmt: skip


def groups() -> list[dict[str, Any]]:
    return [{"lr": 0.5, "weight_decay": 0.1, "params": [0]}, {"lr": 0.25, "weight_decay": 0.0, "params": [1]}]


def scaler() -> LossScaler:
    made = LossScaler()
    made.__dict__ |= {"cur_scale": 8.0, "dynamic": False}
    return made


def common(ranks: int) -> dict[str, Any]:
    return {"loss_scaler": scaler(), "overflow": False, "ds_version": "0.19.8", "partition_count": ranks}


def flat_group(group: int, key: str, size: int, gap: int) -> torch.Tensor:
    """A group's parameters one behind the other, each after a gap for alignment, and padded at the end."""
    pieces = [torch.cat([values()[name][key].flatten(), torch.full((gap,), 9.0)]) for name in SHAPES[group]]
    whole = torch.cat(pieces)
    return torch.cat([whole, torch.full((size - len(whole),), 9.0)])


def by_slices(ranks: int, rank: int, gap: int = 0) -> dict[str, Any]:
    """The optimizer's file of a rank in ZeRO-1 and 2: an equal slice of each group, and where parameters lie in it."""
    states, weights, mappings = {}, [], []
    for index, group in enumerate(SHAPES):
        total = sum(math.prod(shape) + gap for shape in group.values())
        share = -(-total // (2 * ranks)) * 2
        first, start, mapping = rank * share, 0, OrderedDict()
        for name, shape in group.items():
            begin, end = max(start, first), min(start + math.prod(shape), first + share)
            if end > begin:
                mapping[name] = fragment_address(end - begin, begin - first)
            start += math.prod(shape) + gap
        flat = {
            key: flat_group(index, key, share * ranks, gap)[first : first + share].clone()
            for key in values()["in.bias"]
        }
        lean = share - max(0, min(share, first + share - total))
        weights.append(flat.pop("fp32")[:lean].clone().requires_grad_())
        states[index] = {"step": torch.tensor(7.0), **flat}
        mappings.append(mapping)
    base = {"state": states, "param_groups": groups()}
    found = {"base_optimizer_state": base, "single_partition_of_fp32_groups": weights, "param_slice_mappings": mappings}
    return {"optimizer_state_dict": common(ranks) | found | {"partition_count": [ranks, ranks]}}


def by_parameters(ranks: int, rank: int) -> dict[str, Any]:
    """The optimizer's file of a rank in ZeRO-3: an equal slice of each parameter, padded."""
    states, weights = {}, []
    for index, group in enumerate(SHAPES):
        flat = {}
        for key in values()["in.bias"]:
            shares = []
            for name, shape in group.items():
                share = -(-math.prod(shape) // ranks)
                whole = torch.cat([values()[name][key].flatten(), torch.full((ranks * share - math.prod(shape),), 9.0)])
                shares.append(whole[rank * share : (rank + 1) * share])
            flat[key] = torch.cat(shares)
        weights.append(flat.pop("fp32"))
        states[index] = {"step": torch.tensor(7.0), **flat}
    inner = {"state": states, "param_groups": groups()}
    return {"optimizer_state_dict": common(ranks) | {"optimizer_state_dict": inner, "fp32_flat_groups": weights}}


def checkpoint(kind: str, ranks: int) -> dict[str, Any]:
    """The files of a checkpoint by name."""
    files = {}
    for rank in range(ranks):
        prefix = "bf16_" if kind == "gaps" else ""
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states"
        files[name] = (
            by_parameters(ranks, rank) if kind == "stage 3" else by_slices(ranks, rank, 3 if kind == "gaps" else 0)
        )
        if kind == "stage 3":
            files[f"zero_pp_rank_{rank}_mp_rank_00_model_states"] = model_file(3, ranks, rank)
    return files if kind == "stage 3" else files | {"mp_rank_00_model_states": model_file(1, ranks, 0)}


def written(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        torch.save(content, folder / f"{name}.pt")
    return folder


def check_whole(found: dict[str, Any]) -> None:
    assert set(found) == {"model", "optimizer", "deepspeed"}
    assert set(found["model"]) == {*NAMES, *FROZEN, "out.tied", "running", "in._extra_state"}
    assert found["model"]["in._extra_state"] == {"amax": 1.5}
    for name, one in values().items():
        assert torch.equal(found["model"][name], one["fp32"]), name
        assert set(found["optimizer"][name]) == {"exp_avg", "exp_avg_sq", "step"}
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found["optimizer"][name][key], one[key]), name
        assert found["optimizer"][name]["step"] == 7
    assert torch.equal(found["model"]["out.tied"], values()["out.weight"]["fp32"])
    assert torch.equal(found["model"]["frozen.weight"], torch.arange(15.0).reshape(5, 3))
    assert torch.equal(found["model"]["running"], torch.arange(4))
    rest = found["deepspeed"]
    assert rest["model_states"]["extra"] == {"text": "ü", "pair": (1, 2.5)}
    assert rest["model_states"]["lr_scheduler"] == scheduler()
    assert [group["params"] for group in rest["optimizer_state"]["param_groups"]] == [list(group) for group in SHAPES]
    assert rest["optimizer_state"]["loss_scaler"] == {
        "deepspeed.loss_scaler": "LossScaler", "cur_scale": 8.0, "dynamic": False
    }  # fmt: skip
    assert not [key for key in rest["optimizer_state"] if "partition" in key or "flat" in key]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["slices", "gaps", "stage 3"])
def test_partitions_become_whole_parameters(kind: str, ranks: int, policy: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "global_step7", checkpoint(kind, ranks))
    with ts.Checkpointer(policy, "run") as ckpt:
        info = import_version(ckpt, folder)
        check_whole(ckpt.load())
        sizes = {leaf.name: leaf.spec.shape for leaf in ckpt.leaves()}
    assert info.step == 7
    assert sizes['model."in.weight"'] == (53, 41)


def test_a_module_of_any_mesh_restores_it(policy: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "global_step7", checkpoint("slices", 3))
    with ts.Checkpointer(policy, "run") as ckpt:
        import_version(ckpt, folder)
        part = torch.zeros(20, 41)  # as the second of three ranks has it
        ckpt.restore({"model": {"in.weight": ts.Shard(part, (18, 0), (53, 41))}}, only=['model."in.weight"'])
    assert torch.equal(part, values()["in.weight"]["fp32"][18:38])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slices", "stage 3"])
def test_a_version_of_several_ranks_by_its_address(kind: str, call: Call, policy: Path, tmp_path: Path) -> None:
    files = checkpoint(kind, 3)
    for content in files.values():
        if "optimizer_state_dict" in content:  # as `use` saves it
            content["optimizer_state_dict"]["loss_scaler"] = {"deepspeed.loss_scaler": "LossScaler", **vars(scaler())}
    with ts.Checkpointer(policy, "job") as ckpt:
        ckpt.save(files, step=7, metadata={"deepspeed": {"tag": "x"}, "loss": 1.5}).wait()
    told = call("import", "-p", policy, "-r", "whole", f"tierstate://{policy}/job@step-7")
    assert told.status == 0, told.err
    for source in (f"tierstate://{policy}/job", f"tierstate://{policy}/whole"):  # the second is whole already
        with ts.Checkpointer(policy, "again") as ckpt:
            info = import_version(ckpt, source)
            check_whole(ckpt.load())
        assert (info.step, dict(info.metadata)) == (7, {"loss": 1.5})


def test_an_address_of_another_state_is_refused(call: Call, policy: Path) -> None:
    with ts.Checkpointer(policy, "job") as ckpt:
        ckpt.save({"model": torch.ones(3)}, step=1).wait()
    told = call("import", "-p", policy, "-r", "whole", f"tierstate://{policy}/job")
    assert told.status == 2
    assert "ZeRO" in told.err
    assert "names no version" in call("import", "-p", policy, "-r", "whole", f"tierstate://{policy}").err


def universal(folder: Path, stage: int) -> Path:
    """A universal folder, as DeepSpeed's script writes it: of ZeRO-3 with flat tensors."""
    written(
        folder,
        {"mp_rank_00_model_states" if stage < 3 else "zero_pp_rank_0_mp_rank_00_model_states": model_file(stage, 1, 0)},
    )
    for name, one in values().items():
        (folder / "zero" / name).mkdir(parents=True)
        for key, value in one.items():
            torch.save(
                {"cat_dim": 0, "param": value} if stage < 3 else value.flatten(), folder / "zero" / name / f"{key}.pt"
            )
        torch.save(torch.tensor(7.0), folder / "zero" / name / "step.pt")
    (folder / "zero/running").mkdir()
    torch.save({"param": torch.arange(4.0)}, folder / "zero/running/fp32.pt")  # it makes float32 of buffers
    torch.save(common(2) | {"param_groups": groups()}, folder / "zero/optimizer_state.pt")
    return folder


@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_folder(stage: int, policy: Path, tmp_path: Path) -> None:
    with ts.Checkpointer(policy, "run") as ckpt:
        info = import_version(ckpt, universal(tmp_path / "universal", stage))
        found = ckpt.load()
    assert info.step == 7
    assert found["deepspeed"]["optimizer_state"]["param_groups"] == groups()  # it does not say which parameters
    for group, names in zip(found["deepspeed"]["optimizer_state"]["param_groups"], SHAPES, strict=True):
        group["params"] = list(names)
    if stage == 3:
        found["model"]["frozen.weight"] = torch.arange(15.0).reshape(5, 3)  # DeepSpeed's script has dropped it
    check_whole(found)


def test_a_parameter_that_cannot_be_looked_at_is_no_missing_one(policy: Path, tmp_path: Path) -> None:
    folder = universal(tmp_path / "universal", 1)
    first = min((folder / "zero").iterdir())
    shutil.rmtree(first)
    first.symlink_to("n" * 300)
    with (
        ts.Checkpointer(ts.Policy.load(policy), "imported") as ckpt,
        pytest.raises(OSError, match="File name too long"),
    ):
        import_version(ckpt, folder)


Files = dict[str, Any]


def optimizer(files: Files, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states"]["optimizer_state_dict"]
    return found


def shapes(files: Files) -> dict[str, Any]:
    found: dict[str, Any] = files["mp_rank_00_model_states"]["param_shapes"][1]
    return found


def fragment(files: Files) -> dict[str, Any]:
    return vars(optimizer(files)["param_slice_mappings"][0]["in.weight"])


def rename(files: Files, old: str, new: str) -> None:
    files[new] = files.pop(old)


def overlap(files: Files) -> None:
    mapping = optimizer(files, 2)["param_slice_mappings"][1]
    mapping["odd.bias"].start -= 1


def other_step(files: Files) -> None:
    optimizer(files, 1)["base_optimizer_state"]["state"][0]["step"] += 1


def expanded(files: Files) -> None:
    """A tensor of more elements than the file has bytes."""
    optimizer(files)["base_optimizer_state"]["state"][0]["exp_avg"] = torch.zeros(1).expand(1 << 40)


def cut(files: Files) -> None:
    optimizer(files)["base_optimizer_state"]["state"][0]["exp_avg"] = torch.zeros(10)


DAMAGE: dict[str, tuple[Callable[[Files], Any], str]] = {
    "a rank is missing": (lambda files: files.pop("zero_pp_rank_1_mp_rank_00_optim_states"), "rank 1 is missing"),
    "the last rank is missing": (lambda files: files.pop("zero_pp_rank_2_mp_rank_00_optim_states"), "2 are there"),
    "no model": (lambda files: files.pop("mp_rank_00_model_states"), "rank 0 is missing"),
    "tensor parallel": (lambda files: rename(files, "mp_rank_00_model_states", "mp_rank_01_model_states"), "parallel"),
    "a pipeline": (lambda files: files.update(layer_00_model_states={}), "pipeline"),
    "overlap": (overlap, "overlap"),
    "several steps": (other_step, "several steps"),
    "expanded": (expanded, "no plain tensor"),
    "cut": (cut, "shorter"),
    "elastic": (lambda files: optimizer(files).update(base_optimizer_state=[]), "elastic"),
    "no groups": (lambda files: optimizer(files)["base_optimizer_state"].pop("param_groups"), "global_step7"),
    "another shape": (lambda files: shapes(files).update({"odd.bias": [8]}), "not the whole"),
    "no shape": (lambda files: shapes(files).update({"odd.bias": [-7]}), "lengths"),
    "a start before": (lambda files: fragment(files).update(start=-1), "lengths"),
    "not a number": (lambda files: fragment(files).update(start=0.0), "lengths"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_damaged_or_not_read_is_refused(what: str, policy: Path, tmp_path: Path) -> None:
    files = copy.deepcopy(checkpoint("slices", 3))
    change, said = DAMAGE[what]
    change(files)
    folder = written(tmp_path / "global_step7", files)
    with ts.Checkpointer(policy, "run") as ckpt:
        with pytest.raises(ts.FormatError, match=said) as caught:
            import_version(ckpt, folder)
        assert "global_step7" in str(caught.value)
        assert not ckpt.versions()


def test_code_in_a_folder_is_not_run(call: Call, policy: Path, tmp_path: Path) -> None:
    files = checkpoint("slices", 2)
    files["mp_rank_00_model_states"]["sampler"] = open
    told = call("import", "-p", policy, "-r", "run", written(tmp_path / "global_step7", files))
    assert told.status == 2
    assert "client_state" in told.err
