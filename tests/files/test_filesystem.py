"""tierstate:// for fsspec: the files that an export would write, from any tier, and nothing else."""

from __future__ import annotations

import datetime
import io
import json
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from support.checkpointer_worlds import scratch
from support.cli_calls import strict_json
from support.state_strategies import ARRAY_DTYPES, make

import tierstate as ts
from tierstate.engine.packs.formats import DTYPES
from tierstate.files import virtual
from tierstate.files.export import export
from tierstate.files.filesystem import TierstateFileSystem, utc_time
from tierstate.manifest.format.version import MAX_TIME

POLICY = """
chunk: 4KiB
arena: {{size: 256KiB}}
tiers:
  nvme: {{type: nvme, path: "{place}/nvme", keep: {{last: {last}}}}}
  file: {{type: object, url: "file://{place}/object", codec: auto}}
"""


@pytest.fixture(autouse=True)
def registered() -> None:
    """Also where the package was installed before it had this entry point."""
    fsspec.register_implementation("tierstate", TierstateFileSystem, clobber=True)


def write_policy(place: Path, last: int = 9) -> Path:
    path = place / "policy.yaml"
    path.write_text(POLICY.format(place=place, last=last))
    return path


@pytest.fixture
def policy(place: Path) -> Path:
    """A run ``gpt`` of steps 1, 2 and 3, of which 2 is tagged ``best``."""
    path = write_policy(place)
    with ts.Checkpointer(path, "gpt") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state(step), step=step, metadata={"loss": 1 / step}).wait()
        ckpt.tag("best", 2)
    return path


@pytest.fixture
def fs() -> Iterator[TierstateFileSystem]:
    with TierstateFileSystem(skip_instance_cache=True) as made:
        yield made


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weight = torch.nn.Parameter(torch.randn(100, 90, generator=generator))
    return {
        "model": {"embed.weight": weight, "head.weight": weight, "half": torch.ones(3000, dtype=torch.bfloat16) * step},
        "optimizer": {"m": torch.randn(5000, generator=generator), "lr": 0.1, "betas": (0.9, 1j)},
        "seen": np.arange(6, dtype=">i4").reshape(2, 3),
    }


def test_the_model_is_the_file_that_an_export_writes(fs: TierstateFileSystem, policy: Path) -> None:
    to = policy.parent / "model.safetensors"
    with ts.Checkpointer(policy, "gpt") as ckpt:
        export(ckpt, to, step=2, only=["model.**"], strip_prefix="model.")
    data = fs.cat(f"tierstate://{policy}/gpt@tag:best/model.safetensors")
    assert data == to.read_bytes()
    loaded = safetensors.torch.load(data)
    assert set(loaded) == {"embed.weight", "half"}
    assert torch.equal(loaded["embed.weight"], state(2)["model"]["embed.weight"])


def test_leaves_are_arrays(fs: TierstateFileSystem, policy: Path) -> None:
    base, right = f"{policy}/gpt@step-3", state(3)
    described = json.loads(fs.cat(f"{base}/version.json"))
    assert (described["run"], described["step"], described["metadata"]) == ("gpt", 3, {"loss": 1 / 3})
    files = {leaf["name"]: leaf.get("file") for leaf in described["leaves"] if "file" in leaf}
    assert {f"{base}/{name}" for name in files.values() if name != "values.json"} == set(fs.find(f"{base}/leaves"))
    with fs.open(f"{base}/{files['optimizer.m']}") as file:
        assert np.array_equal(np.load(file), right["optimizer"]["m"])
    with fs.open(f"{base}/leaves/seen.npy") as file:
        loaded = np.load(file)
    assert loaded.dtype == right["seen"].dtype
    assert np.array_equal(loaded, right["seen"])
    half = fs.cat(f"{base}/leaves/model.half.bin")
    assert half == right["model"]["half"].view(torch.uint8).numpy().tobytes(), "NumPy has no bfloat16"
    values = json.loads(fs.cat(f"{base}/values.json"))
    assert values["optimizer.lr"] == 0.1
    assert set(values) == {"optimizer.lr", "optimizer.betas"}
    assert set(values["optimizer.betas"]) == {"value"}, "JSON has no complex numbers"


def test_a_default_device_of_torch_does_not_matter(fs: TierstateFileSystem, policy: Path) -> None:
    base, right = f"{policy}/gpt@step-3", state(3)["optimizer"]["m"]
    with torch.device("meta"), fs.open(f"{base}/leaves/optimizer.m.npy") as file:
        assert np.array_equal(np.load(file), right)


