"""The test and predict functions of a model: every row counts once, however replicas are spread."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from typing_extensions import override

from collectives.tree import combined
from strategies.core.rows import EvaluationTask, Told, in_order, padded
from strategies.jax.gradients.model_state import FIRST, MEAN
from strategies.jax.programs.program import jit
from strategies.jax.replicas.replica_context import get_replica_context
from strategies.keras.agreement import broadcast
from strategies.keras.data import Pass
from strategies.keras.protocols import Array, Logs, ModelLike, State, Values
from strategies.keras.state import METRICS, VARIABLES, ModelFunctions, Seeds, results_of, seeds_of
from strategies.outcome import Outcome
from strategies.strategy import Strategy
from strategies.train_state import TrainState
from strategies.trainer import Trainer
from strategies.typing import Batch, Key, Tree, Variables


@dataclass(frozen=True)
class _OfRows(EvaluationTask):
    """A task of a model on its real rows, without padding.

    Its batches are `(numbers, batch)`, with the numbers of the rows in the data, so that replicas and batches draw from
    different random states.
    """

    is_exact: ClassVar[bool] = True
    functions: ModelFunctions

    def _state(self, numbers: jax.Array, model_state: Mapping[str, Values]) -> list[Array]:
        replica = get_replica_context().replica_id_in_sync_group
        return self.functions.seeds.of_replica(model_state[VARIABLES], replica, numbers[0])


@dataclass(frozen=True)
class _MetricsTask(_OfRows):
    """A task that computes the contribution of a replica's rows to the variables of metrics."""

    title: ClassVar[str] = "evaluation"

    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        numbers, rows = batch
        zeros = [jnp.zeros(one.shape, one.dtype) for one in self.functions.model.metrics_variables]
        others = self._state(numbers, model_state[0])
        _, _, metrics, logs = self.functions.losses(variables, others, zeros, rows, training=False)
        return metrics, {name: jnp.asarray(value) for name, value in logs.items()}

    @override
    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        return computed


@dataclass(frozen=True)
class _OutputsTask(_OfRows):
    """A task that computes the model's outputs for each row."""

    title: ClassVar[str] = "prediction"

    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        numbers, rows = batch
        outputs = self.functions.outputs(variables, self._state(numbers, model_state[0]), rows)
        return jax.tree.map(jnp.asarray, outputs)

    @override
    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        return jax.tree.map(partial(padded, mask=mask), computed)


class _Function(ABC):
    """The common part of the test and the predict function.

    Args:
        model: Model of Keras, built.
        strategy: Strategy whose replicas compute.
        steps_per_execution: Number of batches of a call.

    Attributes:
        kind: Class of the task for each batch.
    """

    kind: ClassVar[type[_OfRows]]

    def __init__(self, model: ModelLike, strategy: Strategy, steps_per_execution: int) -> None:
        self._model = model
        self._strategy = strategy
        self._steps = steps_per_execution
        self.functions = ModelFunctions(model, Seeds(seeds_of(model)))
        self._task = self.kind(self.functions)
        self._trainer = Trainer(strategy, _no_loss, optax.identity())
        self._is_adopted = False

    def begin(self) -> None:
        """Broadcast instance 0's variables before the next batch: the user may have changed them."""
        self._is_adopted = False

    @abstractmethod
    def __call__(self, state: State, iterator: Pass) -> tuple[Tree, State]:
        """Return the results of the next batches that Keras asks for, and the state."""

    def taken(self, state: State, iterator: Pass) -> tuple[list[Told], State]:
        """Return all replicas' results for the next batches, and the state.

        Raises:
            StopIteration: If there is no batch.
        """
        trained, others, *rest = state
        if not self._is_adopted:
            self._is_adopted = True
            trained, others = broadcast(self._strategy.replicas, (list(trained), list(others)))
        given = TrainState(list(trained), None, 0, model_state={VARIABLES: list(others)})
        stream = iterator.told(lambda dataset: self._trainer.told(self._task, given, dataset))
        told = list(itertools.islice(stream, self._steps))
        if not told:
            raise StopIteration
        return told, (trained, others, *rest)


class TestFunction(_Function):
    """The function that evaluates for `evaluate` and `test_on_batch`."""

    kind = _MetricsTask

    def __init__(self, model: ModelLike, strategy: Strategy, steps_per_execution: int) -> None:
        super().__init__(model, strategy, steps_per_execution)
        self._results = jit(partial(results_of, model))
        self.begin()

    def begin(self) -> None:
        """Broadcast instance 0's variables before the next batch, and find out again how metrics are merged."""
        super().begin()
        self._words: list[str] | None = None
        self.forget()

    def forget(self) -> None:
        """Reset the metrics."""
        self._seen = 0

    def __call__(self, state: State, iterator: Pass) -> tuple[Logs, State]:
        """Evaluate the next batches.

        Args:
            state: State of Keras's loop.
            iterator: Pass over the data.

        Returns:
            The results of metrics so far, and the new state.

        Raises:
            StopIteration: If there is no batch.
            StrategyError: If a metric cannot be merged.
        """
        if self._words is None:
            trained, others, of_metrics = state
            words, _ = self.functions.words(trained, others, of_metrics, iterator.feed.example, training=False)
            self._words = words[METRICS]
        told, (trained, others, of_metrics) = self.taken(state, iterator)
        metrics = [np.asarray(one) for one in of_metrics]
        logs: Logs = {}
        for of_replicas in told:
            counted = [one.tree for one in of_replicas if one.mask.any()]
            if counted:
                self._seen += len(counted)
                of_variables = zip(*(made for made, _ in counted), strict=True)
                metrics = [self._merged(*each) for each in zip(self._words, metrics, of_variables, strict=True)]
                logs = logs or counted[0][1]
        return dict(logs) | dict(self._results(metrics)), (trained, others, metrics)

    def _merged(self, word: str, old: np.ndarray, made: Sequence[np.ndarray]) -> np.ndarray:
        """Return a metric's variable plus the contributions of the replicas, or their running mean."""
        if word == FIRST:
            return np.asarray(made[0])
        total = combined(made, np.add)
        if word == MEAN:
            return np.asarray(old + (total - len(made) * old) / np.asarray(self._seen, total.dtype), total.dtype)
        return np.asarray(old + total)


class PredictFunction(_Function):
    """The function that predicts for `predict` and `predict_on_batch`."""

    kind = _OutputsTask

    def __call__(self, state: State, iterator: Pass) -> tuple[Tree, State]:
        """Return the outputs for the next batches, in the order of the data, and the state."""
        told, state = self.taken(state, iterator)
        batches = [in_order(of_replicas, False) for of_replicas in told]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches), state


def _no_loss(variables: Variables, batch: Batch, key: Key, model_state: Tree) -> Outcome:
    raise AssertionError("evaluation and prediction compute no loss to train with")
