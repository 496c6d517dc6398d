"""The stateless functions of a model of Keras, of which one replica computes losses, metrics and outputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import jax
import keras
import numpy as np
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

from strategies.keras.protocols import Array, Logs, ModelLike, Values
from strategies.keras.state import Seeds, words_of_metrics
from strategies.programs.dataflow import looks
from strategies.typing import Batch, Tree, Variables


@dataclass(frozen=True, eq=False)
class ModelFunctions:
    """The stateless functions of a model, as they were when it was compiled last.

    Attributes:
        model: it is.
        seeds: which of its variables that are not trained are states of seed generators.
        unscaled: values of the first variables of the optimizer, with which Keras does not scale the loss.
        tracing: entered while losses to train with are traced.
    """

    model: ModelLike
    seeds: Seeds
    unscaled: Values = ()
    tracing: Callable[[], AbstractContextManager[None]] = nullcontext

    def losses(
        self, variables: Variables, others: Values, metrics: Values, batch: Batch, training: bool
    ) -> tuple[jax.Array, list[Array], list[Array], Logs]:
        """Return the loss, the new values of variables that are not trained and of metrics, and the logs; traceable."""
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        named = {"optimizer_variables": list(self.unscaled)} if training else {}
        with self.tracing() if training else nullcontext():
            loss, (unscaled, y_pred, others, metrics) = self.model.compute_loss_and_updates(
                variables, others, metrics, x, y, sample_weight, training=training, **named
            )
        logs, metrics = self.model._update_metrics_variables(metrics, unscaled, x, y, y_pred, sample_weight)
        return loss, list(others), list(metrics), logs

    def words_of_metrics(self, variables: Variables, others: Values, metrics: Values, batch: Batch) -> list[str]:
        """Return how replicas agree on the variables of metrics where nothing is trained; of shapes and dtypes.

        Raises:
            StrategyError: see `strategies.keras.state.words_of_metrics`.
        """

        def after(old: Values, variables: Variables, others: Values, batch: Batch) -> list[Array]:
            return self.losses(variables, others, old, batch, training=False)[2]

        changed, adds = looks(after, metrics, variables, others, batch)
        return words_of_metrics(self.model.metrics_variables, changed, adds)

    def outputs(self, variables: Variables, others: Values, batch: Batch) -> Tree:
        """Return what the model says of each row; traceable."""
        x, _, _ = unpack_x_y_sample_weight(batch)
        named = {"training": False} if self.model._call_has_training_arg else {}
        outputs, _ = self.model.stateless_call(variables, others, x, **named)
        return outputs

    def results(self, metrics: Values) -> Logs:
        """See `results_of`."""
        return results_of(self.model, metrics)


def results_of(model: ModelLike, metrics: Values) -> Logs:
    """Return the results of metrics with these values of their variables; traceable."""
    with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, metrics, strict=True))):
        return model.get_metrics_result()


def shape_of(leaf: Array) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype that an array has in a program."""
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype))
