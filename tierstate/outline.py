"""Outlines: what a state was, as JSON beside its tensors in a file of another format."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tierstate.manifest.errors import FormatError
from tierstate.manifest.leaf import Leaf, Spec, decode_path, encode_path
from tierstate.providers.encoding import decode, encode
from tierstate.providers.structure import Stem, build, grow
from tierstate.providers.values import ValueProvider

from .selection import ties_of
from .stored import Stored, read_tensor

FORMAT = 1
MAX_LEAVES = 1 << 24


class Part(NamedTuple):
    """One leaf of an outline.

    Attributes:
        leaf: what it is.
        name: the tensor in the file that has its bytes, in parts between which formats put a dot or a slash; None where
            it has none there.
        value: the encoded value, of a leaf that is one.
    """

    leaf: Leaf
    name: Sequence[str] | None = None
    value: bytes | None = None


Find = Callable[[Sequence[str], Spec], Stored]
"""The tensor of a name in a file, as a value of that spec. Raises FormatError where it is none."""


def encode_outline(parts: Sequence[Part], about: Mapping[str, Any]) -> dict[str, Any]:
    """An outline as JSON types.

    Args:
        about: what else it says: run, step, and so on.
    """
    return {**about, "format": FORMAT, "leaves": [_encode_part(part) for part in parts]}


def decode_outline(found: Any, what: str) -> list[Part]:
    """The leaves of an outline that may come from anybody.

    Args:
        what: the file's name in messages.

    Raises:
        FormatError: it is none.
    """
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FormatError(f"{what}: its outline is of a format that this program does not know; right is {FORMAT}")
    listed = found.get("leaves")
    if not isinstance(listed, list) or len(listed) > MAX_LEAVES:
        raise FormatError(f"{what}: its outline lists no leaves")
    try:
        return [_decode_part(item) for item in listed]
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise FormatError(f"{what}: its outline lists what is no leaf: {error!r}") from error


def assemble(parts: Sequence[Part], find: Find, what: str) -> Any:
    """The state of an outline; tensors stay in their file until they are asked for.

    Only tensors of which others are parts are read, since nothing else tells what lies in them.

    Raises:
        FormatError: the leaves are no tree, or a tensor is not there.
    """
    leaves = [part.leaf for part in parts]
    root, _ = grow(leaves)
    ties = ties_of(leaves)
    viewed = {tie.root for tie in ties.values() if tie.offset is not None}
    values: dict[int, Any] = {}
    for i, part in enumerate(parts):
        if part.leaf.spec.kind == ValueProvider.kind:
            values[i] = decode(_given(part.value, part.leaf, what))
        elif part.leaf.spec.has_bytes:
            held = find(_given(part.name, part.leaf, what), part.leaf.spec)
            values[i] = read_tensor(held) if i in viewed else held
    for i, tie in ties.items():
        held = values[tie.root]
        values[i] = held.like(tie.spec) if isinstance(held, Stored) else tie.of(held, leaves[tie.root].spec)
    return _put(root, values)


def _put(stem: Stem, values: Mapping[int, Any]) -> Any:
    if not stem.kind:
        return values[stem.index]
    return build(stem, {child.key: _put(child, values) for child in stem.children.values()})


def _given(found: Any, leaf: Leaf, what: str) -> Any:
    if found is None:
        raise FormatError(f"{what}: its outline does not say where leaf {leaf.name} is")
    return found


def _encode_part(part: Part) -> dict[str, Any]:
    spec = part.leaf.spec
    found: dict[str, Any] = {"path": encode_path(part.leaf.path), "kind": spec.kind}
    if spec.kind != ValueProvider.kind and (
        spec.has_bytes or spec.shape or spec.itemsize != 1 or spec.dtype != "uint8"
    ):
        found |= {"dtype": spec.dtype, "itemsize": spec.itemsize, "shape": list(spec.shape)}
    if spec.attrs:
        found["attrs"] = dict(spec.attrs)
    if part.name is not None:
        found["name"] = list(part.name)
    return found if part.value is None else found | _encode_value(part.value)


def _encode_value(value: bytes) -> dict[str, Any]:
    """A value to be read by people, where JSON gives it back exactly; otherwise as its bytes."""
    plain = decode(value)
    if type(plain) in (int, str, bool, type(None)) or (type(plain) is float and math.isfinite(plain)):
        return {"json": plain}
    return {"value": base64.b64encode(value).decode("ascii")}


def _decode_value(item: Mapping[str, Any]) -> bytes | None:
    if "json" in item:
        return encode(item["json"])
    return base64.b64decode(item["value"], validate=True) if "value" in item else None


def _decode_part(item: Any) -> Part:
    path, kind, name = item["path"], item["kind"], item.get("name")
    dtype, itemsize, shape = item.get("dtype", "uint8"), item.get("itemsize", 1), item.get("shape", [])
    attrs = item.get("attrs", {})
    sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 56 for n in [itemsize, *shape])
    if not (isinstance(kind, str) and isinstance(dtype, str) and sizes and isinstance(attrs, dict) and itemsize):
        raise ValueError(f"{item!r:.80}")
    value = _decode_value(item)
    if kind == ValueProvider.kind:
        shape = [len(value or b"")]
    if name is not None and not (isinstance(name, list) and all(isinstance(n, str) for n in name)):
        raise TypeError(f"{name!r:.40} is no name")
    return Part(Leaf(decode_path(path), Spec(kind, dtype, itemsize, tuple(shape), attrs)), name, value)
