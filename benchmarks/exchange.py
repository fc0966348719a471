"""Chunk exchange between two ranks over the loopback interface, with MACs and without, side by side.

python -m benchmarks.exchange [--size 2GiB] [--rounds 5]

One process sends chunks to another, as ranks do in a restore. Each round measures a plain socket, the exchange on a
trusted network (checksums: ``ranks: {trust: network}``), and the exchange with a secret (MACs), in turn. Seconds are of
the clock; CPU seconds are of both processes together, and tell what a busy machine hides.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.machine import facts
from benchmarks.tables import table
from tierstate.engine.ranks.restore.exchange import ChunkExchange, PeerConnection, PeerListener
from tierstate.engine.ranks.restore.exchange_plan import ExchangePlan
from tierstate.manifest.chunk import CHUNK_SIZE, as_buffer
from tierstate.tiers.connections.secret import JobSecret
from tierstate.tiers.units import parse_size

NO_ROWS = np.zeros(0, "i8")
WAYS = ("a plain socket", "trust: network (xxh3)", "a secret (HMAC-SHA256)")


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange")
    parser.add_argument("--size", type=parse_size, default=parse_size("2GiB"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ["TIERSTATE_ADDRESS"] = "127.0.0.1"
    count = max(1, args.size // CHUNK_SIZE)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        found[WAYS[0]].append(measured(plain, count))
        for way, authenticated in zip(WAYS[1:], (False, True), strict=True):
            secret = JobSecret.random(authenticated=authenticated)
            found[way].append(measured(lambda pipe, n, secret=secret: exchanged(pipe, n, secret), count))
    nbytes = count * CHUNK_SIZE
    rows = []
    for way, runs in found.items():
        seconds, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
        rows.append([way, f"{seconds:.2f}", f"{nbytes / seconds / 1e9:.2f}", f"{cpu / (nbytes / 1e9):.2f}"])
    print("; ".join(f"{name}: {value}" for name, value in facts(Path.cwd()).items()))
    print(table("over | seconds | GB/s | CPU seconds per GB, both sides", rows))
    return 0


def measured(receive: Callable[[Connection, int], None], count: int) -> tuple[float, float]:
    """Seconds, and CPU seconds of both processes, until all chunks have come."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    sender = multiprocessing.get_context("fork").Process(target=send, args=(theirs, count))
    sender.start()
    cpu = time.process_time()
    receive(ours, count)
    cpu = time.process_time() - cpu
    seconds, theirs_cpu = ours.recv()
    sender.join()
    return seconds, cpu + theirs_cpu


def send(pipe: Connection, count: int) -> None:
    """The sending process: it is told where to, and says how long all took."""
    chunk = memoryview(b"\7" * CHUNK_SIZE)
    kind, address, key, authenticated = pipe.recv()
    began, cpu = time.monotonic(), time.process_time()
    if kind == "plain":
        with socket.create_connection(("127.0.0.1", address)) as wire:
            for _ in range(count):
                wire.sendall(chunk)
            wire.shutdown(socket.SHUT_WR)
            wire.recv(1)
    else:
        with closing(PeerConnection(1, 0, address, JobSecret(key, authenticated=authenticated), 60.0)) as line:
            for row in range(count):
                line.send(row, chunk)
            pipe.recv()
    pipe.send((time.monotonic() - began, time.process_time() - cpu))


def plain(pipe: Connection, count: int) -> None:
    """Receive over a socket, with nothing around it."""
    out = memoryview(bytearray(CHUNK_SIZE))
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(("plain", server.getsockname()[1], b"", False))
        wire, _ = server.accept()
        with wire:
            for _ in range(count):
                wire.recv_into(out, 0, socket.MSG_WAITALL)


def exchanged(pipe: Connection, count: int, secret: JobSecret) -> None:
    """Receive through the exchange, into memory that is there already."""
    out = as_buffer(bytearray(CHUNK_SIZE))
    plan = ExchangePlan(NO_ROWS, {}, {1: np.arange(count)}, {})
    nbytes = np.full(count, CHUNK_SIZE)
    with closing(PeerListener(1, secret)) as listener:
        pipe.send(("exchange", listener.address, secret.reveal(), secret.authenticated))
        take = ChunkExchange(0, plan, listener, secret, [], nbytes, lambda _row, _raw: True, 60.0, lambda _row: out)
        with closing(take):
            take.wait([])
            pipe.send("all came")


if __name__ == "__main__":
    raise SystemExit(main())
