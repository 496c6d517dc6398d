"""Metrics for files, TensorBoard, Prometheus, MLflow, Weights & Biases, or sinks of your own.

`poprun --metrics WORD`, or POPDIST_METRICS, writes all steps and evaluations of a job; the program stays as it is. See
observability.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import popdist
from popdist.records.distribution_settings import DistributionSettings
from strategies.sinks.sink import Distribution, JobFacts, Row, Sink
from strategies.sinks.sinks import Sinks, asked_sinks, open_sinks, opened
from strategies.strategy import Strategy, get_strategy
from strategies.typing import Number

__all__ = ["Distribution", "Row", "Sink", "Sinks", "log", "open"]


def open(
    *sinks: str | Sink, strategy: Strategy | None = None, norms_every: int = 0, histograms_every: int = 0
) -> Sinks:
    """Write the metrics of every step and evaluation to sinks. Call it on every instance in the same way.

    One instance opens the sinks and writes to them in threads, so a step never waits for a sink. If a sink fails, a
    message says so, and training goes on.

    Example::

        with strategies.metrics.open("csv:run.csv", "tensorboard:logs", strategy=strategy):
            state, metrics = trainer.run(state, dataset)

    Args:
        sinks: `csv:FILE`, `jsonl:FILE`, `tensorboard:FOLDER`, `prometheus:[HOST:]PORT`, `mlflow[:URI]`,
            `wandb[:PROJECT]`, or your own `Sink` objects.
        strategy: Strategy whose trainers write to the sinks. None: the strategy of the open scope; without one, only
            `log` writes to the sinks.
        norms_every: Number of steps from one look at the norms of weights and mean gradients to the next, the first
            step included; 0 for none. Each layer has a metric, and all layers together have one.
        histograms_every: Number of steps from one look at their distributions to the next; 0 for none.

    Raises:
        TypeError: If a number of steps is not an integer.
        ValueError: If a word is unknown, a sink cannot be opened, or a number of steps is negative. If norms or
            histograms are asked for without a strategy, or the strategy takes them already, at other steps.
    """
    strategy = strategy or get_strategy()
    settings = DistributionSettings(norms_every, histograms_every)
    if strategy is None and settings.are_on:
        raise ValueError("norms and histograms are those of a strategy's trainers, and none is given; give a strategy")
    if strategy is None:
        return open_sinks(sinks, JobFacts(is_chief=popdist.is_chief), os.environ)
    replicas = strategy.replicas
    before = replicas.distributions
    if settings.are_on and before not in (None, settings):
        raise ValueError(
            f"the strategy takes {before.words} already, and cannot take {settings.words}; "
            "ask for the same, or only once"
        )
    found = open_sinks(sinks, replicas.job, os.environ)
    found.looks = settings if settings.are_on else None
    replicas.sinks.append(found)
    found.at_close(replicas.sinks.remove)
    return found


def log(values: Mapping[str, Number], step: int) -> None:
    """Write numbers to all open sinks of this process. Call it on every instance in the same way.

    Training loops without a `Trainer` use it, and programs with metrics that a `Trainer` does not know. It is not a
    collective call, and costs nothing if no sink is open.

    Args:
        values: Numbers, or arrays of one element, by name. Arrays of JAX may be unfinished.
        step: Number of steps so far.

    Raises:
        TypeError: If a value is not a number; see `Sinks.log`.
        ValueError: If the values or the step are out of range; see `Sinks.log`.
    """
    asked_sinks(JobFacts(is_chief=popdist.is_chief), os.environ)
    for sinks in opened():
        sinks.log(values, step)
