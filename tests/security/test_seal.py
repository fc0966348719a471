"""Somebody who can write to a sealed tier, and knows all but the key: a wrong value is never restored."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, policy, scratch, tensors
from support.secret_keys import STATE, key_file, objects, sealed, write

import tierstate as ts
from tierstate.engine.maintain.adopt import adopt_tier
from tierstate.manifest.arrays import digest_array
from tierstate.manifest.digest import checksum, digest_function
from tierstate.manifest.errors import TierstateError, Unauthentic
from tierstate.manifest.format.layout import holds_chunks
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.log import Log
from tierstate.manifest.seal import SEAL_BYTES, SealKey, seal, unseal
from tierstate.tiers.posix.directory import Nvme

STRANGER = SealKey.of(b"a key that nobody trusts, of 32 bytes or more")
VERSIONS = 3


def saved(spec: ts.Policy, run: str = "run", versions: int = VERSIONS) -> list[dict[str, torch.Tensor]]:
    """Save versions that share most chunks, and tag the first; what they were."""
    state, truth = tensors(*STATE), []
    with ts.Checkpointer(spec, run) as ckpt:
        for step in range(versions):
            state["a"][step] = -1.0 - step
            ckpt.save(state, step=step).wait()
            truth.append({name: t.clone() for name, t in state.items()})
        ckpt.tag("first", 0)
    return truth


def opened(path: Path) -> bytes:
    """The bytes of a sealed object, which anybody can read."""
    return path.read_bytes()[SEAL_BYTES:]


def forged(record: bytes) -> bytes:
    """A record by somebody who knows the format: other digests, all checksums right."""
    try:
        found = Record.decode(memoryview(record))
    except ts.FormatError:
        return record  # another blow has hit it
    digests = found.version.digests.copy()
    digests[0] = digest_array([digest_function(found.version.head.digest)(memoryview(b"other bytes"))])[0]
    version = found.version.again(dataclasses.replace(found.version.head, metadata={"forged": 1}), digests)
    return Record(version, found.layout, found.commit).encode()


class Kept(NamedTuple):
    """A sealed repository that tests copy: its place, the file with its key, what was saved, and its objects."""

    place: Path
    key: str
    truth: list[dict[str, torch.Tensor]]
    paths: list[Path]


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with scratch() as place:
        key = key_file(place / "keys")
        truth = saved(sealed(place, key))
        yield Kept(place, key, truth, [p.relative_to(place) for p in objects(place)])


def attack(path: Path, other: Path, kind: str, at: float) -> None:
    """One attack on one object; ``other`` is another object, and ``at`` says where, from 0 to 1."""
    data = path.read_bytes()
    head, inner = data[:SEAL_BYTES], data[SEAL_BYTES:]
    spot = min(int(at * len(data)), len(data) - 1)
    body = bytearray(inner[:-16])
    body[min(int(at * len(body)), len(body) - 1)] ^= 1
    changed = {
        "flip": lambda: data[:spot] + bytes([data[spot] ^ (1 << int(at * 7))]) + data[spot + 1 :],
        "cut": lambda: data[:spot],
        "grow": lambda: data + b"\0" * 16,
        "swap": other.read_bytes,
        "bare": lambda: inner,
        "stranger": lambda: seal(STRANGER, "/".join(path.parts[-3:]), inner),
        "repaired": lambda: head + bytes(body) + checksum(bytes(body)),
        "forged": lambda: head + (forged(inner) if path.parts[-3] == "versions" else inner[:-1]),
    }
    write(path, changed[kind]())


@given(
    blows=st.lists(
        st.tuples(
            st.integers(0, 99),
            st.integers(0, 99),
            st.sampled_from(["flip", "cut", "grow", "swap", "bare", "stranger", "repaired", "forged"]),
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
            if path.stat().st_size > SEAL_BYTES + 16:
                attack(path, other, kind, at)
        with ts.Checkpointer(sealed(place, kept.key), "run") as ckpt:
            for asked, right in [({}, truths[-1:]), ({"on_damage": "older"}, truths), ({"tag": "first"}, truths[:1])]:
                try:
                    found: Any = ckpt.load(**asked)
                except TierstateError:
                    continue
                assert any(alike(found, truth) for truth in right), f"{asked} gave a state that was never saved"


def test_every_object_but_packs_is_sealed(kept: Kept) -> None:
    kinds = set()
    for path in kept.paths:
        key = path.relative_to("disk").as_posix()
        kinds.add(key.split("/")[0])
        if not holds_chunks(key):
            secret = bytes.fromhex(Path(kept.key).read_text())
            unseal([SealKey.of(secret)], key, memoryview((kept.place / path).read_bytes()), key)
    assert {"versions", "tags", "packs", "tier.json"} <= kinds


@pytest.fixture
def world(tmp_path: Path) -> tuple[ts.Policy, list[dict[str, torch.Tensor]]]:
    spec = sealed(tmp_path, key_file(tmp_path / "keys"))
    return spec, saved(spec)


def refused(spec: ts.Policy, match: str, run: str = "run", **asked: Any) -> None:
    with ts.Checkpointer(spec, run) as ckpt, pytest.raises(ts.Unsafe, match=match):
        ckpt.load(**asked)


@pytest.mark.parametrize("how", ["bare", "stranger", "forged"])
def test_a_record_that_is_not_authentic_is_unsafe(how: str, world: Any, tmp_path: Path) -> None:
    newest = objects(tmp_path, "versions")[-1]
    attack(newest, newest, how, 0.5)
    refused(world[0], {"bare": "is not sealed", "stranger": "sealed with key", "forged": "changed, or moved"}[how])
    with ts.Checkpointer(world[0], "run") as ckpt:
        assert alike(ckpt.load(on_damage="older"), world[1][-2])
        assert alike(ckpt.load(step=1), world[1][1])
        assert not ckpt.verify().ok


def test_a_record_is_bound_to_its_number_and_its_run(world: Any, tmp_path: Path) -> None:
    spec, _ = world
    first, *_, newest = objects(tmp_path, "versions")
    write(newest, first.read_bytes())
    refused(spec, "changed, or moved")
    other = tmp_path / "disk" / "versions" / "other" / first.name
    write(other, first.read_bytes())
    refused(spec, "changed, or moved", run="other")
    above = newest.with_name(f"{int(newest.name) + 1:012d}")
    write(above, first.read_bytes())
    refused(spec, "changed, or moved")


def test_a_record_is_bound_to_its_tier(tmp_path: Path) -> None:
    key = key_file(tmp_path / "keys")
    tiers = {name: {"type": "nvme", "path": str(tmp_path / name)} for name in ("disk", "far")}
    spec = policy(tiers, seal={"file": key})
    truth = saved(spec)
    record = objects(tmp_path, "versions")[-1]
    twin = tmp_path / "far" / record.relative_to(tmp_path / "disk")
    write(twin, record.read_bytes())
    only_far = policy({"far": tiers["far"]}, seal={"file": key})
    refused(only_far, r"was written to tier \w+, and this is tier")
    with ts.Checkpointer(spec, "run") as ckpt:
        assert alike(ckpt.load(), truth[-1]), "the tier whose record is its own still has it"


def test_a_marker_that_is_not_authentic_makes_no_record_authentic(world: Any, tmp_path: Path) -> None:
    marker = tmp_path / "disk" / "tier.json"
    write(marker, opened(marker))
    refused(world[0], "its marker is damaged")
    with ts.Checkpointer(world[0], "run") as ckpt, pytest.raises(ts.Unsafe, match="tierstate adopt disk"):
        ckpt.save(tensors(*STATE), step=9).wait()
    adopt_tier(world[0], "disk")
    with ts.Checkpointer(world[0], "run") as ckpt:
        assert alike(ckpt.load(), world[1][-1])
        ckpt.save(tensors(*STATE), step=9).wait()
        assert alike(ckpt.load(), tensors(*STATE))


@pytest.mark.parametrize("encrypt", [False, True])
def test_doctor_repairs_what_is_authentic(encrypt: bool, tmp_path: Path) -> None:
    key = key_file(tmp_path / "keys")
    more = {"encrypt": True} if encrypt else {}
    tiers = {name: {"type": "nvme", "path": str(tmp_path / name), **more} for name in ("disk", "far")}
    spec = policy(tiers, seal={"file": key})
    truth = saved(spec)
    for number, record in enumerate(objects(tmp_path, "versions")):
        attack(record, record, ["flip", "cut", "bare"][number % 3], 0.4)
    pack = objects(tmp_path, "packs")[0]
    attack(pack, pack, "flip", 0.2)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert alike(ckpt.load(), truth[-1])
        assert not ckpt.doctor().ok
        ckpt.doctor(apply=True)
        report = ckpt.doctor()
        assert report.ok, report
    with ts.Checkpointer(policy({"disk": tiers["disk"]}, seal={"file": key}), "run") as ckpt:
        for step, state in enumerate(truth):
            assert alike(ckpt.load(step=step), state)


def test_a_tag_cannot_be_pointed_elsewhere(world: Any, tmp_path: Path) -> None:
    tag = objects(tmp_path, "tags")[-1]
    name, _, number = tag.name.partition("@")
    write(tag.with_name(f"{name}@{int(number) + 1}"), tag.read_bytes())
    with ts.Checkpointer(world[0], "run") as ckpt, pytest.raises(ts.TierstateError, match="changed, or moved"):
        ckpt.load(tag=name)


def test_a_newest_version_that_is_gone_is_noticed_by_who_has_saved_it(tmp_path: Path) -> None:
    spec = sealed(tmp_path, key_file(tmp_path / "keys"))
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(2):
            ckpt.save(tensors(*STATE), step=step).wait()
        newest = objects(tmp_path, "versions")[-1]
        before = newest.read_bytes()
        newest.unlink()
        with pytest.raises(ts.Unsafe, match="an older state of the tier was put back"):
            ckpt.load()
        with pytest.raises(ts.Unsafe, match="an older state of the tier was put back"):
            ckpt.restore(into=tensors(*STATE))
        assert ckpt.load(step=0)
        mark = tmp_path / "disk" / "removed" / "run" / f"{newest.name}-0"
        write(mark, b"{}")
        with pytest.raises(ts.Unsafe, match="is not sealed"):
            ckpt.load()
        mark.unlink()
        write(newest, before)
        ckpt.remove(step=1, force=True)
        assert ckpt.load(), "removed by its owner"


class Opened:
    """A pickle that tells when it is opened."""

    ran = False

    def __reduce__(self) -> Any:
        return _open, ()


def _open() -> str:
    Opened.ran = True
    return "opened"


def test_no_pickle_of_a_record_that_is_not_authentic_is_opened(tmp_path: Path) -> None:
    """The run of an attacker, whole in itself, in the place of ours; the policy of the victim allows pickles."""
    key = key_file(tmp_path / "keys")
    tier = {"disk": {"type": "nvme", "path": str(tmp_path / "disk")}}
    rules = [{"match": "**", "pickle": True}]
    with ts.Checkpointer(policy(tier, rules=rules), "run") as ckpt:
        ckpt.save({"x": Opened()}, step=1).wait()
    assert pickle.loads(pickle.dumps(Opened())) == "opened"
    Opened.ran = False
    spec = policy(tier, rules=rules, seal={"file": key})
    for asked in ({}, {"step": 1}, {"on_damage": "older"}):
        refused(spec, "is not sealed", **asked)
    stranger = policy(tier, rules=rules, seal={"file": key_file(tmp_path / "keys", "stranger")})
    shutil.rmtree(tmp_path / "disk")
    with ts.Checkpointer(stranger, "run") as ckpt:
        ckpt.save({"x": Opened()}, step=1).wait()
    refused(spec, "sealed with key")
    assert not Opened.ran
    with ts.Checkpointer(stranger, "run") as ckpt:
        assert ckpt.load() == {"x": "opened"}
    assert Opened.ran, "the test would notice"


def test_digests_that_can_be_forged_are_not_sealed(tmp_path: Path) -> None:
    """A sealed record over digests of xxh3 would let anybody change chunks."""
    key = key_file(tmp_path / "keys")
    with ts.Checkpointer(policy({"disk": {"type": "nvme", "path": str(tmp_path / "disk")}}), "run") as ckpt:
        ckpt.save(tensors(*STATE), step=1).wait()
    secret = SealKey.of(bytes.fromhex(Path(key).read_text()))
    for path in objects(tmp_path):
        name = path.relative_to(tmp_path / "disk").as_posix()
        if not holds_chunks(name):
            write(path, seal(secret, name, path.read_bytes()))
    refused(sealed(tmp_path, key), "digests of xxh3-128, which can be forged")


def test_keys_are_changed_by_a_list(tmp_path: Path) -> None:
    old, new = (key_file(tmp_path / "keys", name) for name in ("old", "new"))
    before = saved(sealed(tmp_path, old), versions=1)
    both = sealed(tmp_path, new, old)
    with ts.Checkpointer(both, "run") as ckpt:
        assert alike(ckpt.load(), before[-1])
        ckpt.save(tensors(*STATE), step=9).wait()
    refused(sealed(tmp_path, old), "sealed with key")
    with ts.Checkpointer(sealed(tmp_path, new), "run") as ckpt, pytest.raises(ts.Unsafe, match="sealed with key"):
        ckpt.load(step=0)
    with ts.Checkpointer(both, "run") as ckpt:
        assert alike(ckpt.load(step=0), before[-1])


def test_an_old_key_can_be_taken_off_when_all_is_sealed_anew(tmp_path: Path) -> None:
    """By the steps of docs/how-to/seal-and-encrypt.md."""
    old, new = (key_file(tmp_path / "keys", name) for name in ("old", "new"))
    few: Any = {"keep": {"last": 2}}
    first, both, last = (sealed(tmp_path, *keys, **few) for keys in ([old], [new, old], [new]))
    saved(first, versions=1)  # with a tag
    with ts.Checkpointer(both, "run") as ckpt:
        ckpt.untag("first")
        for step in (7, 8):
            ckpt.save(tensors(*STATE), step=step).wait()
        ckpt.prune()
    refused(last, r"tier\.json: is sealed with key [0-9a-f]{16}; trusted are")
    adopt_tier(both, "disk")
    with ts.Checkpointer(last, "run") as ckpt:
        assert ckpt.verify(deep=True).ok
        assert alike(ckpt.load(), tensors(*STATE))
        ckpt.save(tensors(*STATE), step=9).wait()
        assert ckpt.prune().ok
        assert [version.step for version in ckpt.versions()] == [8, 9]


def test_nothing_is_saved_without_a_seal_where_all_is_sealed(tmp_path: Path) -> None:
    """By a policy that lacks `seal`, by a slip: jobs with the key would refuse it."""
    key = key_file(tmp_path / "keys")
    saved(sealed(tmp_path, key), versions=1)
    plain = policy({"disk": {"type": "nvme", "path": str(tmp_path / "disk")}})
    before = objects(tmp_path)
    with ts.Checkpointer(plain, "other") as ckpt, pytest.raises(ts.AccessDenied, match="the policy has no `seal`"):
        ckpt.save(tensors(*STATE), step=1).wait()
    assert objects(tmp_path) == before
    adopt_tier(plain, "disk")
    with ts.Checkpointer(plain, "other") as ckpt:
        ckpt.save(tensors(*STATE), step=1).wait()
        assert alike(ckpt.load(), tensors(*STATE))


def test_chunks_in_packs_from_before_a_key_was_replaced_are_whole(tmp_path: Path) -> None:
    """The old pack's copy of its version has the old key's seal; what does not change lies in that pack for long."""
    old, new = (key_file(tmp_path / "keys", name) for name in ("old", "new"))
    first, both, last = (sealed(tmp_path, *keys, keep={"last": 1}) for keys in ([old], [new, old], [new]))
    state = tensors(*STATE)
    for step, spec in enumerate((first, both)):
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save({**state, "step": torch.tensor(step)}, step=step).wait()
            ckpt.prune()
    adopt_tier(both, "disk")
    with ts.Checkpointer(last, "run") as ckpt:
        assert len([key for key in ckpt.rebuild("disk").unread.values() if "sealed with key" in key]) == 1
        found = ckpt.doctor()
        assert [(version.state, version.tiers) for version in found.versions] == [("whole", {"disk": "whole"})]
        assert found.repairs == []
        assert alike(ckpt.load(), {**state, "step": torch.tensor(1)})


def test_records_are_rebuilt_from_sealed_copies_only(world: Any, tmp_path: Path) -> None:
    """The copy of a version in a pack, from which a lost record is made, is sealed too."""
    spec, truth = world
    records, packs = objects(tmp_path, "versions"), objects(tmp_path, "packs")
    for record in records:
        record.unlink()
    with ts.Checkpointer(spec, "run") as ckpt:
        report = ckpt.rebuild("disk")
        assert [one.rebuilt for one in report.versions] == [True] * VERSIONS, report
        assert alike(ckpt.load(), truth[-1])
    for record in objects(tmp_path, "versions"):
        record.unlink()
    _replace_copy(packs[-1])
    with ts.Checkpointer(spec, "run") as ckpt:
        report = ckpt.rebuild("disk")
        assert len([one for one in report.versions if one.rebuilt]) == VERSIONS - 1
        assert "changed, or moved" in str(report.unread)


def _replace_copy(pack: Path) -> None:
    """Put another version of equal length in a pack's copy, with the checksum in the footer."""
    data = pack.read_bytes()
    at = data.index(b"\x89TSS")
    body = at + SEAL_BYTES
    length = int.from_bytes(data[-28:-24], "little")
    table = len(data) - 28 - length
    version = Version.decode(memoryview(data[body:table]))
    other = bytearray(version.data)
    spot = other.index(version.digests[0].tobytes())
    other[spot] ^= 1
    Version.decode(memoryview(bytes(other)))
    changed = data[at:body] + bytes(other)
    footer = data[table:-28].replace(checksum(data[at:table]).hex().encode(), checksum(changed).hex().encode())
    assert footer != data[table:-28]
    write(pack, data[:at] + changed + footer + data[-28:-24] + checksum(footer) + data[-8:])


