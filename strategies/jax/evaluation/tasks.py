"""The tasks of evaluations and predictions, as functions of a replica's rows that JAX traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from strategies.core.evaluation import Mergeable
from strategies.core.rows import EvaluationTask
from strategies.jax.evaluation.mean import Mean
from strategies.jax.gradients.arguments import (
    MODEL_STATE,
    check_function,
    check_loss_function,
    check_takes_state,
    check_weight,
    metric_names,
)
from strategies.jax.gradients.tail import travelling
from strategies.jax.replicas.devices import is_key
from strategies.outcome import Outcome
from strategies.typing import Batch, Function, Key, LossFunction, Number, Tree, Variables

MetricsFunction = Callable[..., Mapping[str, Mergeable]]


def evaluation_task(
    loss_fn: LossFunction, fn: LossFunction | None, metrics_fn: MetricsFunction | None, has_state: bool
) -> EvaluationTask:
    """Return the task of `Trainer.evaluate`.

    Args:
        loss_fn: Loss function of the Trainer.
        fn: Function used instead of the loss function, or None.
        metrics_fn: Function that makes metrics of a whole batch, or None.
        has_state: Whether there is a model state.

    Raises:
        ValueError: Both `fn` and `metrics_fn` are given.
    """
    if fn is not None and metrics_fn is not None:
        raise ValueError("evaluate got both fn and metrics_fn; give only one of them")
    if metrics_fn is not None:
        arguments = ("variables", "batch", "mask", "key")
        check_function("metrics_fn", metrics_fn, (*arguments, MODEL_STATE) if has_state else arguments)
        return MetricsOfBatch(metrics_fn)
    _check(fn, has_state)
    return LossOfRows(fn or loss_fn)


def prediction_task(loss_fn: LossFunction, fn: Function | None, has_state: bool) -> EvaluationTask:
    """Return the task of `Trainer.predict`.

    Args:
        loss_fn: Loss function of the Trainer, which returns outputs.
        fn: Function used instead of the loss function, or None.
        has_state: Whether there is a model state.
    """
    _check(fn, has_state)
    return RowOutputs(fn or loss_fn, is_loss=fn is None)


def _check(fn: Function | None, has_state: bool) -> None:
    if fn is not None:
        check_loss_function(fn)
        check_takes_state(fn, has_state, "fn")


@dataclass(frozen=True)
class LossOfRows(EvaluationTask):
    """The loss and the metrics of each row, computed as a batch of one row, and their means over rows.

    If the function gives a weight for each row, the means are weighted.
    """

    title: ClassVar[str] = "evaluation"
    function: LossFunction

    @override
    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        """Return float32 `[rows]` by the names of the metrics, and the weights float32 `[rows]`, or None."""

        def of_row(row: Tree) -> tuple[dict[str, jax.Array], jax.Array | None]:
            alone = jax.tree.map(lambda leaf: leaf[None], row)
            outcome = Outcome.of(self.function(variables, alone, key, *model_state))
            return _scalars(outcome), _weight(outcome)

        return jax.vmap(of_row)(batch)

    @override
    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        """Return a `Mean` for each name, added row by row."""
        values_of, weights = computed
        if weights is None:
            return {name: Mean(_sum(values[mask]), np.float64(mask.sum())) for name, values in values_of.items()}
        weights = weights[mask].astype(np.float64)
        count = _sum(weights)
        return {
            name: Mean(_sum(np.where(weights > 0, values[mask], 0) * weights), count)
            for name, values in values_of.items()
        }

    @override
    def sums_of_weights(self, merged: Mapping[str, Tree]) -> Sequence[Number]:
        return [mean.count for mean in merged.values()]


@dataclass(frozen=True)
class MetricsOfBatch(EvaluationTask):
    """The metrics that a user's function makes of a whole batch and its mask."""

    title: ClassVar[str] = "evaluation"
    function: MetricsFunction

    @override
    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        metrics = self.function(variables, batch, mask, key, *model_state)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics_fn returns a {type(metrics).__name__}; it must return a dictionary of metrics")
        for name, metric in metrics.items():
            is_tree = not jax.tree_util.all_leaves([metric])
            if not callable(getattr(metric, "merge", None)) or not is_tree:
                raise TypeError(
                    f"metric {name!r} of metrics_fn is a {type(metric).__name__}; batches have different numbers of "
                    "rows, so return a strategies.Mean(total, count), or a pytree with a method merge(other)"
                )
        return dict(metrics)

    @override
    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        return {name: one.widened() if isinstance(one, Mean) else one for name, one in computed.items()}


@dataclass(frozen=True)
class RowOutputs(EvaluationTask):
    """The outputs of the model for each row.

    Attributes:
        function: Function that returns the outputs, or an `Outcome` with them.
        is_loss: Whether it is the loss function, which must return an `Outcome`.
    """

    title: ClassVar[str] = "prediction"
    function: Function
    is_loss: bool

    @override
    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        returned = self.function(variables, batch, key, *model_state)
        if self.is_loss or isinstance(returned, Outcome):
            returned = Outcome.of(returned).outputs
        leaves = jax.tree_util.tree_leaves_with_path(returned)
        if not leaves:
            which = "the loss function" if self.is_loss else "fn"
            raise ValueError(
                f"{which} returns no outputs to predict; return a strategies.Outcome(loss, outputs=...), or give "
                "predict a function fn(variables, batch, key) that returns outputs"
            )
        for path, leaf in leaves:
            name = f"outputs{jax.tree_util.keystr(path)}"
            if is_key(leaf):
                raise TypeError(f"{name} is a random key, which is not an array; return jax.random.key_data of it")
            if jnp.shape(leaf)[:1] != mask.shape:
                raise ValueError(
                    f"{name} is of shape {list(jnp.shape(leaf))} for {mask.shape[0]} rows; outputs need the rows of "
                    "the batch as their first axis: leave out values that belong to no row"
                )
        return jax.tree.map(jnp.asarray, returned)

    @override
    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        return computed


def _scalars(outcome: Outcome) -> dict[str, jax.Array]:
    """Return the loss and the metrics of one row as float32; raise TypeError if one is not a scalar."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), outcome.metrics)
    names = metric_names(shapes)
    if jnp.shape(outcome.loss) != ():
        raise TypeError(
            f"the loss of a batch of one row is of shape {list(jnp.shape(outcome.loss))}, but must be a scalar; take "
            "jnp.mean of it"
        )
    values = {"loss": outcome.loss, **{name: outcome.metrics[name] for name in names}}
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


def _weight(outcome: Outcome) -> jax.Array | None:
    """Return the weight of one row as it travels, or None; raise TypeError if it is not a scalar."""
    if outcome.weight is None:
        return None
    check_weight(jax.ShapeDtypeStruct(jnp.shape(outcome.weight), jnp.result_type(outcome.weight)))
    return travelling(outcome.weight)


def _sum(values: np.ndarray) -> np.float64:
    """Return the sum in float64, added one after another, because the order of `np.sum` depends on the length."""
    total: np.float64 = np.add.accumulate(values, dtype=np.float64)[-1] if values.size else np.float64(0)
    return total
