"""Metrics as a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from strategies.sinks.sink import STEP, Row, Sink


@final
class WandbRun(Sink):
    """A run of Weights & Biases; its own variables decide the rest, as WANDB_MODE=offline and WANDB_DIR.

    "step" is the axis of all numbers. Those of steps that are made again come behind those that are there.

    Args:
        project: empty: as its own variables say.
        run: a name that instances and restarts of a job share; they write to one run then. Empty: each has its own.
    """

    way_out = "log in to it, or set WANDB_MODE=offline"

    def __init__(self, project: str, run: str) -> None:
        self.name = f"wandb:{project}" if project else "wandb"
        self._project = project
        self._id = run
        self._run: Any = None

    def open(self, goes_on: bool) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=self._project or None, id=self._id or None, resume="allow", reinit="create_new", settings=settings
        )
        self._id = self._run.id
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, rows: Sequence[Row]) -> None:
        """See `Sink`; it has a process of its own, which sends them."""
        for row in rows:
            self._run.log({STEP: row.step, "_timestamp": row.time_s, **row.values})

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
