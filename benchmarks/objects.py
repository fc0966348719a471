"""Object storage: one long object up and down an S3 server, side by side with s3fs and with plain HTTP.

python -m benchmarks.objects s3://bucket/prefix [--endpoint URL] [--ca FILE] [--size 256MiB] [--rounds 5] [--skip s3fs]

Credentials and region come from where botocore looks for them (AWS_ACCESS_KEY_ID and so on). All take turns in one
process; its CPU seconds are counted, and not the server's. Ratios are to the first row that is not skipped.
"""

from __future__ import annotations

import argparse
import random
import ssl
import statistics
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPSConnection
from typing import Any, ClassVar, NamedTuple
from urllib.parse import SplitResult, urlsplit

import numpy as np
import torch

from benchmarks.rounds import say
from tierstate.manifest.chunk import Buffer, empty_buffer, view
from tierstate.tiers.base import Range
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.units import parse_size

PIECE = 16 << 20
"""Bytes of a slab, a part and a request, for those that are told."""

THREADS = 8
TUNED = {
    "parameter_validation": False,
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "s3": {"payload_signing_enabled": False},
}


class Place(NamedTuple):
    """Where the objects go, what s3fs is told of it, and the file with the authorities that are trusted, if given."""

    bucket: str
    prefix: str
    options: dict[str, Any]
    ca: str | None = None


class Way(ABC):
    """One way to send an object and to fetch it again."""

    title: ClassVar[str]

    def __init__(self, place: Place) -> None:
        self.place = place

    @abstractmethod
    def up(self, key: str, data: Buffer) -> None:
        """Create the object."""

    @abstractmethod
    def down(self, key: str, out: Buffer) -> None:
        """Fill memory that is there with it, as a restore does."""


class Plain(Way):
    """s3fs as it comes."""

    title = "s3fs"
    config: ClassVar[dict[str, Any]] = {}

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        import s3fs

        self.fs = s3fs.S3FileSystem(**place.options, config_kwargs=self.config, skip_instance_cache=True)

    def path(self, key: str) -> str:
        """As s3fs has it."""
        return f"{self.place.bucket}/{self.place.prefix}/{key}"

    def up(self, key: str, data: Buffer) -> None:
        self.fs.pipe_file(self.path(key), view(data).tobytes())

    def down(self, key: str, out: Buffer) -> None:
        out.numpy()[:] = np.frombuffer(self.fs.cat_file(self.path(key)), np.uint8)

    def delete(self, key: str) -> None:
        """Whoever wrote it."""
        self.fs.rm_file(self.path(key))


class Tuned(Plain):
    """s3fs with no digests, no copy on the way up, and ranges side by side."""

    title = "s3fs, tuned"
    config = TUNED

    def up(self, key: str, data: Buffer) -> None:
        self.fs.pipe_file(self.path(key), view(data), chunksize=PIECE)

    def down(self, key: str, out: Buffer) -> None:
        starts = list(range(0, len(out), PIECE))
        ends = [min(at + PIECE, len(out)) for at in starts]
        found = self.fs.cat_ranges([self.path(key)] * len(starts), starts, ends, on_error="raise")
        for at, data in zip(starts, found, strict=True):
            out[at : at + len(data)].numpy()[:] = np.frombuffer(data, np.uint8)


class Ours(Way):
    """The object tier, as a save uses it: slab after slab, each on a lease."""

    title = "tierstate, `checksum: none`"
    checksum: ClassVar[Any] = "none"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        url = f"s3://{place.bucket}/{place.prefix}"
        self.tier = ObjectStore(url=url, options=place.options, checksum=self.checksum)
        self.tier.put(f"first-{uuid.uuid4().hex}", empty_buffer(1))
        for note in self.tier.traits.notes:
            say(f"{self.title}: {note}")

    def up(self, key: str, data: Buffer) -> None:
        with self.tier.writer(key) as writer:
            for at in range(0, len(data), PIECE):
                writer.append(data[at : at + PIECE], lambda: None)

    def down(self, key: str, out: Buffer) -> None:
        self.tier.read(key, [Range(0, out)])


class Careful(Ours):
    """The same, with what the server verifies."""

    title = "tierstate, `checksum: auto`"
    checksum = "auto"


