"""An encrypted tier in the hands of somebody who has all but the key: nothing is told, nothing wrong is restored."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, policy, scratch, tensors
from support.secret_keys import STATE, encrypted, key_file, objects, write

import tierstate as ts
from tierstate.engine.maintain.adopt import adopt_tier
from tierstate.engine.maintain.rekey import rekey_tiers
from tierstate.manifest.errors import TierstateError, Unauthentic
from tierstate.tiers.base import layer_of
from tierstate.tiers.wrappers.encrypt import Encrypted


def saved(spec: ts.Policy, versions: int = 3) -> list[dict[str, torch.Tensor]]:
    """Save versions that share most chunks, and tag the first; what they were."""
    state, truth = tensors(*STATE), []
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(versions):
            state["a"][step] = -1.0 - step
            ckpt.save(state, step=step, metadata={"note": "a secret note"}).wait()
            truth.append({name: t.clone() for name, t in state.items()})
        ckpt.tag("first", 0)
    return truth


class Kept(NamedTuple):
    """An encrypted repository that tests copy: its place, the file with its key, what was saved, and its objects."""

    place: Path
    key: str
    truth: list[dict[str, torch.Tensor]]
    paths: list[Path]


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with scratch() as place:
        key = key_file(place / "keys")
        truth = saved(encrypted(place, key, codec="delta"))
        yield Kept(place, key, truth, [p.relative_to(place) for p in objects(place)])


@given(
    blows=st.lists(
        st.tuples(
            st.integers(0, 99),
            st.integers(0, 99),
            st.sampled_from(["flip", "cut", "grow", "swap", "delete", "tail"]),
            st.floats(0, 1, exclude_max=True),
        ),
        min_size=1,
        max_size=3,
    )
)
@pytest.mark.slow
def test_whatever_is_done_to_the_objects_no_wrong_value_is_restored(
    kept: Kept, blows: list[tuple[int, int, str, float]]
) -> None:
    truths, paths = kept.truth, kept.paths
    with scratch() as place:
        shutil.copytree(kept.place / "disk", place / "disk")
        for one, two, kind, at in blows:
            path, other = (place / paths[number % len(paths)] for number in (one, two))
            if path.exists() and other.exists() and path.stat().st_size:
                attack(path, other, kind, at)
        with ts.Checkpointer(encrypted(place, kept.key), "run") as ckpt:
            for asked in ({}, {"on_damage": "older"}, {"step": 0}, {"tag": "first"}):
                try:
                    found: Any = ckpt.load(**asked)
                except TierstateError:
                    continue
                # Without its record a version is gone, and one that was saved before it is the newest.
                right = truths[:1] if "step" in asked or "tag" in asked else truths
                assert any(alike(found, truth) for truth in right), f"{asked} gave a state that was never saved"


def attack(path: Path, other: Path, kind: str, at: float) -> None:
    """One attack on one object; ``other`` is another object, and ``at`` says where, from 0 to 1."""
    data, others = path.read_bytes(), other.read_bytes()
    spot = min(int(at * len(data)), len(data) - 1)
    changed = {
        "flip": data[:spot] + bytes([data[spot] ^ (1 << int(at * 7))]) + data[spot + 1 :],
        "cut": data[:spot],
        "grow": data + bytes(16),
        "swap": others,
        "tail": data[:-64] + others[-64:],
    }
    if kind == "delete":
        path.unlink()
    else:
        write(path, changed[kind])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "chunk"),
    [("raw", "2MiB"), ("delta", "2MiB"), *((one, "64KiB") for one in ("raw", "fast", "small", "delta", "auto"))],
)
def test_every_codec_and_operation_works_as_ever(codec: str, chunk: str, tmp_path: Path) -> None:
    """Small and big chunks, with direct I/O; reuse, tags, forks, prune, verify, rebuild."""
    key = key_file(tmp_path / "keys")
    tier = {"type": "nvme", "path": str(tmp_path / "disk"), "encrypt": {"file": key}, "codec": codec}
    spec = policy({"disk": tier}, chunk=chunk, arena={"size": "16MiB"})
    state = {"w": torch.randn(1 << 20), "m": torch.zeros(1 << 19), "n": torch.ones(3)}
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(3):
            state["w"][:1000] += 1.0
            ckpt.save(state, step=step).wait()
        stored = ckpt.stats().tiers["disk"].stored
        ckpt.fork("branch", step=1)
        ckpt.prune()
        assert ckpt.verify(deep=True).ok
    assert stored < 3 * 6 << 20, "unchanged chunks are not written again"
    for record in objects(tmp_path, "versions/run"):
        record.unlink()
    with ts.Checkpointer(spec, "run") as ckpt:
        assert ckpt.rebuild("disk").ok
        assert alike(ckpt.load(step=2), state)
    with ts.Checkpointer(spec, "branch") as ckpt:
        assert torch.equal(ckpt.load(step=1)["n"], torch.ones(3))


def test_nothing_that_is_stored_tells_what_it_is(kept: Kept) -> None:
    """No object holds a leaf's name, the metadata, a digest, or bytes of a tensor."""
    plain = policy({"disk": {"type": "nvme", "path": str(kept.place / "plain" / "disk")}})
    saved(plain, 1)
    words = [b"a secret note", b"xxh3", b"TSR\r", kept.truth[0]["a"].numpy().tobytes()[100:132]]
    shown = b"".join(path.read_bytes() for path in objects(kept.place / "plain"))
    hidden = b"".join((kept.place / path).read_bytes() for path in kept.paths)
    assert [word for word in words if word in shown] == words, "the test would notice"
    assert not [word for word in words if word in hidden]
    with ts.Checkpointer(encrypted(kept.place, kept.key), "run") as ckpt:
        assert (
            layer_of(ckpt._tier_runs[0].tier, Encrypted) is not None
        )  # so it is shown nowhere else, such as in the ranks' store


