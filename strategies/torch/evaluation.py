"""Evaluation of a module and prediction: every row of a data set once, on all replicas, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial

import jax
import numpy as np
import torch

from strategies.comparing.agreement import terms_of
from strategies.core.agreement import insist_on_agreement
from strategies.core.survival import lost_with_an_instance, meet, warn_of_loss
from strategies.data.every_row import EveryRow, every_row
from strategies.data.sources import Masked
from strategies.evaluation.data_pass import (
    Begun,
    DataPass,
    Evaluation,
    Mean,
    Passing,
    Told,
    evaluation_of,
    predictions_of,
)
from strategies.replicas.replicas import Replicas
from strategies.torch.agreement import lines_of_function, lines_of_module
from strategies.torch.inference import InferenceReplicas
from strategies.torch.options import TorchOptions
from strategies.torch.replica_memory import HOST
from strategies.torch.replica_run import LossFunction
from strategies.torch.tensors import as_array, parts_of, tensors_of
from strategies.torch.training import TorchTraining
from strategies.typing import Batch, Number, Tree

Rows = tuple[Batch, int, int]
"""A replica's rows of a batch, how many a replica has at most, and how many of them count."""


class TorchEvaluator:
    """An evaluator of a module, which stays as it is.

    Args:
        loss_fn: of the `Trainer`, for where no other function is given.
        is_recorded: whether every step is recorded, to be compared otherwise.
    """

    def __init__(
        self,
        replicas: Replicas,
        training: TorchTraining,
        loss_fn: LossFunction,
        options: TorchOptions,
        is_recorded: bool,
    ) -> None:
        self._is_recorded = is_recorded
        self._replicas = replicas
        self._training = training
        self._loss_fn = loss_fn
        self._options = options
        self._agreed: set[object] = set()
        self._has_warned = False

    def evaluate(self, dataset: Iterable[Batch], fn: LossFunction | None) -> Evaluation:
        """See `Trainer.evaluate`."""
        return evaluation_of(self._pass("evaluation", _means, fn or self._loss_fn, self._rows(dataset), True))

    def predict(self, dataset: Iterable[Batch], fn: LossFunction | None, to_all: bool) -> Iterator[Tree]:
        """See `Trainer.predict`."""
        rows = self._rows(dataset)
        if rows.dataset is not None and rows.dataset.is_shuffled:
            raise ValueError(
                "the data set is shuffled, and predictions come in the order in which it is read; distribute it with "
                "shuffle=False"
            )
        outputs = partial(_outputs, is_loss=fn is None)
        return predictions_of(self._pass("prediction", outputs, fn or self._loss_fn, rows, to_all), rows.is_interleaved)

    def _rows(self, dataset: Iterable[Batch]) -> EveryRow:
        replicas = self._replicas
        return every_row(dataset, tensors_of, replicas.communicator, len(replicas.local_replicas))

    def _pass(
        self, title: str, tell: Callable[..., Tree], function: LossFunction, rows: EveryRow, to_all: bool
    ) -> Generator[Told, None, None]:
        replicas, step = self._replicas, self._training.step
        is_lost = lost_with_an_instance(False, rows.dataset)
        if not self._has_warned:
            self._has_warned = True
            warn_of_loss(replicas, is_lost)
        replicas.instruments.step_begins(step)
        local = _Local(replicas, self._training, partial(tell, function), self._options)

        def begin(batch: Masked) -> Begun:
            self._agree(title, function, rows, batch)
            return Begun(partial(local.told, batch))

        survives = self._options.own_part is None
        passing = Passing(title, step, begin, lambda: None, partial(meet, replicas) if survives else None)
        return _closing(local, DataPass(replicas, passing, rows, to_all).results())

    def _agree(self, title: str, function: LossFunction, rows: EveryRow, batch: Masked) -> None:
        """Compare what is evaluated with the other instances; a collective call where it is new."""
        replicas = self._replicas
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(tuple(leaf.shape[1:]), as_array(leaf).dtype), tensors_of(batch.values)
        )
        key = title, function, replicas.communicator, str(shapes)
        if key in self._agreed or self._is_recorded:
            return
        self._agreed.add(key)
        programs = {
            "the module": lines_of_module(self._training.module),
            f"the function of the {title}": lines_of_function(function),
        }
        options = {"seed": self._options.seed, "step": self._training.step}
        insist_on_agreement(replicas, terms_of(options, rows.dataset, shapes, programs, None))


