"""The update of a Keras model: means over replicas of gradients and losses, and optimizers that get the mean gradients.

Replicas have different rows, and so different divisors, and the mean of their losses is not the loss of all rows. If
a model has one such loss, and nothing else in its loss depends on rows, the divisor is the weight of a replica's
loss. Otherwise replicas divide each loss by the mean of their divisors, with a collective in the forward pass.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.flatten_util import ravel_pytree
from keras.optimizers import LossScaleOptimizer
from typing_extensions import override

from popdist.records.distribution_settings import LEARNING_RATE
from strategies.errors import StrategyError
from strategies.jax.programs.compilation import key_of
from strategies.jax.programs.jaxpr import depends_on
from strategies.jax.replicas.replica_context import get_replica_context
from strategies.jax.updates.optimizers import Arithmetic, Rate, StepFacts, StepOptimizer
from strategies.keras.checks import is_own
from strategies.keras.patches import Method, hold_place, method_replaced
from strategies.keras.state import Array, ModelFunctions, Values, shape_of
from strategies.loss_scaling import LossScale, LossScaling
from strategies.typing import Batch, Number, OptimizerState, Tree, Variables

Mean: TypeAlias = Callable[[Tree], Tree]

_PLACES = {"apply": 0, "stateless_apply": 1}
"""The methods that apply gradients, and the position of the gradients among their arguments."""


def mean_over_replicas(gradients: Tree) -> Tree:
    """Average gradients over all replicas, in the order of the tree, with one all-reduce per dtype."""
    leaves, structure = jax.tree.flatten(gradients)
    means = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [place for place, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat, unravel = ravel_pytree([leaves[place] for place in places])
        of_dtype = unravel(get_replica_context().all_reduce("mean", flat))
        for place, value in zip(places, of_dtype, strict=True):
            means[place] = value
    return jax.tree.unflatten(structure, means)


@contextmanager
def averaging(optimizers: Iterable[keras.Optimizer], mean: Mean = mean_over_replicas) -> Iterator[None]:
    """Make optimizers apply `mean(gradients)` instead of their gradients, inside the block."""
    is_inside = False  # averages once only: `stateless_apply` calls `apply`, maybe that of an inner optimizer

    def averaged(apply: Method, place: int) -> Method:
        signature = inspect.signature(apply)
        gradients = list(signature.parameters)[place]

        def apply_mean(*arguments: object, **named: object) -> object:
            nonlocal is_inside
            if is_inside:
                return apply(*arguments, **named)
            given = signature.bind(*arguments, **named)
            given.arguments[gradients] = mean(given.arguments[gradients])
            is_inside = True
            try:
                return apply(*given.args, **given.kwargs)
            finally:
                is_inside = False

        return apply_mean

    with ExitStack() as stack:
        for optimizer in {id(one): one for one in optimizers}.values():
            for name, place in _PLACES.items():
                stack.enter_context(method_replaced(optimizer, name, averaged(getattr(optimizer, name), place)))
        yield


# ---- divisors

Rule: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""(loss, its divisor) -> the loss to use instead; traceable."""

NO_ROWS = 2.0**-80
"""The weight of a replica without rows that count. Beside other weights it is nothing; if no replica has such rows,
the mean is that of the rest of the loss, as in Keras: losses of 0, and regularizers."""

present_rule: ContextVar[Rule | None] = ContextVar("strategies.keras.updates", default=None)
"""The rule of the present block; None outside of any."""


@contextmanager
def dividing_by(rule: Rule | None) -> Iterator[None]:
    """Use a rule for the losses that are traced inside the block."""
    token = present_rule.set(rule)
    try:
        yield
    finally:
        present_rule.reset(token)


class NotedDivisors:
    """A rule that leaves losses as they are, and notes their divisors.

    Attributes:
        divisors: The divisors in the order of the losses, float32 scalars.
    """

    def __init__(self) -> None:
        self.divisors: list[jax.Array] = []

    def __call__(self, loss: jax.Array, divisor: jax.Array) -> jax.Array:
        """Note the divisor of a loss, and return the loss."""
        self.divisors.append(divisor)
        return loss

    @property
    def weight(self) -> jax.Array | None:
        """The weight of the only loss; None if no loss is divided."""
        if not self.divisors:
            return None
        [divisor] = self.divisors
        return jnp.where(divisor == 0, NO_ROWS, divisor)


def by_mean_of_replicas(loss: jax.Array, divisor: jax.Array) -> jax.Array:
    """Return the loss divided by the mean of all replicas' divisors; 0 if that is 0, as in Keras. Collective."""
    mean = get_replica_context().all_reduce("mean", divisor)
    found: jax.Array = keras.ops.divide_no_nan(loss * divisor.astype(loss.dtype), mean.astype(loss.dtype))
    return found


def sum_of_replicas(loss: jax.Array) -> jax.Array:
    """Return the sum of a replica's rows times the number of replicas: the mean of these is the sum of all rows."""
    return loss * get_replica_context().num_replicas_in_sync


class LossDivision:
    """The choice of the rule for a model's losses, made for each shape of a batch.

    Args:
        functions: The functions of the model.
        may_meet: Whether replicas may call collectives in the forward pass.

    Attributes:
        is_weighted: Whether a loss has had a weight so far.
    """

    def __init__(self, functions: ModelFunctions, may_meet: bool) -> None:
        self.is_weighted = False
        self._functions = functions
        self._may_meet = may_meet
        self._chosen: dict[Hashable, bool] = {}

    def rule(self, variables: Variables, others: Values, metrics: Values, batch: Batch) -> NotedDivisors | Rule:
        """Return the rule for a batch; shapes and dtypes of the arguments are enough.

        Raises:
            StrategyError: If a collective is needed, but micro-batches or stages cannot call it.
        """
        given = jax.tree.map(shape_of, (list(variables), list(others), list(metrics), batch))
        key = key_of(given)
        if key not in self._chosen:
            self._chosen[key] = self._needs_collective(*given)
        if not self._chosen[key]:
            return NotedDivisors()
        if not self._may_meet:
            raise StrategyError(
                "several parts of the loss depend on rows, and at least one is divided by a mask or by sample weights; "
                "with gradient accumulation or stages such a loss must be the only one: leave added losses, activity "
                "regularizers and further outputs out, or use loss functions with reduction='sum_over_batch_size' "
                "and no mask"
            )
        return by_mean_of_replicas

    def _needs_collective(self, variables: Variables, others: Values, metrics: Values, batch: Batch) -> bool:
        """Return whether one weight for a replica's whole loss is not enough."""

        def total(old: Values, batch: Batch, rule: Rule) -> list[Array]:
            learned, rest = old[: len(variables)], old[len(variables) :]
            with dividing_by(rule):
                loss, *_ = self._functions.losses(
                    learned, rest[: len(others)], rest[len(others) :], batch, training=True
                )
            return [loss]

        noted, old = NotedDivisors(), [*variables, *others, *metrics]
        jax.eval_shape(lambda old, batch: total(old, batch, noted), old, batch)
        if not noted.divisors:
            return False
        if len(noted.divisors) > 1 or is_own(type(self._functions.model), "compute_loss"):
            return True
        flags = self._functions.seeds.flags
        matters = [False] * len(variables) + list(flags) + [False] * len(metrics)
        [depends] = depends_on(lambda old, batch: total(old, batch, _as_zero), old, matters, batch)
        self.is_weighted |= not depends
        return depends


def _as_zero(loss: jax.Array, divisor: jax.Array) -> jax.Array:
    return jnp.zeros_like(loss)


# ---- optimizers

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
