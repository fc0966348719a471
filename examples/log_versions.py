"""Trains a small model, and logs its best version to W&B or MLflow as a reference; nothing is uploaded.

    python examples/log_versions.py --tracker mlflow --output out

W&B runs offline here, and MLflow with a database in the output folder: neither needs a server.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

import tierstate as ts

STEPS, SAVE_STEPS = 40, 10


def main() -> None:
    """The command line."""
    args = arguments()
    output = Path(args.output).resolve()
    output.mkdir(parents=True, exist_ok=True)
    policy = output / "policy.yaml"
    policy.write_text(f"version: 1\ntiers: {{disk: {{type: nvme, path: '{output}/tierstate'}}}}\n")
    info = train(policy)
    uri = (to_wandb if args.tracker == "wandb" else to_mlflow)(policy, info, output)
    print(f"step {info.step} is {uri}")


def train(policy: Path) -> ts.VersionInfo:
    """Train; the version with the least loss."""
    torch.manual_seed(7)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ts.Checkpointer(policy, run="small") as ckpt:
        for step in range(1, STEPS + 1):
            x = torch.randn(8, 16)
            loss = torch.nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % SAVE_STEPS == 0:
                ckpt.save({"model": model, "optimizer": optimizer}, step=step, metadata={"loss": loss.item()}).wait()
        best = min(ckpt.versions(), key=lambda version: version.metadata["loss"])
        ckpt.tag("best", version=best.id)  # retention keeps it
        return ckpt.info(version=best.id)


def to_wandb(policy: Path, info: ts.VersionInfo, output: Path) -> str:
    """An artifact of one reference."""
    import wandb

    from tierstate.integrations.wandb import log_version

    with wandb.init(project="small", dir=output, mode="offline"):
        artifact = log_version(policy, info, aliases=["candidate"])
    return str(artifact.manifest.entries["version"].ref)


def to_mlflow(policy: Path, info: ts.VersionInfo, output: Path) -> str:
    """A version of a registered model, of which the source is the URI."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    import mlflow

    from tierstate.integrations.mlflow import log_version

    mlflow.set_tracking_uri(f"sqlite:///{output}/mlflow.db")
    with mlflow.start_run():
        made = log_version(policy, info, model="small", aliases=["champion"])
    return str(made.source)


def arguments() -> argparse.Namespace:
    """What was given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tracker", choices=["wandb", "mlflow"], default="mlflow")
    parser.add_argument("--output", default="out", help="folder for all that is written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
