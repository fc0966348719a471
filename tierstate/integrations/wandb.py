"""Weights & Biases: a version as a reference artifact. ``log_version("policy.yaml", ckpt.info(tag="best"))``.

The artifact holds the version's URI and what is known of it; nothing is uploaded. Written for wandb 0.31.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import wandb

from tierstate.engine.info import VersionInfo

from .version_uri import version_facts, version_uri

__all__ = ["log_version"]

ENTRY = "version"
"""The name of the artifact's only entry, the reference."""


def log_version(
    policy: str | os.PathLike[str],
    info: VersionInfo,
    *,
    run: wandb.Run | None = None,
    name: str | None = None,
    aliases: Sequence[str] = (),
) -> wandb.Artifact:
    """Log a version as an artifact of the type ``model``. The same version again is the same version of the artifact.

    Aliases are ``step-N``, the version's tags, and those that are given; W&B itself adds ``latest``.

    Args:
        policy: path of the policy file.
        info: of `Checkpointer.info` or `versions`.
        run: by default the current run.
        name: of the artifact; by default the name of the version's run.

    Raises:
        RuntimeError: there is no run.
        FileNotFoundError, ValueError: as `version_uri`.
    """
    run = wandb.run if run is None else run
    if run is None:
        raise RuntimeError("there is no W&B run to log to: call wandb.init() before, or give run=")
    artifact = wandb.Artifact(name or info.run, type="model", metadata=version_facts(info))
    artifact.add_reference(version_uri(policy, info), name=ENTRY, checksum=False)
    run.log_artifact(artifact, aliases=list(dict.fromkeys([f"step-{info.step}", *info.tags, *aliases])))
    return artifact
