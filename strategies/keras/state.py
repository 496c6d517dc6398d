"""The stateless functions of a Keras model on JAX, its untrained state, and types for parts of Keras without types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.utils import unpack_x_y_sample_weight

from strategies.errors import StrategyError
from strategies.jax.gradients.model_state import ALIKE, CONSTANT, FIRST, MEAN, SUM
from strategies.jax.programs.jaxpr import looks
from strategies.typing import Batch, Number, Tree, Variables

Array: TypeAlias = jax.Array | np.ndarray
"""The value of a variable: an array of JAX or NumPy."""

Values: TypeAlias = Sequence[Array]
"""The values of variables, in Keras's order."""

State: TypeAlias = Sequence[Values]
"""The state in Keras's loops: values of the trainable, the other, the optimizer's and the metrics' variables."""

Logs: TypeAlias = dict[str, Number]
"""Losses and results of metrics by name."""

ModelClass: TypeAlias = Any
"""A class of models, of Keras or of the user."""

Callbacks: TypeAlias = Any
"""Callbacks as users give them: one, a nested list of them, a `CallbackList`, or None."""


OTHER_WAYS = ("mean", "only_first_replica")
"""The aggregations by which the variables of a metric are not summed."""

VARIABLES, METRICS = "variables", "metrics"
"""The parts of the model state: variables that are not trained, and variables of metrics."""


def seeds_of(model: keras.Model) -> tuple[bool, ...]:
    """Return, for each variable that is not trained, whether it is the state of a `SeedGenerator`."""
    layers = model._flatten_layers()
    states = {id(generator.state) for layer in layers for generator in layer._seed_generators}
    return tuple(id(variable) in states for variable in model.non_trainable_variables)


def seed_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that are states of seed generators."""
    pairs = zip(model.non_trainable_variables, seeds_of(model), strict=True)
    return [variable for variable, flag in pairs if flag]


def random_states(model: keras.Model) -> list[list[int]]:
    """Return the states of a model's seed generators, which Keras does not save in files."""
    return [np.asarray(variable.value).tolist() for variable in seed_variables(model)]


def set_random_states(model: keras.Model, states: Sequence[Sequence[int]]) -> bool:
    """Set the states of a model's seed generators; return False, and set nothing, if their numbers differ."""
    variables = seed_variables(model)
    if len(variables) != len(states):
        return False
    for variable, state in zip(variables, states, strict=True):
        variable.assign(np.asarray(state, variable.dtype))
    return True


@dataclass(frozen=True)
class Seeds:
    """The states of seed generators among the variables that are not trained.

    Each replica draws from its own states: replica 0 from the model's, the others from states derived from these. After
    a step, all replicas have the model's states advanced by the number of draws of one replica.

    Attributes:
        flags: For each variable, whether it is the state of a seed generator.
    """

    flags: tuple[bool, ...]

    def of_replica(self, values: Values, replica: jax.Array, draw: jax.Array | None = None) -> list[Array]:
        """Return the values with which a replica begins; traceable by JAX.

        Args:
            values: Values of all variables.
            replica: Global index of the replica.
            draw: Number that differs each time the same values are used; None if each is used once.
        """
        return [self._own(one, replica, draw) if flag else one for one, flag in zip(values, self.flags, strict=True)]

    def _own(self, state: Array, replica: jax.Array, draw: jax.Array | None) -> jax.Array:
        own = jnp.where(replica == 0, state, _folded(state, replica))
        return own if draw is None else _folded(own, draw)

    def after(self, values: Values, begun: Values, made: Values) -> list[Array]:
        """Return the values that all replicas have after a step; traceable by JAX.

        Args:
            values: Values before the step.
            begun: Result of `of_replica` for these values.
            made: Values that the model computed from `begun`.
        """
        rows = zip(values, begun, made, self.flags, strict=True)
        return [value + (new - own) if flag else new for value, own, new, flag in rows]


def _folded(state: Array, number: jax.Array) -> jax.Array:
    """Return a state derived from the state of a seed generator and a number; traceable by JAX."""
    key = jax.random.wrap_key_data(jnp.asarray(state), impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, number))


def reductions_of(variables: Sequence[keras.Variable], flags: Sequence[bool], is_changed: Sequence[bool]) -> list[str]:
    """Return, for each untrained variable, how replicas agree on its value, such as by MEAN or FIRST.

    Args:
        variables: Variables that are not trained.
        flags: For each variable, whether it is the state of a seed generator.
        is_changed: For each variable, whether a step changes it.

    Raises:
        StrategyError: If a variable that a step changes is to be summed.
    """
    return [
        ALIKE if flag else reduction_of(variable) if changed else CONSTANT
        for variable, flag, changed in zip(variables, flags, is_changed, strict=True)
    ]


