"""Files of ``torch.save``, read without running code of theirs."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tierstate.manifest.errors import FormatError, Unsafe

from .foreign import Foreign


@contextmanager
def open_torch(path: Path) -> Iterator[Foreign]:
    """The state in a file; its tensors are mapped, not read, where the file is of the kind that torch can map.

    Raises:
        Unsafe: it holds what ``torch.load(weights_only=True)`` does not load.
        FormatError: it is no such file.
    """
    try:
        # Mapped with the descriptor's permission to read only; nothing is written to the file.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()
        raise Unsafe(
            f"{path} holds more than tensors and plain values, and to load that would run its code; save it anew with "
            f"those alone ({reason[0] if reason else 'no reason given'})"
        ) from error
    except OSError:
        raise
    except Exception as error:  # whatever torch makes of bytes that it never wrote
        raise FormatError(f"{path} cannot be read as a file of torch.save: {error}") from error
    yield Foreign(state)
