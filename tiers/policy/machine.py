"""What a machine has for a policy: memory, disks, shared file systems, a job's scratch folder, settings for S3.

`look_at_machine` reads it from ``/proc``, ``/sys`` and the environment into `MachineFacts`, of which
`tierstate.tiers.policy.auto` makes a policy. It writes nothing, and keeps no value of a variable with the name of a
credential.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from tierstate.manifest.errors import AccessDenied, PolicyError
from tierstate.tiers.memory.limits import MemoryLimits
from tierstate.tiers.posix.mounts import Mount, is_within, mount_of, read_mounts
from tierstate.tiers.posix.ownership import check_path
from tierstate.tiers.secrets import SHORTEST_SECRET, credentials_in

from .yaml import PolicyErrors, escape_variables, expand_variables

Medium: TypeAlias = Literal[
    "memory", "ssd", "disk", "block device", "network disk", "disk image", "container", "shared", "unknown"
]
"""What keeps the bytes of a file system:

* memory: tmpfs and the like, empty after the next start;
* ssd, disk: a drive of this machine, without and with turning platters; block device: it is not known which;
* network disk: a block device that lies on other machines; disk image: a file that is mounted (loop device);
* container: the layer of a container that is deleted with it;
* shared: a file system of several hosts; unknown: nothing is known of this kind of file system.
"""


_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})


_CONTAINER = frozenset({"overlay", "overlayfs", "aufs", "fuse.fuse-overlayfs"})


_SHARED = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "beegfs_nodev",
        "ceph",
        "cifs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "lustre_lite",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb2",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    }
)
"""Kinds of file systems that several hosts see; all of FUSE's (``fuse.…``) count too, since most lead elsewhere."""


_POOLS = frozenset({"btrfs", "zfs", "bcachefs"})
"""Local file systems over several devices, which have a device number of their own that /sys does not know."""


_JOBS = {
    "SLURM_JOB_ID": "Slurm",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "FLUX_JOB_ID": "Flux",
    "PJM_JOBID": "PJM",
    "COBALT_JOBID": "Cobalt",
    "_CONDOR_SCRATCH_DIR": "HTCondor",
    "SGE_TASK_ID": "Grid Engine",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
}
"""Variables that are set in jobs, and the scheduler that sets them."""


_JOB_FOLDERS = (
    "SLURM_TMPDIR",
    "PBS_JOBFS",
    "PBS_LOCALDIR",
    "SGE_LOCALDIR",
    "FLUX_JOB_TMPDIR",
    "PJM_LOCALTMP",
    "_CONDOR_SCRATCH_DIR",
    "JOBFS",
    "TMPDIR",
)
"""Variables with the folder that a scheduler makes for a job and deletes after it; TMPDIR only within a job."""


_SCRATCH_FOLDERS = (
    "local",
    "local/scratch",
    "local_scratch",
    "localscratch",
    "localdisk",
    "lscratch",
    "scratch",
    "scratch/local",
    "scr",
    "raid",
    "raid/scratch",
    "nvme*",
    "ssd*",
    "mnt/nvme*",
    "mnt/ssd*",
    "mnt/local*",
    "mnt/scratch*",
    "mnt/disks/*",
    "mnt/ephemeral*",
    "mnt/resource",
)
"""Where sites and clouds mount the disks of a node, as patterns below the root."""


_SYSTEM = re.compile(r"/|/(?:boot|dev|etc|home|lib|lib64|media|nix|opt|proc|root|run|snap|srv|sys|tmp|usr|var)(?:/.*)?")
"""Mount points of the system, where no scratch folder is looked for."""


_INNER = re.compile(r"/(?:dev|proc|run|sys|var)(?:/|$)")
"""Mount points where no user has data, though some are of kinds that lead elsewhere (lxcfs, portals of desktops)."""


_RANKS_PER_HOST = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
)


_ENDPOINTS = ("S3_ENDPOINT_URL", "AWS_S3_ENDPOINT", "S3_ENDPOINT")
"""Variables in which sites keep the address of their store, and which AWS's own tools do not look at."""


AWS_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


CREDENTIAL_SOURCES = frozenset(
    {
        "AWS_ACCESS_KEY_ID",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_PROFILE",
        "AWS_ROLE_ARN",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
    }
)
"""Variables by which AWS's tools find credentials."""


