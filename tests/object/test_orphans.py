"""Objects that dead writers leave on a real server: found, reported, and deleted once they are old enough."""

from __future__ import annotations

import time

import pytest
from support.servers.buckets import BUCKET, Server, client, fresh_prefix, open_tier, uploads

from tierstate.tiers.testing import random_bytes

PART = random_bytes(5 << 20)


def begin(server: Server, key: str) -> None:
    """An upload with one part, of a writer that then died."""
    with client(server) as fs:
        upload = fs.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)["UploadId"]
        fs.call_s3("upload_part", Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=PART.numpy().tobytes())


def keys(server: Server, prefix: str) -> set[str]:
    return {upload["Key"] for upload in uploads(server, prefix)}


@pytest.mark.timeout(600)
def test_uploads_of_dead_writers_are_aborted_when_they_are_old(server: Server) -> None:
    """The age is the server's to tell; what others do beside this tier's prefix is left alone."""
    prefix = fresh_prefix()
    mine, others = f"{prefix}/packs/run/dead", {f"{prefix}-beside/a", f"{prefix}.b"}
    for key in (mine, *others):
        begin(server, key)
    patient = open_tier(server, prefix)
    patient.put("young", PART[:1])
    assert keys(server, prefix) == {mine, *others}
    assert any("may be under way" in note for note in patient.traits.notes)
    patient.close()
    deadline, told = time.monotonic() + 60, ()
    while mine in keys(server, prefix):
        # Servers tell the time in whole seconds.
        assert time.monotonic() < deadline
        hasty = open_tier(server, prefix, orphan_age=0.5)
        hasty.put(f"hasty-{time.monotonic_ns()}", PART[:1])
        told = hasty.traits.notes
        hasty.close()
    assert any("1 begun more than" in note and "aborted" in note for note in told)
    assert keys(server, prefix) == others
    with client(server) as fs:
        assert not fs.exists(f"{BUCKET}/{mine}")
