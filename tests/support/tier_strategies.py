"""Hypothesis strategies for tier hierarchies: which tiers there are, and the policy of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from support.checkpointer_worlds import policy
from support.storage_sites import Site

import tierstate as ts

KINDS = ["nvme", "lustre", "file", "bucket"]
KEEPS: list[dict[str, Any] | None] = [
    None,
    {"last": 1},
    {"last": 2},
    {"last": 1, "every": 3},
    {"last": 1, "best": {"metric": "n", "mode": "min"}},
    {"last": 2, "tags": True},
    {"last": 3},
]
VOLATILE = [
    None,
    {"type": "memory", "keep": {"last": 2}},
    {"type": "host", "keep": {"last": 1}},
    {"type": "gpu", "device": "cpu", "keep": {"last": 2}},
]


def _keys(keys: dict[str, Any], codec: str, format: str, files: bool) -> dict[str, Any]:
    found = {**keys, **({"format": format} if files else {"codec": codec})}
    return {key: value for key, value in found.items() if value is not None}


TIER = st.builds(
    _keys,
    st.fixed_dictionaries(
        {
            "keep": st.sampled_from(KEEPS),
            "every": st.sampled_from([None, None, 2, 3]),
            "on_lag": st.sampled_from([None, "skip"]),
        }
    ),
    codec=st.sampled_from(["raw", "delta", "auto", "small", "fast"]),
    format=st.sampled_from(["native", "safetensors", "hdf5"]),
    files=st.sampled_from([False, False, False, True]),
)
"""What a policy says of a tier, beside where it is."""


@dataclass(frozen=True)
class Plan:
    """What a policy says.

    Attributes:
        tiers: by kind, keys.
        volatile: keys of a tier that is this process's, or None.
        whole: keys beside those of tiers.
        parted: which leaves, and how many of the tiers from the first on get them; None: all get all.
        thinned: keys of a rule by which some leaves are kept shorter; None: there is none.
        guarded: whether the optimizer's step is waited for.
    """

    tiers: Mapping[str, Mapping[str, Any]]
    volatile: Mapping[str, Any] | None
    whole: Mapping[str, Any]
    parted: tuple[str, int] | None
    thinned: Mapping[str, Any] | None
    guarded: bool

    def policy(self, sites: Mapping[str, Site], only: Collection[str] = ()) -> ts.Policy:
        """The policy over these sites, or over some of them alone."""
        tiers = {name: site.keys(**self.tiers[name]) for name, site in sites.items() if not only or name in only}
        keys: dict[str, Any] = {**self.whole, "rules": [dict(self.thinned)] if self.thinned else []}
        if self.parted is not None and not only:
            glob, count = self.parted
            keys["rules"] += [{"match": glob, "tiers": list(tiers)[: max(1, count % (len(tiers) + 1))]}]
        if self.volatile is not None and not only:
            tiers = {"mine": dict(self.volatile), **tiers}
        return policy(tiers, **keys)


def _whole(chunk: int, slabs: int, digest: str) -> dict[str, Any]:
    return {"chunk": chunk, "arena": {"size": slabs * 8192}, "digest": digest}


PLANS = st.builds(
    Plan,
    tiers=st.fixed_dictionaries(dict.fromkeys(KINDS, TIER)),
    volatile=st.sampled_from(VOLATILE),
    whole=st.builds(
        _whole,
        st.sampled_from([8192, 4096, 4112]),
        st.sampled_from([16, 2, 5]),
        st.sampled_from(["xxh3-128", "blake3"]),
    ),
    parted=st.one_of(
        st.none(),
        st.none(),
        st.tuples(st.sampled_from(["optimizer.**", "leaves.**", "**.a"]), st.integers(1, 3)),
    ),
    thinned=st.sampled_from([None, None, {"match": "optimizer.**", "keep": {"last": 1}}]),
    guarded=st.booleans(),
)
MIXES = st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True)