def test_folders(fs: TierstateFileSystem, policy: Path) -> None:
    with ts.Checkpointer(policy, "other") as ckpt:
        ckpt.save({}, step=7).wait()
        first = ckpt.info().id
        ckpt.save({"w": torch.ones(1)}, step=7).wait()
    versions = fs.ls(f"tierstate://{policy}", detail=False)
    assert versions == [
        f"{policy}/{name}" for name in ("gpt@step-1", "gpt@step-2", "gpt@step-3", f"other@{first}", "other@step-7")
    ]
    assert fs.find(f"{policy}/other@step-7") == [
        f"{policy}/other@step-7/{name}"
        for name in ("dcp/.metadata", "dcp/__0_0.distcp", "leaves/w.npy", "model.safetensors", "version.json")
    ]
    assert fs.glob(f"{policy}/gpt@*/version.json") == [f"{policy}/gpt@step-{n}/version.json" for n in (1, 2, 3)]
    assert fs.isdir(str(policy))
    assert fs.isdir(f"{policy}/gpt")
    assert fs.isdir(f"{policy}/gpt/leaves")
    assert fs.isfile(f"{policy}/gpt/version.json")
    assert not fs.isfile(f"{policy}/gpt/leaves")
    assert fs.ls(f"{policy}/gpt/version.json") == [fs.info(f"{policy}/gpt/version.json")]
    assert fs.du(f"{policy}/gpt@step-1") == sum(fs.sizes(fs.find(f"{policy}/gpt@step-1")))
    with pytest.raises(IsADirectoryError):
        fs.cat_file(f"{policy}/gpt/leaves")
    at = f"{policy}/gpt@step-1"
    assert fs.info(f"{at}/version.json")["version"] == fs.info(at)["version"]
    assert fs.created(at) < fs.created(f"{policy}/gpt@step-2")
    assert fs.ukey(f"{at}/version.json") == fs.ukey(f"{policy}/gpt@{fs.info(at)['version']}/version.json")


def test_the_description_is_json_for_strict_readers_too(fs: TierstateFileSystem, policy: Path) -> None:
    """A loss may be NaN, which JSON does not have."""
    with ts.Checkpointer(policy, "nan") as ckpt:
        ckpt.save({"w": torch.ones(1)}, step=1, metadata={"loss": math.nan, "more": [math.inf, -math.inf, 0.5]}).wait()
    found = strict_json(fs.cat_file(f"{policy}/nan/version.json"))
    assert found["metadata"] == {"loss": "NaN", "more": ["Infinity", "-Infinity", 0.5]}


def test_every_name_that_is_listed_can_be_opened_also_that_of_the_highest_step(
    fs: TierstateFileSystem, policy: Path
) -> None:
    with ts.Checkpointer(policy, "long") as ckpt:
        ckpt.save({"w": torch.ones(1)}, step=2**63 - 1).wait()
    for name in fs.ls(str(policy), detail=False):
        assert fs.info(name)["step"] in (1, 2, 3, 2**63 - 1)


@given(st.floats(0, MAX_TIME))
def test_a_version_of_any_time_has_one(seconds: float) -> None:
    found = utc_time(seconds)
    assert found == datetime.datetime.fromtimestamp(seconds, datetime.UTC) if seconds < 2.5e11 else found.year > 9890


SAFE = st.sampled_from([dtype for name, dtype in vars(torch).items() if name in DTYPES])
KEYS = st.one_of(st.text(max_size=8), st.sampled_from(["a", "a.b", "b", "w/x", "..", "%2F", "é*?", '"', "ab::c"]))


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Tensors of the format's dtypes, arrays and values in dicts of any keys, some of them under ``model``."""
    shapes = st.lists(st.sampled_from([3, 1, 0, 40, 17]), max_size=3).map(tuple)
    leaf = st.one_of(
        st.builds(make, SAFE, shapes, st.integers(0, 9)),
        st.builds(np.zeros, shapes, st.sampled_from([np.dtype(name) for name in ("<f8", "|b1", "<u2", "<i8")])),
        st.sampled_from([1, 0.5, "text", None]),
    )
    tree = draw(st.dictionaries(KEYS, st.one_of(leaf, st.dictionaries(KEYS, leaf, max_size=3)), max_size=4))
    if draw(st.booleans()):
        tree["model"] = draw(st.dictionaries(KEYS, leaf, max_size=4))
    return tree