def _closing(local: _Local, batches: Generator[Told, None, None]) -> Generator[Told, None, None]:
    try:
        yield from batches
    finally:
        local.close()


class _Local:
    """The local replicas while a data set is gone through; after a loss there are others.

    Args:
        tell: (module, (rows, how many a replica has at most, how many count)) -> what it tells of them.
    """

    def __init__(
        self, replicas: Replicas, training: TorchTraining, tell: Callable[..., Tree], options: TorchOptions
    ) -> None:
        self._replicas = replicas
        self._training = training
        self._tell = tell
        self._options = options
        self._of: range | None = None
        self._inference: InferenceReplicas | None = None

    def told(self, batch: Masked) -> Told:
        """Return what the replicas tell of a batch, and their masks; modules get only the rows that count."""
        local = self._replicas.local_replicas
        if self._inference is None or self._of != local:
            self.close()
            count, seed = self._replicas.num_replicas_in_sync, self._options.seed
            self._of = local
            instruments = self._replicas.instruments
            memory = self._training.memory_of_replicas
            buffers = self._training.buffers
            buffers.follow()
            self._inference = InferenceReplicas(
                local, count, memory, self._tell, seed, instruments, own=buffers.written
            )
        masks = [np.asarray(mask) for mask in np.split(np.asarray(batch.mask), len(local))]
        parts = parts_of(tensors_of(batch.values), len(local))
        rounds = [[(_first(part, mask), len(mask), int(mask.sum())) for part, mask in zip(parts, masks, strict=True)]]
        masters = [self._training.buffers.masters_of(replica) for replica in local]
        [told] = self._inference(rounds, self._training.step, masters)
        return list(zip(told, masks, strict=True))

    def close(self) -> None:
        """End the threads."""
        if self._inference is not None:
            self._inference.close()
            self._inference = None


def _first(part: Batch, mask: np.ndarray) -> Batch:
    """Drop padding rows. If every row is padding, keep one, so that the shape of the outputs is known."""
    rows = max(int(mask.sum()), 1)
    return jax.tree.map(lambda leaf: leaf[:rows], part)


def _means(function: LossFunction, module: torch.nn.Module, given: Rows) -> Tree:
    """Return the loss and the metrics of a replica's rows, weighted with their number.

    Raises:
        TypeError: if they are no scalars.
    """
    batch, _, count = given
    returned = function(module, batch)
    loss, metrics = returned[:2] if isinstance(returned, tuple) else (returned, {})
    if not isinstance(metrics, Mapping):
        raise TypeError(f"the metrics are a {type(metrics).__name__}; return (loss, dictionary of scalars)")
    values = {"loss": loss, **metrics}
    totals = {name: _scalar(name, value) * count if count else 0.0 for name, value in values.items()}
    return {name: Mean(np.asarray(total, np.float64), np.asarray(count, np.float64)) for name, total in totals.items()}


def _scalar(name: str, value: Number) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise TypeError(f"{name} is of shape {list(value.shape)}; return a scalar: the mean over the rows")
    return float(value)


def _outputs(function: LossFunction, module: torch.nn.Module, given: Rows, is_loss: bool) -> Tree:
    """Return the outputs of a function for a replica's rows, padded with zeros.

    Raises:
        ValueError: if there is nothing, or not something for each row.
    """
    batch, most, _ = given
    count = len(jax.tree.leaves(batch)[0])
    outputs = function(module, batch)
    if is_loss:
        outputs = outputs[2] if isinstance(outputs, tuple) and len(outputs) == 3 else None
    if not jax.tree.leaves(outputs):
        which = "the loss function" if is_loss else "fn"
        raise ValueError(
            f"{which} returns no outputs to predict; return (loss, metrics, outputs), or give predict a function "
            "fn(module, batch) that returns them"
        )
    return jax.tree.map(lambda leaf: _filled(leaf, count, most), outputs)


def _filled(leaf: torch.Tensor | np.ndarray, count: int, most: int) -> np.ndarray:
    array = as_array(leaf.to(HOST)) if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
    if array.shape[:1] != (count,):
        raise ValueError(
            f"an output is of shape {list(array.shape)} for {count} rows; the first axis of outputs is the rows of the "
            "batch: leave out what belongs to no row"
        )
    filled = np.zeros((most, *array.shape[1:]), array.dtype)
    filled[:count] = array
    return filled
