"""Evaluating and predicting: what all replicas say of every batch of a data set, in a fixed order.

What a replica computes depends on its rows alone, and which rows it gets on the number of replicas and the batch size.
All instances get what all replicas say, and merge it themselves: replica by replica, and batch by batch. Predictions
may also go to instance 0 alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import jax
import numpy as np

from collectives.tree import combined
from popdist.instance import replica_block
from strategies.comparing.agreement import insist_on_agreement, terms_of
from strategies.comparing.program_text import lines_of
from strategies.data.every_row import EveryRow, every_row
from strategies.data.sources import Masked
from strategies.errors import StrategyError
from strategies.evaluation.evaluation_program import (
    EvaluationProgram,
    LossOfRows,
    MetricsFunction,
    MetricsOfBatch,
    Outputs,
    Task,
    Told,
)
from strategies.evaluation.merging import Evaluation
from strategies.gradients.arguments import (
    MODEL_STATE,
    check_function,
    check_loss_function,
    check_state,
    check_takes_state,
)
from strategies.gradients.replica_program import LossFunction
from strategies.replicas.membership import lost_with_an_instance, surviving, warn_of_loss
from strategies.replicas.replicas import Replicas
from strategies.roles import Batch, Tree
from strategies.step.options import StepOptions
from strategies.step.single_step import SingleStep
from strategies.train_state import TrainState

_ELSEWHERE: Told = [(None, np.zeros(0, np.bool_))]
"""What an instance is told of a batch of which another one is told everything."""
_AHEAD = 2  # batches that are begun before what the first of them says is asked for


class Evaluator:
    """Evaluates and predicts with the variables of a state, which stays as it is.

    Args:
        replicas: where the replicas are.
        loss_fn: of the `Trainer`, for where no other function is given.
        options: of the step.
        single: makes the steps between which this happens.

    Attributes:
        single: see above.
        survives: whether the state is not lost with an instance.
    """

    def __init__(self, replicas: Replicas, loss_fn: LossFunction, options: StepOptions, single: SingleStep) -> None:
        self.single = single
        self.survives = options.own_part is None
        self._replicas = replicas
        self._devices = replicas.devices
        self._loss_fn = loss_fn
        self._options = options
        self._programs: dict[Any, EvaluationProgram] = {}
        self._agreed: set[Any] = set()  # the keys of programs that the instances that are there have compared
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
        merged: dict[str, Any] = {}
        rows = 0
        with closing(self._pass(task, state, self._rows(dataset))) as batches:
            for told in batches:
                rows += sum(int(mask.sum()) for _, mask in told)
                of_batch = combined([metrics for metrics, _ in told], _merged)
                merged = _merged(merged, of_batch) if merged else of_batch
        if not rows:
            raise ValueError("there is no row to evaluate")
        in_order = sorted(merged, key=lambda name: name != "loss")  # the loss first
        return Evaluation({name: merged[name] for name in in_order}, rows)

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
        task = Outputs(fn or self._loss_fn, is_loss=fn is None)
        return self._predictions(self._pass(task, state, rows, to_all), rows.is_interleaved)

    def told(self, task: Task, state: TrainState, dataset: Iterable[Batch]) -> Generator[Told, None, None]:
        """For each batch what a task tells of it on all replicas, in their order, with their masks.

        Taking a batch is a collective call.

        Args:
            task: see there.
            state: see `predict`.
            dataset: see `evaluate`.

        Raises:
            TypeError, ValueError, DisagreementError: see `evaluate`, and what the task raises.
        """
        return self._pass(task, state, self._rows(dataset))

    def _predictions(self, batches: Generator[Told, None, None], is_interleaved: bool) -> Generator[Tree, None, None]:
        with closing(batches):
            for of_replicas in batches:
                yield None if of_replicas is _ELSEWHERE else in_order(of_replicas, is_interleaved)

    def _check(self, fn: LossFunction | None, has_state: bool) -> None:
        if fn is not None:
            check_loss_function(fn)
            check_takes_state(fn, has_state, "fn")

    def _rows(self, dataset: Iterable[Batch]) -> EveryRow:
        replicas = self._replicas
        return every_row(dataset, replicas.dealing.batch, replicas.communicator, len(replicas.local_replicas))

    def _pass(self, task: Task, state: TrainState, rows: EveryRow, to_all: bool = True) -> Generator[Told, None, None]:
        check_state(state)
        if not self._has_warned:
            self._has_warned = True
            warn_of_loss(self._replicas, lost_with_an_instance(False, rows.dataset))
        self._replicas.instruments.step_begins(state.step)
        return _Pass(self, self._replicas, task, state, rows, to_all).results()

    # ---- programs

    def program(self, task: Task, state: TrainState, batch: Masked, rows: EveryRow) -> EvaluationProgram:
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
            found = self._programs[key] = EvaluationProgram(replicas, task, self._options, state, of_one)
        if key not in self._agreed and replicas.communicator.size > 1 and not self.single.is_recorded:
            programs = {f"the {task.title}": lines_of(found.equations)}
            terms = terms_of({"seed": self._options.seed, "step": state.step}, rows.dataset, of_one, programs, None)
            insist_on_agreement(replicas, terms)
        self._agreed.add(key)
        return found


class _Pass:
    """Goes through the rest of a data set once, with all instances that there are.

    Args:
        evaluator: has the programs.
        replicas: connects the instances.
        task: what is wanted of every batch.
        state: what it is computed with.
        rows: the data set.
        to_all: whether all instances are told, or instance 0 alone.
    """

    def __init__(
        self, evaluator: Evaluator, replicas: Replicas, task: Task, state: TrainState, rows: EveryRow, to_all: bool
    ) -> None:
        self._evaluator = evaluator
        self._replicas = replicas
        self._task = task
        self._state = state
        self._rows = rows
        self._gather = gather_replicas if to_all else gather_replicas_on_first
        self._batches = rows.batches(0)
        self._begun: deque[Callable[[], Told]] = deque()
        self._number = 0  # of the oldest batch that was begun
        self._ahead = 0
        self._is_at_end = False

    def results(self) -> Generator[Told, None, None]:
        """For each batch what all replicas tell, and their masks, in their order; taking it is a collective call."""
        done = 0
        try:
            while told := self._surviving(done):
                done += 1
                yield told
        finally:
            self._stop()
            self._replicas.place.passes += 1
            self._replicas.place.batches = 0
            if not self._is_at_end:
                self._rows.leave(done)

    def _surviving(self, done: int) -> Told:
        self._replicas.place.batches = done
        if not self._evaluator.survives:
            return self._next(done)
        return surviving(self._replicas, lambda: self._next(done), lambda: self._catch_up(done))

    def _next(self, done: int) -> Told:
        """What is told of the batch that comes after so many; nothing behind the last one."""
        while True:
            check_state(self._state)
            self._begin()
            title = f"{self._task.title} at step {self._state.step}"
            if not self._begun:
                self._is_at_end = True
                self._replicas.communicator.barrier(name=f"end of {title}")
                return []
            local = self._wait(self._begun.popleft())
            told = self._gather(self._replicas, local, f"{title}, batch {self._number}")
            self._number += 1
            if self._number > done:
                return told

    def _begin(self) -> None:
        """Have so many batches computed that no replica waits for this thread."""
        while len(self._begun) <= self._ahead:
            batch = next(self._batches, None)
            if batch is None:
                return
            program = self._evaluator.program(self._task, self._state, batch, self._rows)
            self._begun.append(program.begin(self._state, batch))
            self._ahead = _AHEAD if program.is_independent else 0  # replicas that meet do so in one batch at a time

    def _wait(self, begun: Callable[[], Told]) -> Told:
        """What the local replicas tell. Errors of collectives inside of the function are those raised there."""
        reducer = self._replicas.reducer
        try:
            return begun()
        except jax.errors.JaxRuntimeError as error:
            if reducer.last_error not in (None, error):
                raise reducer.last_error from error
            raise
        finally:
            reducer.end()

    def _catch_up(self, done: int) -> Told | None:
        """After a loss: nothing where others are through, else None, and it goes on with what an instance has not got.

        Who is through has met all others at the end, where they have got everything.
        """
        self._stop()
        meeting, own = self._evaluator.single.meet(), self._replicas.place.passes
        if meeting.passes.max() > own:
            if not self._is_at_end:
                raise StrategyError(
                    f"an instance is lost, and others have left the {self._task.title} after {done} batches; take all "
                    "batches that predict gives"
                )
            return []
        self._is_at_end = False
        self._number = int(np.where(meeting.passes == own, meeting.batches, 0).min())
        self._batches = self._rows.batches(self._number)
        return None

    def _stop(self) -> None:
        """Give up what was begun, once no replica computes any more."""
        self._batches.close()
        while self._begun:
            with suppress(Exception):  # nobody has asked for it
                self._begun.popleft()()


def gather_replicas(replicas: Replicas, local: Sequence[Tree], name: str) -> list[Tree]:
    """The host trees of all replicas, in their order; a collective call.

    Args:
        replicas: connects the instances.
        local: those of the local replicas, alike in structure, shapes and dtypes.
        name: of the call.
    """
    whole = replicas.communicator.all_gather(_message(replicas, local), name=name)
    return _told_by(replicas, whole, local[0])


def gather_replicas_on_first(replicas: Replicas, local: Sequence[Tree], name: str) -> list[Tree]:
    """See `gather_replicas`, for instance 0 alone; the others are told `_ELSEWHERE`."""
    whole = replicas.communicator.gather(_message(replicas, local), name=name)
    return _ELSEWHERE if whole is None else _told_by(replicas, whole, local[0])


def _blocks(replicas: Replicas) -> list[range]:
    """The replicas of each instance."""
    count = replicas.communicator.size
    return [replica_block(rank, count, replicas.num_replicas_in_sync) for rank in range(count)]


def _message(replicas: Replicas, local: Sequence[Tree]) -> np.ndarray:
    """The bytes of the local replicas' trees, one row each; some instances may have one replica less than others."""
    packed = [_packed(tree) for tree in local]
    message = np.zeros((max(map(len, _blocks(replicas))), packed[0].size), np.uint8)
    message[: len(packed)] = packed
    return message


