"""Experiment trackers get the events of a run as numbers: ``to_wandb(ckpt)``, ``to_mlflow(ckpt)``, ``to_tensorboard``.

Each is a hook (`Checkpointer.on`), called in a thread of its own. Versions as artifacts are in `wandb` and `mlflow`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tierstate.engine.events import EVERY, Event

if TYPE_CHECKING:
    from tierstate.run import Run

__all__ = ["to_mlflow", "to_tensorboard", "to_wandb"]


def values_of(event: Event) -> Mapping[str, float]:
    """The numbers of an event, by the names under which trackers show them; empty if it has none for them."""
    where = f"tierstate/{event.tier}" if event.tier and event.kind != "restored" else "tierstate"
    match event.kind:
        case "saved":
            return {f"{where}/blocked_seconds": event.seconds or 0.0}
        case "waited":
            return {f"{where}/guard_wait_seconds": event.seconds or 0.0}
        case "committed" | "cascaded" | "brought":
            found = {f"{where}/written_bytes": float(event.nbytes or 0)}
            if event.seconds is not None:
                found[f"{where}/{'copy' if event.kind == 'cascaded' else 'committed'}_seconds"] = event.seconds
            return found
        case "failed" | "left_out" | "owed":
            return {f"{where}/{event.kind}": 1.0}
        case "restored":
            return {f"{where}/restore_seconds": event.seconds or 0.0}
    return {}


def _subscribe(ckpt: Run, log: Callable[[Mapping[str, float], int | None], object]) -> Callable[[], None]:
    def call(event: Event) -> None:
        if values := values_of(event):
            log(values, event.step)

    return ckpt.on(EVERY, call)


def to_wandb(ckpt: Run, run: Any = None) -> Callable[[], None]:
    """Log to Weights & Biases. W&B's own step is left to the training: the values go with what it logs next, the newest
    of those that have come since it last did. The step of a version is a value of its own, ``tierstate/step``, and for
    each tier ``tierstate/TIER/step``, since tiers get a version at different times.

    Args:
        run: by default the current run.

    Returns:
        A function that ends this.

    Raises:
        RuntimeError: there is no run.
    """
    import wandb

    run = wandb.run if run is None else run
    if run is None:
        raise RuntimeError("there is no W&B run to log to: call wandb.init() before, or give run=")
    for kind in ("saved", "waited", "restored"):
        for name in values_of(Event(kind, 0.0, ckpt.run)):
            run.define_metric(name, step_metric="tierstate/step")
    for tier in ckpt.policy.tiers:
        run.define_metric(f"tierstate/{tier.name}/step")  # not by itself
        run.define_metric(f"tierstate/{tier.name}/*", step_metric=f"tierstate/{tier.name}/step")

    def log(values: Mapping[str, float], step: int | None) -> None:
        where = {name.rpartition("/")[0] for name in values}
        run.log({**values, **{f"{one}/step": step for one in where}}, commit=False)

    return _subscribe(ckpt, log)


def to_mlflow(ckpt: Run, run_id: str | None = None) -> Callable[[], None]:
    """Log to MLflow.

    Args:
        run_id: by default that of the active run.

    Returns:
        A function that ends this.

    Raises:
        RuntimeError: there is no active run.
    """
    import mlflow

    if run_id is None:
        active = mlflow.active_run()
        if active is None:
            raise RuntimeError("there is no active MLflow run: call mlflow.start_run() before, or give run_id=")
        run_id = active.info.run_id
    client = mlflow.MlflowClient()

    def log(values: Mapping[str, float], step: int | None) -> None:
        for name, value in values.items():
            client.log_metric(run_id, name, value, step=step or 0)

    return _subscribe(ckpt, log)


def to_tensorboard(ckpt: Run, writer: Any) -> Callable[[], None]:
    """Log to TensorBoard.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or what has its ``add_scalar``.

    Returns:
        A function that ends this.
    """

    def log(values: Mapping[str, float], step: int | None) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return _subscribe(ckpt, log)
