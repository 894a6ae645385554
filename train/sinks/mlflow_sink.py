"""MLflow: one run there for all attempts of a run here."""

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from train.sinks.resumable import SinkState
from train.sinks.sink import Figures

log = logging.getLogger(__name__)

EXPERIMENT = "keepstep"
FORBIDDEN = re.compile(r"[^\w./ -]")
"""Characters that the name of a metric or parameter must not have."""
PARAMS = 100
"""Parameters that one request may have."""
LONGEST = 500
"""Characters of a parameter's value that are logged."""


class MlflowSink:
    """Logs to the run whose id is in the run folder, or to a new one.

    `MLFLOW_TRACKING_URI` names the server, and `MLFLOW_EXPERIMENT_NAME` the experiment. Without a server, files in the
    run folder hold the run. The recipe's settings become its parameters when it is created."""

    def __init__(self, folder: Path, state: SinkState, name: str, settings: Mapping[str, Any]) -> None:
        """`folder`: where MLflow's own files go. `name`: of the run. `settings`: by dotted name."""
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (folder / "mlruns").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        self._state = state
        self._id = self._resumed(self._state.id) or self._created(name, settings)
        self.lacks_from = self._state.last_step

    def log(self, step: int, figures: Figures) -> None:
        """Log the values that MLflow does not have yet."""
        if new := self._state.new(step, figures):
            now = int(time.time() * 1000)
            metrics = [Metric(FORBIDDEN.sub("_", tag), value, now, step) for tag, value in new.items()]
            self._client.log_batch(self._id, metrics=metrics)
            self._state.sent(step, new)

    def close(self) -> None:
        """Mark the run as finished; a resume continues it."""
        self._client.set_terminated(self._id, "FINISHED")

    def _resumed(self, run_id: str) -> str | None:
        """Continue a run; None if there is none, or if the server does not know it."""
        if not run_id:
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            log.warning("MLflow does not know the run %s any more; a new one begins", run_id)
            return None
        return run_id

    def _created(self, name: str, settings: Mapping[str, Any]) -> str:
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(wanted)
        experiment = found.experiment_id if found else self._client.create_experiment(wanted)
        run_id: str = self._client.create_run(experiment, run_name=name).info.run_id
        self._state.begin(run_id)
        params = [Param(FORBIDDEN.sub("_", key), str(value)[:LONGEST]) for key, value in settings.items()]
        for first in range(0, len(params), PARAMS):
            self._client.log_batch(run_id, params=params[first : first + PARAMS])
        return run_id