def has_model(tree: dict[str, Any]) -> bool:
    """Whether tensors are below the key ``model``; not with an empty key, whose name would be its prefix."""
    if not isinstance(tree.get("model"), dict):
        return False
    names = [key for key, value in tree["model"].items() if isinstance(value, (torch.Tensor, np.ndarray))]
    return bool(names) and "" not in names


@pytest.mark.slow
@settings(max_examples=25)
@given(trees(), st.data())
def test_any_range_is_that_of_the_exported_file(tree: dict[str, Any], data: st.DataObject) -> None:
    with scratch() as place, TierstateFileSystem(skip_instance_cache=True) as fs:
        policy, to = write_policy(place), place / "model.safetensors"
        with ts.Checkpointer(policy, "run") as ckpt:
            ckpt.save(tree, step=1).wait()
            if has_model(tree):
                export(ckpt, to, only=["model.**"], strip_prefix="model.")
            else:
                export(ckpt, to)
        truth, url = to.read_bytes(), f"tierstate://{policy}/run/model.safetensors"
        assert fs.size(url) == len(truth)
        with fs.open(url, block_size=data.draw(st.sampled_from([7, 1000, 1 << 20]))) as file:
            for _ in range(4):
                start, stop = (data.draw(st.integers(-len(truth) - 1, len(truth) + 1)) for _ in range(2))
                assert fs.cat_file(url, start, stop) == truth[start:stop]
                at, nbytes = data.draw(st.integers(0, len(truth))), data.draw(st.integers(0, 3000))
                file.seek(at)
                assert file.read(nbytes) == truth[at : at + nbytes]
        names = fs.find(f"tierstate://{policy}/run")
        assert len(names) == len(set(names))
        for name in names:
            with fsspec.open(f"tierstate://{name}") as file:  # no character of a name means something to fsspec
                assert len(file.read()) == fs.size(name)


@given(st.sampled_from(ARRAY_DTYPES))
def test_npy_is_what_numpy_reads_or_is_not_made(dtype: np.dtype[Any]) -> None:
    array = np.zeros((2, 3), dtype)
    from tierstate.providers.tensors.arrays import ArrayProvider

    header = virtual.npy_header(ArrayProvider(array).spec)
    if header is not None:
        loaded = np.load(io.BytesIO(header + array.tobytes()))
        assert (loaded.dtype, loaded.shape) == (dtype, (2, 3))
    assert header is not None or dtype.names is not None


def test_safe_open_reads_a_cached_copy(fs: TierstateFileSystem, policy: Path) -> None:
    url = f"simplecache::tierstate://{policy}/gpt@step-1/model.safetensors"
    cache = {"cache_storage": str(policy.parent / "cache")}
    with fsspec.open(url, simplecache=cache) as file, safe_open(file.name, "pt") as opened:
        assert torch.equal(opened.get_tensor("half"), state(1)["model"]["half"])


def test_long_models_are_sets_of_files(fs: TierstateFileSystem, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "MAX_SHARD_FILE", 8000)
    with ts.Checkpointer(policy, "gpt") as ckpt:
        to = policy.parent / "model.safetensors"
        done = export(ckpt, to, step=1, only=["model.**"], strip_prefix="model.", max_shard=8000)
    base = f"{policy}/gpt@step-1"
    assert len(done.files) == 3
    for path in done.files:
        assert fs.cat(f"{base}/{path.name}") == path.read_bytes()
    assert not fs.exists(f"{base}/model.safetensors")
    fs.get(base, str(policy.parent / "copy"), recursive=True)
    assert (policy.parent / "copy" / done.files[0].name).read_bytes() == done.files[0].read_bytes()


def test_a_model_is_never_without_some_of_its_tensors(fs: TierstateFileSystem, policy: Path) -> None:
    with ts.Checkpointer(policy, "odd") as ckpt:
        ckpt.save({"model": {"w": torch.ones(2), "z": torch.ones(2, dtype=torch.complex64)}, "t": {1}}, step=1)
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors, but a file for each leaf.*\n.*complex64"):
        fs.info(f"{policy}/odd/model.safetensors")
    found = fs.ls(f"{policy}/odd", detail=False)
    assert f"{policy}/odd/model.safetensors" not in found
    with fs.open(f"{policy}/odd/leaves/model.z.npy") as file:
        assert np.array_equal(np.load(file), np.ones(2, "c8"))


