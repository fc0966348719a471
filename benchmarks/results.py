"""Results: samples as they were measured, kept as JSON, and medians of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Sample = dict[str, Any]


@dataclass
class Results:
    """All that one run has found.

    Attributes:
        machine: facts by name.
        options: the run's own.
        versions: of the competitors, by name.
        left_out: what could not run here, and why.
        failures: what went wrong.
        samples: each with its ``phase``, and ``peer``, ``size``, ``round``, ``way`` where they apply.
    """

    machine: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Results that were written before."""
        found = json.loads(path.read_text())
        found.pop("medians")
        return cls(**found)

    def write(self, path: Path) -> None:
        """Keep everything, with the medians for whoever reads the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self) | {"medians": self.medians()}, indent=1) + "\n")

    def pick(self, phase: str, **wanted: Any) -> list[Sample]:
        """Samples of a phase that have these values."""
        return [s for s in self.samples if s["phase"] == phase and all(s.get(k) == v for k, v in wanted.items())]

    def sizes(self, phase: str) -> list[int]:
        """Sizes measured, smallest first."""
        return sorted({s["size"] for s in self.pick(phase)})

    def medians(self) -> list[Sample]:
        """One line for each thing that was measured, over its rounds."""
        groups: dict[tuple[Any, ...], list[Sample]] = {}
        for sample in self.samples:
            key = tuple(sample.get(name) for name in ("phase", "size", "peer", "way", "every"))
            groups.setdefault(key, []).append(_counted(sample))
        lines = []
        for (phase, size, peer, way, every), samples in groups.items():
            line = {"phase": phase, "size": size, "peer": peer, "way": way, "every": every, "rounds": len(samples)}
            numbers = {k: [s[k] for s in samples] for k, v in samples[0].items() if isinstance(v, (int, float))}
            lines.append(line | {k: statistics.median(v) for k, v in numbers.items() if k not in line})
        return lines


def _counted(sample: Sample) -> Sample:
    """A sample with the numbers of its last save, which is the one that counts, at the top."""
    return sample | sample["saves"][-1] if "saves" in sample else sample


@dataclass(frozen=True)
class Spread:
    """Median, least and most of some repetitions."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: list[Sample], number: Callable[[Sample], float | None]) -> Spread | None:
        """None where there is nothing to measure."""
        found = [n for n in map(number, samples) if n is not None]
        return cls(statistics.median(found), min(found), max(found)) if found else None

    def __str__(self) -> str:
        middle, least, most = map(short, (self.median, self.least, self.most))
        return middle if least == most else f"{middle} ({least}–{most})"


def short(number: float) -> str:
    """A number with three digits that count, about."""
    return f"{number:.3f}" if abs(number) < 1 else f"{number:.2f}" if abs(number) < 100 else f"{number:.0f}"
