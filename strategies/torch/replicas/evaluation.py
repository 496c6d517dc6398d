"""Evaluation and prediction: the turns of local replicas with a module that is not trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import numpy as np
import torch
from torch.jit import optimized_execution
from typing_extensions import override

import strategies.trees as trees
from strategies.core.agreement import insist_on_agreement
from strategies.core.engine import EvaluationTask, PendingBatch, Results, padded
from strategies.core.evaluation import ReadAsValue
from strategies.data.sources import Masked
from strategies.errors import StrategyError
from strategies.jax.comparing.agreement import terms_of
from strategies.jax.evaluation.mean import Mean
from strategies.jax.replicas.replicas import Replicas, row_results
from strategies.pipelines.timetable import Timed
from strategies.torch.agreement import lines_of_function, lines_of_module
from strategies.torch.data import CollatedBatch, parts_of, shape_of_rows, tensors_of
from strategies.torch.options import WEIGHT, outcome_of, weighted_value
from strategies.torch.pipelines import PipelineRun, StageCursor, TorchPipeline, drawing
from strategies.torch.replicas.attributes import attributes_of
from strategies.torch.replicas.generators import Baton, kept_generators, seed_of
from strategies.torch.replicas.gradient_map import ReplicaRows
from strategies.torch.replicas.guard import WriteMarks, is_due
from strategies.torch.replicas.module_parts import Slot, slots_of
from strategies.torch.replicas.passes import LossFunction
from strategies.torch.replicas.sync_batch_norm import SyncLayers
from strategies.torch.tensors import ReplicaMemory, as_array, intra_op_threads, keep_freed_memory, kept_apart
from strategies.torch.training import TorchTraining
from strategies.typing import Batch, Metric, Number, Numbers, Tree

OwnBuffers = Sequence[Mapping[int, torch.Tensor]]
"""For each local replica, the values of buffers that differ from those of the module, by the number of the slot."""


class InferenceTurns:
    """The computation of a module's outputs in evaluation mode, without gradients. Afterwards the module is as before.

    Args:
        replicas: The replicas of all instances.
        module: The module.
        memory: The memory in which replicas compute.
        call: (module, batch) -> outputs.
        seed: The seed of random numbers.
        pipeline: The pipeline in which the module's blocks run as stages; None to run them one after another.

    Attributes:
        spans: The timed actions of the simulated devices in the last call, by local replica; empty without a pipeline.
        written: For each local replica, the buffers that the last call has written, by their numbers.
    """

    def __init__(
        self,
        replicas: Replicas,
        module: torch.nn.Module,
        memory: ReplicaMemory,
        call: Callable[[torch.nn.Module, Batch], Tree],
        seed: int,
        pipeline: TorchPipeline | None = None,
    ) -> None:
        keep_freed_memory()
        self._replicas, self._of_all = replicas.local_replicas, replicas.num_replicas_in_sync
        self._instruments = replicas.instruments
        self._module, self._memory, self._call, self._seed = module, memory, call, seed
        self._rows = [ReplicaRows(module, replica, self._of_all) for replica in self._replicas]
        self._layers = SyncLayers(module, replicas, meets=False)
        self._pipeline, self._attributes = pipeline, attributes_of(module)
        self._run: PipelineRun | None = None
        self._rounds = 0  # the number of micro-batches for which `_run` was made
        self._calls = 0
        self.spans: Mapping[int, Sequence[Timed]] = {}
        self.written: list[dict[int, torch.Tensor]] = []

    def __call__(
        self, rounds: Sequence[Sequence[Batch]], number: int, own: OwnBuffers | None = None
    ) -> list[list[Tree]]:
        """Return the outputs by micro-batch and replica.

        Args:
            rounds: For each micro-batch, the batches of the local replicas.
            number: The number of the call, on which random numbers depend.
            own: Buffers of the replicas that differ from those of the module.
        """
        if self._pipeline is not None and self._rounds != len(rounds):
            self.close()
            self._rounds = len(rounds)
            self._run = PipelineRun(self._pipeline, len(rounds), 1, self._module, False, self._instruments)
        slots, attributes, device = slots_of(self._module), self._attributes, self._memory.device
        changed = {number for of_replica in own or () for number in of_replica}
        kept = {n: slot.copied() for n, slot in enumerate(slots) if not slot.is_parameter or n in changed}
        self._calls += 1
        marks = WriteMarks(list(self._module.named_parameters()) if self._of_all > 1 else [], is_due(self._calls))
        found: list[list[Tree]] = []
        self.written = []
        attributes.follow()
        have_own = attributes.begin(self._replicas)
        with kept_generators(device), intra_op_threads(1), _evaluating(self._module):
            view = attributes.view()
            for place, column in enumerate(zip(*rounds, strict=True)):
                with Baton(device), ExitStack() as ends:
                    ends.callback(attributes.put, view)
                    if have_own:
                        ends.enter_context(attributes.of(self._replicas[place]))
                        self._module.eval()
                    for slot_number, value in kept.items():
                        ends.callback(slots[slot_number].put, value)
                    for slot_number, value in (own[place] if own else {}).items():
                        slots[slot_number].put(value)
                    before = [(slot.tensor, slot.tensor._version) for slot in slots]
                    with self._rows[place].put():
                        found.append(self._outputs(place, column, number))
                    self.written.append(_written(slots, before))
        marks.check()
        if self._run is not None:
            self.spans = self._run.spans
        return [list(of_replicas) for of_replicas in zip(*found, strict=True)]

    def _outputs(self, place: int, batches: Sequence[Batch], number: int) -> list[Tree]:
        found: list[Tree] = [None] * len(batches)
        replica, layers, memory = self._replicas[place], self._layers, self._memory

        def work(micro_batch: int, cursor: StageCursor | None) -> None:
            draws = drawing(seed_of(self._seed, replica, number, micro_batch), memory.device, cursor)
            with draws, torch.no_grad(), layers.entered(replica, micro_batch), optimized_execution(False):
                outputs = memory.fetched(self._call(self._module, memory.put(batches[micro_batch])))
                found[micro_batch] = kept_apart(outputs, self._module.buffers())
                if cursor is not None:
                    cursor.leave()

        if self._run is not None:
            self._run.each(work, replica)
            return found
        self._instruments.replica_begins(replica, 0)
        for micro_batch in range(len(batches)):
            work(micro_batch, None)
            self._instruments.replica_ends(replica, 0, micro_batch)
        return found

    def close(self) -> None:
        """End the threads of the pipeline."""
        if self._run is not None:
            self._run.close()
            self._run = None


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, without gradients for the code inside, and restore the modes of its parts."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for one, mode in modes:
            one.training = mode


def _written(slots: Sequence[Slot], before: Sequence[tuple[torch.Tensor, int]]) -> dict[int, torch.Tensor]:
    """Return copies of the buffers that were written, by number."""
    pairs = enumerate(zip(slots, before, strict=True))
    return {
        number: slot.copied()
        for number, (slot, (tensor, version)) in pairs
        if not slot.is_parameter and (slot.tensor is not tensor or tensor._version != version)
    }


# ---- tasks


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
                "the loss of some rows has a weight, and that of others has none; give all of them weights"
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
    def host_results(self, computed: Mapping[str, Number], mask: np.ndarray) -> Tree:
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
        computed = partial(self.function, module, batch)
        outputs = outcome_of(computed).outputs if self.is_loss else computed()
        if not (leaves := trees.leaves(outputs)):
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
    def host_results(self, computed: Tree, mask: np.ndarray) -> Tree:
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
        self._key: tuple[EvaluationTask, range] | None = None
        self._turns: InferenceTurns | None = None  # for this task and these replicas

    def begin_task(self, task: EvaluationTask, state: TorchTraining, batch: Masked) -> PendingBatch:
        """Begin a task for a batch, as `Engine.begin_task` does. The work is done in `PendingBatch.wait`."""
        self._agree(task, state, batch)
        return PendingBatch(partial(self._results, task, state, batch))

    def _agree(self, task: EvaluationTask, state: TorchTraining, batch: Masked) -> None:
        """Compare the task with the other instances. Collective if the task or the batch's shapes are new."""
        replicas = self._replicas
        shapes = trees.map(shape_of_rows, tensors_of(batch.values))
        key = task, replicas.communicator, str(shapes)
        if key in self._agreed or self._is_recorded:
            return
        self._agreed.add(key)
        programs = {
            "the module": lines_of_module(state.module, state.attributes.of_all(replicas.communicator)),
            f"the function of the {task.title}": lines_of_function(task.code),
        }
        options = {"seed": self._seed, "step": state.step}
        insist_on_agreement(replicas, terms_of(options, replicas.dataset_of(batch), shapes, programs, None))

    def _results(self, task: EvaluationTask, state: TorchTraining, batch: Masked) -> Results:
        """Return the results of the local replicas. The module gets only the rows that count."""
        local, turns = self._replicas.local_replicas, self._turns
        if turns is None or self._key != (task, local):  # if an instance is lost, `local` can change
            state.buffers.follow()
            turns = InferenceTurns(self._replicas, state.module, state.memory_of_replicas, task, self._seed)
            self._key, self._turns = (task, local), turns
        state.buffers.follow_shown()
        masks = [np.asarray(mask) for mask in np.split(np.asarray(batch.mask), len(local))]
        rows = _without_padding(batch.values, masks)
        own = [{number: each[replica] for number, each in state.buffers.own.items()} for replica in local]
        [computed] = turns([rows], state.step, own)
        return [row_results(task.host_results(one, mask), mask) for one, mask in zip(computed, masks, strict=True)]


def _without_padding(values: Batch, masks: Sequence[np.ndarray]) -> list[Batch]:
    """Return the rows of each replica. If every row is padding, keep one, so that the shape of the outputs is known."""
    rows = [max(int(mask.sum()), 1) for mask in masks]
    if isinstance(values, CollatedBatch):
        return parts_of(CollatedBatch(values.shortened(rows)), len(masks))
    parts = parts_of(tensors_of(values), len(masks))
    return [trees.map(lambda leaf, count=count: leaf[:count], part) for part, count in zip(parts, rows, strict=True)]
