"""A golden repository: what every later version of tierstate restores bit for bit.

    python tests/golden/make.py

writes `tests/golden/format-<number>` and, beside it, what its tables consist of. Not run by the tests, and to be run
only when a format number is added: a stored repository is never written again, and neither are the states below
changed, from which the tests know what must come back. Everything is made of whole numbers, so that it is the same on
every machine.
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import tierstate as ts
from tierstate.manifest.format import table as table_module
from tierstate.manifest.format.record import decode_sections
from tierstate.manifest.history import leases
from tierstate.manifest.history.log import Log

HERE = Path(__file__).parent
FORMAT = 1
NATIVE, OTHER = ("nvme", "object"), ("safetensors", "hdf5")
STEPS = {
    "main": {"nvme": (2, 3, 4), "object": (1, 2, 3, 4), "safetensors": (4,), "hdf5": (4,)},
    "branch": {"nvme": (3, 4), "object": (3, 4)},
    "plain": {"nvme": (1, 2)},
}
"""Steps of each run that are there in each tier; ``branch`` begins with step 3 of ``main``."""

WITH_OPTIMIZER = {"main": (3, 4), "branch": (3, 4)}
"""Steps of which the native tiers still have the optimizer's state."""

FILES = ("model", "arrays")
"""What of the state the rules send to the tiers of files of other kinds."""


class Point(NamedTuple):
    """A named tuple."""

    x: int
    y: torch.Tensor