def reduction_of(variable: keras.Variable) -> str:
    """Return how replicas agree on a variable that is not of a metric: by MEAN or FIRST.

    Raises:
        StrategyError: If the variable is to be summed.
    """
    if variable.aggregation == "sum":
        raise StrategyError(
            f"variable {variable.path!r} has aggregation='sum', but layers get means over replicas; use "
            "aggregation='mean' and add values multiplied by num_replicas_in_sync, or count in a metric"
        )
    is_float = jnp.issubdtype(variable.dtype, jnp.floating)
    return MEAN if is_float and variable.aggregation != "only_first_replica" else FIRST


def reductions_of_metrics(
    variables: Sequence[keras.Variable], is_changed: Sequence[bool], adds: Sequence[bool]
) -> list[str]:
    """Return, for each variable of metrics, how replicas agree on it: by an exact SUM, unless Keras asks otherwise.

    Args:
        variables: Variables of metrics.
        is_changed: For each variable, whether a step changes it.
        adds: For each variable, whether a step adds a value that does not depend on the variable.

    Raises:
        StrategyError: If a variable is to be summed, but a step does something else than add to it.
    """
    reductions = []
    for variable, changed, is_added in zip(variables, is_changed, adds, strict=True):
        reductions.append(reduction_of(variable) if variable.aggregation in OTHER_WAYS else SUM)
        if not changed:
            reductions[-1] = CONSTANT
        elif reductions[-1] == SUM and not is_added:
            raise StrategyError(
                f"variable {variable.path!r} of a metric is aggregated as {variable.aggregation!r} over replicas, but "
                "update_state does more than add to it; use add_variable(aggregation='mean') or "
                "'only_first_replica', or a metric that adds"
            )
    return reductions


@dataclass(frozen=True, eq=False)
class ModelFunctions:
    """The stateless functions of a model, as they were when it was last compiled.

    Attributes:
        model: Model of Keras.
        seeds: Variables that are states of seed generators.
        unscaled: Values of the optimizer's first variables that keep Keras from scaling the loss.
        tracing: Context entered while training losses are traced.
    """

    model: keras.Model
    seeds: Seeds
    unscaled: Values = ()
    tracing: Callable[[], AbstractContextManager[None]] = nullcontext

    def losses(
        self, variables: Variables, others: Values, metrics: Values, batch: Batch, training: bool
    ) -> tuple[jax.Array, list[Array], list[Array], Logs]:
        """Return the loss, the new values of untrained variables and of metrics, and the logs; traceable by JAX.

        If the optimizer has a `loss_scale_factor`, gradients of the loss have that factor, and its value has not.
        """
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        named = {"optimizer_variables": list(self.unscaled)} if training else {}
        with self.tracing() if training else nullcontext():
            loss, (unscaled, y_pred, others, metrics) = self.model.compute_loss_and_updates(
                variables, others, metrics, x, y, sample_weight, training=training, **named
            )
        if training and getattr(self.model.optimizer, "loss_scale_factor", None) is not None:
            loss = _valued(unscaled, loss)
        logs, metrics = self.model._update_metrics_variables(metrics, unscaled, x, y, y_pred, sample_weight)
        return loss, list(others), list(metrics), logs

    def reductions(
        self, variables: Variables, others: Values, metrics: Values, batch: Batch, training: bool
    ) -> tuple[dict[str, list[str]], tuple[str, ...]]:
        """Return how replicas agree on each part of the model state, and the logs that do not come from metrics.

        Only shapes and dtypes of the arguments matter.

        Raises:
            StrategyError: If the variable of a metric cannot be summed over replicas; see `reductions_of_metrics`.
        """
        count, names = len(others), list[str]()

        def after(old: Values, variables: Variables, batch: Batch) -> list[Array]:
            _, others, metrics, logs = self.losses(variables, old[:count], old[count:], batch, training)
            names[:] = [name for name in logs if name not in results_of(self.model, metrics)]
            return [*others, *metrics]

        changed, adds = looks(after, *jax.tree.map(shape_of, ([*others, *metrics], list(variables), batch)))
        reductions = {
            VARIABLES: reductions_of(self.model.non_trainable_variables, self.seeds.flags, changed[:count]),
            METRICS: reductions_of_metrics(self.model.metrics_variables, changed[count:], adds[count:]),
        }
        return reductions, tuple(names)

    def outputs(self, variables: Variables, others: Values, batch: Batch) -> Tree:
        """Return the model's outputs for each row; traceable by JAX."""
        x, _, _ = unpack_x_y_sample_weight(batch)
        named = {"training": False} if self.model._call_has_training_arg else {}
        outputs, _ = self.model.stateless_call(variables, others, x, **named)
        return outputs


@jax.custom_jvp
def _valued(value: jax.Array, derived: jax.Array) -> jax.Array:
    """Return `value`, with the derivative of `derived`."""
    return value


_valued.defjvp(lambda given, tangents: (given[0], tangents[1]))


def results_of(model: keras.Model, metrics: Values) -> Logs:
    """Return the results of metrics whose variables have these values; traceable by JAX."""
    with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, metrics, strict=True))):
        results: Logs = model.get_metrics_result()
        return results


def shape_of(leaf: Array) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype that an array has in a JAX program."""
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype))
