"""Moves a state's bytes from its providers to others, as the engine would, and its leaves through JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from tierstate.manifest.chunk import as_buffer, empty_buffer, to_bytes
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.leaf_path import decode_path, encode_path
from tierstate.providers.base import Provider
from tierstate.providers.tree.flatten import FlatState
from tierstate.providers.tree.unflatten import plan_restore


def stream(provider: Provider, size: int = 1 << 20) -> bytes:
    """All bytes of a value, in chunks of ``size`` bytes; checks that they are cut as the contract says."""
    pieces, at = [], 0
    for start, nbytes, fill in provider.chunks(size):
        assert (start, nbytes) == (at, min(size, provider.spec.nbytes - at))
        out = empty_buffer(nbytes)
        event = fill(out)
        if event is not None:
            event.synchronize()
        pieces.append(to_bytes(out))
        at += nbytes
    assert at == provider.spec.nbytes
    return b"".join(pieces)


def transfer(tree: FlatState, size: int = 1 << 20) -> tuple[list[Leaf], dict[int, bytes]]:
    """The leaves as they come back from a manifest, and the bytes of each that has some."""
    data = {i: stream(node.provider, size) for i, node in enumerate(tree.nodes) if node.provider is not None}
    return [again(leaf) for leaf in tree.leaves], data


def again(leaf: Leaf) -> Leaf:
    """The leaf after a way through text."""
    spec = leaf.spec
    attrs = json.loads(json.dumps(dict(spec.attrs)))
    return Leaf(decode_path(encode_path(leaf.path)), Spec(spec.kind, spec.dtype, spec.itemsize, spec.shape, attrs))


def feed(provider: Provider, data: bytes, piece: int = 1 << 20, seed: int = 0) -> None:
    """Load all bytes in pieces of ``piece`` bytes, in an order of no meaning."""
    starts = list(range(0, len(data), piece))
    random.Random(seed).shuffle(starts)
    for start in starts:
        provider.load(start, as_buffer(data[start : start + piece]))


def restore(
    leaves: Sequence[Leaf],
    data: Mapping[int, bytes],
    *,
    piece: int = 1 << 20,
    seed: int = 0,
    by_memory: bool = False,
    **options: Any,
) -> Any:
    """Restore what `transfer` gave, by ``load`` or straight into memory; options are those of ``plan_restore``."""
    target = plan_restore(leaves, content=data.get, **options)

    def give(index: int, provider: Provider) -> None:
        memory = provider.memory() if by_memory else None
        if memory is not None and data[index]:
            memory.copy_(as_buffer(data[index]))
        else:
            feed(provider, data[index], piece, seed)

    for index, provider in target.ahead:
        give(index, provider)
    target.settle()
    try:
        for index, provider in target.wanted.items():
            give(index, provider)
        return target.finish()
    except BaseException:
        target.undo()
        raise