def numbers(count: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that compress a little, of which one in forty changes with each step."""
    at = np.arange(count, dtype="u8")
    noise = (at * 2654435761 + 12345) % 65521 // 7
    moved = np.where((at + step) % 40 == 0, step, 0)
    return torch.from_numpy((noise.astype("i8") % 512 - 256 + moved).astype("f4") / 64).to(dtype)


def state(run: str, step: int) -> dict[str, Any]:
    """What was saved."""
    if run == "plain":
        return {"weight": numbers(700, step).reshape(7, 100), "half": numbers(9, 1, torch.bfloat16), "step": step}
    weight, tied = numbers(2200, step, torch.bfloat16).reshape(22, 100), numbers(90, 2)
    codes = torch.from_numpy((np.arange(512) * 7 % 255 - 127).astype("f4"))  # each block has a 127: codes are exact
    return {
        "model": {
            "weight": weight,
            "norm.weight": numbers(24, step),
            "tied": tied,
            "head": tied,
            "frozen": numbers(1200, 0),
            "view": tied[10:20],
            "parameter": torch.nn.Parameter(numbers(5, step)),
            "scalar": torch.tensor(step + 0.5, dtype=torch.float64),
            "empty": torch.zeros(0, 3),
        },
        "dtypes": [
            numbers(17, step).to(dtype)
            for dtype in (torch.float16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64)
        ],
        "optimizer": {"state": {0: {"exp_avg": numbers(400, step), "step": torch.tensor(float(step))}}, "lr": 2**-7},
        "ema": numbers(300, step) + 2**-9,
        "moments": codes,
        "arrays": {"big": np.arange(12, dtype=">i4").reshape(3, 4) + step, "flags": np.array([True, False, step > 3])},
        "containers": OrderedDict(
            z=(1, [2, (), {}, []], OrderedDict()), a=Point(step, torch.arange(3)), m={"nested": {"deeper": [None]}}
        ),
        "keys": {0: "int", "0": "text", True: "bool", None: "none", 1.5: "float", b"\xff": "bytes", "x.y": "dots",
                 (1, "a"): "tuple", "\ud800": "no text", "": "empty", "*": "star"},
        "values": [step, 1 << 90, -0.0, float("nan"), "text\0ü", b"\0\1", 1 + 2j, {1, 2}],
    }  # fmt: skip


def restored(run: str, step: int) -> dict[str, Any]:
    """What must come back: what was saved, but for a tensor that was saved with fewer bits."""
    found = state(run, step)
    if "ema" in found:
        found["ema"] = found["ema"].bfloat16().float()
    return found


def policy(place: Path, *names: str, run: str = "main", keep: bool = False) -> ts.Policy:
    """The policy of a run over all its tiers below a folder, or over some of them."""
    files = {"type": "nvme", "io": "buffered", "every": 2, "keep": {"last": 1}}
    tiers: dict[str, dict[str, Any]] = {
        "nvme": {"type": "nvme", "path": f"{place}/nvme", "io": "buffered"},
        "object": {"type": "object", "url": f"file://{place}/object", "codec": "delta"},
        **{name: {**files, "path": f"{place}/{name}", "format": name} for name in OTHER},
    }
    rules: list[dict[str, Any]] = [
        {"match": "ema", "lossy": "bf16"},
        {"match": "moments", "lossy": "int8"},
        {"match": "model.frozen", "codec": "fast"},
        {"match": "dtypes.*", "codec": "small"},
        *({"match": top, "tiers": OTHER + NATIVE} for top in (f"{top}.**" for top in FILES)),
        {"match": "**", "tiers": NATIVE},
    ]
    if keep:
        tiers["nvme"]["keep"] = {"last": 3}
        rules.append({"match": "optimizer.**", "keep": {"last": 2}})
    chosen = {name: tiers[name] for name in names or STEPS[run]}
    if names or run != "main":
        rules = [{**rule, "tiers": list(chosen)} if "tiers" in rule else rule for rule in rules if run != "plain"]
    document = {"chunk": "4KiB", "arena": {"size": "512KiB"}, "tiers": chosen, "rules": rules}
    return ts.Policy.parse(json.dumps(document))


def build(place: Path) -> None:
    """Write the repository with the program that is imported."""
    for run, last in (("main", 4), ("plain", 2)):
        with ts.Checkpointer(policy(place, run=run), run) as ckpt:
            for step in range(1, last + 1):
                ckpt.save(state(run, step), step, {"loss": 1 / step, "note": "ü"}).wait()
    with ts.Checkpointer(policy(place, keep=True), "main") as ckpt:
        for name, step in (("best", 2), ("best", 4), ("gone", 3)):
            ckpt.tag(name, step)
        ckpt.untag("gone")
        ckpt.fork("branch", 3)
        ckpt.prune(grace=0)  # drops and thins, and writes the index
    with ts.Checkpointer(policy(place, run="branch"), "branch") as ckpt:
        ckpt.save(state("branch", 4), 4).wait()
    _damage(place)
    with ts.Checkpointer(policy(place), "main") as ckpt:
        ckpt.verify(mend=True)


def _damage(place: Path) -> None:
    """Change a byte of a chunk in one tier, to be mended from another."""
    record = Log(_tier(place), "main").read(4)
    leaf = next(i for i, leaf in enumerate(record.version.leaves) if leaf.path == ("optimizer", "state", 0, "exp_avg"))
    row = record.version.chunk_leaf.tolist().index(leaf)
    spot = record.layout.place(row)
    assert spot is not None
    path = place / "nvme" / spot.object
    data = bytearray(path.read_bytes())
    data[spot.offset] ^= 1
    path.write_bytes(data)


def _tier(place: Path, name: str = "nvme") -> Any:
    from tierstate.tiers.registry import open_tier

    found = policy(place).tier(name)
    return open_tier(found.name, found.type, found.options)


def described(place: Path) -> dict[str, Any]:
    """What the records, footers, indexes, tags and pins of a repository consist of."""
    found: dict[str, Any] = {}
    for what, section in _sections(place):
        if section[:1] == b"{":
            here: Mapping[str, Any] = dict.fromkeys(json.loads(section), "json")
        else:
            head, table = table_module.decode_table(memoryview(section), what)
            here = {f"head.{field}": "json" for field in head if field != "columns"}
            here |= {name: column.dtype.str for name, column in table.items()}
        found.setdefault(what, {}).update(here)
    return {what: dict(sorted(found[what].items())) for what in sorted(found)}


def _sections(place: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(p for p in place.rglob("*") if p.is_file()):
        kind, data = path.relative_to(place).parts[1], path.read_bytes()
        if kind in ("versions", "index"):
            for name, section in decode_sections(memoryview(data)).items():
                yield f"{kind}: {name}", bytes(section)
        elif kind in ("tags", "leases"):
            yield kind, data
        elif data.endswith(b"\x89TSP\r\n\x1a\n"):
            yield "packs: footer", data[-28 - int.from_bytes(data[-28:-24], "little") : -28]


def main() -> None:
    """Write it, beside this file."""
    target = HERE / f"format-{FORMAT}"
    if target.exists():
        raise SystemExit(f"{target} is there; a golden repository is not written again")
    socket.gethostname, leases._PROC = lambda: "golden", "/nowhere"  # what is stored says nothing of who made it
    with tempfile.TemporaryDirectory() as scratch:
        build(Path(scratch))
        shutil.copytree(scratch, target)
    text = json.dumps(described(target), indent=1)
    (HERE / f"format-{FORMAT}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
