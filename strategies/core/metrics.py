"""The metrics of a step, norms and distributions of its layers, and their way to sinks and instruments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from collectives.instruments import Instruments, is_seen
from popdist.records.distribution_settings import GRADIENT_NORM, WEIGHT_NORM, DistributionSettings
from strategies.core.agreement import Members, gather_arrays
from strategies.exchange.flat import Shards
from strategies.loss_scaling import LossScale
from strategies.sinks.sink import NO_DISTRIBUTIONS, Distribution, PlainNumber, Reading, Row
from strategies.typing import Leaf, Metric, Tree

EVALUATION = "evaluation/"
"""The prefix of the names of evaluations' metrics in sinks."""

UnreadArray: TypeAlias = Leaf
"""An array of NumPy, or an array on a device that may be unfinished; `np.asarray` waits for it."""
ReadingOfSteps: TypeAlias = Callable[[int], Mapping[str, float]]
"""A function that waits for numbers of a step and returns them by name, given how many of the steps came later."""
_GRADIENTS, _WEIGHTS = "gradients", "weights"
_NOT_IN_NAMES = re.compile(r"[^\w./ -]")
_MOST_LETTERS = 200
"""The most letters of a layer's name. MLflow takes 250 for the name of a number, such as `gradients/LAYER/p50`."""
_CHUNK = 1 << 15
"""The elements that are squared at once; 256 KiB in float64, which a core's cache holds."""


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
class StepExtras:
    """Extra values of steps for sinks: learning rates, norms, histograms.

    Attributes:
        reads: Functions that read the numbers of a step.
        distributions: Distributions in the last step, by name.
    """

    reads: Sequence[ReadingOfSteps] = ()
    distributions: Mapping[str, Distribution] = field(default_factory=lambda: NO_DISTRIBUTIONS)


