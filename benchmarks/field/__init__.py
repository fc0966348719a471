"""The field: every competitor by name, in the order of the tables."""

from __future__ import annotations

from importlib import import_module

from benchmarks.competitor import Competitor

NAMES = {
    "lazy": "ours:Lazy",
    "eager": "ours:Eager",
    "waiting": "ours:Waiting",
    "small": "ours:SmallArena",
    "as-safetensors": "ours:AsSafetensors",
    "as-hdf5": "ours:AsHdf5",
    "torch": "torch_save:TorchSave",
    "dcp": "dcp:Dcp",
    "dcp-async": "dcp:DcpAsync",
    "safetensors": "safetensors_file:Safetensors",
    "torchsnapshot": "torchsnapshot_take:TorchSnapshot",
    "orbax": "orbax_save:Orbax",
    "memcpy": "memory:Memcpy",
    "memcpy-1": "memory:MemcpyAlone",
    "direct": "disk:Direct",
    "fio": "fio:Fio",
}
"""What ``--peers`` takes, and where it is."""


class Missing(Exception):
    """A competitor cannot run here; the message says what is missing."""


def find(name: str) -> type[Competitor]:
    """The competitor of that name.

    Raises:
        Missing: it cannot run here.
    """
    module, _, kind = NAMES[name].partition(":")
    try:
        found: type[Competitor] = getattr(import_module(f"{__name__}.{module}"), kind)
    except ImportError as error:
        raise Missing(f"{name}: {error}") from error
    if found.version() == "":
        raise Missing(f"{name}: the program is not installed")
    return found
