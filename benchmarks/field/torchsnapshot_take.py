"""TorchSnapshot: the sync take of an app state, and its restore."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from torchsnapshot import Snapshot, StateDict

from benchmarks.competitor import Competitor, Pending
from benchmarks.state import State


class TorchSnapshot(Competitor):
    """``Snapshot.take`` and ``restore``."""

    title = "TorchSnapshot"
    ways = ("TorchSnapshot `restore`",)
    note = (
        "it has no call that loads a whole state without a template; "
        "async_take is left out, since it may save values of CPU tensors from after the call"
    )

    @classmethod
    def version(cls) -> str:
        return f"torchsnapshot {version('torchsnapshot')}"

    def save(self, state: State, number: int) -> Pending:
        Snapshot.take(str(self.place(number)), app_state(state))
        return Pending()

    def restore(self, state: State, number: int, way: str) -> None:
        Snapshot(str(self.place(number))).restore(app_state(state))


def app_state(state: State) -> dict[str, Any]:
    """The state in the form it takes."""
    if not isinstance(state, State):  # tensors by name
        return {"state": StateDict(**state.nested())}
    return {"model": state.model, "optimizer": state.optimizer, "values": StateDict(**state.values)}
