"""The metrics of a step, and their way to sinks and instruments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from collectives.instruments import Instruments, is_seen
from strategies.core.members import Members
from strategies.loss_scaling import LossScale
from strategies.sinks.distribution import Distribution
from strategies.sinks.sink import NO_DISTRIBUTIONS, PlainNumber, Reading
from strategies.typing import Leaf, Metric

EVALUATION = "evaluation/"
"""The prefix of the names of evaluations' metrics in sinks."""

UnreadArray: TypeAlias = Leaf
"""An array of NumPy, or an array on a device that may be unfinished; `np.asarray` waits for it."""
ReadingOfSteps: TypeAlias = Callable[[int], Mapping[str, float]]
"""A function that waits for numbers of a step and returns them by name, given how many of the steps came later."""


class Metrics(Mapping[str, float]):
    """Means over all replicas by name: "loss", and the names that the loss function gave.

    Reading a value waits until the device has computed it.

    Example::

        state, metrics = trainer.step(state, batch)
        metrics["loss"], dict(metrics)  # floats

    Attributes:
        names: "loss", and the names that the loss function gave.
        means: Means in the order of the names, float32; other values may follow. An array on a device may be
            unfinished.
    """

    def __init__(self, names: tuple[str, ...], means: UnreadArray) -> None:
        self.names = names
        self.means: UnreadArray = means

    def __getitem__(self, name: str) -> float:
        try:
            position = self.names.index(name)
        except ValueError:
            raise KeyError(name) from None
        if not isinstance(self.means, np.ndarray):  # indexing an array on a device would run a program for it
            self.means = np.asarray(self.means)
        return float(self.means[position])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def loss_at_hand(self) -> float | None:
        """Return the loss; None if there is none, it is unfinished, or its memory was freed."""
        means = self.means
        if not self.names:
            return None
        if not isinstance(means, np.ndarray) and (means.is_deleted() or not means.is_ready()):
            return None
        return float(np.asarray(means)[0])

    def __repr__(self) -> str:
        return f"Metrics({dict(self)})"


@dataclass(frozen=True)
class _UnreadWithScale:
    """Metrics on a device, and the loss scale behind them; `np.asarray` waits for both."""

    tail: UnreadArray
    count: int
    scale: LossScale

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(metrics_of(("",) * self.count, np.asarray(self.tail), self.scale).means)

    def __getitem__(self, place: int) -> float:
        return float(np.asarray(self)[place])

    def is_ready(self) -> bool:
        """Return whether reading would not wait."""
        return bool(self.tail.is_ready())

    def is_deleted(self) -> bool:
        """Return whether the memory was freed."""
        return bool(self.tail.is_deleted())


def metrics_of(names: tuple[str, ...], tail: UnreadArray, scale: LossScale | None) -> Metrics:
    """Return the metrics of a step; with loss scaling also "loss_scale" and "skipped_steps".

    Args:
        names: The names of the metrics.
        tail: Their means, followed by other values.
        scale: The scale of the next loss; None without loss scaling.
    """
    if scale is None:
        return Metrics(names, tail)
    if not isinstance(tail, np.ndarray):
        return Metrics((*names, "loss_scale", "skipped_steps"), _UnreadWithScale(tail, len(names), scale))
    own, rest = np.split(np.asarray(tail), [len(names)])
    of_scale = np.array([scale.scale, scale.skipped], np.float32)
    return Metrics((*names, "loss_scale", "skipped_steps"), np.concatenate([own, of_scale, rest]))


@dataclass(frozen=True)
class Beside:
    """The values of steps that sinks get beside the metrics.

    Attributes:
        reads: Functions that read the numbers of a step.
        distributions: Distributions in the last step, by name.
    """

    reads: Sequence[ReadingOfSteps] = ()
    distributions: Mapping[str, Distribution] = field(default_factory=lambda: NO_DISTRIBUTIONS)


