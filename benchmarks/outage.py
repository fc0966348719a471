"""Outages: how long after the death of an S3 gateway a save is durable there, and what is lost.

python -m benchmarks.outage [--size 512MiB] [--outages 0,5,20] [--path DIR]

Starts a real Ceph on the loopback interface (needs ceph-mon, ceph-osd and radosgw), saves through a policy of a folder
and a bucket, kills the gateway in the middle of an upload, starts it again after so many seconds, and waits. Then the
folder is deleted and everything is restored from the bucket alone.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import torch

import tierstate as ts
from tierstate.tiers.units import parse_size

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.servers.buckets import make_bucket, two_tiers
from support.servers.ceph import Ceph, install
from support.servers.faults import Fault
from support.servers.proxy import Proxy

LEAVES = 8
COLUMNS = ("outage s", "blocked s", "durable before s", "back until durable s", "saves needed", "bytes lost")


def main() -> int:
    """Measure, and print a table; 1 where bytes were lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=parse_size("512MiB"), help="bytes of state")
    parser.add_argument("--outages", default="0,5,20", help="seconds for which the gateway is dead")
    parser.add_argument("--path", help="where everything goes; it is removed afterwards")
    args = parser.parse_args()
    install()
    place = Path(tempfile.mkdtemp(prefix="tierstate-outage-", dir=args.path))
    (place / "ceph").mkdir()
    ceph = Ceph(place / "ceph")
    try:
        ceph.create()
        make_bucket(ceph)
        rows = [measure(ceph, place, args.size, float(outage)) for outage in args.outages.split(",")]
    finally:
        ceph.stop()
        shutil.rmtree(place, ignore_errors=True)
    print("  ".join(COLUMNS))
    for row in rows:
        print("  ".join(f"{value:>{len(name)}.{0 if isinstance(value, int) else 2}f}" for name, value in row.items()))
    return 1 if any(row["bytes lost"] for row in rows) else 0


def state(nbytes: int, seed: int) -> dict[str, torch.Tensor]:
    """Random weights, so that nothing of one version is in another."""
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(nbytes // LEAVES // 4, generator=generator) for i in range(LEAVES)}


def measure(ceph: Ceph, place: Path, nbytes: int, outage: float) -> dict[str, Any]:
    """One outage: a save before it, one in whose upload the gateway dies, and as many more as it takes."""
    ceph.start()
    prefix, folder = uuid.uuid4().hex, place / uuid.uuid4().hex
    folder.mkdir()
    dead = threading.Event()

    def die() -> None:
        ceph.kill("rgw")
        dead.set()

    truth = {step: state(nbytes, step) for step in (0, 1)}
    with Proxy(ceph) as proxy, ts.Checkpointer(two_tiers(folder, proxy, prefix), "run") as ckpt:
        start = time.monotonic()
        ckpt.save(truth[0], step=0).wait("s3")
        before = time.monotonic() - start
        proxy.add(Fault("pass_up", "PUT", f"{prefix}/packs/.*partNumber=2", at=1 << 20, action=die))
        start = time.monotonic()
        save = ckpt.save(truth[1], step=1)
        blocked = time.monotonic() - start
        dead.wait()
        time.sleep(outage)
        ceph.start()
        back, saves = time.monotonic(), 1
        while not arrives(save):
            saves += 1
            step = saves
            truth[step] = truth[1]
            save = ckpt.save(truth[step], step=step)
        durable = time.monotonic() - back
    shutil.rmtree(folder / "nvme")
    lost = check(two_tiers(folder, ceph, prefix), truth, {0, save.step})
    shutil.rmtree(folder)
    return dict(zip(COLUMNS, (outage, blocked, before, durable, saves, lost), strict=True))


def arrives(save: ts.Save) -> bool:
    """Whether a save comes to be in the bucket."""
    try:
        save.wait("s3")
    except ts.TierstateError as error:
        print(f"step {save.step}: {error}", file=sys.stderr)
        return False
    return True


def check(policy: Path, truth: dict[int, dict[str, torch.Tensor]], durable: set[int]) -> int:
    """Bytes of durable versions, and of listed ones, that the bucket alone does not give back as they were."""
    lost = 0
    with ts.Checkpointer(policy, "run") as ckpt:
        for step in durable | {version.step for version in ckpt.versions()}:
            try:
                found = ckpt.load(step=step)
            except ts.TierstateError as error:
                print(f"step {step}: {error}", file=sys.stderr)
                found = {}
            lost += sum(t.nbytes for name, t in truth[step].items() if name not in found or not t.equal(found[name]))
    return lost


if __name__ == "__main__":
    sys.exit(main())
