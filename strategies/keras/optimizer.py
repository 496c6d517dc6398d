"""Keras optimizers as the update of a step: they get the mean gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.optimizers import LossScaleOptimizer
from typing_extensions import override

from popdist.records.distribution_settings import LEARNING_RATE
from strategies.jax.updates.optimizers import Arithmetic, Rate, StepFacts, StepOptimizer
from strategies.keras.patches import hold_place
from strategies.keras.state import Array, Values
from strategies.loss_scaling import LossScale, LossScaling
from strategies.typing import Number, OptimizerState, Variables

Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@final
class KerasOptimizer(StepOptimizer):
    """A Keras optimizer as the update of a step, with its clipping, averages, decay and schedules.

    For a `LossScaleOptimizer` it uses the inner optimizer; the step scales the loss.

    Args:
        optimizer: Optimizer, built for the trainable variables of a model.
    """

    def __init__(self, optimizer: keras.Optimizer) -> None:
        self._given = optimizer
        self._optimizer = optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer
        self._config = self._optimizer.get_config()  # read now, because Keras's loops remove the values
        self._of_parts: dict[Shapes, keras.Optimizer] = {}  # the same optimizer for variables of other shapes

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the optimizer that makes the update."""
        return list(self._optimizer.variables)

    @property
    def num_whole(self) -> int:
        """The number of variables before the first one that is not a scalar."""
        return len(list(itertools.takewhile(lambda variable: not variable.shape, self._optimizer.variables)))

    @property
    @override
    def rates(self) -> Sequence[Rate]:
        rate, places = self._optimizer._learning_rate, list(map(id, self._optimizer.variables))
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return [Rate(LEARNING_RATE, places.index(id(self._optimizer._iterations)), rate)]
        return [Rate(LEARNING_RATE, places.index(id(rate)))] if id(rate) in places else []

    def hold_places(self) -> None:
        """Give Keras zeros without memory for the variables that each instance holds only in part."""
        for variable in self._optimizer.variables[self.num_whole :]:
            if variable._value is None:
                hold_place(variable)

    def _for(self, variables: Values) -> keras.Optimizer:
        """Return the optimizer for variables of these shapes, which are the model's or parts of them."""
        shapes = tuple(tuple(one.shape) for one in variables)
        if shapes == tuple(tuple(one.shape) for one in self._optimizer._trainable_variables):
            return self._optimizer
        if shapes not in self._of_parts:
            with jax.ensure_compile_time_eval():
                self._of_parts[shapes] = _like(self._optimizer, self._config, shapes)
        return self._of_parts[shapes]

    @property
    def scaling(self) -> LossScaling | None:
        """The rule of loss scaling; None without scaling, or with a constant scale inside the optimizer."""
        if not isinstance(self._given, LossScaleOptimizer):
            return None
        return LossScaling(float(self._given.initial_scale), 2.0, int(self._given.dynamic_growth_steps))

    @override
    def init(self, variables: Variables) -> OptimizerState:
        # Training begins with the values of Keras (`Trainer.adopt`), so only the shapes matter here.
        return [jnp.zeros(variable.shape, variable.dtype) for variable in self._for(variables).variables]

    @override
    def apply(
        self,
        gradients: Variables,
        optimizer_state: OptimizerState,
        variables: Variables,
        known: StepFacts,
        arithmetic: Arithmetic,
    ) -> tuple[Variables, OptimizerState]:
        optimizer = self._for(variables)

        def update(gradients: Values, state: Values, variables: Values) -> tuple[list[Array], list[Array]]:
            new, state = optimizer.stateless_apply(state, gradients, variables)
            return list(new), list(state)

        new: tuple[list[Array], list[Array]] = arithmetic.rounded(update)(gradients, optimizer_state, variables)
        return new

    @property
    def _own(self) -> list[keras.Variable]:
        """The variables of the `LossScaleOptimizer` itself, which come first."""
        count = len(self._given.variables) - len(self._optimizer.variables)
        return list(self._given.variables[:count])

    def divide(self, values: Values) -> tuple[list[Array], list[Array]]:
        """Divide the values of all variables: those of the `LossScaleOptimizer` itself, and the inner optimizer's."""
        count = len(self._own)
        return list(values[:count]), list(values[count:])

    def scale_of(self, own: Values, skipped: Number) -> LossScale | None:
        """Return the loss scale in the variables of a `LossScaleOptimizer`; None if losses are not scaled."""
        if self.scaling is None:
            return None
        named = {variable.name: value for variable, value in zip(self._own, own, strict=True)}
        return LossScale(np.float32(named["dynamic_scale"]), np.int32(named["step_counter"]), np.int32(skipped))

    def with_scale(self, own: Values, scale: LossScale | None) -> list[Array]:
        """Return the values of the `LossScaleOptimizer`'s own variables after a step."""
        if scale is None:
            return list(own)
        new: dict[str, Any] = {"dynamic_scale": np.float32(scale.scale), "step_counter": np.int32(scale.good_steps)}
        return [new.get(variable.name, value) for variable, value in zip(self._own, own, strict=True)]

    @property
    def for_unscaled_loss(self) -> list[Array]:
        """The values of the first variables that keep Keras from scaling the loss, because the step scales it."""
        return [np.full(one.shape, 1 if one.name == "dynamic_scale" else 0, one.dtype) for one in self._own]

    def step_of(self, inner: Values) -> int:
        """Return the number of updates so far, which a variable of the optimizer holds."""
        places = list(map(id, self._optimizer.variables))
        return int(inner[places.index(id(self._optimizer._iterations))])


def _like(optimizer: keras.Optimizer, config: dict[str, object], shapes: Shapes) -> keras.Optimizer:
    """Return the same optimizer, built for variables of other shapes, and without memory for them."""
    made: keras.Optimizer = type(optimizer).from_config(dict(config))
    variables: list[keras.Variable] = []
    for own, shape in zip(optimizer._trainable_variables, shapes, strict=True):
        *outer, scope = own.path.split("/")[:-1] or [""]
        with keras.name_scope(scope, override_parent="/".join(outer)) if scope else nullcontext():
            variable: Any = keras.Variable(initializer="zeros", shape=shape, dtype=own.dtype, name=own.name)
        variable.constraint = own.constraint
        variables.append(variable)
    pairs = zip(optimizer._trainable_variables, variables, strict=True)
    excluded = getattr(optimizer, "_exclude_from_weight_decay", ())
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    made.exclude_from_weight_decay(
        [new for old, new in pairs if optimizer._var_key(old) in excluded], [pattern.pattern] if pattern else None
    )
    made.build(variables)
    for variable in [*variables, *made.variables]:
        hold_place(variable)
    return made
