"""Metrics as a run of MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, final

from typing_extensions import override

from popdist.records.distribution_settings import GRADIENT_NORM, WEIGHT_NORM
from strategies.sinks.sink import Row, Sink

EXPERIMENT_VARIABLE = "MLFLOW_EXPERIMENT_NAME"
_USUAL_EXPERIMENT = "popdist"
_TAG = "popdist.run"
_MOST_IN_A_BATCH = 1000  # the limit of MLflow's log-batch request


@final
class MlflowRun(Sink):
    """A run in an MLflow experiment.

    If steps are made again, their values are added behind the earlier ones, because MLflow cannot replace values.
    Of a distribution it gets the quantiles and the other numbers. The norms of layers have the plural as their folder,
    `gradient_norms/LAYER`: in a folder of MLflow, `gradient_norm` is a file.

    Args:
        uri: URI of the tracking server or its folder; empty: chosen by MLflow's own variables.
        experiment: Name of the experiment; empty: "popdist".
        run: Name of one run shared by all instances and restarts of the job; empty: each has its own run.
    """

    way_out = "check its server, or name another URI"

    def __init__(self, uri: str, experiment: str, run: str) -> None:
        self.name = f"mlflow:{uri}" if uri else "mlflow"
        self._uri = uri
        self._experiment = experiment or _USUAL_EXPERIMENT
        self._run = run
        self._run_id = ""
        self._client: Any = None

    @override
    def open(self, goes_on: bool) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri or None)
        if not self._run_id:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
            self._run_id = self._shared_run(experiment)
            if not self._run_id:
                run = self._client.create_run(experiment, tags={_TAG: self._run} if self._run else None)
                self._run_id = str(run.info.run_id)

    @override
    def write(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        metrics = (
            Metric(_path_of(name), number, int(1000 * row.time_s), row.step)
            for row in rows
            for name, number in row.all_values.items()
        )
        while batch := list(islice(metrics, _MOST_IN_A_BATCH)):
            self._client.log_batch(self._run_id, metrics=batch)

    @override
    def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self._run_id, "FINISHED")

    def _shared_run(self, experiment: str) -> str:
        if not self._run:
            return ""
        runs = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{self._run}'", max_results=1)
        return runs[0].info.run_id if runs else ""


def _path_of(name: str) -> str:
    """Return the name of a number in MLflow."""
    kind, slash, layer = name.partition("/")
    return f"{kind}s/{layer}" if slash and kind in (GRADIENT_NORM, WEIGHT_NORM) else name
