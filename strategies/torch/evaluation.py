"""Evaluation and prediction: results for the rows of a module's local replicas, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import numpy as np
import torch
from typing_extensions import override

import strategies.trees as trees
from strategies.core.agreement import insist_on_agreement
from strategies.core.evaluation import ReadAsValue
from strategies.core.rows import Begun, EvaluationTask, Told, padded
from strategies.data.sources import Masked
from strategies.errors import StrategyError
from strategies.jax.comparing.agreement import terms_of
from strategies.jax.evaluation.mean import Mean
from strategies.jax.replicas.gathering import told_rows
from strategies.jax.replicas.replicas import Replicas
from strategies.outcome import Outcome
from strategies.torch.agreement import lines_of_function, lines_of_module
from strategies.torch.collated import CollatedBatch
from strategies.torch.outcomes import WEIGHT, outcome_of, weighted_value
from strategies.torch.replicas.inference import InferenceTurns
from strategies.torch.replicas.passes import LossFunction
from strategies.torch.tensors import as_array, dtype_of, parts_of, tensors_of
from strategies.torch.training import TorchTraining
from strategies.trees import ShapeOfArray
from strategies.typing import Batch, Metric, Number, Numbers, Tree


@partial(trees.register_dataclass, data_fields=["total", "count", "is_weighted"], meta_fields=[])
@dataclass(frozen=True)
class MeanOfLosses(ReadAsValue):
    """A mean over rows, or over the weights of losses, which is merged exactly with others of its kind.

    Attributes:
        total: The sum of the values times their weights, float64.
        count: The number of rows, or the sum of their weights, float64.
        is_weighted: Whether `count` is a sum of weights, bool.
    """

    total: np.ndarray
    count: np.ndarray
    is_weighted: np.ndarray

    def merge(self, other: MeanOfLosses) -> MeanOfLosses:
        """Return the mean over all rows of both means.

        Raises:
            StrategyError: If the losses of only one of them have weights.
        """
        if self.is_weighted != other.is_weighted:
            raise StrategyError(
                "the loss of some rows has a weight, and that of others has none; give all of them weights, the "
                "number of rows for example"
            )
        return MeanOfLosses(self.total + other.total, self.count + other.count, self.is_weighted)

    @property
    @override
    def value(self) -> Numbers:
        return Mean(self.total, self.count).value


@dataclass(frozen=True)
class MeansOfRows(EvaluationTask):
    """The means of the loss and the metrics over a replica's rows, weighted by the number of rows.

    If the function gives weights of its losses, these count in place of the numbers of rows.
    """

    is_exact: ClassVar[bool] = True
    title: ClassVar[str] = "evaluation"
    function: LossFunction

    @override
    def __call__(self, module: torch.nn.Module, batch: Batch) -> Tree:
        """Compute the loss and the metrics, by name, and the weight of the loss if there is one.

        Raises:
            TypeError: If a value is not a scalar, the metrics are not a mapping, or one of them is called "loss".
        """
        outcome = outcome_of(partial(self.function, module, batch))
        values = {"loss": outcome.loss, **outcome.metrics}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise TypeError(f"{name} is of shape {list(value.shape)}; return a scalar: the mean over the rows")
        return values if outcome.weight is None else {**values, WEIGHT: outcome.weight}

    @override
    def told(self, computed: Mapping[str, Number], mask: np.ndarray) -> Tree:
        """Return a `MeanOfLosses` for each name."""
        count = int(mask.sum())
        weight = float(computed.get(WEIGHT, count)) if count else 0.0
        totals = {name: weighted_value(float(value), weight) for name, value in computed.items() if name != WEIGHT}
        of_rows, is_weighted = np.asarray(weight, np.float64), np.asarray(WEIGHT in computed)
        return {
            name: MeanOfLosses(np.asarray(total, np.float64), of_rows, is_weighted) for name, total in totals.items()
        }

    @override
    def sums_of_weights(self, merged: Mapping[str, Metric]) -> Sequence[Number]:
        return [mean.count for mean in merged.values()]


@dataclass(frozen=True)
class OutputsOfRows(EvaluationTask):
    """The outputs for each row.

    Attributes:
        function: A function that returns the outputs, or the loss function, which returns them as its third result.
        is_loss: Whether `function` is the loss function.
    """

    is_exact: ClassVar[bool] = True
    title: ClassVar[str] = "prediction"
    function: LossFunction
    is_loss: bool

    @override
    def __call__(self, module: torch.nn.Module, batch: Batch) -> Tree:
        """Compute the outputs.

        Raises:
            ValueError: If there are no outputs, or the first axis of an output is not the rows.
        """
        outputs = self.function(module, batch)
        if self.is_loss:
            parts = (None, None, outputs.outputs) if isinstance(outputs, Outcome) else outputs
            outputs = parts[2] if isinstance(parts, tuple) and len(parts) == 3 else None
        leaves = trees.leaves(outputs)
        if not leaves:
            which = "the loss function" if self.is_loss else "fn"
            raise ValueError(
                f"{which} returns no outputs to predict; return (loss, metrics, outputs), or give predict a function "
                "fn(module, batch) that returns them"
            )
        count = len(trees.leaves(batch)[0])
        for shape in map(np.shape, leaves):
            if shape[:1] != (count,):
                raise ValueError(
                    f"an output is of shape {list(shape)} for {count} rows; the first axis of each output must be the "
                    "rows of the batch: leave out values that belong to no row"
                )
        return outputs

    @override
    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        return trees.map(lambda leaf: padded(_host_array(leaf), mask), computed)


def _host_array(leaf: torch.Tensor | np.ndarray) -> np.ndarray:
    return as_array(leaf) if isinstance(leaf, torch.Tensor) else np.asarray(leaf)


@final
class TorchRows:
    """The computation of a task for the rows of local replicas, which take turns with the module.

    Args:
        replicas: The replicas of all instances.
        seed: The seed of random numbers.
        is_recorded: Whether every step is recorded. Then instances are not compared here.
    """

    def __init__(self, replicas: Replicas, seed: int, is_recorded: bool) -> None:
        self._replicas = replicas
        self._seed = seed
        self._is_recorded = is_recorded
        self._agreed: set[object] = set()

    def tell(self, task: EvaluationTask, state: TorchTraining, batch: Masked) -> Begun:
        """Begin a task for a batch, as `Engine.tell` does. The work is done in `Begun.wait`."""
        self._agree(task, state, batch)
        return Begun(partial(self._told, task, state, batch))

    def _agree(self, task: EvaluationTask, state: TorchTraining, batch: Masked) -> None:
        """Compare the task with the other instances. Collective if the task or the batch's shapes are new."""
        replicas = self._replicas
        shapes = trees.map(_shape_of_row, tensors_of(batch.values))
        key = task, replicas.communicator, str(shapes)
        if key in self._agreed or self._is_recorded:
            return
        self._agreed.add(key)
        programs = {
            "the module": lines_of_module(state.module, state.attributes.of_steps),
            f"the function of the {task.title}": lines_of_function(task.code),
        }
        options = {"seed": self._seed, "step": state.step}
        insist_on_agreement(replicas, terms_of(options, replicas.dataset_of(batch), shapes, programs, None))

    def _told(self, task: EvaluationTask, state: TorchTraining, batch: Masked) -> Told:
        """Return the results of the local replicas. The module gets only the rows that count."""
        state.buffers.follow()
        state.buffers.follow_shown()
        local = self._replicas.local_replicas
        masks = [np.asarray(mask) for mask in np.split(np.asarray(batch.mask), len(local))]
        rows = _without_padding(batch.values, masks)
        own = [{number: each[replica] for number, each in state.buffers.own.items()} for replica in local]
        turns = InferenceTurns(
            self._replicas, state.module, state.memory_of_replicas, task, self._seed, attributes=state.attributes
        )
        [computed] = turns([rows], state.step, own)
        return [told_rows(task.told(one, mask), mask) for one, mask in zip(computed, masks, strict=True)]


def _without_padding(values: Batch, masks: Sequence[np.ndarray]) -> list[Batch]:
    """Return the rows of each replica. If every row is padding, keep one, so that the shape of the outputs is known."""
    rows = [max(int(mask.sum()), 1) for mask in masks]
    if isinstance(values, CollatedBatch):
        return parts_of(CollatedBatch(values.shortened(rows)), len(masks))
    parts = parts_of(tensors_of(values), len(masks))
    return [trees.map(lambda leaf, count=count: leaf[:count], part) for part, count in zip(parts, rows, strict=True)]


def _shape_of_row(leaf: torch.Tensor | CollatedBatch) -> ShapeOfArray | None:
    return ShapeOfArray(tuple(leaf.shape[1:]), dtype_of(leaf)) if isinstance(leaf, torch.Tensor) else None
