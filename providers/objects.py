"""Arbitrary objects as pickles: only where the user says so, and marked in the manifest."""

from __future__ import annotations

import pickle
from typing import Any, ClassVar

from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.leaf import Spec

from .values import Encoded


class ObjectProvider(Encoded):
    """An object as a pickle of protocol 5, made when it is first asked for its spec or bytes.

    Raises:
        CaptureError: when asked, if the object cannot be pickled.
    """

    kind: ClassVar[str] = "object"
    unsafe: ClassVar[str] = "is a pickle, which can run any code while it is read"

    @property
    def spec(self) -> Spec:
        kind = type(self._value)
        return Spec(self.kind, "uint8", 1, (self.data.numel(),), {"type": f"{kind.__module__}.{kind.__qualname__}"})

    @staticmethod
    def _encode(value: Any) -> bytes:
        try:
            return pickle.dumps(value, protocol=5)
        except Exception as error:
            raise CaptureError(f"a {type(value).__qualname__} cannot be pickled: {error}") from error

    @staticmethod
    def _decode(data: bytes) -> Any:
        try:
            return pickle.loads(data)
        except Exception as error:
            raise FormatError(f"a pickle cannot be read here: {type(error).__name__}: {error}") from error
