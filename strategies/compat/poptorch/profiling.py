"""Measured times of a program in place of PopVision's: channels of spans, performance counters, and recordings."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.profiler import record_function

import strategies.trees as trees
from collectives.instruments import Instrument
from popdist.instance import Instance
from popdist.timeline.asked import FOLDER_VARIABLE, TimelineOptions
from strategies.compat.poptorch.errors import ConfigFileError
from strategies.errors import StrategyError
from strategies.typing import Tree

if TYPE_CHECKING:
    from popdist.timeline.attaching import Timeline

Instrumented = TypeVar("Instrumented")

Latency = tuple[float, float, float]
"""Minimum, maximum and mean, in seconds."""

ENGINE_OPTIONS = "POPLAR_ENGINE_OPTIONS"
_FOLDER, _REPORTS = "autoReport.directory", "autoReport."

_recordings: dict[Path, Timeline] = {}

logger = logging.getLogger("strategies.torch.poptorch")


class Channel:
    """A named channel of spans in PyTorch's profiler.

    Args:
        name: Prefix of the name of each span.

    Example::

        channel = poptorch.profiling.Channel("training")
        with channel.tracepoint("epoch"):
            train(model)
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def instrument(self, obj: Instrumented, *methods: str) -> Instrumented:
        """Record a span for every call of these methods of an object or class, and return the object.

        Raises:
            AttributeError: If it lacks one of the methods.
        """
        for method in methods:
            setattr(obj, method, _span(f"{self._name}.{method}")(getattr(obj, method)))
        return obj

    def tracepoint(self, name: str) -> AbstractContextManager[None]:
        """Return a context that records a span, for a `with` statement."""
        return _span(f"{self._name}.{name}")


@contextmanager
def _span(name: str) -> Iterator[None]:
    with record_function(name):  # as a decorator it would not support recursion or several threads
        yield


class Counters:
    """Times of the last call of a model: of its updates, or of an inference call as a whole.

    Tensors are not transferred, so each is available at once.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._inputs = self._outputs = 0

    def begin(self, inputs: Tree) -> None:
        """Begin a call with these inputs."""
        self._spans = []
        self._inputs, self._outputs = _tensors_in(inputs), 0

    def add(self, began_s: float, ended_s: float) -> None:
        """Add the start and end of an update."""
        self._spans.append((began_s, ended_s))

    def end(self, outputs: Tree) -> None:
        """End the call with these outputs."""
        self._outputs = _tensors_in(outputs)

    def events(self) -> dict[str, list[list[float]]]:
        """Return seconds by kind of event, tensor and update; a kind without tensors has one empty list."""
        began = [[span[0] for span in self._spans] for _ in range(self._inputs)] or [[]]
        ended = [[span[1] for span in self._spans] for _ in range(self._outputs)] or [[]]
        return {
            "input": began,
            "input_complete": [list(each) for each in began],
            "output": ended,
            "output_complete": [list(each) for each in ended],
        }

    def of_updates(self) -> Latency:
        """Return the minimum, maximum and mean duration of the updates.

        Raises:
            StrategyError: If the model was not called.
        """
        if not self._spans:
            raise StrategyError("the model was not called, so there are no times; call it first")
        seconds = [ended_s - began_s for began_s, ended_s in self._spans]
        return min(seconds), max(seconds), fmean(seconds)


def _tensors_in(tree: Tree) -> int:
    return sum(isinstance(leaf, torch.Tensor) for leaf in trees.leaves(tree))


def folder_wanted(environ: Mapping[str, str], engine_options: Mapping[str, str]) -> Path | None:
    """Return the folder for reports, or None if no reports are wanted. The environment has precedence.

    Raises:
        ConfigFileError: If the variable is not a JSON object.
    """
    try:
        of_environ = json.loads(environ.get(ENGINE_OPTIONS) or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigFileError(
            f'{ENGINE_OPTIONS} is not JSON: {error}; write {{"autoReport.directory": "reports"}}, or unset it'
        ) from None
    if not isinstance(of_environ, dict):
        raise ConfigFileError(f'{ENGINE_OPTIONS} is not a JSON object; write {{"autoReport.directory": "reports"}}')
    options = {**engine_options, **of_environ}
    wanted = any(
        name.startswith(_REPORTS) and (name == _FOLDER or str(value).lower() == "true")
        for name, value in options.items()
    )
    return Path(str(options.get(_FOLDER, "."))).absolute() if wanted else None


def record_job(folder: Path) -> None:
    """Make instances that connect later record into a folder, unless the job is already recorded."""
    if not os.environ.get(FOLDER_VARIABLE):
        os.environ[FOLDER_VARIABLE] = str(folder)
        _tell(folder)


def tell_too_late() -> None:
    """Warn that the instances are connected already and the job is not recorded."""
    if not os.environ.get(FOLDER_VARIABLE):
        logger.warning(
            "enableProfiling has no effect after the instances were connected; start the program with "
            'poprun --timeline FILE, or with POPLAR_ENGINE_OPTIONS=\'{"autoReport.directory": "FOLDER"}\''
        )


def recording_into(folder: Path, num_replicas: int) -> tuple[Instrument, ...]:
    """Return instruments that record this process alone; the first of several strategies describes the instance."""
    from popdist.timeline.attaching import Timeline  # only recordings need it

    if folder not in _recordings:
        _tell(folder)
        alone = Instance(0, 1, num_replicas, 0, num_replicas, 0)
        _recordings[folder] = Timeline(TimelineOptions(folder), alone, os.environ)
    return _recordings[folder].instruments


def close_recordings() -> None:
    """Write the rest of this process's recordings and end them; otherwise that happens at exit."""
    while _recordings:
        _recordings.popitem()[1].close()


def _tell(folder: Path) -> None:
    logger.warning(
        "%s gets a recording of each instance in place of PopVision's reports; open it with: "
        "poprun timeline report %s --html report.html, or poprun timeline merge %s -o trace.json and "
        "https://ui.perfetto.dev",
        *[folder] * 3,
    )