ABSENT = {
    "step": ("gpt@step-4/version.json", "no version with step 4"),
    "tag": ("gpt@tag:none/version.json", "no tag 'none'"),
    "id": ("gpt@00000000000000000000000000000000", "no version with id 0"),
    "selector": ("gpt@newest", "names no version; a URL is tierstate://POLICY"),
    "empty selector": ("gpt@/version.json", "names no version"),
    "run": ("none/version.json", "run 'none' has no version"),
    "unicode run": ("läufe", "cannot name a run"),
    "file": ("gpt/weights.bin", r"no file 'weights\.bin'; right are version\.json"),
    "leaf": ("gpt/leaves/none.npy", "no file"),
    "up": ("gpt/../gpt/version.json", r"'\.\.' is no name"),
    "out": ("../policy.yaml", r"'\.\.' is no name"),
    "from leaves": ("gpt/leaves/../../../nvme/tier.json", r"'\.\.' is no name"),
    "escaped": ("gpt/leaves/%2e%2e%2fversion.json", "no file"),
    "empty": ("gpt//version.json", "empty name"),
    "policy": ("../none.yaml/gpt", "is no name"),
}


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_not_there_says_so(fs: TierstateFileSystem, policy: Path, name: str) -> None:
    path, told = ABSENT[name]
    assert not fs.exists(f"tierstate://{policy}/{path}")
    for call in (fs.info, fs.ls, fs.cat_file, fs.open):
        with pytest.raises(FileNotFoundError, match=told):
            call(f"tierstate://{policy}/{path}")


def test_the_policy_is_the_first_file_that_ends_so(
    fs: TierstateFileSystem, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match="no part of it is an existing policy file"):
        fs.info(f"{policy.parent}/none.yaml/gpt")
    folder = policy.parent / "folder.yaml"
    folder.mkdir()
    (folder / "at@b.YML").write_text(policy.read_text())
    assert fs.exists(f"{folder}/at@b.YML/gpt@step-1/version.json")
    monkeypatch.chdir(policy.parent)
    assert fs.exists("tierstate://policy.yaml/gpt@step-1/version.json")
    with fsspec.open("tierstate://policy.yaml/gpt@step-1/version.json", "rt") as file:
        assert json.load(file)["step"] == 1


@pytest.mark.parametrize("call", [
    lambda fs, url: fs.open(url, "wb"), lambda fs, url: fs.pipe_file(url, b""), lambda fs, url: fs.rm(url),
    lambda fs, url: fs.rm_file(url), lambda fs, url: fs.mkdir(url), lambda fs, url: fs.makedirs(url, exist_ok=True),
    lambda fs, url: fs.touch(url), lambda fs, url: fs.cp_file(url, url), lambda fs, url: fs.mv(url, url),
    lambda fs, url: fs.put(__file__, url), lambda fs, url: fs.write_text(url, "x"), lambda fs, url: fs.rmdir(url),
])  # fmt: skip
def test_nothing_can_be_written(fs: TierstateFileSystem, policy: Path, call: Any) -> None:
    before = files_below(policy.parent)
    with pytest.raises(PermissionError, match="read-only"):
        call(fs, f"tierstate://{policy}/gpt@step-1/version.json")
    assert files_below(policy.parent) == before


