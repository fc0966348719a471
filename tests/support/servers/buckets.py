"""Direct access to an object store for tests, not through the tier under test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import yaml

from tierstate.tiers.object.tier import ObjectStore

BUCKET = "bucket"


class Server(Protocol):
    """A real server that speaks S3."""

    front: tuple[str, ...]

    @property
    def endpoint(self) -> str: ...
    def options(self) -> dict[str, Any]: ...
    def start(self, *names: str) -> None: ...
    def kill(self, *names: str) -> None: ...


class At(Protocol):
    """Where a client sends its requests to: a server, or a proxy in front of one."""

    def options(self) -> dict[str, Any]: ...


@contextmanager
def client(server: At) -> Iterator[Any]:
    """A plain S3 client."""
    import s3fs

    fs = s3fs.S3FileSystem(**server.options(), skip_instance_cache=True, use_listings_cache=False)
    try:
        yield fs
    finally:
        if fs._s3 is not None:
            fs.close_session(fs.loop, fs._s3)


def make_bucket(server: At, name: str = BUCKET) -> None:
    """Make a bucket. Without a location, since Ceph knows no regions by Amazon's names."""
    with client(server) as fs:
        fs.call_s3("create_bucket", Bucket=name)


def uploads(server: At, prefix: str = "") -> list[dict[str, Any]]:
    """Uploads in parts below a prefix that were begun, and neither completed nor aborted."""
    with client(server) as fs:
        found = fs.call_s3("list_multipart_uploads", Bucket=BUCKET, Prefix=prefix).get("Uploads", [])
    return list(found)


def parts(server: At, upload: dict[str, Any]) -> list[dict[str, Any]]:
    """Parts that one of these has."""
    with client(server) as fs:
        where = {"Bucket": BUCKET, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        return list(fs.call_s3("list_parts", **where).get("Parts", []))


def fresh_prefix() -> str:
    """A folder of the bucket that nobody has used."""
    return uuid.uuid4().hex


def open_tier(at: At, prefix: str, **keys: Any) -> ObjectStore:
    """An object tier below a prefix of the bucket, as a policy would open it."""
    tier = ObjectStore(url=f"s3://{BUCKET}/{prefix}", options=at.options(), **keys)
    tier.name = "s3"
    return tier


def two_tiers(place: Path, at: At, prefix: str, first: str = "nvme", **keys: Any) -> Path:
    """A policy file: a folder and the bucket, of which ``first`` is the faster one; 40 MiB go in several parts."""
    tiers = {
        "nvme": {"type": "nvme", "path": str(place / "nvme")},
        "s3": {"type": "object", "url": f"s3://{BUCKET}/{prefix}", "options": at.options(), **keys},
    }
    ordered = {name: tiers[name] for name in sorted(tiers, key=lambda name: name != first)}
    path = place / "policy.yaml"
    document = {"version": 1, "chunk": "1MiB", "arena": {"size": "64MiB"}, "tiers": ordered}
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path
