"""MLflow: the URI of a version as tags of a run, and as the source of a model version in the registry.

    log_version("policy.yaml", ckpt.info(tag="best"), model="gpt")

Nothing is uploaded. Written for MLflow 3.17.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, ErrorCode

from tierstate.engine.info import VersionInfo

from .version_uri import version_facts, version_uri

__all__ = ["log_version"]


def log_version(
    policy: str | os.PathLike[str],
    info: VersionInfo,
    *,
    run_id: str | None = None,
    model: str | None = None,
    aliases: Sequence[str] = (),
    client: MlflowClient | None = None,
) -> Any:
    """Tag a run with a version, and register the version as one of a model, if that is named.

    Tags are ``tierstate.uri``, ``tierstate.version``, ``tierstate.step`` and so on. A run has those of the version that
    was logged last; a model version in the registry keeps its own.

    Args:
        policy: path of the policy file.
        info: of `Checkpointer.info` or `versions`.
        run_id: by default that of the active run.
        model: name of a registered model; it is made if there is none.
        aliases: of the model version.
        client: by default one for MLflow's current tracking and registry URIs.

    Returns:
        The registry's model version; None without ``model``.

    Raises:
        RuntimeError: no run is active.
        ValueError: aliases without a model.
        FileNotFoundError, ValueError: as `version_uri`.
        MlflowException: the server refused something, or cannot be reached.
    """
    active = mlflow.active_run()
    run_id = run_id or (active.info.run_id if active else None)
    if run_id is None:
        raise RuntimeError("there is no MLflow run to log to: call mlflow.start_run() before, or give run_id=")
    if aliases and model is None:
        raise ValueError("aliases belong to a model version: give model= too")
    client = client or MlflowClient()
    uri = version_uri(policy, info)
    tags = {"tierstate.uri": uri} | {f"tierstate.{key}": _text(value) for key, value in version_facts(info).items()}
    for key, value in tags.items():
        client.set_tag(run_id, key, value)
    if model is None:
        return None
    _register(client, model)
    made = client.create_model_version(model, uri, run_id, tags=tags)
    for alias in aliases:
        client.set_registered_model_alias(model, alias, made.version)
    return client.get_model_version(model, made.version)


def _register(client: MlflowClient, model: str) -> None:
    try:
        client.create_registered_model(model)
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
            raise


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
