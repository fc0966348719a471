"""Changes every byte of a state's memory, and changes it back."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch


def blocks(value: Any, seen: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Address and length of all memory that tensors, arrays and bytearrays of a state lie in."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        seen[storage.data_ptr()] = (storage.data_ptr(), storage.nbytes())
    elif isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        address = value.__array_interface__["data"][0]
        seen[address] = (address, value.nbytes)
    elif isinstance(value, dict):
        for item in value.values():
            blocks(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            blocks(item, seen)
    return seen


def flip(state: Any) -> None:
    """Change every byte of the state's memory; done twice, everything is as before."""
    for address, nbytes in blocks(state, {}).values():
        memory = (
            np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8) if nbytes else np.zeros(0, "u1")
        )
        memory ^= 1
