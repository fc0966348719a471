"""What is found on a machine: disks, memory, shared file systems, a job's folder, settings for S3."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.machines import GIB, Machine

from tierstate.manifest.errors import PolicyError
from tierstate.tiers.policy.machine import MachineFacts, look_at_machine
from tierstate.tiers.posix.mounts import MOUNTS


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def look(machine: Machine, *places: str, devices: int = 0, **environ: str) -> MachineFacts:
    return look_at_machine(places, environ, machine.root, devices)


def media(facts: MachineFacts) -> list[str]:
    return [place.folder.medium for place in facts.places if place.folder is not None]


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    facts = look_at_machine([str(tmp_path), "s3://bucket/ckpt"])
    folder = facts.places[0].folder
    assert folder is not None
    assert folder.written == str(tmp_path)
    assert folder.refused == ""
    assert folder.size is not None
    assert folder.free is not None
    assert 0 < folder.free <= folder.size
    assert folder.kind in Path(MOUNTS).read_text()
    assert facts.limits.total is not None
    assert facts.places[1].url == "s3://bucket/ckpt"
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_what_a_file_system_lies_on(machine: Machine) -> None:
    machine.mount("/fast", "xfs", "259:1")
    machine.drive("259:1", "nvme0n1", partition="nvme0n1p1", model="FAST 3000")
    machine.mount("/virtual", "ext4", "254:0")
    machine.drive("254:0", "vda", turning=True, bus="pci0/virtio1")
    machine.mount("/remote", "ext4", "250:0")
    machine.drive("250:0", "rbd0")
    machine.mount("/fabric", "ext4", "251:0")
    machine.drive("251:0", "nvme1n1", bus="virtual/nvme-fabrics/ctl")
    machine.mount("/image", "ext4", "7:0")
    machine.drive("7:0", "loop0")
    machine.mount("/bare", "ext4", "9:0")
    kinds = {
        "/home": "disk", "/fast/x": "ssd", "/virtual": "block device", "/remote": "network disk",
        "/fabric": "network disk", "/image": "disk image", "/bare": "block device",
    }  # fmt: skip
    others = {
        "tmpfs": "memory", "ramfs": "memory", "overlay": "container", "lustre": "shared", "nfs4": "shared",
        "ceph": "shared", "beegfs": "shared", "gpfs": "shared", "wekafs": "shared", "fuse.sshfs": "shared",
        "fuse.fuse-overlayfs": "container", "zfs": "block device", "btrfs": "block device", "strange": "unknown",
    }  # fmt: skip
    for kind, medium in others.items():
        machine.mount(f"/on-{kind}", kind)
        kinds[f"/on-{kind}/ckpt"] = medium
    assert dict(zip(kinds, media(look(machine, *kinds)), strict=True)) == kinds
    fast = look(machine, "/fast").places[0].folder
    assert fast is not None
    assert fast.model == "FAST 3000"


def test_nothing_is_known_where_there_is_no_proc(tmp_path: Path) -> None:
    facts = look_at_machine(["/data"], {}, tmp_path, 0)
    assert media(facts) == ["unknown"]
    assert (facts.limits.total, facts.scratch, facts.shared) == (None, (), ())


def test_a_link_is_followed_to_where_it_leads(machine: Machine) -> None:
    machine.mount("/lus", "lustre")
    (machine.root / "ckpt").symlink_to("lus")
    assert media(look(machine, "/ckpt/run")) == ["shared"]


def test_the_folder_of_a_job_is_written_as_its_variable(machine: Machine) -> None:
    machine.folder("/local/job.17")
    job = {"SLURM_JOB_ID": "17", "SLURM_TMPDIR": "/local/job.17"}
    facts = look(machine, "/local/job.17/deep", "${SLURM_TMPDIR}", "/local/job.170", **job)
    assert facts.scheduler == "Slurm"
    assert [(p.folder.written, p.folder.job) for p in facts.places if p.folder] == [
        ("${SLURM_TMPDIR}/deep", "SLURM_TMPDIR"),
        ("${SLURM_TMPDIR}", "SLURM_TMPDIR"),
        ("/local/job.170", ""),
    ]
    assert facts.scratch[0].written == "${SLURM_TMPDIR}/tierstate"


def test_tmpdir_is_the_folder_of_a_job_only_within_one(machine: Machine) -> None:
    machine.folder("/local/tmp.1")
    assert look(machine, TMPDIR="/local/tmp.1").scratch[0].written == f"/local/tierstate-{os.getuid()}"
    found = look(machine, TMPDIR="/local/tmp.1", PBS_JOBID="1.head").scratch[0]
    assert (found.written, found.job) == ("${TMPDIR}/tierstate", "TMPDIR")


def test_scratch_folders_are_ranked_and_what_will_not_do_is_rejected(machine: Machine) -> None:
    machine.folder("/scratch")  # on the root's disk, which turns
    machine.mount("/mnt/nvme0", "xfs", "259:0")
    machine.drive("259:0", "nvme0n1")
    machine.mount("/local", "tmpfs")
    machine.mount("/scr", "nfs4")
    machine.mount("/raid", "overlay")
    machine.folder("/localscratch/ada")
    machine.folder("/lscratch", mode=0o777)
    facts = look(machine, USER="ada")
    own = f"tierstate-{os.getuid()}"
    written = [folder.written for folder in facts.scratch]
    assert written[0] == f"/mnt/nvme0/{own}"
    assert set(written[1:]) == {f"/scratch/{own}", "/localscratch/ada/tierstate", f"/localscratch/{own}"}
    assert dict(facts.rejected) == {
        "/local": "on tmpfs",
        "/raid": "on overlay",
        "/lscratch": "another user could change what lies there",
    }
    assert facts.shared == (("/scr", "nfs4"),)
    facts = look(machine, TMPDIR="/scr/job.1", PBS_JOBID="1")
    assert ("${TMPDIR}", "nfs4, which other hosts see too") in facts.rejected


def test_file_systems_that_the_system_needs_are_no_places(machine: Machine) -> None:
    machine.mount("/proc/stat", "fuse.lxcfs")
    machine.mount("/run/user/7/doc", "fuse.portal")
    machine.mount("/home", "nfs4")
    assert look(machine).shared == (("/home", "nfs4"),)


def test_a_mounted_disk_of_the_system_is_no_scratch_folder(machine: Machine) -> None:
    for point in ("/home", "/var/lib/x", "/boot"):
        machine.mount(point, "ext4", "8:1")
    assert look(machine).scratch == ()
    machine.mount("/fastdata", "ext4", "8:1")
    assert look(machine).scratch[0].written == f"/fastdata/tierstate-{os.getuid()}"


@pytest.mark.skipif(os.getuid() == 0, reason="root can write everywhere")
def test_a_folder_where_this_user_cannot_write_is_rejected(machine: Machine) -> None:
    machine.folder("/scratch", mode=0o555)
    facts = look(machine)
    assert (facts.scratch, facts.rejected) == ((), (("/scratch", "this user cannot write there"),))


@pytest.mark.parametrize(
    ("environ", "devices", "count"),
    [
        ({}, 0, 1),
        ({}, 8, 8),
        ({"LOCAL_WORLD_SIZE": "2"}, 8, 2),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3"}, 1, 4),
        ({"SLURM_NTASKS_PER_NODE": "junk"}, 0, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 0, 1),
    ],
)
def test_processes_that_share_the_memory(machine: Machine, environ: dict[str, str], devices: int, count: int) -> None:
    facts = look(machine, devices=devices, **environ)
    assert (facts.processes, facts.devices) == (count, devices)


def test_the_limit_of_the_container_is_found(machine: Machine) -> None:
    machine.file("proc/self/cgroup", "0::/job")
    machine.file("sys/fs/cgroup/job/memory.max", str(3 * GIB))
    assert (look(machine).limits.container, look(machine).limits.total) == (3 * GIB, 256 * GIB)


def test_settings_for_s3_are_found_by_name(machine: Machine) -> None:
    machine.file("home/ada/.aws/credentials", "[default]")
    facts = look(
        machine, HOME="/home/ada", AWS_SECRET_ACCESS_KEY="abcdefgh", AWS_PROFILE="x", S3_ENDPOINT="http://s3:9"
    )
    assert facts.aws == ("AWS_PROFILE", "AWS_SECRET_ACCESS_KEY")
    assert (facts.aws_files, facts.endpoint) == (True, "S3_ENDPOINT")
    assert look(machine, S3_ENDPOINT="s3:9").endpoint == "", "an address without a protocol is none"
    assert look(machine, S3_ENDPOINT="http://s3:9", AWS_ENDPOINT_URL="http://s3:8").endpoint == ""


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("s3://ada:secret123@bucket/x", "has a user or password in it"),
        ("https://token123@store/x", "has a user or password in it"),
        ("memory://x", "gone with the process"),
        ("~/ckpt", "starts with '~'"),
        ("  ", "is empty"),
        ("/data/${NOT_SET}", "NOT_SET is not set"),
        ("/data/${MY_TOKEN}", "MY_TOKEN is named like a credential"),
        ("s3://bucket/hunter2-hunter2", "the value of the variable MY_TOKEN"),
        ("/data/\udcff", "is not UTF-8"),
    ],
)
def test_places_that_cannot_be(machine: Machine, place: str, said: str) -> None:
    with pytest.raises(PolicyError) as caught:
        look(machine, place, MY_TOKEN="hunter2-hunter2")
    assert said in str(caught.value)
    assert not any(secret in str(caught.value) for secret in ("secret123", "token123", "hunter2"))


def test_a_place_is_given_once(machine: Machine) -> None:
    with pytest.raises(PolicyError, match="given twice"):
        look(machine, "/a", "/a")


def test_a_relative_path_is_below_the_working_directory_and_variables_stay(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    facts = look(machine, "ckpt", "${NAME}/x", "a$$b", NAME="ckpt")
    assert [place.folder.written for place in facts.places if place.folder] == [
        f"{tmp_path}/ckpt",
        f"{tmp_path}/${{NAME}}/x",
        f"{tmp_path}/a$$b",
    ]
