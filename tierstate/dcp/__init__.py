"""Plug-ins for ``torch.distributed.checkpoint`` (DCP): a storage writer, a storage reader, a stager, and `routed`."""

from .engine import close
from .plugins import TierReader, TierWriter
from .routed import routed
from .staging import TierStager

__all__ = ["TierReader", "TierStager", "TierWriter", "close", "routed"]
