"""DCP's own fsspec reader loads a version by its URL as `TierReader` does."""

from __future__ import annotations

import io
import pickle
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given
from hypothesis import strategies as st
from support.checkpointer_worlds import scratch
from support.equality import bits, difference, leaves
from support.state_strategies import Point, states, tensors
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import tierstate as ts
from tierstate.dcp import TierReader, close
from tierstate.files import dcp_folder
from tierstate.files.filesystem import TierstateFileSystem

POLICY = "{{arena: {{size: 256KiB}}, chunk: 4KiB, tiers: {{nvme: {{type: nvme, path: '{place}/nvme'}}}}}}\n"


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """Also where the package was installed before it had this entry point."""
    fsspec.register_implementation("tierstate", TierstateFileSystem, clobber=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is|ComplexHalf support")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        yield
    close()


def saved(place: Path, state: Any) -> str:
    """The URL of the folder of a version."""
    path = place / "policy.yaml"
    path.write_text(POLICY.format(place=place))
    with ts.Checkpointer(path, "run") as ckpt:
        ckpt.save(state, step=1).wait()
    return f"tierstate://{path}/run/dcp"


def everything(reader: Any) -> Any:
    """All that it can load; its error if it can nothing."""
    try:
        return _load_state_dict_from_keys(storage_reader=reader)
    except CheckpointException as failure:
        (error,) = failure.failures.values()
        return type(error[0])


def savable(value: Any) -> bool:
    """Whether torch can write and copy it: not some dtypes, one memory as several dtypes, a local class, and bools of
    other bytes than 0 and 1, which a copy of torch changes."""
    if any(
        isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool and max(bits(leaf), default=0) > 1
        for leaf in leaves(value)
    ):
        return False
    try:
        torch.save(value, io.BytesIO())
    except Exception:
        return False
    return True


NINES = torch.full((3,), 9.0)
TIED = [Point(NINES, NINES), Point(NINES, NINES[1:]), deque([NINES.view(3, 1), NINES, torch.ones(2)])]
"""Containers that DCP does not look into, with tensors that share memory."""


@pytest.mark.slow
@example(TIED[0])
@example(TIED[1])
@example(TIED[2])
@given(states().filter(savable))
def test_any_state_is_loaded_as_by_the_reader_of_tiers(state: Any) -> None:
    with scratch() as place:
        url = saved(place, {"state": state})
        ours, theirs = everything(TierReader(place / "policy.yaml", "run")), everything(FsspecReader(url))
        close()
        if isinstance(ours, type):
            assert theirs == (FileNotFoundError if issubclass(ours, ts.StateMismatch) else ours)
        else:
            assert difference(ours, theirs) == ""


@given(tensors().filter(savable), st.integers(0, 3))
def test_a_tensor_is_a_file_of_torch_save(tensor: torch.Tensor, more: int) -> None:
    with scratch() as place:
        url = saved(place, {"first": torch.zeros(more), "it": tensor})
        fs = fsspec.filesystem("tierstate")
        found = pickle.loads(fs.cat(f"{url}/.metadata"))
        (where,) = (at for index, at in found.storage_data.items() if index.fqn == "it")
        raw = fs.cat_file(f"{url}/{where.relative_path}", where.offset, where.offset + where.length)
        loaded = torch.load(io.BytesIO(raw), weights_only=True)
        # By bits: where `contiguous` applies a lazy negative to half floats one by one, it quiets signalling NaNs.
        assert (loaded.dtype, loaded.shape, bits(loaded)) == (tensor.dtype, tensor.shape, bits(tensor.detach()))
        fs.close()


def test_a_load_that_names_the_url_goes_through_it(place: Path) -> None:
    base = torch.randn(40)
    state = {"w": base, "view": base[3:].view(37, 1), "groups": [{"lr": 0.1, "x": torch.ones(2)}], "step": 5}
    url = saved(place, state)
    into = {"w": torch.zeros(40), "view": torch.zeros(37, 1), "groups": [{"lr": 0.0, "x": torch.zeros(2)}], "step": 0}
    dcp.load(into, checkpoint_id=url)
    assert (into["step"], into["groups"][0]["lr"]) == (5, 0.1)
    pairs = zip([base, state["view"], torch.ones(2)], [into["w"], into["view"], into["groups"][0]["x"]], strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    fs = fsspec.filesystem("tierstate")
    names = [Path(name).name for name in fs.ls(url, detail=False)]
    assert names == [dcp_folder.METADATA, dcp_folder.DATA]
    assert fs.isdir(url)
    fs.close()


def test_what_needs_a_pickle_is_missing(place: Path) -> None:
    path = place / "policy.yaml"
    path.write_text(POLICY.format(place=place))
    with ts.Checkpointer(path, "run", allow_pickle=["odd"]) as ckpt:
        ckpt.save({"odd": pickle.Pickler, "fine": torch.ones(2)}, step=1).wait()
    into = {"odd": None, "fine": torch.zeros(2)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: odd"):
        dcp.load(into, checkpoint_id=f"tierstate://{path}/run/dcp")
    assert everything(FsspecReader(f"tierstate://{path}/run/dcp")).keys() == {"fine"}


def test_too_many_values_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = saved(place, {"text": "x" * 100, "w": torch.ones(3)})
    monkeypatch.setattr(dcp_folder, "MAX_VALUES", 50)
    with pytest.raises(FileNotFoundError, match=r"no folder dcp: .* more than 50 bytes of plain values"):
        fsspec.filesystem("tierstate").ls(url)
