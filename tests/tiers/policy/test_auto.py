"""Policies made for a machine: each is valid, fits the memory, keeps nothing in tmpfs, and holds no secret."""

from __future__ import annotations

import logging
import string
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machines import GIB, Machine

import tierstate as ts
from tierstate.manifest.errors import PolicyError
from tierstate.tiers.memory.limits import MemoryLimits
from tierstate.tiers.policy.auto import choose_places, policy_text, policy_warnings
from tierstate.tiers.policy.machine import FolderFacts, MachineFacts, Medium, PlaceFacts, look_at_machine
from tierstate.tiers.policy.yaml import escape_variables

MUCH = MemoryLimits(None, None, None, None, 256 * GIB)
JOB = {"SLURM_TMPDIR": "/local/job.17"}


def on(medium: Medium, path: str = "/data/ckpt", **facts: Any) -> PlaceFacts:
    return PlaceFacts(folder=FolderFacts(path, facts.pop("kind", "ext4"), medium, **facts))


def text_of(*places: PlaceFacts, **facts: Any) -> str:
    return policy_text(choose_places(MachineFacts(places, **{"limits": MUCH, **facts})))


def parse(text: str, **environ: str) -> ts.Policy:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        return ts.Policy.parse(text)


# What is chosen


def test_places_become_tiers_in_the_order_of_their_speed() -> None:
    lustre = on("shared", "/lus/ckpt", kind="lustre")
    policy = parse(text_of(PlaceFacts("s3://bucket/x"), lustre, on("disk", "/slow"), on("ssd", "/fast")))
    assert [(t.name, t.type) for t in policy.tiers] == [
        ("host", "host"),
        ("nvme", "nvme"),
        ("disk", "nvme"),
        ("lustre", "lustre"),
        ("s3", "object"),
    ]
    assert [t.every for t in policy.tiers] == [None, None, *(timedelta(minutes=n) for n in (5, 15, 30))]
    assert [t.keep.last for t in policy.tiers] == [1, 3, 5, 5, 5]
    assert policy.durable == "nvme"


def test_what_wait_waits_for_takes_every_save_and_outlives_the_job() -> None:
    scratch = on("ssd", "${SLURM_TMPDIR}/x", job="SLURM_TMPDIR")
    text = text_of(scratch, on("shared", "/nfs/ckpt", kind="nfs4"), PlaceFacts("s3://bucket/x"))
    policy = parse(text, **JOB)
    assert policy.durable == "nfs4"
    assert [(t.name, t.every) for t in policy.tiers][1:3] == [("nvme", None), ("nfs4", None)]
    assert "WARNING: what is here goes when the job ends" in text
    assert policy.tiers[1].options["path"] == Path("/local/job.17/x")


def test_places_of_one_kind_have_numbers_and_the_order_in_which_they_were_given() -> None:
    policy = parse(text_of(on("ssd", "/b"), on("ssd", "/a"), PlaceFacts("s3://one/x"), PlaceFacts("s3://two/x")))
    assert [t.name for t in policy.tiers] == ["host", "nvme", "nvme-2", "s3", "s3-2"]
    assert [str(t.options["path"]) for t in policy.tiers[1:3]] == ["/b", "/a"]


@pytest.mark.parametrize("kind", ["0", "9p", "1e5", "null", "true", "on", "0x10", "2026-11-26"])
def test_a_tier_named_after_a_kind_that_yaml_reads_as_something_else_is_quoted(kind: str) -> None:
    policy = parse(text_of(on("ssd", "${SLURM_TMPDIR}/x", job="SLURM_TMPDIR"), on("shared", kind=kind)), **JOB)
    assert [t.name for t in policy.tiers] == ["host", "nvme", kind]
    assert policy.durable == kind


@pytest.mark.parametrize(
    "place", [on("memory", kind="tmpfs"), replace(on("memory", kind="ramfs"), url="file:///shm/x")]
)
def test_memory_is_no_place_for_what_must_last(place: PlaceFacts) -> None:
    with pytest.raises(PolicyError, match="which is memory"):
        text_of(place)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (on("container", kind="overlay"), "with its container"),
        (on("ssd", temporary=True), "many systems empty /tmp"),
        (on("ssd", refused="this user cannot write there"), "this user cannot write there"),
    ],
)
def test_what_does_not_last_is_said_in_the_text_and_as_a_warning(place: PlaceFacts, said: str) -> None:
    facts = MachineFacts((place,), limits=MUCH)
    assert f"WARNING: {'nothing' if place.folder and place.folder.refused else 'what is here'}" in policy_text(facts)
    assert said in " ".join(policy_text(facts).replace("\n  # ", " ").split())
    assert said in " ".join(policy_warnings(facts))


