"""Metrics on their way out: to files, TensorBoard, Prometheus, MLflow, Weights & Biases, or a sink of one's own.

`poprun --metrics WORD`, or POPDIST_METRICS, has all steps and evaluations of a job written without a change of the
program. See observability.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import popdist
from strategies.sinks.opening import asked_sinks, open_sinks, opened
from strategies.sinks.sink import Row, Sink
from strategies.sinks.sinks import JobFacts, Sinks
from strategies.strategy import Strategy, get_strategy
from strategies.typing import Number

__all__ = ["Row", "Sink", "Sinks", "log", "open"]


def open(*sinks: str | Sink, strategy: Strategy | None = None) -> Sinks:
    """Have the metrics of every step and evaluation written; to be called on every instance alike.

        with strategies.metrics.open("csv:run.csv", "tensorboard:logs", strategy=strategy):
            state, metrics = trainer.run(state, dataset)

    One instance opens and writes them, in threads of their own; nothing waits for a sink. One that fails is said to,
    and stops nothing.

    Args:
        sinks: `csv:FILE`, `jsonl:FILE`, `tensorboard:FOLDER`, `prometheus:[HOST:]PORT`, `mlflow[:URI]`,
            `wandb[:PROJECT]`, or sinks of one's own.
        strategy: whose trainers write there; None: the current one (`strategy.scope()`), or none: then it is for `log`.

    Raises:
        ValueError: a word means nothing, or a sink cannot be opened.
    """
    strategy = strategy or get_strategy()
    if strategy is None:
        return open_sinks(sinks, JobFacts(is_chief=popdist.is_chief), os.environ)
    replicas = strategy.replicas
    found = open_sinks(sinks, replicas.job, os.environ)
    replicas.sinks.append(found)
    found.at_close(replicas.sinks.remove)
    return found


def log(values: Mapping[str, Number], step: int) -> None:
    """Write numbers of one's own to all sinks of this process; to be called on every instance alike.

    For loops of one's own, and for what a `Trainer` does not know. It is no collective call, and costs nothing where no
    sink is open.

    Args:
        values: numbers by their names, or arrays of one; those of JAX may still be being computed.
        step: how many steps were made.

    Raises:
        TypeError, ValueError: see `Sinks.log`.
    """
    asked_sinks(JobFacts(is_chief=popdist.is_chief), os.environ)
    for sinks in opened():
        sinks.log(values, step)