def files_below(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def damage(place: Path) -> None:
    for path in (place / "packs").rglob("*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[:: len(data) // 40] = bytes(len(data[:: len(data) // 40]))
            path.write_bytes(data)


def test_what_one_tier_has_damaged_comes_from_the_next_and_nothing_is_written(
    fs: TierstateFileSystem, policy: Path
) -> None:
    url = f"{policy}/gpt@step-3/leaves/optimizer.m.npy"
    truth = fs.cat(url)
    damage(policy.parent / "nvme")
    before = files_below(policy.parent)
    with TierstateFileSystem(skip_instance_cache=True) as again:
        assert again.cat(url) == truth
        assert files_below(policy.parent) == before
        damage(policy.parent / "object")
    with TierstateFileSystem(skip_instance_cache=True) as third:
        with pytest.raises(ts.Damaged, match=r"leaf optimizer\.m of version 3"):
            third.cat(url)
        assert third.exists(url), "its size is known"
        assert json.loads(third.cat(f"{policy}/gpt@step-3/version.json"))["step"] == 3


def test_a_tier_that_cannot_be_asked_is_no_missing_file(fs: TierstateFileSystem, policy: Path) -> None:
    for name in ("nvme", "object"):
        (policy.parent / name).rename(policy.parent / f"{name}-away")
        (policy.parent / name).write_text("no folder")
    for version in ("", "@step-3", "@tag:best"):
        with pytest.raises(ts.TierstateError):
            fs.exists(f"{policy}/gpt{version}/version.json")


def test_latest_stays_until_the_cache_is_invalidated(fs: TierstateFileSystem, policy: Path) -> None:
    url = f"{policy}/gpt/version.json"
    fresh = TierstateFileSystem(listings_expiry_time=0.0, skip_instance_cache=True)
    with fresh, fs.open(url) as opened, ts.Checkpointer(policy, "gpt") as ckpt:
        assert json.loads(fresh.cat(url))["step"] == 3
        ckpt.save(state(4), step=4).wait()
        assert json.loads(fs.cat(url))["step"] == 3
        assert json.loads(fresh.cat(url))["step"] == 4
        fs.invalidate_cache()
        assert json.loads(fs.cat(url))["step"] == 4
        assert json.loads(opened.read())["step"] == 3, "a file stays of its version"
        assert pickle.loads(pickle.dumps(opened)).path.endswith(f"/gpt@{ckpt.info(step=3).id}/version.json")


def test_a_version_that_moves_is_followed_and_one_that_is_dropped_is_not_there(
    fs: TierstateFileSystem, place: Path
) -> None:
    policy = write_policy(place, last=1)
    document = policy.read_text().replace("codec: auto", "codec: auto, every: 1000, keep: {last: 1}")
    policy.write_text(document)
    with ts.Checkpointer(policy, "gpt") as ckpt:
        ckpt.save(state(0), step=0).wait()
        ckpt.save(state(1), step=1).wait()
        url = f"{policy}/gpt@step-1/leaves/optimizer.m.npy"
        assert fs.size(url) == 128 + 20_000
        ckpt.copy(step=1, to="file")
        ckpt.save(state(2), step=2).wait()
        ckpt.prune(grace=0)
        assert "nvme" not in ckpt.info(step=1).tiers
        assert np.array_equal(np.load(io.BytesIO(fs.cat(url))), state(1)["optimizer"]["m"])
        file = fs.open(f"{policy}/gpt@step-2/leaves/optimizer.m.npy")
        ckpt.save(state(3), step=3).wait()
        ckpt.prune(grace=0)
        with pytest.raises(FileNotFoundError, match="no version with id"):
            file.read()


def test_readers_at_once(fs: TierstateFileSystem, policy: Path) -> None:
    names = fs.find(f"{policy}/gpt@step-1") + fs.find(f"{policy}/gpt@step-2")
    truth = {name: fs.cat_file(name) for name in names}
    errors: list[BaseException] = []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(30):
                name = names[random.integers(len(names))]
                start, stop = sorted(random.integers(0, len(truth[name]) + 1, 2).tolist())
                assert fs.cat_file(name, start, stop) == truth[name][start:stop]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


FORK = """
import os, sys
from tierstate.files.filesystem import TierstateFileSystem
url = sys.argv[1]
with TierstateFileSystem(skip_instance_cache=True) as fs:
    file = fs.open(url, block_size=64)
    truth = fs.cat(url)
    assert file.read(70) == truth[:70]
    child = os.fork()
    if not child:
        sound = fs.cat(url) == truth and file.read() == truth[70:]
        fs.close()
        os._exit(0 if sound else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert file.read() == truth[70:]
"""


@pytest.mark.slow
def test_a_forked_child_reads_too(policy: Path) -> None:
    url = f"tierstate://{policy}/gpt@step-1/leaves/optimizer.m.npy"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, url], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_credentials_stay_in_the_policy(fs: TierstateFileSystem, place: Path) -> None:
    policy = place / "policy.yaml"
    policy.write_text(f"""
        tiers:
          nvme: {{type: nvme, path: "{place}/nvme"}}
          s3: {{type: object, url: "s3://bucket/x", options: {{key: AKIAKEY, secret: hidden-word, endpoint_url: nope}}}}
    """)
    with pytest.raises((ts.TierstateError, OSError)) as caught:
        fs.ls(f"tierstate://{policy}/run")
    told: list[str] = []
    error: BaseException | None = caught.value
    while error is not None:
        told.append(repr(error))
        error = error.__cause__ or error.__context__
    assert "hidden-word" not in "".join([*told, repr(fs), fs.to_json()])