def tell_end(
    members: Members,
    instruments: Instruments,
    rows_of_all: Callable[[], int],
    local: int,
    metrics: Metrics,
    step: int,
    beside: Callable[[], Beside] = Beside,
    tails: UnreadArray | None = None,
) -> None:
    """Report the successful end of a step to instruments and sinks of metrics.

    Args:
        members: The instances.
        instruments: The instruments attached to this instance.
        rows_of_all: Returns the number of rows of all local replicas in the batch.
        local: The number of replicas to which the batch belongs.
        metrics: The metrics of the step.
        step: The number of steps so far, with this one.
        beside: Returns what sinks get beside the metrics; called only if a sink or an instrument takes it.
        tails: The metrics of each step, if one program has made several steps with the same number of rows.
    """
    sinks = members.sinks
    waits, counts = is_seen(instruments.step_ends), is_seen(instruments.steps_made)
    if not (sinks or waits or counts):
        return
    rows = rows_of_all()
    count = 1 if tails is None else len(tails)
    takes_numbers = is_seen(instruments.step_numbers)
    also = beside() if sinks or takes_numbers else _NOTHING
    for each in sinks:
        samples = rows // local * members.num_replicas_in_sync
        for later in reversed(range(count)):
            read = _reading(metrics) if tails is None else partial(_of_step, metrics.names, tails, count - 1 - later)
            if also.reads:
                read = partial(_read_both, read, also.reads, later)
            each.tell(step - later, read, samples, NO_DISTRIBUTIONS if later else also.distributions)
    if takes_numbers and also.reads:
        instruments.step_numbers(_numbers(also.reads, 0))
    if counts:
        instruments.steps_made(count, count * rows, metrics.loss_at_hand)
    if waits:
        instruments.step_ends(count * rows, float(metrics.means[0]) if metrics.names else float("nan"))


def tell_evaluation(members: Members, step: int, found: Mapping[str, Metric]) -> None:
    """Hand the metrics of an evaluation to sinks.

    Args:
        members: The instances.
        step: The number of steps before the evaluation.
        found: The metrics by name. Metrics that are not scalars are left out, and a log message names them.
    """
    for sinks in members.sinks:
        sinks.log_scalars({f"{EVALUATION}{name}": value for name, value in found.items()}, step)


def _reading(metrics: Metrics) -> Reading:
    """Return a function that reads metrics later, and keeps only their memory alive."""
    names, means = metrics.names, metrics.means
    if isinstance(means, np.ndarray):
        means = means[: len(names)].copy()
    return lambda: dict(zip(names, np.asarray(means).tolist(), strict=False))


def _numbers(reads: Sequence[ReadingOfSteps], later: int) -> dict[str, float]:
    """Return the numbers beside the metrics of a step after which `later` others were made with it."""
    return {name: number for read in reads for name, number in read(later).items()}


def _read_both(read: Reading, reads: Sequence[ReadingOfSteps], later: int) -> dict[str, PlainNumber]:
    """Return the numbers of a step; a metric of the loss function goes before another number of the same name."""
    found = dict(read())
    for name, number in _numbers(reads, later).items():
        found.setdefault(name, number)
    return found


def _of_step(names: tuple[str, ...], tails: UnreadArray, number: int) -> dict[str, float]:
    return dict(zip(names, np.asarray(tails)[number].tolist(), strict=False))


_NOTHING = Beside()


class StepNotice:
    """A notice to any instance, known to all instances at the end of the same step.

    `Trainer` sends it along with the metrics, so it costs no message of its own. A notice that comes during a step
    travels with the next step.

    Attributes:
        number: The notice that this instance got, such as the number of a signal; 0 before.
        is_agreed: Whether any instance had a notice when it began the last step; the same on all instances.
    """

    def __init__(self) -> None:
        self.number = 0
        self.is_agreed = False

    @property
    def is_given(self) -> bool:
        """Whether this instance was given a notice."""
        return self.number != 0

    def give(self, number: int) -> None:
        """Give this instance a notice; may be called by a signal handler."""
        self.number = number

    def agree(self, replicas: float) -> None:
        """Set `is_agreed`, given the share of replicas with a notice at the beginning of the last step."""
        self.is_agreed = replicas > 0