def report_step(
    members: Members,
    instruments: Instruments,
    rows_of_all: Callable[[], int],
    local: int,
    metrics: Metrics,
    step: int,
    extras: Callable[[], StepExtras] = StepExtras,
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
        extras: Returns the extra values for sinks; called only if a sink or an instrument takes them.
        tails: The metrics of each step, if one program has made several steps with the same number of rows.
    """
    sinks = members.sinks
    waits, counts = is_seen(instruments.step_ends), is_seen(instruments.steps_made)
    if not (sinks or waits or counts):
        return
    rows = rows_of_all()
    count = 1 if tails is None else len(tails)
    takes_numbers = is_seen(instruments.step_numbers)
    also = extras() if sinks or takes_numbers else _NOTHING
    for each in sinks:
        samples = rows // local * members.num_replicas_in_sync
        for later in reversed(range(count)):
            read = _reading(metrics) if tails is None else partial(_of_step, metrics.names, tails, count - 1 - later)
            if also.reads:
                read = partial(_read_both, read, also.reads, later)
            each.add_step(step - later, read, samples, NO_DISTRIBUTIONS if later else also.distributions)
    if takes_numbers and also.reads:
        instruments.step_numbers(_numbers(also.reads, 0))
    if counts:
        instruments.steps_made(count, count * rows, metrics.loss_at_hand)
    if waits:
        instruments.step_ends(count * rows, float(metrics.means[0]) if metrics.names else float("nan"))


def report_evaluation(members: Members, step: int, found: Mapping[str, Metric]) -> None:
    """Write the metrics of an evaluation to sinks.

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
    """Return the extra numbers of a step; `later` steps followed it in the same program."""
    return {name: number for read in reads for name, number in read(later).items()}


def _read_both(read: Reading, reads: Sequence[ReadingOfSteps], later: int) -> dict[str, PlainNumber]:
    """Return the numbers of a step; a metric of the loss function goes before another number of the same name."""
    found = dict(read())
    for name, number in _numbers(reads, later).items():
        found.setdefault(name, number)
    return found


def _of_step(names: tuple[str, ...], tails: UnreadArray, number: int) -> dict[str, float]:
    return dict(zip(names, np.asarray(tails)[number].tolist(), strict=False))


_NOTHING = StepExtras()


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


# ---- norms and distributions of weights and mean gradients, layer by layer


def _on_host(leaf: Leaf) -> np.ndarray:
    return np.asarray(leaf)


@dataclass(frozen=True)
class Layers:
    """The trained variables of a step and their mean gradients, before the update.

    Attributes:
        names: Name of each variable; see `layer_names`.
        variables: The variables, whole.
        gradients: The mean gradient of each variable times `divisor`; None for a variable without one. If there are
            `shards`, a gradient that they divide is this instance's part.
        divisor: The loss scale times the mean weight of the losses, as far as gradients are not divided by them yet. A
            number, or an unread scalar on a device.
        shards: The division of the gradients; None if they are whole.
        on_host: Returns an array in the memory of the host.
        gathered: Returns a mean gradient, whole, given its number and its part. Collective.
        device_norms: Returns the unread norms of arrays on a device; None if all arrays are on the host.
    """

    names: Sequence[str]
    variables: Sequence[Leaf]
    gradients: Sequence[Leaf]
    divisor: UnreadArray = 1.0
    shards: Shards | None = None
    on_host: Callable[[Leaf], np.ndarray] = _on_host
    gathered: Callable[[int, Leaf], np.ndarray] = lambda number, part: _on_host(part)
    device_norms: Callable[[Sequence[Leaf]], UnreadArray] | None = None

    def is_cut(self, number: int) -> bool:
        """Return whether a gradient is this instance's part."""
        variable, gradient = self.variables[number], self.gradients[number]
        if gradient is None or self.shards is None or not self.shards.divides(variable):
            return False
        return tuple(gradient.shape) != tuple(variable.shape)


@dataclass(frozen=True)
class LayerStatistics:
    """Norms and histograms of the layers in one step.

    Attributes:
        step: Number of steps so far, including this one.
        read: Reads the norms of the step; waits for a device.
        distributions: Distributions by name.
    """

    step: int
    read: ReadingOfSteps
    distributions: Mapping[str, Distribution] = field(default_factory=dict)

    @property
    def as_json(self) -> list[object]:
        """The results as values of JSON, for an instance that lacks them; waits for a device."""
        return [self.step, dict(self.read(0)), {name: each.as_json for name, each in self.distributions.items()}]

    @classmethod
    def from_json(cls, as_json: Tree) -> LayerStatistics:
        """Return results from `as_json`, with the same bits."""
        step, norms, of_all = as_json
        distributions = {name: Distribution.from_json(each) for name, each in of_all.items()}
        return cls(step, lambda later: {} if later else norms, distributions)


def layer_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names that all sinks accept: short relative paths of letters, digits, and `_. -`; all are different."""
    found: dict[str, None] = {}
    for name in names:
        parts = _NOT_IN_NAMES.sub("_", name).strip().split("/")
        plain = "/".join(part for part in parts if part not in ("", ".", ".."))[-_MOST_LETTERS:].strip("/")
        plain = plain or "variables"
        number, chosen = 1, plain
        while chosen in found:
            number += 1
            chosen = f"{plain}_{number}"
        found[chosen] = None
    return tuple(found)


def layer_statistics(
    settings: DistributionSettings, step: int, layers: Callable[[], Layers], members: Members
) -> LayerStatistics | None:
    """Return the norms and distributions of a step if they are due. Collective if gradients are in parts.

    The values have the same bits however the replicas are spread over instances.

    Args:
        settings: Steps in which norms and histograms are taken.
        step: Number of steps before this one.
        layers: Returns the layers of the step.
        members: The instances.
    """
    if not settings.are_due(step):
        return None
    norms, histograms, known = settings.norms_are_due(step), settings.histograms_are_due(step), layers()
    with np.errstate(all="ignore"):  # of layers whose training has failed
        return LayerStatistics(
            step + 1,
            _norms(known, members) if norms else lambda later: {},
            _distributions(known) if histograms else {},
        )


def report_layer_statistics(members: Members, seen: LayerStatistics | None, prefix: str) -> None:
    """Write the norms and histograms of a step to sinks and instruments.

    Args:
        members: The instances.
        seen: Statistics of the step; None if none were due.
        prefix: Beginning of all names.
    """
    if seen is None:
        return
    numbers = {f"{prefix}{name}": number for name, number in seen.read(0).items()}
    distributions = {f"{prefix}{name}": each for name, each in seen.distributions.items()}
    for sinks in members.sinks:
        sinks.add(Row(seen.step, lambda: numbers, distributions=distributions))
    if numbers and is_seen(members.instruments.step_numbers):
        members.instruments.step_numbers(numbers)


def _distributions(layers: Layers) -> dict[str, Distribution]:
    found = {}
    for number, (name, variable, gradient) in enumerate(
        zip(layers.names, layers.variables, layers.gradients, strict=True)
    ):
        found[f"{_WEIGHTS}/{name}"] = Distribution.of(layers.on_host(variable))
        if gradient is not None:
            whole = layers.gathered(number, gradient) if layers.is_cut(number) else layers.on_host(gradient)
            divisor = float(layers.divisor)
            found[f"{_GRADIENTS}/{name}"] = Distribution.of(whole if divisor == 1 else _divided(whole, divisor))
    return found


def _divided(array: np.ndarray, divisor: float) -> np.ndarray:
    dtype = array.dtype if array.dtype == np.float64 else np.float32
    quotient: np.ndarray = array.astype(dtype) / np.asarray(divisor, dtype)
    return quotient


def _norms(layers: Layers, members: Members) -> ReadingOfSteps:
    """Return a function that reads the norms; those of arrays on the host are computed now."""
    weights = _norms_of(layers.variables, layers, members)
    gradients = _norms_of(layers.gradients, layers, members, [*map(layers.is_cut, range(len(layers.names)))])
    divisor, names = layers.divisor, layers.names

    def read(later: int) -> Mapping[str, float]:
        if later:
            return {}
        found = {}
        with np.errstate(all="ignore"):  # in the thread of a sink, of a step without weight or a failed training
            of_weights = np.asarray(weights, np.float64)
            of_gradients = np.asarray(gradients, np.float64) / float(divisor)
            for kind, norms in ((GRADIENT_NORM, of_gradients), (WEIGHT_NORM, of_weights)):
                found[kind] = float(np.sqrt(np.square(norms).sum()))
                found |= {f"{kind}/{name}": norm for name, norm in zip(names, norms.tolist(), strict=True)}
        return found

    return read


def _norms_of(
    leaves: Sequence[Leaf], layers: Layers, members: Members, are_cut: Sequence[bool] | None = None
) -> UnreadArray:
    cut = np.flatnonzero(are_cut) if are_cut else np.zeros(0, np.int64)
    are_on_host = all(leaf is None or isinstance(leaf, np.ndarray) for leaf in leaves)
    if layers.device_norms is not None and not are_on_host and not len(cut):
        return layers.device_norms(leaves)
    replicas = members.num_replicas_in_sync
    sums = np.zeros((len(leaves), replicas))
    for number, leaf in enumerate(leaves):
        if leaf is not None and number not in cut:
            sums[number] = squares_of_shards(layers.on_host(leaf).reshape(-1), replicas)
    if len(cut):
        assert layers.shards is not None
        parts = [(layers.on_host(leaves[number]), layers.variables[number]) for number in cut.tolist()]
        own = [_own_squares(part, variable, layers.shards) for part, variable in parts]
        of_replicas = gather_arrays(members, [[each] for each in np.transpose(own)], "norms of parts of gradients")
        sums[cut] = np.transpose([each for [each] in of_replicas])
    return np.sqrt(sums.sum(axis=1))


def squares_of_shards(flat: np.ndarray, count: int) -> np.ndarray:
    """Return the sum of the squares in each of `count` equal shards, float64 `[count]`; zeros fill up the last ones.

    The bits of a sum depend on the elements of its shard alone: neither on the other shards nor on the memory.
    """
    part = -(-flat.size // count)
    sums = np.zeros(count)
    if not part:
        return sums
    full, rest = divmod(flat.size, part)
    sums[:full] = squares_of_rows(flat[: full * part].reshape(full, part))
    if rest:
        last = np.zeros((1, part), flat.dtype)
        last[0, :rest] = flat[full * part :]
        sums[full] = squares_of_rows(last)[0]
    return sums


def squares_of_rows(rows: np.ndarray) -> np.ndarray:
    """Return the sum of the squares in each row, float64."""
    count, size = rows.shape
    sums = np.zeros(count)
    together = max(1, _CHUNK // max(size, 1))
    for first in range(0, count, together):
        for start in range(0, size, _CHUNK):
            part = rows[first : first + together, start : start + _CHUNK].astype(np.float64)
            sums[first : first + together] += np.add.reduce(np.multiply(part, part, out=part), axis=1)
    return sums


def _own_squares(part: np.ndarray, variable: Leaf, shards: Shards) -> np.ndarray:
    """Return the sum of the squares of a gradient in the shard of each local replica."""
    size = shards.local * shards.part(variable)
    own = part.reshape(-1)[:size]
    if own.size < size:
        own = np.pad(own, (0, size - own.size))
    return squares_of_rows(own.reshape(shards.local, -1))