def test_what_was_saved_before_is_taken_over_by_a_copy(tmp_path: Path) -> None:
    plain = policy({"disk": {"type": "nvme", "path": str(tmp_path / "plain")}})
    state = tensors(*STATE)
    with ts.Checkpointer(plain, "run") as ckpt:
        ckpt.save(state, step=1).wait()
        there = sealed(tmp_path, key_file(tmp_path / "keys"))
        ckpt.copy(step=1, into=there)
    with ts.Checkpointer(there, "run") as ckpt:
        assert alike(ckpt.load(), state)
        assert ckpt.verify(deep=True).ok


def test_a_seal_is_for_one_name_only() -> None:
    key = SealKey.of(bytes(range(32)))
    sealed_bytes = seal(key, "ab", b"c")
    assert bytes(unseal([key], "ab", memoryview(sealed_bytes), "here")) == b"c"
    for name, data in [("a", b"bc"), ("abc", b""), ("ab", b"cc")]:
        moved = sealed_bytes[:SEAL_BYTES] + data
        with pytest.raises(Unauthentic):
            unseal([key], name, memoryview(moved), "here")


def test_no_forged_lease_and_no_forged_index_ends_a_prune(world: Any, tmp_path: Path) -> None:
    """What cannot be read keeps what it may be about; the operations go on."""
    for name in ("000000000001-read-abc", "000000000002-fork-x@1"):
        write(tmp_path / "disk" / "leases" / "run" / name, b"{}")
    for path in objects(tmp_path, "index"):
        write(path, opened(path))
    with ts.Checkpointer(world[0], "run") as ckpt:
        ckpt.prune()
        assert alike(ckpt.load(), world[1][-1])
        assert [info.step for info in ckpt.versions()] == [0, 1, 2]


def test_without_a_key_it_is_said_which_one_is_needed(kept: Kept) -> None:
    with pytest.raises(ts.FormatError, match=r"is sealed with key [0-9a-f]{16}"):
        Log(Nvme(path=str(kept.place / "disk")), "run").latest()
