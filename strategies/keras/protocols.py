"""Types for parts of Keras without types of their own: models, and the values in their loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import keras
import numpy as np

from strategies.typing import Batch, Data, Number, Tree

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


class NodeLike(Protocol):
    """A call of a layer or of a model, in the graph of a functional model."""

    operation: keras.Layer
    is_input: bool
    outputs: Sequence[Tree]
    input_tensors: Sequence[Tree]
    arguments: Any


class FunctionLike(Protocol):
    """A function that Keras's loops call, such as a model's `train_function`.

    Attributes:
        function: Function of a strategy behind it.
    """

    function: Any

    def __call__(self, state: State, iterator: Iterator[Batch]) -> tuple[Tree, State]:
        """Run the next execution; return its results and the new state."""


class ModelLike(Protocol):
    """A `keras.Model` on JAX, whose base class depends on the backend."""

    name: str
    variables: list[keras.Variable]
    trainable_variables: list[keras.Variable]
    non_trainable_variables: list[keras.Variable]
    optimizer: keras.Optimizer | None
    layers: Sequence[ModelLike]
    train_function: FunctionLike | None
    test_function: FunctionLike | None
    predict_function: FunctionLike | None
    steps_per_execution: int
    run_eagerly: bool
    stop_training: bool
    _initial_epoch: int | None
    _jax_state_synced: bool
    _call_has_training_arg: bool
    _functional: keras.Function | None
    metrics_variables: list[keras.Variable]
    _loss_tracker: keras.metrics.Mean

    def __call__(self, x: Data) -> Tree:
        """Return the outputs for a batch."""

    def _flatten_layers(self) -> Sequence[keras.Layer]: ...
    def _assert_compile_called(self, method_name: str) -> None: ...
    def jax_state_sync(self) -> None:
        """Assign the state of a running loop to the variables."""

    def save_weights(self, filepath: object) -> None:
        """Write the weights to a file."""

    def load_weights(self, filepath: object) -> None:
        """Read the weights from a file."""

    def stateless_call(
        self, trainable_variables: Values, non_trainable_variables: Values, x: Data, **named: bool
    ) -> tuple[Tree, Values]:
        """Return the outputs, and the new values of variables that are not trained."""

    def compute_loss_and_updates(
        self,
        trainable_variables: Values,
        non_trainable_variables: Values,
        metrics_variables: Values,
        x: Data,
        y: Data,
        sample_weight: Data,
        *,
        training: bool,
        optimizer_variables: Values = ...,
    ) -> tuple[jax.Array, tuple[jax.Array, Tree, Values, Values]]:
        """Return the loss, and (unscaled loss, outputs, values not trained, values of metrics)."""

    def _update_metrics_variables(
        self, metrics_variables: Values, unscaled_loss: jax.Array, x: Data, y: Data, y_pred: Tree, sample_weight: Data
    ) -> tuple[Logs, Values]: ...
    def get_metrics_result(self) -> Logs:
        """Return the results of all metrics by name."""
