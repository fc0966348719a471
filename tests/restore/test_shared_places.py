"""Two tiers in one place are refused, however the place is named, and two places are taken for two."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import opened, policy, scratch, tensors
from support.single_steps import resumed, save

import tierstate as ts
from tierstate.engine.maintain.adopt import adopt_tier, init_tiers
from tierstate.manifest.format.marker import MARKER_KEY
from tierstate.tiers.posix.directory import Nvme

S3 = {"key": "k", "secret": "s"}


def _same(base: Path) -> str:
    return str(base)


def _slashes(base: Path) -> str:
    return f"{base.parent}//{base.name}/"


def _dots(base: Path) -> str:
    return f"{base}/sub/../../{base.name}/."


def _link(base: Path) -> str:
    (base.parent / "link").symlink_to(base)
    return str(base.parent / "link")


def _linked_parent(base: Path) -> str:
    (base.parent / "up").symlink_to(base.parent)
    return str(base.parent / "up" / base.name)


def _nested(base: Path) -> str:
    return str(base / "packs" / "run")


def _around(base: Path) -> str:
    return str(base.parent)


ALIASES: list[Callable[[Path], str]] = [_same, _slashes, _dots, _link, _linked_parent, _nested, _around]


KINDS = ("nvme", "lustre", "file")


def keys(kind: str, path: str) -> dict[str, Any]:
    return {"type": "object", "url": f"file://{path}"} if kind == "file" else {"type": kind, "path": path}


@given(st.sampled_from(ALIASES), st.sampled_from(KINDS), st.sampled_from(KINDS), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_two_tiers_in_one_place_are_refused_and_nothing_is_lost(alias, kind, other, swapped, saved):
    with scratch() as place:
        base = place / "in" / "base"
        base.parent.mkdir()
        alone = policy({"one": keys(kind, str(base))})
        if saved:
            save(alone, 1)
        before = sorted(place.rglob("*"))
        path = alias(base)
        assume(not (other == "file" and path.endswith("/.")))
        links = {p for p in place.rglob("*") if p.is_symlink()}
        tiers = {"one": keys(kind, str(base)), "two": keys(other, path)}
        both = policy(dict(reversed(tiers.items())) if swapped else tiers)
        with ts.Checkpointer(both, "run") as ckpt:
            with pytest.raises(ts.PolicyError, match="one place"):
                ckpt.save(tensors(9000, seed=2), step=2)
            with pytest.raises(ts.PolicyError, match="one place"):
                ckpt.prune(grace=0)
            with pytest.raises(ts.PolicyError, match="one place"):
                ckpt.resume(into=tensors(9000))
        for call in (init_tiers, lambda p: adopt_tier(p, "two")):
            with pytest.raises(ts.PolicyError, match="one place"):
                call(both)
        assert sorted({*place.rglob("*")} - links) == before
        if saved:
            assert resumed(alone) == 1


@given(
    st.sampled_from([("a", "ab"), ("a", "b"), ("x/a", "x/b"), ("a b", "a")]),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
)
@settings(max_examples=10)
def test_two_places_are_taken_for_two(names, kind, other):
    with scratch() as place:
        both = policy({n: keys(k, str(place / p)) for n, k, p in zip("xy", (kind, other), names, strict=True)})
        with ts.Checkpointer(both, "run") as ckpt:
            made = ckpt.save(tensors(9000, seed=1), step=1)
            made.wait("x")
            made.wait("y")


@pytest.mark.root
@pytest.mark.parametrize("inner", ["", "sub", "up"])
def test_bind_mounts_are_seen_through(tmp_path, inner):
    base, bound = tmp_path / "base", tmp_path / "bound"
    (base / "sub").mkdir(parents=True)
    bound.mkdir()
    source, path = (base / "sub", base) if inner == "sub" else (base, base / "sub" if inner == "up" else base)
    done = subprocess.run(["mount", "--bind", source, bound], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no bind mounts here")
    try:
        both = policy({"one": keys("nvme", str(path)), "two": keys("nvme", str(bound))})
        with ts.Checkpointer(both, "run") as ckpt, pytest.raises(ts.PolicyError, match="one place"):
            ckpt.save(tensors(9000), step=1)
    finally:
        subprocess.run(["umount", bound], check=True)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("s3://b/p", "s3://b/p/", True),
        ("s3://b/p", "s3a://b/p", True),
        ("s3://b/p", "s3://b/p/q", True),
        ("s3://b", "s3://b/p", True),
        ("s3://b/p", "s3://b/pq", False),
        ("s3://b/p", "s3://c/p", False),
        ("memory://b/p", "memory://b/p/q", True),
        ("memory://b/p", "memory://b/q", False),
    ],
)
def test_buckets_and_prefixes(one, other, same):
    def tier(url: str) -> dict[str, Any]:
        options = {"options": {**S3, "endpoint_url": "http://127.0.0.1:1"}} if url.startswith("s3") else {}
        return {"type": "object", "url": url, **options}

    from tierstate.tiers.places import check_places

    spec = policy({"one": tier(one), "two": tier(other), "disk": {"type": "nvme", "path": "/nowhere/ckpt"}})
    opened_tiers = [opened(spec, name) for name in ("one", "two")]
    try:
        if same:
            with pytest.raises(ts.PolicyError, match="one place"):
                check_places(opened_tiers)
        else:
            check_places(opened_tiers)
    finally:
        for tier_ in opened_tiers:
            tier_.close()


class Unplaced(Nvme):
    """A tier that does not know where it lies, as a bucket that has two endpoints."""

    def __init__(self, *, path: Path) -> None:
        super().__init__(path=path)

    def place(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("saved", [False, True])
def test_a_place_that_no_path_shows_is_found_by_the_marker(place, saved):
    ts.register_tier("unplaced", Unplaced)
    keys = {"type": "unplaced", "path": str(place / "ckpt")}
    if saved:
        save(policy({"one": keys}), 1)
    before = {p for p in place.rglob("*") if p.name != MARKER_KEY and p.is_file()}
    with ts.Checkpointer(policy({"one": keys, "two": keys}), "run") as ckpt:
        made = ckpt.save(tensors(9000, seed=2), step=2)
        for name in made.tiers:
            with pytest.raises(ts.TierstateError, match="marker"):
                made.wait(name)
    assert {p for p in place.rglob("*") if p.name != MARKER_KEY and p.is_file()} == before
    assert resumed(policy({"one": keys})) == (1 if saved else None)
