"""Differences against a model that keeps each leaf as plain lists."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manifest_strategies import cuts

from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import spans
from tierstate.manifest.format.leaf import CONTAINERS, Leaf, Spec
from tierstate.manifest.format.leaf_path import encode_path
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.manifest.history.diff import diff_versions
from tierstate.manifest.history.leaf_statistics import changed_share

NAMES = ["a", "b", "c", True, 1, float("nan")]


class Held(NamedTuple):
    """A leaf as the model has it: spec, and per shard its box and its chunks as (length, digest)."""

    spec: Spec
    shards: tuple[tuple[Box, tuple[tuple[int, int], ...]], ...]

    @property
    def chunks(self):
        return [chunk for _, chunks in self.shards for chunk in chunks]


class State(NamedTuple):
    """A state: chunk length, and leaves by position in NAMES."""

    chunk: int
    leaves: dict[int, Held]


@st.composite
def held(draw, chunk):
    kind = draw(st.sampled_from(["tensor", "tensor", "tensor", "tied", "dict"]))
    spec = Spec(kind, draw(st.sampled_from(["int8", "uint8"])), 1, draw(st.sampled_from([(), (0,), (40,), (9, 7)])))
    boxes = draw(cuts(spec.shape, most=1)) if spec.has_bytes else []
    return Held(spec, tuple((box, draw(filled(box, chunk))) for box in boxes))


def filled(box, chunk):
    lengths = [n for _, n in spans(box.volume, chunk)]
    return st.tuples(*(st.integers(0, 2).map(lambda digest, n=n: (n, digest)) for n in lengths))


@st.composite
def states(draw, chunk=None):
    chunk = chunk or draw(st.sampled_from([16, 32]))
    order = draw(st.lists(st.integers(0, len(NAMES) - 1), unique=True, max_size=5))
    return State(chunk, {i: draw(held(chunk)) for i in order})


@st.composite
def successors(draw, state):
    """The state some steps later: cut the same, with some leaves new, gone, or of other content."""
    leaves = dict(state.leaves)
    for i in list(leaves):
        match draw(st.sampled_from(["keep", "keep", "train", "train", "turn", "replace", "drop", "cast"])):
            case "turn":
                leaves[i] = leaves[i]._replace(shards=leaves[i].shards[::-1])
            case "train":
                shards = tuple((box, draw(filled(box, state.chunk))) for box, _ in leaves[i].shards)
                leaves[i] = leaves[i]._replace(shards=shards)
            case "replace":
                leaves[i] = draw(held(state.chunk))
            case "cast":
                leaves[i] = leaves[i]._replace(spec=dataclasses.replace(leaves[i].spec, attrs={"x": 1}))
            case "drop" if draw(st.booleans()):
                del leaves[i]
    return State(state.chunk, leaves)


def version_of(state, digest="xxh3-128"):
    leaves = [Leaf((NAMES[i],), h.spec) for i, h in state.leaves.items()]
    rows = [ShardRow(n, 0, box) for n, h in enumerate(state.leaves.values()) for box, _ in h.shards]
    numbers = [(5, digest) for h in state.leaves.values() for _, digest in h.chunks]
    table = np.array(numbers, "u8").reshape(-1, 2)
    return Version.build(Head("run", 1, 1, 0.0, chunk=state.chunk, digest=digest), leaves, rows, table)


def is_value(leaf):
    return leaf is not None and leaf.spec.kind not in CONTAINERS


def model(old, new):
    """(name, change, nbytes, changed_nbytes) by the definition in LeafDiff."""
    found = []
    for i, leaf in new.leaves.items():
        if is_value(leaf):
            had = old.leaves.get(i)
            change, fresh = compare(had, leaf) if is_value(had) else ("added", total(leaf.chunks))
            found.append((i, change, leaf.spec.nbytes, fresh))
    gone = [i for i, h in old.leaves.items() if is_value(h) and not is_value(new.leaves.get(i))]
    return found + [(i, "removed", old.leaves[i].spec.nbytes, 0) for i in gone]


def compare(had, leaf):
    shape = [(box, [n for n, _ in chunks]) for box, chunks in leaf.shards]
    if not had.chunks and not leaf.chunks:
        return "same" if had.spec == leaf.spec else "changed", 0
    if shape != [(box, [n for n, _ in chunks]) for box, chunks in had.shards]:
        known = {digest for _, digest in had.chunks}
        return "changed", total([c for c in leaf.chunks if c[1] not in known])
    fresh = [now for then, now in zip(had.chunks, leaf.chunks, strict=True) if then != now]
    return "same" if had.spec == leaf.spec and not fresh else "changed", total(fresh)


def total(chunks):
    return sum(n for n, _ in chunks)


def listed(found):
    def position(key):
        return next(i for i, n in enumerate(NAMES) if type(n) is type(key) and (n == key or n != n))

    return [(position(d.path[0]), d.change, d.nbytes, d.changed_nbytes) for d in found]


@given(states(), states())
def test_any_two_versions(old, new):
    assert listed(diff_versions(version_of(old), version_of(new))) == model(old, new)


@given(st.data())
def test_a_version_and_its_successor(data):
    old = data.draw(states())
    new = data.draw(successors(old))
    assert listed(diff_versions(version_of(old), version_of(new))) == model(old, new)


@pytest.mark.slow
@given(st.data())
def test_aligned_and_unaligned_tables_tell_the_same(data):
    """One more leaf at the front moves every row, and nothing else."""
    old = data.draw(states(chunk=16).map(lambda s: State(16, {i: h for i, h in s.leaves.items() if i})))
    new = State(16, {i: data.draw(successors(State(16, {i: h}))).leaves.get(i, h) for i, h in old.leaves.items()})
    more = Held(Spec("tensor", shape=(16,)), ((Box((0,), (16,)), ((16, 1),)),))
    longer = State(16, {0: more, **new.leaves})
    plain = listed(diff_versions(version_of(old), version_of(new)))
    moved = listed(diff_versions(version_of(old), version_of(longer)))
    assert moved == [(0, "added", 16, 16), *plain]


@given(states())
def test_a_version_and_itself(state):
    version = version_of(state)
    for other in (version, Version.decode(memoryview(version.data))):
        found = diff_versions(version, other)
        assert {d.change for d in found} <= {"same"}
        assert sum(d.changed_nbytes for d in found) == 0
        assert len(found) == sum(map(is_value, state.leaves.values()))


@given(states(), states())
def test_bounds(old, new):
    found = diff_versions(version_of(old), version_of(new))
    back = {d[0]: d[1] for d in listed(diff_versions(version_of(new), version_of(old)))}
    opposite = {"added": "removed", "removed": "added", "same": "same", "changed": "changed"}
    assert back == {d[0]: opposite[d[1]] for d in listed(found)}
    for d in found:
        assert 0 <= d.changed_nbytes <= d.nbytes
        assert d.change != "same" or d.changed_nbytes == 0
        assert d.change != "added" or d.changed_nbytes == d.nbytes


@given(states())
def test_other_digests_tell_nothing(state):
    found = diff_versions(version_of(state), version_of(state, digest="blake3"))
    for d in found:
        assert (d.change, d.changed_nbytes) == ("changed" if d.nbytes else "same", d.nbytes)


@given(st.data())
def test_the_changed_share_of_leaves_is_what_a_diff_says_or_not_known(data):
    state = data.draw(states())
    later = data.draw(st.one_of(successors(state), states()))
    old, new = version_of(state), version_of(later, data.draw(st.sampled_from(["xxh3-128", "xxh3-128", "sha256"])))
    share = changed_share(new, old)
    if old.head.digest != new.head.digest or old.head.chunk != new.head.chunk or old.boxes != new.boxes:
        assert share is None
    elif share is not None:
        for d in diff_versions(old, new):
            assert not d.nbytes or share[new.leaf_index[encode_path(d.path)]] == d.changed_nbytes / d.nbytes


def tensor(*digests):
    return Held(
        Spec("tensor", shape=(16 * len(digests),)),
        ((Box((0,), (16 * len(digests),)), tuple((16, d) for d in digests)),),
    )


@pytest.mark.parametrize("more", [{}, {2: tensor(7)}], ids=["same leaves", "one more"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_same_digests_in_other_shards(more, order):
    """Rows moved within a leaf: the same list of digests is other content when its boxes are other ones."""
    boxes = [Box((0, 0), (1, 16)), Box((1, 0), (1, 16))]
    spec = Spec("tensor", shape=(2, 16))
    old = State(16, {0: Held(spec, ((boxes[0], ((16, 1),)), (boxes[1], ((16, 2),))))})
    new = State(16, {0: Held(spec, ((boxes[order[0]], ((16, 1),)), (boxes[order[1]], ((16, 2),))))})
    found = listed(diff_versions(version_of(old), version_of(new._replace(leaves=new.leaves | more))))
    assert found[0] == (0, "same" if order == (0, 1) else "changed", 32, 0)


@pytest.mark.parametrize("more", [{}, {2: tensor(7)}], ids=["same leaves", "one more"])
def test_the_same_boxes_in_other_chunks(more):
    def whole(n, *chunks, itemsize=1):
        return Held(Spec("tensor", "x", itemsize, (n,)), ((Box((0,), (n,)), chunks),))

    def compared(old, new):
        return listed(diff_versions(version_of(old), version_of(new._replace(leaves=new.leaves | more))))[0]

    small = State(16, {0: whole(40, (16, 0), (16, 1), (8, 2))})
    large = State(32, {0: whole(40, (32, 3), (8, 2))})
    assert compared(small, large) == (0, "changed", 40, 32)
    wide = State(16, {0: whole(40, *((16, k) for k in range(5)), itemsize=2)})
    assert compared(small, wide) == (0, "changed", 80, 32)
    half, double = State(16, {0: whole(4, (4, 1))}), State(16, {0: whole(4, (8, 1), itemsize=2)})
    assert compared(half, double) == (0, "changed", 8, 0)
    assert compared(State(16, {0: whole(4, (4, 1))}), State(32, {0: whole(4, (4, 1))})) == (0, "same", 4, 0)


def test_leaves_that_swapped_their_content_have_changed():
    """Every digest is somewhere in the older version, with one leaf more so that rows do not line up."""
    old = State(16, {0: tensor(1), 1: tensor(2)})
    new = State(16, {0: tensor(2), 1: tensor(1), 2: tensor(1)})
    assert [d[1] for d in listed(diff_versions(version_of(old), version_of(new)))] == ["changed", "changed", "added"]


def test_a_leaf_that_grew_has_only_its_new_chunks_changed():
    old, new = State(16, {0: tensor(1, 2)}), State(16, {0: tensor(1, 2, 3)})
    assert listed(diff_versions(version_of(old), version_of(new))) == [(0, "changed", 48, 16)]


def test_a_value_that_became_a_container_is_removed():
    old, new = State(16, {0: tensor(1)}), State(16, {0: Held(Spec("dict"), ())})
    assert listed(diff_versions(version_of(old), version_of(new))) == [(0, "removed", 16, 0)]
    assert listed(diff_versions(version_of(new), version_of(old))) == [(0, "added", 16, 16)]


def test_names_are_printed_paths():
    version = version_of(State(16, {3: tensor(1), 4: tensor(1)}))
    assert [d.name for d in diff_versions(version, version)] == ["True", "1"]
