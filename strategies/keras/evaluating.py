"""The test and predict functions of a model: every row counts once, however replicas are spread."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from collectives.tree import combined
from strategies.evaluation.data_pass import Told, in_order
from strategies.evaluation.evaluation_program import EvaluationTask
from strategies.gradients.model_state import FIRST, MEAN
from strategies.keras.agreement import broadcast
from strategies.keras.data import Pass
from strategies.keras.programs import MetricsTask, ModelFunctions, OutputsTask
from strategies.keras.state import VARIABLES, Seeds, seeds_of
from strategies.programs.program import jit
from strategies.roles import Batch, Tree
from strategies.strategy import Strategy
from strategies.train_state import TrainState
from strategies.trainer import Trainer

State = Sequence[Any]


class _Function(ABC):
    """What both have in common.

    Args:
        model: of Keras, built.
        strategy: where the replicas are.
        steps_per_execution: how many batches a call is for.
        task: makes what is wanted of each batch of the functions of a model.
    """

    def __init__(
        self, model: Any, strategy: Strategy, steps_per_execution: int, task: Callable[[ModelFunctions], EvaluationTask]
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._steps = steps_per_execution
        self.functions = ModelFunctions(model, Seeds(tuple(seeds_of(model))))
        self._task = task(self.functions)
        self._trainer = Trainer(strategy, _no_loss, optax.identity())
        self._is_adopted = False

    def begin(self) -> None:
        """Have instance 0's variables on all instances before the next batch: the user may have changed them."""
        self._is_adopted = False

    @abstractmethod
    def __call__(self, state: State, iterator: Pass) -> tuple[Any, State]:
        """What Keras asks for of the next batches, and the state."""

    def taken(self, state: State, iterator: Pass) -> tuple[list[Told], State]:
        """What is told of the next batches, and the state.

        Raises:
            StopIteration: if there is none.
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
    """Evaluates for `evaluate` and `test_on_batch`."""

    def __init__(self, model: Any, strategy: Strategy, steps_per_execution: int) -> None:
        super().__init__(model, strategy, steps_per_execution, MetricsTask)
        self._results = jit(self.functions.results)
        self.begin()

    def begin(self) -> None:
        """See above; and how metrics are merged is looked at anew."""
        super().begin()
        self._words: list[str] | None = None
        self.forget()

    def forget(self) -> None:
        """Metrics begin anew."""
        self._seen = 0

    def __call__(self, state: State, iterator: Pass) -> tuple[dict[str, Any], State]:
        """Evaluate the next batches; see `TrainFunction`.

        Raises:
            StopIteration: if there is no batch.
            StrategyError: if a metric cannot be merged.
        """
        if self._words is None:
            self._words = self._looked_at(state, iterator.feed.example)
        told, (trained, others, metrics) = self.taken(state, iterator)
        metrics = [np.asarray(one) for one in metrics]
        logs: dict[str, Any] = {}
        for of_replicas in told:
            counted = [of_replica for of_replica, mask in of_replicas if mask.any()]
            if counted:
                self._seen += len(counted)
                of_variables = zip(*(made for made, _ in counted), strict=True)
                metrics = [self._merged(*each) for each in zip(self._words, metrics, of_variables, strict=True)]
                logs = logs or counted[0][1]
        return dict(logs) | dict(self._results(metrics)), (trained, others, metrics)

    def _merged(self, word: str, old: np.ndarray, made: Sequence[np.ndarray]) -> np.ndarray:
        """A variable of a metric, and what the rows of each replica have made of zero: their sum, or a running mean."""
        if word == FIRST:
            return np.asarray(made[0])
        total = combined(made, np.add)
        if word == MEAN:
            return np.asarray(old + (total - len(made) * old) / np.asarray(self._seen, total.dtype), total.dtype)
        return np.asarray(old + total)

    def _looked_at(self, state: State, example: Batch) -> list[str]:
        trained, others, metrics = jax.tree.map(_shape, tuple(map(list, state)))
        return self.functions.words_of_metrics(trained, others, metrics, jax.tree.map(_shape, example))


class PredictFunction(_Function):
    """Predicts for `predict` and `predict_on_batch`."""

    def __init__(self, model: Any, strategy: Strategy, steps_per_execution: int) -> None:
        super().__init__(model, strategy, steps_per_execution, OutputsTask)

    def __call__(self, state: State, iterator: Pass) -> tuple[Tree, State]:
        """The outputs for the next batches, in the order of the data, and the state."""
        told, state = self.taken(state, iterator)
        batches = [in_order(of_replicas, False) for of_replicas in told]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches), state


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype))


def _no_loss(variables: Any, batch: Any, key: Any, model_state: Any) -> Any:
    raise AssertionError("nothing is trained here")
