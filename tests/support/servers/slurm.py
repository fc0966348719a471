"""A Slurm of three nodes on this machine, with MUNGE: a partition whose jobs are preempted, and one that preempts."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from pathlib import Path

from support.outcomes import until
from support.ports import free_ports
from support.servers.daemons import Daemons
from support.servers.packages import install

NODES = 3

GRACE = 30
"""Seconds from SIGTERM to SIGKILL for a job that is preempted."""

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/control.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=preempt_youngest_first
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=20
ReturnToService=2
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


class Slurm(Daemons):
    """The daemons, and the commands of a user.

    Args:
        folder: of the daemons' files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._munge = folder / "munge.socket"
        control, *ports = free_ports(NODES + 1)
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000"
            for i, port in enumerate(ports)
        ]
        self._configuration = folder / "slurm.conf"
        self._configuration.write_text(
            CONFIGURATION.format(host=host, control=control, folder=folder, nodes="\n".join(lines), grace=GRACE)
        )
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        paths = {"key-file": key, "socket": self._munge, "pid-file": folder / "munge.pid", "log-file": folder / "log"}
        paths["seed-file"] = folder / "munge.seed"
        # --force: it distrusts folders that others may write to, as the one for temporary files.
        munge = ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in paths.items())]
        self.commands = {"munge": munge, "control": ["slurmctld", "-D", "-c", "-f", self._configuration]}
        self.ports = {"control": control}
        for i, port in enumerate(ports):
            self.commands[f"n{i}"] = ["slurmd", "-D", "-N", f"n{i}", "-f", self._configuration]
            self.ports[f"n{i}"] = port

    def create(self) -> None:
        """Start the daemons, and wait until all nodes take jobs."""
        self.start("munge")
        until(self._munge.exists)
        self.start()
        until(lambda: self.run("sinfo", "-h", "-p", "low", "-o", "%T %D") == f"idle {NODES}", pause=0.2)

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """What a command of a user prints."""
        environment = os.environ | {"SLURM_CONF": str(self._configuration)}
        done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


def install_slurm() -> None:
    """Make sure that its programs are there.

    Raises:
        NotInstallable
    """
    install("Slurm", {"slurmctld": "slurmctld", "slurmd": "slurmd", "slurm-client": "sbatch", "munge": "munged"})
