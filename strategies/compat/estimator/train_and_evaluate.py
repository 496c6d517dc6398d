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
    strategy, end = estimator.strategy_of(ModeKeys.TRAIN), train_spec.max_steps
    due_at, is_over = 0.0, False
    result: tuple[dict[str, Metric], list[object]] = {}, []

    def evaluate(is_final: bool) -> None:
        nonlocal due_at, is_over, result
        due_at, is_over = time.monotonic() + eval_spec.throttle_secs, is_final
        found = estimator.evaluate(eval_spec.input_fn, eval_spec.steps, eval_spec.hooks, None, eval_spec.name)
        exporters = [eval_spec.exporters] if hasattr(eval_spec.exporters, "export") else eval_spec.exporters or ()
        exporters, folder = exporters if strategy.is_chief else (), Path(estimator.model_dir or ".", "export")
        saved = estimator.latest_checkpoint()
        result = found, [one.export(estimator, str(folder / one.name), saved, found, is_final) for one in exporters]

    def after_save(session: None, global_step: int) -> None:
        if strategy.broadcast(np.int32(time.monotonic() >= due_at)):  # worker 0 decides
            evaluate(end is not None and global_step >= end)

    listeners = [*(train_spec.saving_listeners or ()), SimpleNamespace(after_save=after_save)]
    estimator.train(train_spec.input_fn, train_spec.hooks, None, end, listeners)
    if not is_over:
        evaluate(is_final=True)
    return result