def _told_by(replicas: Replicas, whole: np.ndarray, like: Tree) -> list[Tree]:
    """The trees of all replicas, of the messages of all instances."""
    rows = [whole[rank, row] for rank, block in enumerate(_blocks(replicas)) for row in range(len(block))]
    return [_unpacked(row, like) for row in rows]


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: metric.merge(other[name]) for name, metric in one.items()}


def _packed(tree: Tree) -> np.ndarray:
    leaves = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


def _unpacked(data: np.ndarray, like: Tree) -> Tree:
    leaves, structure = jax.tree.flatten(like)
    found = []
    begin = 0
    for leaf in leaves:
        array = np.empty(leaf.shape, leaf.dtype)
        array.reshape(-1).view(np.uint8)[:] = data[begin : begin + array.nbytes]
        begin += array.nbytes
        found.append(array)
    return jax.tree.unflatten(structure, found)


def in_order(of_replicas: Told, is_interleaved: bool) -> Tree:
    """The rows that count of what replicas predict, in the order of the data set."""
    trees, masks = zip(*of_replicas, strict=True)

    def ordered(arrays: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.stack(arrays, axis=1 if is_interleaved else 0)
        return whole.reshape(-1, *arrays[0].shape[1:])

    counts = ordered(masks)
    return jax.tree.map(lambda *leaves: ordered(leaves)[counts], *trees)