def test_equal_states_are_stored_differently(tmp_path: Path) -> None:
    spec = encrypted(tmp_path, key_file(tmp_path / "keys"))
    for run in ("one", "two"):
        with ts.Checkpointer(spec, run) as ckpt:
            ckpt.save({"w": torch.arange(50_000)}, step=1).wait()
    one, two = (objects(tmp_path, f"packs/{run}")[0].read_bytes() for run in ("one", "two"))
    pieces = {data[at : at + 16] for data in (one, two) for at in range(0, 65536, 16)}
    assert len(pieces) == 2 * 65536 / 16


def test_the_wrong_key_names_the_right_one(kept: Kept, tmp_path: Path) -> None:
    shutil.copytree(kept.place / "disk", tmp_path / "disk")
    wrong = key_file(tmp_path / "keys")
    spec = encrypted(tmp_path, wrong)
    for asked in ({}, {"step": 0}, {"on_damage": "older"}):
        with ts.Checkpointer(spec, "run") as ckpt, pytest.raises(ts.Unsafe, match=r"is encrypted for key [0-9a-f]{16}"):
            ckpt.load(**asked)
    before = objects(tmp_path)
    with ts.Checkpointer(spec, "run") as ckpt:
        save = ckpt.save(tensors(*STATE), step=9)
        with pytest.raises(ts.Unsafe, match="is encrypted for key"):
            save.wait()
    assert objects(tmp_path) == before
    with pytest.raises(ts.Unsafe, match="is encrypted for key"):
        adopt_tier(spec, "disk")
    assert objects(tmp_path) == before
    secret = Path(wrong).read_text().strip()
    assert secret not in repr(spec) + spec.dump()


def test_without_a_key_nothing_is_read_and_nothing_is_taken_for_ours(kept: Kept, tmp_path: Path) -> None:
    shutil.copytree(kept.place / "disk", tmp_path / "disk")
    plain = policy({"disk": {"type": "nvme", "path": str(tmp_path / "disk")}})
    with (
        ts.Checkpointer(plain, "run") as ckpt,
        pytest.raises(ts.Damaged, match=r"record is encrypted; give the tier its key .*encrypt: \{file"),
    ):
        ckpt.load()


@pytest.mark.parametrize("sealed", [False, True])
def test_nothing_is_written_in_plain_to_an_encrypted_tier(kept: Kept, tmp_path: Path, sealed: bool) -> None:
    """A policy that lacks `encrypt`, by a slip, is told so; `adopt` does not make it a tier of plain objects either."""
    shutil.copytree(kept.place / "disk", tmp_path / "disk")
    seal = {"seal": {"file": key_file(tmp_path / "keys")}} if sealed else {}
    plain = policy({"disk": {"type": "nvme", "path": str(tmp_path / "disk")}}, **seal)
    before = {path: path.read_bytes() for path in (tmp_path / "disk").rglob("*") if path.is_file()}
    with ts.Checkpointer(plain, "new") as ckpt:
        save = ckpt.save(tensors(*STATE), step=9)
        with pytest.raises(ts.AccessDenied, match="the policy has no `encrypt` for it"):
            save.wait()
    with pytest.raises(ts.AccessDenied, match="is encrypted"):
        adopt_tier(plain, "disk")
    assert {path: path.read_bytes() for path in (tmp_path / "disk").rglob("*") if path.is_file()} == before


