"""Exports: files that other programs open as they lie there, whole or not at all."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.checkpointer_worlds import alike, tensors, tier
from support.checkpointer_worlds import policy as tier_policy
from support.cli_calls import BITS, Call, damage, odd, state, strict_json
from support.equality import difference
from support.leaks import nothing_left

import tierstate as ts
from tierstate.files import export as export_module
from tierstate.files.export import export
from tierstate.files.importing import open_source


@pytest.fixture
def run(policy: Path) -> Path:
    """The policy, and one more run, ``odd``, of one version."""
    with ts.Checkpointer(policy, "odd") as ckpt:
        ckpt.save(odd(), step=7, metadata={"loss": 0.5})
    return policy


def test_a_safetensors_file_opens_as_it_lies_there(call: Call, run: Path) -> None:
    to = run.parent / "out.safetensors"
    answer = call("export", "-p", run, "-r", "odd", to)
    assert answer.status == 0, answer
    assert 'model."head.weight" is tied to model."embed.weight"' in answer.out
    right = odd()
    loaded = safetensors.torch.load_file(to)
    assert set(loaded) == {
        "model.embed.weight", "model.norm", "optimizer.state.0.m", "optimizer.state.0.step", "a.b", "a.b~2", "a.empty",
        "seen.0", "array",
    }  # fmt: skip
    assert torch.equal(loaded["model.embed.weight"], right["model"]["embed.weight"].detach())
    assert torch.equal(loaded["optimizer.state.0.m"].view(torch.int32), BITS.view(torch.int32))
    assert loaded["model.norm"].dtype == torch.bfloat16
    assert loaded["array"].tolist() == right["array"].tolist()
    assert loaded["a.empty"].shape == (0, 3)
    with safe_open(to, "pt") as opened:
        metadata = opened.metadata()
    assert (metadata["format"], metadata["step"], metadata["run"]) == ("pt", "7", "odd")
    assert json.loads(metadata["metadata"])["loss"] == 0.5


def test_an_hdf5_file_opens_as_it_lies_there(call: Call, run: Path) -> None:
    to = run.parent / "out.h5"
    assert call("export", "-p", run, "-r", "odd", to).status == 0
    right = odd()
    with h5py.File(to) as file:
        assert np.array_equal(file["model/embed.weight"], right["model"]["embed.weight"].detach())
        assert file["optimizer/state/0/m"][()].tobytes() == BITS.numpy().tobytes()
        assert np.array_equal(file["model/norm"], right["model"]["norm"].float())
        assert file["array"][()].tolist() == right["array"].tolist()
        assert (file.attrs["step"], file.attrs["run"]) == (7, "odd")
        outline = json.loads(file["__tierstate__/metadata"][()])["tierstate"]
    shown = {leaf["path"]: leaf["json"] for leaf in outline["leaves"] if "json" in leaf}
    assert shown == {'["optimizer","lr"]': 0.1, '["a","none"]': None, '["seen",1]': "text"}, "for people to read"


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed")
def test_h5dump_reads_it(call: Call, run: Path) -> None:
    to = run.parent / "out.hdf5"
    assert call("export", "-p", run, "-r", "odd", to, "--only", "array").status == 0
    shown = subprocess.run(["h5dump", "-d", "/array", str(to)], capture_output=True, text=True, check=True).stdout
    assert "(1,0): 3, 4, 5" in shown


@pytest.mark.slow
def test_parts_and_prefixes(call: Call, run: Path) -> None:
    to = run.parent / "model.safetensors"
    options = ["-p", run, "-r", "odd", to, "--strip-prefix", "model."]
    refused = call("export", *options)
    assert refused.status == 2
    assert "do not begin with 'model.': optimizer.state.0.m" in refused.err
    assert "--only" in refused.err
    found = call("export", *options, "--only", "model.**", "--json").json
    assert (found["version"]["step"], found["tensors"], found["files"]) == (7, 2, [str(to)])
    assert set(safetensors.torch.load_file(to)) == {"embed.weight", "norm"}
    part = run.parent / "head.h5"
    assert call("export", *options[:4], part, "--only", 'model."head.weight"', "--strip-prefix", "model.").status == 0
    with h5py.File(part) as file:
        assert np.array_equal(file["head/weight"], odd()["model"]["embed.weight"].detach()), (
            "what it was tied to is not"
        )
    nothing = call("export", *options[:4], run.parent / "x.h5", "--only", "decoder.**")
    assert nothing.status == 2
    assert "decoder" in nothing.err


@pytest.mark.slow
def test_long_exports_are_sets_of_files_with_an_index(call: Call, run: Path) -> None:
    to = run.parent / "big.safetensors"
    answer = call("export", "-p", run, "-r", "gpt", to, "--max-shard", "8KiB", "--step", "2")
    assert answer.status == 0, answer
    index = json.loads((run.parent / "big.safetensors.index.json").read_text())
    names = ["big-00001-of-00002.safetensors", "big-00002-of-00002.safetensors"]
    assert index["weight_map"] == {"model.w": names[0], "model.b": names[1]}
    assert index["metadata"]["total_size"] == 12_008
    assert not to.exists()
    parts = [safetensors.torch.load_file(run.parent / name) for name in names]
    assert torch.equal(parts[0]["model.w"], state(2)["model"]["w"])
    assert torch.equal(parts[1]["model.b"], state(2)["model"]["b"])
    again = call("export", "-p", run, "-r", "gpt", to, "--max-shard", "8KiB")
    assert again.status == 2
    assert call("export", "-p", run, "-r", "gpt", to, "--max-shard", "8KiB", "--force").status == 0
    assert torch.equal(safetensors.torch.load_file(run.parent / names[0])["model.w"], state(3)["model"]["w"])


def test_an_index_is_json_for_strict_readers_too(policy: Path) -> None:
    """A loss may be NaN, which JSON does not have; what was exported has it still."""
    told = {"best": -math.inf, "loss": math.nan}
    with ts.Checkpointer(policy, "nan") as ckpt:
        ckpt.save({"a": torch.ones(3), "b": torch.ones(3), "lr": math.nan}, 1, told).wait()
        export(ckpt, to := policy.parent / "nan.safetensors", max_shard=12)
    index = to.with_name("nan.safetensors.index.json")
    found = strict_json(index.read_text())
    with open_source(index) as source:
        assert difference(told, dict(source.metadata)) == ""
        assert math.isnan(source.state["lr"])
    found["metadata"]["tierstate"] = json.loads(found["metadata"]["tierstate"])  # as at first
    index.write_text(json.dumps(found))
    with open_source(index) as source:
        assert (source.step, sorted(source.state)) == (1, ["a", "b", "lr"])


def test_no_file_of_a_set_has_more_bytes_of_tensors_than_the_limit(policy: Path) -> None:
    """Unless one tensor alone is longer; and no file ends while the next tensor fits."""
    sizes = [12, 8, 4, 8, 40, 4, 4, 4, 16, 8]
    with ts.Checkpointer(policy, "sizes") as ckpt:
        ckpt.save({f"{i:02}": torch.ones(size // 4) for i, size in enumerate(sizes)}, step=1).wait()

        @given(st.integers(1, sum(sizes) + 1))
        def fits(limit: int) -> None:
            done = export(ckpt, policy.parent / "out.safetensors", max_shard=limit, force=True)
            tensors = [
                [tensor.nbytes for tensor in safetensors.torch.load_file(path).values()]
                for path in done.files
                if path.suffix == ".safetensors"
            ]
            assert [nbytes for file in tensors for nbytes in file] == sizes
            assert all(len(file) == 1 or sum(file) <= limit for file in tensors)
            assert all(sum(file) + following[0] > limit for file, following in pairwise(tensors))

        fits()


def test_a_file_that_is_there_stays(call: Call, run: Path) -> None:
    to = run.parent / "out.safetensors"
    to.write_text("mine")
    refused = call("export", "-p", run, "-r", "gpt", to)
    assert refused.status == 2
    assert "--force" in refused.err
    assert to.read_text() == "mine"
    assert call("export", "-p", run, "-r", "gpt", to, "--force").status == 0
    assert torch.equal(safetensors.torch.load_file(to)["model.w"], state(3)["model"]["w"])


@pytest.mark.slow
def test_damage_is_never_exported(call: Call, run: Path) -> None:
    damage(run)
    with nothing_left(run.parent):
        answer = call("export", "-p", run, "-r", "gpt", run.parent / "out.h5")
    assert answer.status == 2
    assert "leaf model.w of version 3 (step 3" in answer.err
    assert sorted(p.name for p in run.parent.iterdir()) == ["nvme", "object", "policy.yaml"]
    # What one tier has damaged comes from another.
    for path in (run.parent / "nvme/packs/gpt").iterdir():
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    to = run.parent / "out.safetensors"
    assert call("export", "-p", run, "-r", "gpt", to, "--step", "2").status == 0
    assert torch.equal(safetensors.torch.load_file(to)["model.w"], state(2)["model"]["w"])


def test_a_leaf_that_keep_has_dropped_is_named_before_anything_is_read(place: Path) -> None:
    rules = [{"match": "optimizer.**", "keep": {"last": 1}}]
    spec = tier_policy({"nvme": tier("nvme", place, keep={"last": 3})}, rules=rules)
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(2):
            state = {"model": tensors(9000, seed=step), "optimizer": tensors(9000, seed=step + 2)}
            ckpt.save(state, step=step)
    with ts.Checkpointer(spec, "run") as ckpt:
        to, read = place / "out.safetensors", list[int]()
        told = (
            r"leaf optimizer\.a of step 0 is in none of the tiers; `keep` has dropped leaves of it \(optimizer\.\*\* "
        )
        with pytest.raises(ts.Damaged, match=told + r"from nvme\): ask for others by `only`, or for another version"):
            export(ckpt, to, step=0, progress=read.append)
        assert read == []
        assert not to.exists()
        export(ckpt, to, step=0, only=["model.**"])
    assert alike({"model.a": tensors(9000)["a"]}, safetensors.torch.load_file(to))


def test_what_a_format_cannot_hold_is_listed(call: Call, policy: Path) -> None:
    rest = {
        "complex": torch.ones(2, dtype=torch.complex64),
        "text": np.array([b"ab"]),
        "trust": {1, 2},
        "w": torch.ones(3),
    }
    with ts.Checkpointer(policy, "rest") as ckpt:
        ckpt.save({**rest, "trust": print, "lr": 0.5}, step=1)
    to = policy.parent / "out.safetensors"
    refused = call("export", "-p", policy, "-r", "rest", to)
    assert refused.status == 2
    assert [line.split(":")[0].strip() for line in refused.err.splitlines()[1:]] == ["complex", "text", "trust"]
    assert "--skip-values" in refused.err
    answer = call("export", "-p", policy, "-r", "rest", to, "--skip-values", "--json").json
    assert answer["left_out"] == ["complex", "text", "trust", "lr"]
    assert set(safetensors.torch.load_file(to)) == {"w"}
    kept = call("export", "-p", policy, "-r", "rest", policy.parent / "out.h5", "--skip-values", "--json").json
    assert kept["left_out"] == ["text", "trust", "lr"], "HDF5 has complex numbers"


def test_values_that_are_too_long_are_refused(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "MAX_VALUES", 1000)
    with ts.Checkpointer(policy, "long") as ckpt:
        ckpt.save({"text": "x" * 1001, "w": torch.ones(1)}, step=1).wait()
        with pytest.raises(ts.StateMismatch, match=r"1\d\d\d bytes, and at most 1000 .*--skip-values"):
            export(ckpt, policy.parent / "out.h5")
        assert export(ckpt, policy.parent / "out.h5", skip_values=True).tensors == 1


ERRORS = {
    "no such ending": (["out.bin"], "ends with .safetensors, .h5, .hdf5"),
    "no such folder": (["nowhere/out.h5"], "out.h5 has no folder to be in; make it first"),
    "no such step": (["out.h5", "--step", "9"], "no version with step 9"),
    "no size": (["out.safetensors", "--max-shard", "big"], "big"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_message(call: Call, policy: Path, name: str) -> None:
    (to, *options), expected = ERRORS[name]
    answer = call("export", "-p", policy, "-r", "gpt", policy.parent / to, *options)
    assert answer.status == 2, answer
    assert answer.err.startswith("tierstate: ")
    assert expected in answer.err


@pytest.mark.slow
def test_a_full_disk_leaves_nothing(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with nothing_left(policy.parent), ts.Checkpointer(policy, "gpt") as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr("os.posix_fallocate", full)
            with pytest.raises(OSError, match="No space left"):
                export(ckpt, policy.parent / "out.h5")
        assert not (policy.parent / "out.h5").exists()
        seen: list[int] = []
        done = export(ckpt, policy.parent / "out.h5", progress=seen.append)
    assert sum(seen) == 12_008
    assert done.nbytes == (policy.parent / "out.h5").stat().st_size


MEASURE = """
import resource, sys, torch, tierstate as ts
from tierstate.files.export import export
from tierstate.files.importing import import_version
policy, to = sys.argv[1:]
import h5py
with ts.Checkpointer(policy, "big") as ckpt:
    export(ckpt, to.replace("big.safetensors", "small.h5"), only=["none"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    export(ckpt, to)
    import_version(ckpt, to, step=2)
    export(ckpt, to.replace("big.safetensors", "big.h5"))
    import_version(ckpt, to.replace("big.safetensors", "big.h5"), step=3)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(grown >> 10, [v.nbytes >> 20 for v in ckpt.versions()])
"""


@pytest.mark.slow
def test_memory_is_bounded_by_the_arena(place: Path) -> None:
    policy = place / "big.yaml"
    policy.write_text(f"chunk: 1MiB\narena: {{size: 16MiB}}\ntiers: {{nvme: {{type: nvme, path: {place}/nvme}}}}")
    with ts.Checkpointer(policy, "big") as ckpt:
        ckpt.save({"w": torch.randn(16 << 20), "none": torch.zeros(1), "b": torch.randn(16 << 20)}, step=1).wait()
    command = [sys.executable, "-c", MEASURE, str(policy), str(place / "big.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown, sizes = done.stdout.split(" ", 1)
    assert sizes.strip() == "[128, 128, 128]"
    assert int(grown) < 64, "MiB, of 128 that went through four times"


@pytest.mark.slow
def test_what_was_cut_otherwise_does_not_stay_beside(call: Call, run: Path) -> None:
    """Readers of a folder take the index where there is one, and so would load the older version."""
    to = run.parent / "model.safetensors"
    options = ["-p", run, "-r", "gpt", to]
    (run.parent / "model-00001-of-00002.safetensors.bak").write_text("mine")
    (run.parent / "model-x-00001-of-00002.safetensors").write_text("mine")
    set_of_two = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    mine = ["model-00001-of-00002.safetensors.bak", "model-x-00001-of-00002.safetensors"]

    def there() -> list[str]:
        return sorted(path.name for path in run.parent.glob("model*"))

    assert call("export", *options, "--step", "1", "--max-shard", "8KiB").status == 0
    assert there() == sorted(set_of_two + mine)
    refused = call("export", *options)
    assert refused.status == 2
    assert "model.safetensors.index.json exists" in refused.err
    assert there() == sorted(set_of_two + mine)
    assert call("export", *options, "--force").status == 0
    assert there() == sorted(["model.safetensors", *mine])
    refused = call("export", *options, "--max-shard", "8KiB")
    assert refused.status == 2
    assert "model.safetensors exists" in refused.err
    assert call("export", *options, "--max-shard", "8KiB", "--force").status == 0
    assert there() == sorted(set_of_two + mine)
    # One stale file of a set is enough: which index it once had, nobody knows.
    for name in [*set_of_two[1:]]:
        (run.parent / name).unlink()
    assert "model-00001-of-00002.safetensors exists" in call("export", *options).err


def test_a_folder_in_the_way_changes_nothing(call: Call, run: Path) -> None:
    to = run.parent / "model.safetensors"
    options = ["-p", run, "-r", "gpt", to, "--max-shard", "8KiB", "--force"]
    assert call("export", *options, "--step", "1").status == 0
    second = run.parent / "model-00002-of-00002.safetensors"
    second.unlink()
    second.mkdir()
    before = {path: path.read_bytes() for path in run.parent.glob("model*") if path.is_file()}
    answer = call("export", *options)
    assert answer.status == 2
    assert f"{second} is a folder" in answer.err
    assert before == {path: path.read_bytes() for path in run.parent.glob("model*") if path.is_file()}
    assert len(before) == 2


def test_a_reserved_name_that_comes_of_a_prefix_gets_a_number(policy: Path) -> None:
    state = {"model": {"__metadata__": torch.ones(2), "b": torch.zeros(1)}}
    to = policy.parent / "model.safetensors"
    with ts.Checkpointer(policy, "odd") as ckpt:
        ckpt.save(state, step=1).wait()
        export(ckpt, to, strip_prefix="model.")
    assert len(safetensors.torch.load_file(to)) == 2
    with open_source(to) as found:
        assert set(found.state["model"]) == {"__metadata__", "b"}


@pytest.mark.parametrize("limit", [0, -5])
def test_files_of_no_bytes_are_refused(policy: Path, limit: int) -> None:
    with ts.Checkpointer(policy, "gpt") as ckpt, pytest.raises(ValueError, match="bytes in one file are none"):
        export(ckpt, policy.parent / "out.safetensors", max_shard=limit)


def test_leaves_are_exported_under_other_names(call: Call, policy: Path) -> None:
    shared = torch.randn(3)
    with ts.Checkpointer(policy, "wrapped") as ckpt:
        model = {"module.fc.weight": shared, "module.tied": shared, "module.head": torch.ones(2)}
        ckpt.save({"model": model, "step": 3}, step=3)
    to = policy.parent / "out.safetensors"
    options = ["-p", policy, "-r", "wrapped", to, "--force"]
    asked = call("export", *options, "--rename", "unwrapped", "--rename", "model.fc=model.proj", "--only", "model.**")
    assert asked.status == 0, asked.err
    with safe_open(to, "pt") as file:
        assert sorted(file.keys()) == ["model.head", "model.proj.weight"]
        assert torch.equal(file.get_tensor("model.proj.weight"), shared)
    back = ts.Policy.load(policy)
    assert call("import", "-p", policy, "-r", "again", to).status == 0
    with ts.Checkpointer(back, "again") as ckpt:
        loaded = ckpt.load()["model"]
        assert loaded.keys() == {"proj.weight", "tied", "head"}
        assert loaded["tied"].data_ptr() == loaded["proj.weight"].data_ptr()
    for wrong, said in (("fc", "right are OLD=NEW"), ("model.module.head=model.module.tied", "have one name")):
        refused = call("export", *options, "--rename", wrong)
        assert refused.status == 2 or refused.status == 1
        assert said in refused.err
