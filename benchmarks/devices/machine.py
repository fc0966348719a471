"""Whether a machine can measure what was asked for, and what a reader has to know of its device."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from tierstate.tiers.units import rough_size

from .state import SMALL

PIECE = 256 << 20
"""Bytes of a raw copy, at most."""

PINNED = 1 << 30
"""Bytes of the pinned buffer of raw copies, at most, and of what is pinned to see what that costs."""

BESIDE = 3 * PIECE
"""Device memory that is needed beside the states: pieces of raw copies, and the matrices of the steps."""


class TooSmall(Exception):
    """This machine cannot measure what was asked for."""


def gpu_facts() -> dict[str, str]:
    """What a reader has to know of the device."""
    seen = torch.cuda.get_device_properties(0)
    found = {
        "GPU": f"{seen.name}, {seen.total_memory / 2**30:.0f} GiB",
        "CUDA of torch": str(torch.version.cuda),
    }
    names = ("driver_version", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current")
    which = getattr(seen, "uuid", None)
    told = _nvidia_smi(names, f"GPU-{which}" if which is not None else "0")
    if told is None:
        return found | {"driver and PCIe link": "nvidia-smi does not tell"}
    driver, now, most, width = told
    return found | {"driver": driver, "PCIe": f"generation {most} (now {now}), {width} lanes"}


def _nvidia_smi(names: Sequence[str], which: str) -> list[str] | None:
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "-i", which]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in ran.stdout.strip().split(",")]
    return values if len(values) == len(names) else None


def check_machine(size: int, shapes: Sequence[str]) -> None:
    """Whether this machine can measure states of this size.

    Raises:
        TooSmall: it has no CUDA device, or too little memory.
    """
    if not torch.cuda.is_available():
        raise TooSmall("there is no CUDA device that torch can use here, and this benchmark measures nothing else")
    most = max(SMALL if shape == "small" else 4 for shape in shapes)
    if size < most:
        raise TooSmall(f"--size is less than a tensor of {rough_size(most)}")
    free = torch.cuda.mem_get_info()[0]
    if free < 3 * size + BESIDE:
        raise TooSmall(
            f"a state of {rough_size(size)} needs three times that and {rough_size(BESIDE)} of device memory: "
            f"the state and two copies in a gpu tier; {rough_size(free)} are free: give a smaller --size"
        )
    line = next(one for one in Path("/proc/meminfo").read_text().splitlines() if one.startswith("MemAvailable"))
    available = int(line.split()[1]) * 1024
    if available < 2.25 * size + PINNED:
        raise TooSmall(
            f"a state of {rough_size(size)} needs {rough_size(int(2.25 * size) + PINNED)} of host memory: two versions "
            f"in a host tier, and what is pinned for raw copies; {rough_size(available)} are available: give a smaller "
            "--size"
        )
