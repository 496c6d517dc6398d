"""What one replica computes of a model of Keras: losses and metrics to train with, metrics to evaluate, outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

from strategies.evaluation.evaluation_program import EvaluationTask
from strategies.gradients.arguments import Outcome
from strategies.keras.state import METRICS, VARIABLES, Seeds, words_of_metrics
from strategies.programs.dataflow import looks
from strategies.replicas.replica_context import get_replica_context
from strategies.roles import Batch, Key, Tree, Variables


@dataclass(frozen=True, eq=False)
class ModelFunctions:
    """The stateless functions of a model, as they were when it was compiled last.

    Attributes:
        model: it is.
        seeds: which of its variables that are not trained are states of seed generators.
        unscaled: values of the first variables of the optimizer, with which Keras does not scale the loss.
        tracing: entered while losses to train with are traced.
    """

    model: Any
    seeds: Seeds
    unscaled: Sequence[Any] = ()
    tracing: Callable[[], AbstractContextManager[Any]] = nullcontext

    def losses(
        self, variables: Variables, others: Sequence[Any], metrics: Sequence[Any], batch: Batch, training: bool
    ) -> tuple[jax.Array, list[Any], list[Any], dict[str, Any]]:
        """The loss, the new values of variables that are not trained and of metrics, and the logs; traceable."""
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        named = {"optimizer_variables": list(self.unscaled)} if training else {}
        with self.tracing() if training else nullcontext():
            loss, (unscaled, y_pred, others, metrics) = self.model.compute_loss_and_updates(
                variables, others, metrics, x, y, sample_weight, training=training, **named
            )
        logs, metrics = self.model._update_metrics_variables(metrics, unscaled, x, y, y_pred, sample_weight)
        return loss, list(others), list(metrics), logs

    def words_of_metrics(self, variables: Any, others: Any, metrics: Sequence[Any], batch: Any) -> list[str]:
        """How replicas agree on the variables of metrics where nothing is trained; of shapes and dtypes.

        Raises:
            StrategyError: see `strategies.keras.state.words_of_metrics`.
        """

        def after(old: list[Any], variables: Any, others: Any, batch: Any) -> list[Any]:
            return self.losses(variables, others, old, batch, training=False)[2]

        changed, adds = looks(after, metrics, variables, others, batch)
        return words_of_metrics(self.model.metrics_variables, changed, adds)

    def outputs(self, variables: Variables, others: Sequence[Any], batch: Batch) -> Tree:
        """What the model says of each row; traceable."""
        x, _, _ = unpack_x_y_sample_weight(batch)
        named = {"training": False} if self.model._call_has_training_arg else {}
        outputs, _ = self.model.stateless_call(variables, others, x, **named)
        return outputs

    def results(self, metrics: Sequence[Any]) -> dict[str, Any]:
        """What metrics say, by their names; traceable."""
        mapping = list(zip(self.model.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            results: dict[str, Any] = self.model.get_metrics_result()
        return results


@dataclass(frozen=True, eq=False)
class TrainLoss:
    """The loss function of a `Trainer` for a model.

    Attributes:
        functions: of the model.
        names: of logs that are no results of metrics, such as what an own `compute_metrics` returns; their means are
            metrics of the step.
    """

    functions: ModelFunctions
    names: tuple[str, ...] = ()

    def __call__(self, variables: Variables, batch: Batch, key: Key, model_state: Mapping[str, Any]) -> Outcome:
        """See `Trainer`. The model has random states of its own, so the key is not used."""
        seeds, given = self.functions.seeds, model_state[VARIABLES]
        own = seeds.of_replica(given, get_replica_context().replica_id_in_sync_group)
        loss, made, metrics, logs = self.functions.losses(variables, own, model_state[METRICS], batch, training=True)
        after = {VARIABLES: seeds.after(given, own, made), METRICS: metrics}
        return Outcome(loss, {name: jnp.mean(jnp.asarray(logs[name])) for name in self.names}, after)


class _OfRows(EvaluationTask):
    """A task of a model, for rows that count and no others.

    Its batches are `(numbers, batch)`: the numbers of the rows in the data, so that replicas and batches draw from
    different random states.
    """

    is_exact: ClassVar[bool] = True
    functions: ModelFunctions

    def _state(self, numbers: jax.Array, model_state: Mapping[str, Any]) -> list[Any]:
        replica = get_replica_context().replica_id_in_sync_group
        return self.functions.seeds.of_replica(model_state[VARIABLES], replica, numbers[0])


@dataclass(frozen=True)
class MetricsTask(_OfRows):
    """What the rows of a replica add to the variables of metrics."""

    title: ClassVar[str] = "evaluation"
    functions: ModelFunctions

    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        """See `EvaluationTask`."""
        numbers, rows = batch
        zeros = [jnp.zeros(one.shape, one.dtype) for one in self.functions.model.metrics_variables]
        others = self._state(numbers, model_state[0])
        _, _, metrics, logs = self.functions.losses(variables, others, zeros, rows, training=False)
        return metrics, {name: jnp.asarray(value) for name, value in logs.items()}

    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        """See `EvaluationTask`."""
        return computed


@dataclass(frozen=True)
class OutputsTask(_OfRows):
    """What the model says of each row."""

    title: ClassVar[str] = "prediction"
    functions: ModelFunctions

    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        """See `EvaluationTask`."""
        numbers, rows = batch
        outputs = self.functions.outputs(variables, self._state(numbers, model_state[0]), rows)
        return jax.tree.map(jnp.asarray, outputs)

    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        """See `EvaluationTask`: as many rows as others tell, of which those behind the ones that count are zeros."""

        def padded(leaf: np.ndarray) -> np.ndarray:
            whole = np.zeros((len(mask), *leaf.shape[1:]), leaf.dtype)
            count = int(mask.sum())
            whole[:count] = leaf[:count]
            return whole

        return jax.tree.map(padded, computed)
