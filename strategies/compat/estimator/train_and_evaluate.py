"""Training with evaluations in between."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from strategies.argument_checks import wrong_type
from strategies.compat.estimator.base import Estimator
from strategies.compat.estimator.run_config import EvalSpec, ModeKeys, TrainSpec


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any], list[Any]]:
    """Train, and evaluate at checkpoints and at the end. Collective.

    Returns:
        The last evaluation, and what exporters returned.

    Raises:
        TypeError: If an argument has the wrong type.
    """
    for value, kind in ((estimator, Estimator), (train_spec, TrainSpec), (eval_spec, EvalSpec)):
        if not isinstance(value, kind):
            raise wrong_type(f"the {kind.__name__}", value, f"use an object of {kind.__name__}")
    listener = _Evaluations(estimator, eval_spec)
    listeners = [listener, *(train_spec.saving_listeners or ())]
    estimator.train(train_spec.input_fn, train_spec.hooks, None, train_spec.max_steps, listeners)
    return listener.evaluate(is_final=True)


class _Evaluations:
    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self._estimator, self._spec, self._last = estimator, spec, time.monotonic()

    def after_save(self, session: None, global_step: int) -> None:
        """Evaluate, if the last evaluation is long enough ago on worker 0."""
        is_due = time.monotonic() - self._last >= self._spec.throttle_secs
        if bool(self._estimator.strategy_of(ModeKeys.TRAIN).broadcast(np.int32(is_due))):
            self.evaluate(is_final=False)

    def evaluate(self, is_final: bool) -> tuple[dict[str, Any], list[Any]]:
        """Return an evaluation, and what exporters return."""
        own, spec = self._estimator, self._spec
        found = own.evaluate(spec.input_fn, spec.steps, spec.hooks, None, spec.name)
        self._last = time.monotonic()
        exporters = [spec.exporters] if hasattr(spec.exporters, "export") else spec.exporters or []
        exporters = exporters if own.strategy_of(ModeKeys.TRAIN).is_chief else []
        folder, checkpoint = Path(own.model_dir or ".", "export"), own.latest_checkpoint()
        return found, [one.export(own, str(folder / one.name), checkpoint, found, is_final) for one in exporters]
