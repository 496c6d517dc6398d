"""Types for the parts of Keras that this package uses: Keras's own code has no type hints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias

import jax
import numpy as np

from strategies.typing import Batch, Data, Number, Tree

Array: TypeAlias = jax.Array | np.ndarray
"""The value of a variable: an array of JAX or NumPy."""

Values: TypeAlias = Sequence[Array]
"""The values of variables, in Keras's order."""

State: TypeAlias = Sequence[Values]
"""The state in Keras's loops: values of trainable variables, of others, of the optimizer's, and of those of metrics."""

Logs: TypeAlias = dict[str, Number]
"""Losses and results of metrics, by name."""

ModelClass: TypeAlias = Any
"""A class of models, of Keras or of the user."""

Callbacks: TypeAlias = Any
"""Callbacks as users give them: one, a nested list of them, a `CallbackList`, or None."""

BackupAndRestore: TypeAlias = Any
"""The callback of Keras."""


class VariableLike(Protocol):
    """A `keras.Variable`."""

    trainable: bool
    _value: Any  # an array, or None while Keras's loops have it
    constraint: Any
    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    aggregation: str
    value: jax.Array

    def assign(self, value: Array) -> object: ...


class LayerLike(Protocol):
    """A `keras.Layer`."""

    name: str
    built: bool
    _inbound_nodes: list[NodeLike]
    _seed_generators: Sequence[SeedGeneratorLike]
    variables: list[VariableLike]
    trainable_variables: list[VariableLike]
    non_trainable_variables: list[VariableLike]

    def __call__(self, *arguments: Tree, **named: Tree) -> Tree: ...


class SeedGeneratorLike(Protocol):
    """A `keras.random.SeedGenerator`."""

    state: VariableLike


class NodeLike(Protocol):
    """A call of a layer, or of a model, in the graph of a functional model."""

    operation: ModelLike
    is_input: bool
    outputs: Sequence[Tree]
    input_tensors: Sequence[Tree]
    arguments: Any


class FunctionalLike(Protocol):
    """A functional model, with the inputs and outputs of its graph."""

    inputs: Sequence[Tree]
    outputs: Sequence[Tree]
    _outputs_struct: Tree
    _nodes_by_depth: Mapping[int, Sequence[NodeLike]]


class OptimizerLike(Protocol):
    """A `keras.Optimizer`."""

    built: bool
    gradient_accumulation_steps: int | None
    _trainable_variables: Sequence[VariableLike]
    _iterations: VariableLike
    variables: list[VariableLike]

    def build(self, variables: Sequence[VariableLike]) -> None: ...
    def exclude_from_weight_decay(self, var_list: Sequence[VariableLike], var_names: Sequence[str] | None) -> None: ...
    def get_config(self) -> dict[str, object]: ...
    @classmethod
    def from_config(cls, config: dict[str, object]) -> Self: ...
    def _var_key(self, variable: VariableLike) -> str: ...
    def apply(self, grads: Sequence[Array | None], trainable_variables: Sequence[VariableLike] | None) -> None: ...
    def stateless_apply(
        self, optimizer_variables: Values, grads: Values, trainable_variables: Values
    ) -> tuple[Values, Values]: ...


class FunctionLike(Protocol):
    """A function that Keras's loops call, such as a model's `train_function`.

    Attributes:
        function: the function of a strategy behind it.
    """

    function: Any

    def __call__(self, state: State, iterator: Iterator[Batch]) -> tuple[Tree, State]: ...


class ModelLike(LayerLike, Protocol):
    """A `keras.Model`."""

    optimizer: OptimizerLike | None
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
    _functional: FunctionalLike | None
    metrics_variables: list[VariableLike]

    def _flatten_layers(self) -> Sequence[LayerLike]: ...
    def _assert_compile_called(self, method_name: str) -> None: ...
    def jax_state_sync(self) -> None: ...
    def save_weights(self, filepath: object) -> None: ...
    def load_weights(self, filepath: object) -> None: ...
    def stateless_call(
        self, trainable_variables: Values, non_trainable_variables: Values, x: Data, **named: bool
    ) -> tuple[Tree, Values]: ...
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
    ) -> tuple[jax.Array, tuple[jax.Array, Tree, Values, Values]]: ...
    def _update_metrics_variables(
        self, metrics_variables: Values, unscaled_loss: jax.Array, x: Data, y: Data, y_pred: Tree, sample_weight: Data
    ) -> tuple[Logs, Values]: ...
    def get_metrics_result(self) -> Logs: ...
