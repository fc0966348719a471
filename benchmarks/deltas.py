"""Deltas: what fine-tuning steps of the example GPT take in a tier with `codec: delta`, beside one with `codec: fast`.

python -m benchmarks.deltas [--saves 40] [--every 1,10] [--rate 1e-5] [--path DIR]

A GPT is trained on the sources of this repository with AdamW, and then trained on at a small learning rate, saving
every so many steps to two folders. Twice: all in bf16, moments too ("pure"); and as mixed precision does it, fp32
weights and moments, of which the bf16 weights are a copy ("master"). Every version is restored from the folder of
deltas alone and compared bit for bit.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import tierstate as ts
from tierstate.manifest.history.log import Log
from tierstate.tiers.registry import open_tier

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT

ROOT = Path(__file__).resolve().parents[1]
State = dict[str, dict[str, torch.Tensor]]
WARM_UP = 150


class Save(NamedTuple):
    """Bytes of one group of leaves in one save: raw, and written to each folder."""

    group: str
    raw: int
    fast: int
    delta: int


def main() -> int:
    """Train, save, and print a table; 1 where a version did not come back as it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=40)
    parser.add_argument("--every", default="1,10", help="steps between saves")
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--path", help="where everything goes; it is removed afterwards")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("stored/raw of a save         fast   delta: mean, least, median, most")
    for precision in ("pure", "master"):
        for every in map(int, args.every.split(",")):
            place = Path(tempfile.mkdtemp(prefix="tierstate-deltas-", dir=args.path))
            try:
                saves = list(measured(place, precision, every, args.saves, args.rate))
            finally:
                shutil.rmtree(place)
            for group in dict.fromkeys(save.group for save in saves):
                print(
                    f"{precision:7}{every:3} steps {group:11}", line([s for s in saves if s.group == group]), flush=True
                )
    return 0


def line(saves: list[Save]) -> str:
    """A group's figures over all saves."""
    raw, shares = sum(s.raw for s in saves), sorted(s.delta / s.raw for s in saves)
    fast, delta = sum(s.fast for s in saves) / raw, sum(s.delta for s in saves) / raw
    return f"{fast:.3f}   {delta:.3f}  {shares[0]:.3f}  {shares[len(shares) // 2]:.3f}  {shares[-1]:.3f}"


def measured(place: Path, precision: str, every: int, count: int, rate: float) -> Iterator[Save]:
    """The bytes of each save, group by group."""
    spec = ts.Policy.parse(f"""
        version: 1
        arena: {{size: 64MiB}}
        tiers:
          fast: {{type: nvme, path: {place}/fast, codec: fast}}
          delta: {{type: nvme, path: {place}/delta, codec: delta}}
    """)
    with ts.Checkpointer(spec, "run") as ckpt:
        for i, state in zip(range(count), states(precision, every, rate), strict=False):
            ckpt.save(state, step=i).wait("delta")
            torch.save(state, place / str(i))
    found = {name: list(written(place / name)) for name in ("fast", "delta")}
    shutil.rmtree(place / "fast")
    with ts.Checkpointer(spec, "run") as ckpt:
        for i in range(count):
            then, now = torch.load(place / str(i)), ckpt.load(step=i)
            assert all(bits(t) == bits(now[g][n]) for g in then for n, t in then[g].items()), f"step {i} is another"
    for fast, delta in zip(found["fast"], found["delta"], strict=True):
        for group, (raw, stored) in delta.items():
            yield Save(group, raw, fast[group][1], stored)


def written(folder: Path) -> Iterator[dict[str, tuple[int, int]]]:
    """Per version, for each group of leaves its raw bytes, and those that its save wrote."""
    tier = open_tier("read", "nvme", {"path": folder})
    log = Log(tier, "run")
    for seq in log.seqs():
        version, layout = (record := log.read(seq)).version, record.layout
        mine = np.array([f"/{seq:012d}-" in key for key in layout.objects])[layout.object]
        found: dict[str, tuple[int, int]] = {}
        for row, leaf in enumerate(version.chunk_leaf.tolist()):
            group = str(version.leaves[leaf].path[0])
            raw, stored = found.get(group, (0, 0))
            found[group] = raw + int(version.chunk_nbytes[row]), stored + int(layout.stored[row] * mine[row])
        yield found
    tier.close()


def states(precision: str, every: int, rate: float) -> Iterator[State]:
    """A state after every so many steps of fine-tuning."""
    torch.manual_seed(0)
    text = torch.tensor(list(b"".join(p.read_bytes() for p in sorted((ROOT / "tiers").glob("*.py")))))
    model = GPT()
    steps(model, torch.optim.AdamW(model.parameters(), lr=1e-3), text, WARM_UP)
    if precision == "pure":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    steps(model, optimizer, text, 5)
    while True:
        steps(model, optimizer, text, every)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        moments: State = {"exp_avg": {}, "exp_avg_sq": {}}
        for name, p in model.named_parameters():
            for moment, values in moments.items():
                values[name] = optimizer.state[p][moment]
        groups = {"weights": {name: p.bfloat16() for name, p in weights.items()}, **moments}
        yield groups if precision == "pure" else {**groups, "master": weights}


def steps(model: GPT, optimizer: torch.optim.Optimizer, text: torch.Tensor, count: int) -> None:
    """Some steps of training."""
    for _ in range(count):
        starts = torch.randint(0, len(text) - 65, (8,))
        loss = model.loss(torch.stack([text[at : at + 65] for at in starts.tolist()]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    sys.exit(main())