class Raw(Way):
    """Nothing but sockets: the same bytes through signed URLs, without digests, retries or checks of the answers."""

    title = "plain HTTP"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        import botocore.session
        from botocore.config import Config

        known = {"endpoint_url": place.options.get("endpoint_url")}
        self.s3 = botocore.session.Session().create_client(
            "s3", config=Config(**TUNED, signature_version="s3v4"), verify=place.ca, **known
        )

    def where(self, key: str) -> dict[str, Any]:
        """As S3's requests have it."""
        return {"Bucket": self.place.bucket, "Key": f"{self.place.prefix}/{key}"}

    def up(self, key: str, data: Buffer) -> None:
        upload = self.where(key) | {"UploadId": self.s3.create_multipart_upload(**self.where(key))["UploadId"]}

        def send(connection: HTTPConnection, at: int) -> Any:
            number = at // PIECE + 1
            url = urlsplit(self.s3.generate_presigned_url("upload_part", upload | {"PartNumber": number}))
            piece = view(data[at : at + PIECE])
            connection.putrequest("PUT", f"{url.path}?{url.query}", skip_accept_encoding=True)
            connection.putheader("Content-Length", str(len(piece)))
            connection.endheaders()
            connection.sock.sendall(piece)
            answer = connection.getresponse()
            answer.read()
            return {"PartNumber": number, "ETag": answer.headers["ETag"]}

        parts = self._each(len(data), send)
        self.s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})

    def down(self, key: str, out: Buffer) -> None:
        url = urlsplit(self.s3.generate_presigned_url("get_object", self.where(key)))

        def fetch(connection: HTTPConnection, at: int) -> None:
            piece = view(out[at : at + PIECE])
            wanted = {"Range": f"bytes={at}-{at + len(piece) - 1}"}
            connection.request("GET", f"{url.path}?{url.query}", headers=wanted)
            connection.getresponse().readinto(piece)

        self._each(len(out), fetch)

    def _each(self, nbytes: int, do: Callable[[HTTPConnection, int], Any]) -> list[Any]:
        url = urlsplit(self.s3.generate_presigned_url("get_object", self.where("x")))
        lines = [_connect(url, self.place.ca) for _ in range(THREADS)]

        def some(number: int) -> list[Any]:
            return [(at, do(lines[number], at)) for at in range(number * PIECE, nbytes, THREADS * PIECE)]

        with ThreadPoolExecutor(THREADS) as pool:
            found = [one for several in pool.map(some, range(THREADS)) for one in several]
        for line in lines:
            line.close()
        return [answer for _, answer in sorted(found, key=lambda one: one[0])]


def _connect(url: SplitResult, ca: str | None) -> HTTPConnection:
    host = url.hostname or ""
    if url.scheme != "https":
        return HTTPConnection(host, url.port)
    return HTTPSConnection(host, url.port, context=ssl.create_default_context(cafile=ca))


WAYS: tuple[type[Way], ...] = (Plain, Tuned, Ours, Careful, Raw)


class Cost(NamedTuple):
    """What one transfer took, in seconds."""

    seconds: float
    cpu: float


def main() -> None:
    """Measure, and print a table."""
    args = arguments()
    bucket, _, prefix = args.url.removeprefix("s3://").partition("/")
    options = {"endpoint_url": args.endpoint, **({"client_kwargs": {"verify": args.ca}} if args.ca else {})}
    place = Place(bucket, f"{prefix or 'bench'}/{uuid.uuid4().hex}", options, args.ca)
    ways = [way(place) for way in WAYS if way.title not in args.skip]
    store = Plain(place)
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (args.size,), dtype=torch.uint8, generator=generator)
    out = torch.zeros_like(data)
    found: dict[str, list[tuple[Cost, Cost]]] = {way.title: [] for way in ways}
    # The first round opens connections and touches memory; it is not counted.
    for number in range(args.rounds + 1):
        for way in random.sample(ways, len(ways)):
            key = f"{number}-{uuid.uuid4().hex}"
            costs = _timed(lambda: way.up(key, data)), _timed(lambda: way.down(key, out))  # noqa: B023
            if not torch.equal(out, data):
                raise SystemExit(f"{way.title}: other bytes came back than were sent")
            out.zero_()
            store.delete(key)
            if number:
                found[way.title].append(costs)
                up, down = (args.size / 2**20 / cost.seconds for cost in costs)
                say(f"round {number}: {way.title}: {up:.0f} MiB/s up, {down:.0f} down")
    store.fs.rm(f"{place.bucket}/{place.prefix}", recursive=True)
    print(table(found, args.size))


def _timed(call: Callable[[], None]) -> Cost:
    start, cpu = time.perf_counter(), time.process_time()
    call()
    return Cost(time.perf_counter() - start, time.process_time() - cpu)


def table(found: dict[str, list[tuple[Cost, Cost]]], size: int) -> str:
    """The medians, each with its ratio to the first row, which is s3fs's as a rule."""
    lines = ["| | MiB/s up | | CPU s/GiB | | MiB/s down | | CPU s/GiB | |", "| --- |" + " ---: |" * 8]
    base: list[float] = []
    for title, pairs in found.items():
        cells = []
        for costs in zip(*pairs, strict=True):
            cells.append(size / 2**20 / statistics.median(cost.seconds for cost in costs))
            cells.append(statistics.median(cost.cpu for cost in costs) * 2**30 / size)
        base = base or cells
        shown = [
            f"{cell:.{2 * (i % 2)}f} | {cell / first:.2f}x"
            for i, (cell, first) in enumerate(zip(cells, base, strict=True))
        ]
        lines.append(f"| {title} | {' | '.join(shown)} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """What was given on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objects", description=__doc__.splitlines()[0])
    parser.add_argument("url", help="bucket and prefix below which objects are made and removed, as in s3://b/bench")
    parser.add_argument("--endpoint", help="of the server; by default AWS")
    parser.add_argument("--ca", help="file with the certificate of the authority that signed the server's")
    parser.add_argument("--size", type=parse_size, default=256 << 20, help="bytes of the object")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each")
    titles = [way.title for way in WAYS]
    parser.add_argument("--skip", action="append", default=[], choices=titles, help="leave one out; may be repeated")
    return parser.parse_args()


if __name__ == "__main__":
    main()
