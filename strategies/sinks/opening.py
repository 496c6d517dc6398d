"""The sinks that words and environment variables name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import popdist
from popdist.errors import EnvironmentMismatchError
from popdist.records.faults import ATTEMPT_VARIABLE
from popdist.records.metric_words import (
    CSV,
    JSON_LINES,
    MLFLOW,
    PROMETHEUS,
    RUN_VARIABLE,
    TENSORBOARD,
    VARIABLE,
    MetricWord,
    fault_of,
    parse_words,
)
from strategies.sinks.csv_file import CsvFile
from strategies.sinks.json_lines import JsonLines
from strategies.sinks.mlflow_run import EXPERIMENT_VARIABLE, MlflowRun
from strategies.sinks.prometheus import Prometheus
from strategies.sinks.sink import Sink
from strategies.sinks.sinks import JobFacts, Sinks
from strategies.sinks.tensorboard import TensorBoard
from strategies.sinks.wandb_run import WandbRun

_opened: list[Sinks] = []
_asked: dict[str, Sinks] = {}


def open_sinks(wanted: Sequence[str | Sink], job: JobFacts, environ: Mapping[str, str]) -> Sinks:
    """Open sinks. `opened` lists them until they are closed.

    Args:
        wanted: Words such as "csv:run.csv", and sinks.
        job: Facts about the job.
        environ: Environment variables, with the number of restarts.

    Returns:
        The sinks, open on the instance that writes.

    Raises:
        ValueError: A word has no meaning, or a sink cannot be opened.
    """
    job = replace(job, restarts=int(environ.get(ATTEMPT_VARIABLE, "0")))
    words = parse_words([each for each in wanted if isinstance(each, str)])
    if job.is_chief() and not job.restarts and (faults := [fault for word in words if (fault := fault_of(word))]):
        raise ValueError(faults[0])
    own = [each for each in wanted if not isinstance(each, str)]
    if not words and not own:
        raise ValueError("metrics have no sink; name one, for example csv:run.csv")
    sinks = Sinks([*(sink_of(word, job, environ) for word in words), *own], job)
    _opened.append(sinks)
    sinks.at_close(_opened.remove)
    return sinks


def asked_sinks(job: JobFacts, environ: Mapping[str, str]) -> list[Sinks]:
    """Return the sinks that the environment names; a process opens them only once.

    Raises:
        EnvironmentMismatchError: The environment names an unknown sink, or one that cannot be opened.
    """
    text = environ.get(VARIABLE)
    if not text:
        return []
    if text not in _asked:
        # Under a launcher each of several processes may have a strategy of one instance; only the chief writes.
        only_one = replace(job, is_chief=lambda: job.is_chief() and popdist.is_chief())
        try:
            _asked[text] = open_sinks([text], only_one, environ)
        except ValueError as error:
            raise EnvironmentMismatchError(f"{VARIABLE}: {error}") from error
        _asked[text].at_close(lambda closed: _asked.pop(text))
    return [_asked[text]]


def opened() -> Sequence[Sinks]:
    """Return all open sinks of this process."""
    return tuple(_opened)


def sink_of(word: MetricWord, job: JobFacts, environ: Mapping[str, str]) -> Sink:
    """Return the sink that a word names, not yet opened."""
    run = environ.get(RUN_VARIABLE, "")
    if word.kind == CSV:
        return CsvFile(word.path)
    if word.kind == JSON_LINES:
        return JsonLines(word.path)
    if word.kind == TENSORBOARD:
        return TensorBoard(word.path)
    if word.kind == PROMETHEUS:
        return Prometheus(*word.address, job)
    if word.kind == MLFLOW:
        return MlflowRun(word.target, environ.get(EXPERIMENT_VARIABLE, ""), run)
    return WandbRun(word.target, run)
