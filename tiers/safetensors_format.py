"""The safetensors format: a JSON header, then every tensor's bytes without a gap."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tierstate.manifest.errors import FormatError
from tierstate.manifest.leaf import Leaf, encode_path

from .formats import About, Blueprint, Format, Item, element
from .naming import dotted, is_plain
from .packing import BIG, BLOCK

PATHS = "tierstate.paths"
"""Key of the metadata under which the paths stand that the names do not say: JSON, name to encoded path."""

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16",
    "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32", "int64": "I64", "uint64": "U64",
    "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Types that readers have known for long. One type that a reader does not know makes it refuse the whole file."""

MAX_HEADER = 100_000_000
"""Bytes of a header that readers accept."""

_LENGTH = 8


class Safetensors(Format):
    """Files as ``safetensors.safe_open`` and Hugging Face loaders open them."""

    name = "safetensors"
    suffix = ".safetensors"

    def expresses(self, leaf: Leaf) -> bool:
        return element(leaf) in DTYPES

    def lay_out(self, items: Sequence[Item], about: About) -> Blueprint:
        """The first leaf of 1 MiB and more, and so all whole blocks that follow it, start at blocks."""
        leaves = [item.leaf for item in items]
        starts = list(accumulate((leaf.spec.nbytes for leaf in leaves), initial=0))
        header = json.dumps(_header(leaves, starts, about), ensure_ascii=False, separators=(",", ":")).encode()
        before = next((at for leaf, at in zip(leaves, starts, strict=False) if leaf.spec.nbytes >= BIG), 0)
        data = -(-(_LENGTH + len(header)) // 8) * 8
        data += -(data + before) % BLOCK
        if data > MAX_HEADER:
            raise FormatError(f"a header of {data} bytes is more than readers accept; at most {MAX_HEADER} are right")
        head = (data - _LENGTH).to_bytes(_LENGTH, "little") + header.ljust(data - _LENGTH)
        return Blueprint(data + starts[-1], tuple(data + at for at in starts[:-1]), head)


def _header(leaves: Sequence[Leaf], starts: Sequence[int], about: About) -> dict[str, Any]:
    names = dotted((leaf.path for leaf in leaves), ["__metadata__"])
    pairs = list(zip(names, leaves, strict=True))
    paths = {name: encode_path(leaf.path) for name, leaf in pairs if not is_plain(leaf.path, name.split("."))}
    metadata = {
        "format": "pt", "run": about.run, "seq": str(about.seq), "step": str(about.step), "time": repr(about.time),
        "metadata": about.metadata, PATHS: json.dumps(paths, separators=(",", ":")),
    }  # fmt: skip
    entries = {
        name: {
            "dtype": DTYPES[element(leaf)],
            "shape": list(leaf.spec.shape),
            "data_offsets": [at, at + leaf.spec.nbytes],
        }
        for (name, leaf), at in zip(pairs, starts, strict=False)
    }
    return {"__metadata__": metadata, **entries}
