"""Tracker `mlflow`: MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import AfterValidator

from rlsys.monitoring.events import AlertRaised
from rlsys.monitoring.tracker import EndReason, RunFacts, StepTracker, TrackedEpisode
from rlsys.util.leaves import leaves
from rlsys.util.url_credentials import credential_in

_Client: TypeAlias = Any
"""An `mlflow.MlflowClient`, untyped because `mlflow` is imported only where it is used."""
_PARAMS_AT_ONCE = 100
_LONGEST_PARAM = 6000


def _without_password(uri: str) -> str:
    if (credential := credential_in(uri)) is not None:
        remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
        raise ValueError(f"has {credential}, which the files of the run would show; {remedy}")
    return uri


@dataclass(frozen=True, kw_only=True)
class MLflow(StepTracker):
    """MLflow, on a server or in files; a resumed run continues under the same id."""

    package: ClassVar[str] = "mlflow"
    experiment: str = "rlsys"
    """Experiment of the run; created if it does not exist."""
    uri: Annotated[str, AfterValidator(_without_password)] | None = None
    """Server or store, e.g. `http://host:5000`; set user and password in the variables MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD. None: the value of MLFLOW_TRACKING_URI, else files in `RUN/tracking/mlflow`."""

    def start(self, run: RunFacts) -> MLflowRun:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 prefers a database
        files = (run.folder / "mlflow").absolute().as_uri()
        client = import_module("mlflow").MlflowClient(self.uri or os.environ.get("MLFLOW_TRACKING_URI") or files)

        def create_run() -> str:
            return client.create_run(experiment_of(client, self.experiment), run_name=run.title).info.run_id

        opened = MLflowRun(client, run.kept_id("mlflow", create_run))
        opened.begin(run.config)
        return opened


class MLflowRun:
    """Open run in MLflow."""

    def __init__(self, client: _Client, identity: str) -> None:
        self._client, self._id = client, identity
        self._entities = import_module("mlflow.entities")

    def begin(self, config: Mapping[str, Any]) -> None:
        """Log each key of the configuration, and all of it as a file, because a logged parameter cannot change."""
        self._client.update_run(self._id, status="RUNNING")
        stored_params = self._client.get_run(self._id).data.params
        named = {_allowed_name(key): str(value)[:_LONGEST_PARAM] for key, value in leaves(config)}
        params = [self._entities.Param(key, value) for key, value in named.items() if key not in stored_params]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + _PARAMS_AT_ONCE])
        self._client.log_dict(self._id, dict(config), "config.yaml")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log one value of each metric. MLflow allows no `@` in a name: `pass@4` becomes `pass_at_4`."""
        now_ms = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(_allowed_name(name), float(value), now_ms, step) for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def rollouts(self, step: int, rows: Sequence[TrackedEpisode]) -> None:
        """Write the file `rollouts/step_N.json`."""
        table = {"columns": TrackedEpisode._fields, "data": rows}
        self._client.log_dict(self._id, table, f"rollouts/step_{step}.json")

    def alert(self, alert: AlertRaised) -> None:
        """Set the tag `alert.NAME` to the newest sentence."""
        self._client.set_tag(self._id, f"alert.{_allowed_name(alert.alert)}", f"step {alert.step}: {alert.sentence}")

    def close(self, reason: EndReason) -> None:
        """Mark the run as finished, killed or failed."""
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[reason]
        self._client.set_terminated(self._id, status)


def experiment_of(client: _Client, name: str) -> str:
    """Id of an experiment, which is created if it does not exist."""
    if there := client.get_experiment_by_name(name):
        return there.experiment_id
    try:
        return client.create_experiment(name)
    except import_module("mlflow.exceptions").MlflowException:
        if there := client.get_experiment_by_name(name):  # another policy or run has just created it
            return there.experiment_id
        raise


def _allowed_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