def test_a_policy_with_a_place_that_lasts_has_no_warning() -> None:
    facts = MachineFacts((on("container", kind="overlay"), PlaceFacts("s3://bucket/x")), limits=MUCH)
    assert policy_warnings(facts) == []


def test_without_a_place_the_best_scratch_folder_is_used() -> None:
    scratch = (FolderFacts("/mnt/nvme0/tierstate-1", "xfs", "ssd"), FolderFacts("/scratch/tierstate-1", "ext4", "disk"))
    policy = parse(text_of(scratch=scratch))
    assert [str(t.options["path"]) for t in policy.tiers if t.type == "nvme"] == ["/mnt/nvme0/tierstate-1"]


def test_without_a_place_and_without_a_disk_the_error_says_what_to_give() -> None:
    with pytest.raises(PolicyError) as caught:
        text_of(rejected=(("/local", "on tmpfs"),), shared=(("/lus", "lustre"),))
    for said in ("'s3://bucket/ckpt'", "/local will not do (on tmpfs)", "/lus is shared (lustre)"):
        assert said in str(caught.value)


def test_the_address_of_a_store_is_named_and_never_written() -> None:
    text = text_of(PlaceFacts("s3://bucket/x"), endpoint="S3_ENDPOINT_URL")
    policy = parse(text, S3_ENDPOINT_URL="https://s3.example.org")
    assert policy.tiers[-1].options["options"] == {"endpoint_url": "https://s3.example.org"}
    assert "example.org" not in text
    assert "AWS_ENDPOINT_URL" in text_of(PlaceFacts("s3://bucket/x"), aws=("AWS_ENDPOINT_URL",))


def test_memory_is_shared_by_the_processes_of_a_host() -> None:
    one, eight = (parse(text_of(on("ssd"), processes=n)) for n in (1, 8))
    assert (one.arena.size, eight.arena.size) == (8 * GIB, 2 * GIB)
    small = MemoryLimits(1 << 20, 1 * GIB, None, None, 256 * GIB)
    text = text_of(on("ssd"), limits=small, devices=1)
    assert parse(text).arena.size == GIB // 16
    assert "host" not in [t.name for t in parse(text).tiers], "too little memory for a tier"
    assert "limit of locked memory (ulimit -l) is 1 MiB" in text


# What holds for every machine

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SIZES = st.none() | st.integers(0, 1 << 60)
FOLDERS = st.builds(
    lambda path, job, **facts: FolderFacts(f"${{{job}}}{path}" if job else path, job=job, **facts),
    WORDS.map(lambda text: "/" + escape_variables(text.replace("\0", ""))),
    st.sampled_from(["", "SLURM_TMPDIR"]),
    kind=WORDS,
    medium=st.sampled_from(get_args(Medium)),
    model=WORDS,
    size=SIZES,
    free=SIZES,
    temporary=st.booleans(),
    refused=WORDS,
)
URLS = st.sampled_from(
    ["s3://bucket/a b", "s3a://b/x", "gs://b/x", "file:///data/#x", "abfs://c@account/x", "s3://b/ä: #"]
)
PLACES = FOLDERS.map(lambda folder: PlaceFacts(folder=folder)) | st.builds(PlaceFacts, URLS, st.none() | FOLDERS)
MACHINES = st.builds(
    MachineFacts,
    places=st.lists(PLACES, max_size=5).map(tuple),
    limits=st.builds(
        MemoryLimits,
        SIZES,
        st.none() | st.integers(1 << 20, 1 << 50),
        SIZES,
        SIZES,
        st.none() | st.integers(1, 1 << 50),
    ),
    processes=st.integers(1, 64),
    devices=st.integers(0, 8),
    scheduler=WORDS,
    scratch=st.lists(FOLDERS.map(lambda folder: replace(folder, medium="ssd")), max_size=2).map(tuple),
    rejected=st.lists(st.tuples(WORDS, WORDS), max_size=2).map(tuple),
    shared=st.lists(st.tuples(WORDS, WORDS), max_size=2).map(tuple),
    aws=st.lists(st.sampled_from(["AWS_PROFILE", "AWS_REGION", "AWS_ENDPOINT_URL"]), unique=True).map(tuple),
    endpoint=st.sampled_from(["", "S3_ENDPOINT"]),
)


