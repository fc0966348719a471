"""Differences of two versions: by digests, and element by element, reading only what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, scratch, tier
from support.damage import objects, saved, two

import tierstate as ts
from tierstate.manifest.history.diff import ElementDiff

SIZES = {"a": 5000, "b": 40, "c": 1, "d": 0}


@given(
    changes=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4999), st.floats(width=32)), max_size=6),
    chunks=st.sampled_from([(4096, 4096), (4096, 16384), (8192, 4096), (4096, 4112)]),
    digests=st.sampled_from([("xxh3-128", "xxh3-128"), ("xxh3-128", "blake3")]),
)
def test_numbers_are_those_of_the_whole_leaf(changes: Any, chunks: tuple[int, int], digests: tuple[str, str]) -> None:
    before = {name: torch.linspace(-1, 1, n) if n else torch.zeros(0) for name, n in SIZES.items()}
    after = {name: t.clone() for name, t in before.items()}
    for name, at, value in changes:
        after[name][at % len(after[name])] = value
    seen: list[int] = []
    with scratch() as place:
        for step, state in enumerate((before, after)):
            spec = policy({"nvme": tier("nvme", place)}, chunk=chunks[step], digest=digests[step])
            with ts.Checkpointer(spec, "run") as ckpt:
                ckpt.save(state, step=step).wait()
                found = {leaf.name: leaf for leaf in ckpt.diff(0, step, values=True, progress=seen.append)}
    for name, leaf in found.items():
        one, other = before[name].numpy(), after[name].numpy()
        hit = one.view("u4") != other.view("u4")
        both = np.isfinite(one) & np.isfinite(other)
        apart = np.where(both, np.abs(one.astype("f8") - other.astype("f8")), 0)
        if not hit.any() and leaf.change == "same":
            assert leaf.numbers is None
            continue
        assert leaf.numbers is not None
        assert (leaf.numbers.elements, leaf.numbers.changed) == (one.size, np.count_nonzero(hit))
        assert leaf.numbers.largest == (apart.max() if apart.size else 0)
        assert leaf.numbers.rms == pytest.approx(float(np.sqrt(np.mean(apart**2))) if apart.size else 0.0, rel=1e-9)
        assert leaf.numbers.nan == (0, np.count_nonzero(hit & np.isnan(other)))
        assert leaf.numbers.inf == (0, np.count_nonzero(hit & np.isinf(other)))
    if chunks[0] == chunks[1] and digests[0] == digests[1]:
        rows = {(name, at % SIZES[name] * 4 // chunks[0]) for name, at, _ in changes}
        assert sum(seen) <= 2 * sum(min(chunks[0], 4 * SIZES[name]) for name, _ in rows), "only what differs is read"


def states() -> tuple[dict[str, Any], dict[str, Any]]:
    old: dict[str, Any] = {
        "same": torch.ones(2000), "cast": torch.ones(3), "grown": torch.ones(3), "lr": 0.1, "name": "x" * 9000,
        "kind": torch.ones(2), "gone": 1, "half": torch.ones(3).bfloat16(), "big": np.array([2**63 - 1, -(2**63)]),
        "raw": np.array([b"ab", b"cd"]), "set": {"lr": 1, "lists": [1, 2]},
    }  # fmt: skip
    new = {
        **old, "cast": torch.ones(3).double(), "grown": torch.ones(4), "lr": 0.2, "name": "y" * 9000,
        "kind": 3, "half": torch.tensor([1, 1, -0.0]).bfloat16(), "big": np.array([-(2**63), 2**63 - 1]),
        "raw": np.array([b"ab", b"ce"]), "new": torch.ones(2), "set": {"lr": 1, "lists": [1, 3]},
    }  # fmt: skip
    del new["gone"]
    return old, new


def test_ints_of_more_digits_than_python_writes_are_compared(place: Path) -> None:
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        for step in (1, 2):
            ckpt.save({"n": 10**5000 + step, "in": [10**5000, step]}, step=step).wait()
        n, within = ckpt.diff(1, 2, values=True)
    assert n.values == ("<int of 16610 bits>",) * 2
    assert within.values == ("[<int of 16610 bits>, 1]", "[<int of 16610 bits>, 2]")


def test_what_cannot_be_compared_is_told_and_values_are_shown(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        for step, state in enumerate(states()):
            ckpt.save(state, step=step).wait()
        found = {leaf.name: leaf for leaf in ckpt.diff(0, 1, values=True)}
        plain = ckpt.diff(0, 1)
        assert [(d.name, d.change, d.changed_nbytes) for d in plain] == [
            (d.name, d.change, d.changed_nbytes) for d in found.values()
        ]
        assert all(d.numbers is None and d.values is None and not d.note for d in plain)
        some = ckpt.diff(0, 1, values=True, only=["set", "h*"])
        assert [d.name for d in some] == ["half", *(name for name in found if name.startswith("set."))]
        with pytest.raises(ts.StateMismatch, match="nothing"):
            ckpt.diff(0, 1, only=["nothing"])
        with pytest.raises(ts.NotFound, match="step 7"):
            ckpt.diff(0, 7)
    assert found["same"].change == "same"
    assert found["cast"].note == "tensor float32 3 -> tensor float64 3"
    assert found["grown"].note == "tensor float32 3 -> tensor float32 4"
    assert found["kind"].note == "tensor float32 2 -> value"
    assert found["name"].note == "longer than 4096 bytes"
    assert found["lr"].values == ("0.1", "0.2")
    assert found["half"].numbers == ElementDiff(3, 1, 1.0, pytest.approx(3**-0.5))  # type: ignore[arg-type]
    assert found["big"].numbers is not None
    assert found["big"].numbers.largest == 2**64 - 1
    assert found["raw"].numbers == ElementDiff(4, 1)
    assert (found["gone"].change, found["new"].change) == ("removed", "added")
    assert found["new"].numbers is None


def test_damaged_chunks_are_read_elsewhere_or_refused(place: Path) -> None:
    spec = two(place)
    saved(spec, 2)
    with ts.Checkpointer(spec, "run") as ckpt:
        sound = ckpt.diff(0, 1, values=True)
        for path in objects(place, "nvme", "packs"):
            path.write_bytes(bytes(path.stat().st_size))
        assert ckpt.diff(0, 1, values=True) == sound
        for path in objects(place, "file", "packs"):
            path.unlink()
        with pytest.raises(ts.Damaged, match="whole in no tier"):
            ckpt.diff(0, 1, values=True)
        assert [d.change for d in ckpt.diff(0, 1)] == [d.change for d in sound], "digests are in the records"
