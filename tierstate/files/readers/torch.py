"""Reads files of ``torch.save`` without running code in them."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tierstate.manifest.errors import FormatError, Unsafe

from .reader import ImportSource


@contextmanager
def open_torch(path: Path) -> Iterator[ImportSource]:
    """The state in a file. Tensors are memory-mapped, not read, if the file has torch's zip format.

    Raises:
        Unsafe: it contains objects that ``torch.load(weights_only=True)`` does not load.
        FormatError: it is not such a file.
    """
    try:
        # The mapping uses a descriptor that is open for reading only; nothing is written to the file.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise Unsafe(
            f"{path} holds more than tensors and plain values, and to load that would run its code; save it anew with "
            f"those alone ({_reason(str(error))})"
        ) from error
    except OSError:
        raise
    except Exception as error:  # torch may raise anything for bytes that it did not write
        raise FormatError(f"{path} cannot be read as a file of torch.save: {error}") from error
    yield ImportSource(state)


def _reason(text: str) -> str:
    """What torch found, without its advice, which comes first in bold letters and is to load the file as it is."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = next((line for line in lines if "Unsupported " in line), lines[0] if lines else "no reason given")
    return found.partition("WeightsUnpickler error: ")[2].partition(" was not an allowed global")[0] or found
