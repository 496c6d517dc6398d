"""Metrics as a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from typing_extensions import override

from strategies.sinks.sink import STEP, Row, Sink


@final
class WandbRun(Sink):
    """A run of Weights & Biases. Its own variables decide the rest, for example WANDB_MODE=offline and WANDB_DIR.

    "step" is the axis of all numbers. If steps are made again, their numbers are added behind the earlier ones.

    Args:
        project: Name of the project; empty: chosen by the variables of Weights & Biases.
        run: Id of one run shared by all instances and restarts of the job; empty: each has its own run.
    """

    way_out = "log in to it, or set WANDB_MODE=offline"

    def __init__(self, project: str, run: str) -> None:
        self.name = f"wandb:{project}" if project else "wandb"
        self._project = project
        self._id = run
        self._run: Any = None

    @override
    def open(self, goes_on: bool) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=self._project or None, id=self._id or None, resume="allow", reinit="create_new", settings=settings
        )
        self._id = self._run.id
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    @override
    def write(self, rows: Sequence[Row]) -> None:
        """Hand the rows to the process of Weights & Biases, which sends them."""
        import wandb

        for row in rows:
            of_all = row.distributions.items()
            histograms = {name: wandb.Histogram(np_histogram=(each.counts, each.edges)) for name, each in of_all}
            self._run.log({STEP: row.step, "_timestamp": row.time_s, **histograms, **row.values})

    @override
    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