@given(MACHINES, st.lists(WORDS, max_size=2))
def test_the_policy_of_any_machine_is_valid_and_fits_it(facts: MachineFacts, remarks: list[str]) -> None:
    try:
        facts = choose_places(facts)
    except PolicyError:
        in_memory = any(place.folder and place.folder.medium == "memory" for place in facts.places)
        assert in_memory or not (facts.places or facts.scratch)
        return
    text = policy_text(facts)
    policy = parse(text, **JOB, S3_ENDPOINT="http://s3:9000")
    assert text == policy_text(facts)
    assert all(warning.strip() for warning in policy_warnings(facts))
    told = policy_text(facts, remarks, {tier.name: remarks for tier in policy.tiers})
    assert parse(told, **JOB, S3_ENDPOINT="http://s3:9000") == policy, "comments change nothing"

    lasting = [tier for tier in policy.tiers if tier.persistent]
    assert len(lasting) == len(facts.places)
    assert policy.tier(policy.durable).every is None
    known = [size for size in (facts.limits.container, facts.limits.total) if size]
    share = min(known, default=4 * GIB) // facts.processes
    host = sum(tier.options["capacity"] for tier in policy.tiers if tier.type == "host")
    assert policy.arena.size <= max(share // 16, 32 << 10)
    assert policy.arena.size + host <= max(share // 4, 32 << 10)
    for place in facts.places:
        assert place.folder is None or place.folder.medium != "memory"
        if place.folder and place.folder.medium == "container":
            assert "WARNING" in text
    shared = sum(1 for p in facts.places if p.folder and not p.url and p.folder.medium in ("shared", "unknown"))
    assert [tier.type for tier in policy.tiers].count("lustre") == shared, "no shared file system is taken for a disk"


SECRET_NAMES = st.sampled_from(
    ["AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "MY_API_TOKEN", "DB_PASSWORD", "AWS_ACCESS_KEY_ID"]
)
SECRETS = st.text(string.ascii_uppercase + string.digits + "+/", min_size=12, max_size=40).filter(lambda s: s[0] != "/")
PLAIN_NAMES = st.sampled_from(["TMPDIR", "SLURM_TMPDIR", "USER", "HOME", "S3_ENDPOINT", "AWS_PROFILE", "SLURM_JOB_ID"])


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(SECRET_NAMES, SECRETS, min_size=1), st.data())
def test_no_secret_of_the_environment_is_in_the_text(secrets: dict[str, str], data: st.DataObject) -> None:
    values = list(secrets.values())
    places = st.sampled_from(
        ["/data/x", "s3://bucket/x", "${HOME}/x", f"/data/{values[0]}", f"s3://bucket/{values[0]}"]
    )
    leaky = st.sampled_from([f"/scratch/{values[0]}", f"http://ada:{values[-1]}@s3", values[0], "/scratch", "plain"])
    environ = {**data.draw(st.dictionaries(PLAIN_NAMES, leaky)), **secrets}
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        machine.folder(f"/scratch/{values[0]}")
        machine.mount(f"/mnt/nvme-{values[-1]}", "ext4", "259:0")
        machine.drive("259:0", "nvme0n1", model=values[0])
        given_places = data.draw(st.lists(places, unique=True, max_size=3))
        try:
            facts = choose_places(look_at_machine(given_places, environ, machine.root, 0))
            text = policy_text(facts) + " ".join(policy_warnings(facts))
        except PolicyError as error:
            text = str(error)
    assert not any(value in text for value in values)


# Policy.auto


def test_auto_saves_and_restores(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tierstate"):
        policy = ts.Policy.auto(disk / "a", f"file://{disk}/b")
    assert caplog.text == ""
    assert policy == ts.Policy.auto(disk / "a", f"file://{disk}/b")
    assert policy == ts.Policy.parse(policy.dump())
    small = policy.model_copy(update={"arena": policy.arena.model_copy(update={"size": 64 << 20})})
    state = {"w": torch.arange(1000.0), "step": 3}
    with ts.Checkpointer(small, "auto") as ckpt:
        ckpt.save(state, step=3).wait()
    empty = {"w": torch.zeros(1000), "step": 0}
    with ts.Checkpointer(small, "auto") as ckpt:
        ckpt.restore(into=empty)
    assert torch.equal(empty["w"], state["w"])
    assert empty["step"] == 3


def test_auto_uses_the_folder_of_the_job_and_tells_that_it_does_not_last(
    disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_TMPDIR", str(disk))
    with caplog.at_level(logging.WARNING, "tierstate"):
        policy = ts.Policy.auto()
    assert policy.tier(policy.durable).options["path"] == disk / "tierstate"
    assert "${SLURM_TMPDIR}/tierstate" in policy.dump()
    assert "every place of this policy goes when the job ends" in caplog.text


def test_auto_refuses_a_url_that_is_none() -> None:
    with pytest.raises(PolicyError, match="two slashes and the bucket"):
        ts.Policy.auto("s3:/bucket/x")