def test_what_was_stored_plain_is_refused_by_an_encrypted_tier(tmp_path: Path) -> None:
    plain = policy({"disk": {"type": "nvme", "path": str(tmp_path / "disk")}})
    with ts.Checkpointer(plain, "run") as ckpt:
        ckpt.save(tensors(*STATE), step=1).wait()
    key = key_file(tmp_path / "keys")
    with ts.Checkpointer(encrypted(tmp_path, key), "run") as ckpt, pytest.raises(ts.Unsafe, match="is not encrypted"):
        ckpt.load()


def test_a_key_made_of_the_seal_encrypts_too(tmp_path: Path) -> None:
    key = key_file(tmp_path / "keys")
    truth = saved(encrypted(tmp_path, seal=key))
    with ts.Checkpointer(encrypted(tmp_path, seal=key), "run") as ckpt:
        assert alike(ckpt.load(), truth[-1])
    with ts.Checkpointer(encrypted(tmp_path, key), "run") as ckpt, pytest.raises(ts.Unsafe, match="encrypted for key"):
        ckpt.load()  # the key of the tier is derived: it is not that of the seal itself


def test_a_copy_to_another_tier_is_encrypted_for_that_one(tmp_path: Path) -> None:
    """The cascade from a plain tier to an encrypted one, and a restore from either alone."""
    keys = [key_file(tmp_path / "keys", name) for name in ("one", "two")]
    tiers = {
        "near": {"type": "nvme", "path": str(tmp_path / "near")},
        "far": {"type": "nvme", "path": str(tmp_path / "far"), "encrypt": {"file": keys[0]}},
        "away": {"type": "nvme", "path": str(tmp_path / "away"), "encrypt": {"file": keys[1]}, "codec": "small"},
    }
    state = tensors(*STATE)
    with ts.Checkpointer(policy(tiers), "run") as ckpt:
        save = ckpt.save(state, step=1)
        for name in tiers:
            save.wait(name)
    for name, tier in tiers.items():
        with ts.Checkpointer(policy({name: tier}), "run") as ckpt:
            assert alike(ckpt.load(), state)
    pack = objects_of(tmp_path / "far", "packs")[0]
    data = bytearray(pack.read_bytes())
    data[0] ^= 1
    write(pack, bytes(data))
    with ts.Checkpointer(policy({"far": tiers["far"], "near": tiers["near"]}), "run") as ckpt:
        assert alike(ckpt.load(), state), "what is damaged in one tier is read from the next"
    with ts.Checkpointer(policy({"far": tiers["far"]}), "run") as ckpt:
        assert alike(ckpt.load(), state), "and was repaired, encrypted, in the first"


def objects_of(place: Path, prefix: str) -> list[Path]:
    return sorted(p for p in (place / prefix).rglob("*") if p.is_file())


def test_the_key_of_a_tier_is_replaced(kept: Kept, tmp_path: Path) -> None:
    shutil.copytree(kept.place / "disk", tmp_path / "disk")
    new = key_file(tmp_path / "keys")
    packs = {path: path.read_bytes() for path in objects(tmp_path, "packs")}
    (done,) = rekey_tiers(encrypted(tmp_path, new, kept.key))
    assert (done.tier, done.data_keys) == ("disk", 2)
    assert {path: path.read_bytes() for path in objects(tmp_path, "packs")} == packs
    with ts.Checkpointer(encrypted(tmp_path, new), "run") as ckpt:
        assert alike(ckpt.load(), kept.truth[-1])
        ckpt.save(tensors(*STATE), step=9).wait()
        assert ckpt.verify(deep=True).ok
    with ts.Checkpointer(encrypted(tmp_path, kept.key), "run") as ckpt, pytest.raises(ts.Unsafe, match=done.key):
        ckpt.load()
    with pytest.raises(ts.NotFound, match="neither sealed nor encrypted"):
        rekey_tiers(policy({"disk": {"type": "nvme", "path": str(tmp_path / "disk")}}), ["disk"])


def test_a_record_of_another_number_or_run_is_refused(kept: Kept, tmp_path: Path) -> None:
    shutil.copytree(kept.place / "disk", tmp_path / "disk")
    first, *_, newest = objects(tmp_path, "versions")
    write(newest, first.read_bytes())
    other = tmp_path / "disk" / "versions" / "other" / first.name
    write(other, first.read_bytes())
    for run in ("run", "other"):
        with (
            ts.Checkpointer(encrypted(tmp_path, kept.key), run) as ckpt,
            pytest.raises(Unauthentic, match="moved here"),
        ):
            ckpt.load()