_AWS = re.compile(r"AWS_[A-Z0-9_]+")


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A folder, which need not exist yet, and what it lies on.

    Attributes:
        written: its path as the policy writes it; it may start with a variable.
        kind: of the file system, as in ``ext4``; empty if it is not known.
        medium: what keeps the bytes.
        model: of the drive, as it calls itself; empty if it is not known.
        size, free: bytes of the file system; None if not known.
        job: the variable of the scheduler that names the job's folder in which this one lies; empty if in none.
        temporary: whether it is below ``/tmp``, which many systems empty when they start.
        refused: why nothing can be written there; empty if it can.
    """

    written: str
    kind: str = ""
    medium: Medium = "unknown"
    model: str = ""
    size: int | None = None
    free: int | None = None
    job: str = ""
    temporary: bool = False
    refused: str = ""


@dataclass(frozen=True, slots=True)
class PlaceFacts:
    """A place that a policy shall use.

    Attributes:
        url: as the policy writes it; empty for a folder.
        folder: the folder; None for a URL that leads to none of this machine.
    """

    url: str = ""
    folder: FolderFacts | None = None

    @property
    def protocol(self) -> str:
        """Of the URL; empty for a folder."""
        return self.url.partition(":")[0]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What a policy is made of. It holds no value of a variable with the name of a credential.

    Attributes:
        places: what the user gave.
        limits: of the memory of this process.
        processes: processes of the job on this host, which share its memory.
        processes_from: how that is known.
        devices: CUDA devices.
        scheduler: of the job in which this process runs; empty if in none.
        scratch: folders on disks of this machine that are made for such data, best first.
        rejected: such folders that will not do, and why.
        shared: mount point and kind of each file system that other hosts see.
        aws: names of the variables that AWS's tools read, and that are set.
        aws_files: whether there are AWS's files with credentials or profiles.
        endpoint: the variable that has the store's address, if AWS's tools do not find it by themselves.
    """

    places: tuple[PlaceFacts, ...] = ()
    limits: MemoryLimits = field(default_factory=lambda: MemoryLimits(None, None, None, None))
    processes: int = 1
    processes_from: str = "one process"
    devices: int = 0
    scheduler: str = ""
    scratch: tuple[FolderFacts, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    aws: tuple[str, ...] = ()
    aws_files: bool = False
    endpoint: str = ""


def look_at_machine(
    places: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    devices: int | None = None,
) -> MachineFacts:
    """The facts of this machine, and of the places that a policy shall use. Writes nothing.

    File systems of other hosts are not touched unless a place lies in one: a dead server would block the call.

    Args:
        places: folders and URLs, in the words of a policy: ``${NAME}`` is a variable. A relative path is one below the
            working directory.
        environ: the environment; None: of this process.
        root: the folder where ``proc``, ``sys`` and all other paths are looked up.
        devices: number of CUDA devices; None: as torch says, which needs no CUDA context.

    Raises:
        PolicyError: a place cannot be used; the message says what is right.
    """
    environ = os.environ if environ is None else environ
    host = _Host(root, environ)
    count = _device_count() if devices is None else devices
    processes, known = _processes(environ, count)
    scratch, rejected = _scratch(host)
    return MachineFacts(
        places=tuple(_place(host, text) for text in _each_once(places)),
        limits=MemoryLimits.of_process(root),
        processes=processes,
        processes_from=known,
        devices=count,
        scheduler=host.scheduler,
        scratch=scratch,
        rejected=rejected,
        shared=_shared(host),
        aws=tuple(sorted(name for name in environ if _AWS.fullmatch(name) and environ[name])),
        aws_files=any(
            host.here(f"{environ.get('HOME', '')}/.aws/{name}").is_file() for name in ("credentials", "config")
        ),
        endpoint=_endpoint(environ),
    )


def medium_of(mount: Mount | None, root: Path = Path("/")) -> Medium:
    """What keeps the bytes of a mounted file system.

    Args:
        root: the folder where ``sys`` is.
    """
    if mount is None:
        return "unknown"
    if mount.kind in _MEMORY:
        return "memory"
    if mount.kind in _CONTAINER:
        return "container"
    if mount.kind in _SHARED or mount.kind.startswith("fuse."):
        return "shared"
    if mount.kind in _POOLS:
        return "block device"
    return "unknown" if mount.device.startswith("0:") else _drive(root / "sys/dev/block" / mount.device)


def _drive(device: Path) -> Medium:
    """The medium of a block device, of which /sys has this folder."""
    real = os.path.realpath(device)
    name = os.path.basename(real)
    if name.startswith("loop"):
        return "disk image"
    # Of iSCSI and of NVMe over a network the path leads through these names.
    if name.startswith(("nbd", "rbd", "drbd")) or "/session" in real or "/nvme-fabrics" in real:
        return "network disk"
    if "/virtio" in real or name.startswith("xvd"):
        return "block device"  # disks of virtual machines mostly say that they turn, whatever they are
    turning = _first_line(_whole_device(device) / "queue/rotational")
    return {"0": "ssd", "1": "disk"}.get(turning, "block device")  # type: ignore[return-value]


def _whole_device(device: Path) -> Path:
    """The folder in /sys of the drive of which a device is a partition, or of the device itself."""
    real = Path(os.path.realpath(device))
    return real.parent if (real / "partition").exists() else real


def _first_line(file: Path) -> str:
    with suppress(OSError, ValueError):
        return file.read_text().strip().partition("\n")[0]
    return ""


class _Host:
    """Looks at paths below a root folder, in the environment of a process."""

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self.root = root
        self.environ = environ
        self._secrets = {name: _one_slash(value) for name, value in credentials_in(environ).items()}
        try:
            text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:  # not Linux
            text = ""
        self.mounts = read_mounts(text)
        self.scheduler = next((name for variable, name in _JOBS.items() if environ.get(variable)), "")
        self.job_folders = [
            (os.path.normpath(environ[name]), name)
            for name in _JOB_FOLDERS
            if environ.get(name, "").startswith("/") and (name != "TMPDIR" or self.scheduler)
        ]

    def here(self, path: str) -> Path:
        """Where a path of the machine is looked up."""
        return self.root / path.lstrip("/")

    def leaks(self, text: str) -> str:
        """The variable of a credential whose value is in a text; empty if there is none."""
        # In a path each slash is one, however many the value has.
        plain = _one_slash(text)
        found = (name for name, value in self._secrets.items() if len(value) >= SHORTEST_SECRET and value in plain)
        return next(found, "")

    def folder(self, path: str, written: str) -> FolderFacts:
        """A folder by its absolute path."""
        mount = mount_of(self._real(path), self.mounts)
        medium = medium_of(mount, self.root)
        size, free = self._room(path)
        job = next((name for above, name in self.job_folders if is_within(path, above)), "")
        return FolderFacts(
            written=written,
            kind=mount.kind if mount else "",
            medium=medium,
            model=self._model(mount) if mount and medium == "ssd" else "",
            size=size,
            free=free,
            job=job,
            temporary=is_within(path, "/tmp"),
            refused=self._refusal(path),
        )

    def covered_by_shared(self, path: str) -> str:
        """The kind of a file system of other hosts in which a path lies, told without touching it; empty for others."""
        mount = mount_of(path, self.mounts)
        return mount.kind if mount and medium_of(mount, self.root) == "shared" else ""

    def written(self, path: str) -> str:
        """An absolute path as a policy writes it. A job's folder is another one in each job: the variable names it."""
        for above, name in self.job_folders:
            if is_within(path, above):
                return f"${{{name}}}{escape_variables(path[len(above.rstrip('/')) :])}"
        return escape_variables(path)

    def _real(self, path: str) -> str:
        top, real = os.path.realpath(self.root), os.path.realpath(self.here(path))
        return "/" + os.path.relpath(real, top) if is_within(real, top) and real != top else path

    def _nearest(self, path: str) -> Path:
        place = self.here(path)
        return next((one for one in (place, *place.parents) if os.path.lexists(one)), self.root)

    def _room(self, path: str) -> tuple[int | None, int | None]:
        try:
            found = os.statvfs(self._nearest(path))
        except OSError:
            return None, None
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def _model(self, mount: Mount) -> str:
        model = _first_line(_whole_device(self.root / "sys/dev/block" / mount.device) / "device/model")
        return "" if self.leaks(model) else model

    def _refusal(self, path: str) -> str:
        """Why nothing can be written to a folder; empty if it can."""
        nearest = self._nearest(path)
        if not nearest.is_dir():
            return "it is not a folder"
        if not os.access(nearest, os.W_OK | os.X_OK):
            return "this user cannot write there"
        try:
            check_path(self.here(path))
        except (AccessDenied, OSError) as error:
            # The message may name a folder by the variable's value, and it is for the tier to give it in full.
            return (
                "another user could change what lies there" if isinstance(error, AccessDenied) else str(error.strerror)
            )
        return ""


def _one_slash(text: str) -> str:
    return re.sub("/+", "/", text).strip("/")


def _each_once(places: Iterable[str]) -> Iterator[str]:
    seen = set()
    for text in places:
        if text in seen:
            raise PolicyError(f"the place {text!r} is given twice; give it once")
        seen.add(text)
        yield text


def _place(host: _Host, text: str) -> PlaceFacts:
    """What is at a place that the user gave."""
    _check_place(host, text)
    findings = PolicyErrors(f"the place {text!r}")
    plain = str(expand_variables(text, host.environ, findings))
    findings.raise_any()
    if re.match(r"[a-z][a-z0-9+.\-]*:/", plain):
        return _url(host, text, plain)
    if plain.startswith("~"):
        raise PolicyError(f"the place {text!r} starts with '~', which only shells know; write '${{HOME}}'")
    # A variable stays one: the policy may be for other users, and other jobs.
    fixed = text == escape_variables(plain)
    path = os.path.normpath(os.path.join(os.getcwd(), plain))
    relative = not os.path.isabs(plain)
    written = host.written(path) if fixed else f"{escape_variables(os.getcwd())}/{text}" if relative else text
    _check_place(host, written)
    return PlaceFacts(folder=host.folder(path, written))


def _check_place(host: _Host, text: str) -> None:
    if name := host.leaks(text):
        raise PolicyError(f"a place has the value of the variable {name} in it, which is named like a credential")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PolicyError(f"the place {text!r} is not UTF-8, as a policy is; use another name") from error
    if not text.strip():
        raise PolicyError("a place is empty; give a folder, or a URL as in 's3://bucket/ckpt'")


def _url(host: _Host, text: str, plain: str) -> PlaceFacts:
    protocol, _, rest = plain.partition("://")
    user, at, _ = rest.rpartition("@")
    # abfs://container@account is the way of Azure, and no user.
    if at and (":" in user or not protocol.startswith("abfs")):
        raise PolicyError(
            f"a URL of {protocol}:// has a user or password in it, which a policy does not keep; take it out, and give "
            "credentials by the store's own variables or files"
        )
    if protocol == "memory":
        raise PolicyError("memory:// is gone with the process; give a folder or the URL of a store")
    folder = (
        host.folder(os.path.normpath(rest), text) if protocol in ("file", "local") and rest.startswith("/") else None
    )
    return PlaceFacts(text, folder)


def _device_count() -> int:
    import torch

    return torch.cuda.device_count()  # asks the driver's library (NVML), so that no context is made


def _processes(environ: Mapping[str, str], devices: int) -> tuple[int, str]:
    """Processes of this job on this host, and how that is known."""
    for name in _RANKS_PER_HOST:
        # Slurm writes 8(x4) for eight each on four hosts, and 8,4 where they differ.
        found = [int(n) for n in re.findall(r"(?:^|,)(\d{1,6})", environ.get(name, ""))]
        if found and max(found) > 0:
            return max(found), f"by {name}"
    if devices > 1:
        return devices, "one for each CUDA device"
    return 1, "one process"


def _endpoint(environ: Mapping[str, str]) -> str:
    if any(environ.get(name) for name in AWS_ENDPOINTS):
        return ""
    return next((name for name in _ENDPOINTS if environ.get(name, "").startswith(("http://", "https://"))), "")


def _shared(host: _Host) -> tuple[tuple[str, str], ...]:
    """Mount points of file systems of other hosts, with their kinds; none of those that the system itself needs."""
    found = {(m.point, m.kind) for m in host.mounts if medium_of(m, host.root) == "shared"}
    return tuple(sorted(one for one in found if not _INNER.match(one[0]) and not host.leaks(one[0])))


_RANK: Mapping[Medium, int] = {"ssd": 0, "block device": 1, "disk": 2, "network disk": 3}
"""The media on which a scratch folder may lie, fastest first."""


def _scratch(host: _Host) -> tuple[tuple[FolderFacts, ...], tuple[tuple[str, str], ...]]:
    """Scratch folders of this machine, best first, and those that will not do, each with the reason."""
    good, bad, seen = [], {}, set()
    for order, (path, inner) in enumerate(_candidates(host)):
        if path in seen or host.leaks(path):
            continue
        seen.add(path)
        shown = host.written(path)
        if kind := host.covered_by_shared(path):
            bad[shown] = f"{kind}, which other hosts see too"
            continue
        if not host.here(path).is_dir():
            continue
        found = host.folder(os.path.join(path, inner), host.written(os.path.join(path, inner)))
        why = found.refused or ("" if found.medium in _RANK else f"on {found.kind or 'an unknown file system'}")
        if why:
            bad[shown] = why
        else:
            # The folder that the scheduler made for this job comes first: nobody else is meant to use that disk.
            good.append(((not found.job, _RANK[found.medium], -(found.size or 0), order), found))
    return tuple(found for _, found in sorted(good, key=lambda one: one[0])), tuple(bad.items())


def _candidates(host: _Host) -> Iterator[tuple[str, str]]:
    """Folders in which a scratch folder may be, each with the name that it gets."""
    for path, _name in host.job_folders:
        yield path, "tierstate"
    # Others may use the same disk: a folder of one user is refused to the next one.
    own = f"tierstate-{os.getuid()}"
    user = host.environ.get("USER", "")
    for pattern in _SCRATCH_FOLDERS:
        for found in sorted(host.root.glob(pattern)) if not host.covered_by_shared(f"/{pattern}") else ():
            path = f"/{found.relative_to(host.root)}"
            if re.fullmatch(r"[\w.-]+", user) and not host.covered_by_shared(path) and (found / user).is_dir():
                yield f"{path}/{user}", "tierstate"
            yield path, own
    for mount in host.mounts:
        if medium_of(mount, host.root) in _RANK and not _SYSTEM.fullmatch(mount.point):
            yield mount.point, own
