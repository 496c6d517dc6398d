"""Training with evaluations in between."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from strategies.argument_checks import wrong_type
from strategies.compat.estimator.base import Estimator
from strategies.compat.estimator.run_config import EvalSpec, ModeKeys, TrainSpec
from strategies.typing import Metric


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Metric], list[object]]:
    """Train, and evaluate at checkpoints and at the end. Collective.

    Returns:
        The last evaluation, and what exporters returned.

    Raises:
        TypeError: If an argument has the wrong type.
    """
    for value, kind in ((estimator, Estimator), (train_spec, TrainSpec), (eval_spec, EvalSpec)):
        if not isinstance(value, kind):
            raise wrong_type(f"the {kind.__name__}", value, f"use an object of {kind.__name__}")
    strategy, last = estimator.strategy_of(ModeKeys.TRAIN), time.monotonic()

    def after_save(session: None, global_step: int) -> None:
        nonlocal last
        if strategy.broadcast(np.int32(time.monotonic() - last >= eval_spec.throttle_secs)):  # worker 0 decides
            evaluated(is_final=False)
            last = time.monotonic()

    def evaluated(is_final: bool) -> tuple[dict[str, Metric], list[object]]:
        found = estimator.evaluate(eval_spec.input_fn, eval_spec.steps, eval_spec.hooks, None, eval_spec.name)
        exporters = [eval_spec.exporters] if hasattr(eval_spec.exporters, "export") else eval_spec.exporters or ()
        exporters, folder = exporters if strategy.is_chief else (), Path(estimator.model_dir or ".", "export")
        saved = estimator.latest_checkpoint()
        return found, [one.export(estimator, str(folder / one.name), saved, found, is_final) for one in exporters]

    listeners = [SimpleNamespace(after_save=after_save), *(train_spec.saving_listeners or ())]
    estimator.train(train_spec.input_fn, train_spec.hooks, None, train_spec.max_steps, listeners)
    return evaluated(is_final=True)
