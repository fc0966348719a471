"""The targets: what this project set itself, and what the run gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.results import Results, Sample, Spread
from benchmarks.tables import table

Pick = Callable[[Sample], float | None]
PEERS = ("torch", "dcp", "safetensors", "torchsnapshot")


def targets_table(results: Results) -> str:
    """Each target, what was found, and whether it was reached; only what this run measured."""
    sizes = results.sizes("save")
    rows = [*_saves(results, max(sizes)), *_blocked(results, min(sizes))] if sizes else []
    rows += [*_restores(results, max(sizes))] if sizes else []
    rows += [*_rest(results, max(sizes, default=0))]
    return table("target | found | reached", [list(row) for row in rows])


Row = tuple[str, str, str]


def _saves(results: Results, size: int) -> Iterator[Row]:
    durable = {peer: _last(results, size, peer, "durable") for peer in ("eager", "direct", *PEERS)}
    yield from _least("durable: of the bare disk's rate", durable["direct"], durable["eager"], 0.90)
    for peer, least in (("dcp", 3.0), ("torch", 4.0), ("torchsnapshot", 3.0), ("safetensors", 2.5)):
        yield from _least(f"durable: times as fast as {peer}", durable[peer], durable["eager"], least)
    cpu = [n for peer in PEERS if (n := _last(results, size, peer, "cpu")) is not None]
    ours = _last(results, size, "eager", "cpu")
    yield from _most("durable: CPU seconds, of the best peer's", ours, min(cpu, default=None), 0.2)


def _blocked(results: Results, size: int) -> Iterator[Row]:
    eager, lazy = (_last(results, size, peer, "blocked") for peer in ("eager", "lazy"))
    for peer, how in (("memcpy-1", "by one thread"), ("memcpy", "by torch's threads")):
        copied = _last(results, size, peer, "blocked")
        yield from _most(f"blocked: eager, of one copy in memory {how}", eager, copied, 1.3)
    biggest = max(results.sizes("save"))
    big = [_last(results, biggest, peer, "blocked") for peer in ("lazy", "eager")]
    yield from _most("blocked: lazy, of eager, the bigger state", big[0], big[1], 0.02)
    tensors = next((s["tensors"] for s in results.pick("save", size=biggest)), 0)
    yield from _most(f"blocked: lazy, milliseconds for {tensors:,} tensors", big[0], 0.001, 20)
    if lazy is not None and eager is not None:
        yield from _most("blocked: lazy, of eager, the smaller state", lazy, eager, 0.02)


def _restores(results: Results, size: int) -> Iterator[Row]:
    def seconds(peer: str, phase: str = "restore", part: str = "") -> float | None:
        found = [s for s in results.pick(phase, size=size, peer=peer) if part in s.get("way", "")]
        return _median(found, lambda s: s["seconds"])

    ours = seconds("eager")
    yield from _least("cold restore: of the bare disk's rate", seconds("direct"), ours, 0.90)
    yield from _least("cold restore: times as fast as DCP", seconds("dcp"), ours, 2.5)
    ways = [n for way in ("load_file", "safe_open") if (n := seconds("safetensors", part=way)) is not None]
    yield from _least("cold restore: times as fast as safetensors (its faster way)", min(ways, default=None), ours, 1.8)
    yield from _least("cold restore: times as fast as torch.load(mmap=True)", seconds("torch", part="mmap"), ours, 2.5)
    yield from _most("fresh load, of the restore in place", seconds("eager", "load"), ours, 1.3)


def _rest(results: Results, size: int) -> Iterator[Row]:
    memory = _median(results.pick("save", size=size, peer="small"), lambda s: s["memory"])
    yield from _most("extra memory with an arena of 512 MiB, of the arena", memory, 512 << 20, 1.05)
    unchanged = results.pick("unchanged", peer="eager")
    written = _median(unchanged, lambda s: s["saves"][-1]["written"] / s["nbytes"])
    yield from _most("unchanged state: bytes written, of its bytes", written, 1.0, 0.001)
    rate = _median(unchanged, lambda s: s["nbytes"] / s["saves"][-1]["captured"] / 1e9)
    yield from _least("unchanged state: GB/s, all threads together", rate, 1.0, 10)
    for every, most in ((5, 3.0), (1, 10.0)):
        for sample in results.pick("training", peer="lazy", every=every):
            quiet, saving = (sum(sample[k]) / len(sample[k]) for k in ("quiet", "saving"))
            slower = 100 * (saving / quiet - 1)
            yield from _most(f"training slowed, lazy, a save each {every} steps: %", slower, 1.0, most)


def _last(results: Results, size: int, peer: str, what: str) -> float | None:
    return _median(results.pick("save", size=size, peer=peer), lambda s: s["saves"][-1][what])


def _median(samples: list[Sample], number: Pick) -> float | None:
    found = Spread.of(samples, number)
    return None if found is None else found.median


def _least(what: str, one: float | None, other: float | None, least: float) -> Iterator[Row]:
    if one is not None and other:
        yield f"{what}: at least {least:g}", f"{one / other:.2f}", "yes" if one / other >= least else "**no**"


def _most(what: str, one: float | None, other: float | None, most: float) -> Iterator[Row]:
    if one is not None and other:
        yield f"{what}: at most {most:g}", f"{one / other:.4g}", "yes" if one / other <= most else "**no**"
