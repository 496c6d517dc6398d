"""Evaluating and predicting: what all replicas say of every batch of a data set, in a fixed order.

What a replica computes depends on its rows alone, and which rows it gets on the number of replicas and the batch size.
All instances get what all replicas say, and merge it themselves: replica by replica, and batch by batch. Predictions
may also go to instance 0 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from functools import partial

import jax

from strategies.comparing.agreement import lines_of, terms_of
from strategies.core.agreement import insist_on_agreement
from strategies.core.survival import lost_with_an_instance, meet, warn_of_loss
from strategies.data.every_row import EveryRow, every_row
from strategies.data.sources import Masked
from strategies.evaluation.data_pass import (
    AHEAD,
    Begun,
    DataPass,
    Evaluation,
    Passing,
    Told,
    evaluation_of,
    predictions_of,
)
from strategies.evaluation.evaluation_program import (
    EvaluationProgram,
    EvaluationTask,
    LossOfRows,
    MetricsFunction,
    MetricsOfBatch,
    RowOutputs,
)
from strategies.gradients.arguments import (
    MODEL_STATE,
    check_function,
    check_loss_function,
    check_state,
    check_takes_state,
)
from strategies.replicas.replicas import Replicas
from strategies.step.options import StepOptions
from strategies.train_state import TrainState
from strategies.typing import Batch, LossFunction, Tree


class JaxEvaluator:
    """Evaluates and predicts with the variables of a state, which stays as it is.

    Args:
        replicas: where the replicas are.
        loss_fn: of the `Trainer`, for where no other function is given.
        options: of its steps.
        is_recorded: whether every step is recorded, to be compared otherwise.
    """

    def __init__(self, replicas: Replicas, loss_fn: LossFunction, options: StepOptions, is_recorded: bool) -> None:
        self._is_recorded = is_recorded
        self._survives = options.own_part is None
        self._replicas = replicas
        self._devices = replicas.devices
        self._loss_fn = loss_fn
        self._options = options
        self._programs: dict[Hashable, EvaluationProgram] = {}
        self._agreed: set[Hashable] = set()  # the keys of programs that the instances that are there have compared
        self._has_warned = False

    def evaluate(
        self, state: TrainState, dataset: Iterable[Batch], fn: LossFunction | None, metrics_fn: MetricsFunction | None
    ) -> Evaluation:
        """Means over all rows of a data set; a collective call.

        The function gets each row as a batch of one, so that what is a mean over rows is the mean over all of them,
        however many there are. It is added in float64, a replica's rows one after another, then the replicas in the
        order of the tree, and batch by batch.

        Args:
            state: what `Trainer.init`, `step` or `run` returned last.
            dataset: a `DistributedDataset` with `remainder="pad"`, the rest of whose epoch is read; or an iterable of
                batches of this instance, of which later ones may have fewer rows than the first.
            fn: as the `loss_fn` of a `Trainer`, for instance without dropout; None for that one itself. Its key is
                always `jax.random.key(seed)`.
            metrics_fn: instead of it `(variables, batch, mask, key) -> {name: metric}` of all rows of a replica, of
                which those count whose mask, bool `[rows]`, is True. A metric is a `Mean`, or another pytree of arrays
                with a method `merge(other)`, which is called with host arrays.

        Raises:
            TypeError: if a loss or metric is no scalar, or what `metrics_fn` returns cannot be merged.
            ValueError: if there is no row, the data set leaves rows out or accumulates, batches differ in more than the
                number of rows, the function has feeds or, of single rows, collectives, or the state was used up.
            DisagreementError: on all instances, if they differ in what is evaluated.
        """
        if fn is not None and metrics_fn is not None:
            raise ValueError("fn and metrics_fn are two ways to say what is evaluated; give one of them")
        has_state = getattr(state, "model_state", None) is not None
        if metrics_fn is not None:
            arguments = ("variables", "batch", "mask", "key")
            check_function("metrics_fn", metrics_fn, (*arguments, MODEL_STATE) if has_state else arguments)
        self._check(fn, has_state)
        task = LossOfRows(fn or self._loss_fn) if metrics_fn is None else MetricsOfBatch(metrics_fn)
        return evaluation_of(self._pass(task, state, self._rows(dataset)))

    def predict(
        self, state: TrainState, dataset: Iterable[Batch], fn: LossFunction | None, to_all: bool
    ) -> Iterator[Tree]:
        """What a function says of each row, in the order of the data and batch by batch.

        Taking a batch is a collective call. Where all instances leave the iterator early the data set stays there.

        Args:
            state: see `evaluate`; not to be used up before the last batch is taken.
            dataset: see `evaluate`; with `shuffle=False`.
            fn: see `Trainer.predict`.
            to_all: see there.

        Returns:
            For each batch the outputs for the rows of all replicas, as host arrays `[rows, ...]`.

        Raises:
            TypeError, ValueError, DisagreementError: see `evaluate`; and if the data set is shuffled, or the outputs
                are not one for each row.
        """
        self._check(fn, getattr(state, "model_state", None) is not None)
        rows = self._rows(dataset)
        if rows.dataset is not None and rows.dataset.is_shuffled:
            raise ValueError(
                "the data set is shuffled, and predictions come in the order in which it is read; distribute it with "
                "shuffle=False"
            )
        task = RowOutputs(fn or self._loss_fn, is_loss=fn is None)
        return predictions_of(self._pass(task, state, rows, to_all), rows.is_interleaved)

    def told(self, task: EvaluationTask, state: TrainState, dataset: Iterable[Batch]) -> Generator[Told, None, None]:
        """For each batch what a task tells of it on all replicas, in their order, with their masks.

        Taking a batch is a collective call.

        Raises:
            TypeError, ValueError, DisagreementError: see `evaluate`, and what the task raises.
        """
        return self._pass(task, state, self._rows(dataset))

    def _check(self, fn: LossFunction | None, has_state: bool) -> None:
        if fn is not None:
            check_loss_function(fn)
            check_takes_state(fn, has_state, "fn")

    def _rows(self, dataset: Iterable[Batch]) -> EveryRow:
        replicas = self._replicas
        return every_row(dataset, replicas.dealing.batch, replicas.communicator, len(replicas.local_replicas))

    def _pass(
        self, task: EvaluationTask, state: TrainState, rows: EveryRow, to_all: bool = True
    ) -> Generator[Told, None, None]:
        check_state(state)
        if not self._has_warned:
            self._has_warned = True
            warn_of_loss(self._replicas, lost_with_an_instance(False, rows.dataset))
        self._replicas.instruments.step_begins(state.step)
        begin = partial(self._begun, task, state, rows)
        to_meet = partial(meet, self._replicas) if self._survives else None
        passing = Passing(task.title, state.step, begin, partial(check_state, state), to_meet)
        return DataPass(self._replicas, passing, rows, to_all).results()

    def _begun(self, task: EvaluationTask, state: TrainState, rows: EveryRow, batch: Masked) -> Begun:
        program = self.program(task, state, batch, rows)
        wait = partial(self._wait, program.begin(state, batch))
        return Begun(wait, AHEAD if program.is_independent else 0)  # replicas that meet do so in one batch at a time

    def _wait(self, begun: Callable[[], Told]) -> Told:
        """What the local replicas tell. Errors of collectives inside of the function are those raised there."""
        with self._replicas.reducer.ending():
            return begun()

    # ---- programs

    def program(self, task: EvaluationTask, state: TrainState, batch: Masked, rows: EveryRow) -> EvaluationProgram:
        """The program for such a batch; a collective call where it is the first one of its shapes."""
        replicas = self._replicas
        if self._devices is not replicas.devices:  # an instance was lost
            self._devices = replicas.devices
            self._agreed.clear()
        replicas.dealing.refuse_others(batch)
        of_one = jax.tree.map(replicas.devices.replica_shape, batch)
        model_state = self._options.shapes_of_replica(state.model_state)
        leaves, structure = jax.tree.flatten((state.variables, model_state, of_one))
        key = task, structure, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
        found = self._programs.get(key)
        if found is None or not found.fits(replicas):
            self._agreed.discard(key)
            found = self._programs[key] = EvaluationProgram(replicas, task, self._options, state, of_one)
        if key not in self._agreed and replicas.communicator.size > 1 and not self._is_recorded:
            programs = {f"the {task.title}": lines_of(found.equations)}
            terms = terms_of({"seed": self._options.seed, "step": state.step}, rows.dataset, of_one, programs, None)
            insist_on_agreement(replicas, terms)
        self._agreed.add(key)
        return found
