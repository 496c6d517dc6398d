"""The functions that a `model_fn` calls: variables, found while it runs and read by their names afterwards; optimizers.

In a `model_fn`, gradients are handles, because the step computes and applies them. In `strategy.run`, and in a
`Trainer`, optimizers are gradient transformations of optax.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from strategies.argument_checks import positive
from strategies.compat.functions.optimizer_function import accumulators_of
from strategies.core.options import GradientAccumulationReductionMethod
from strategies.cross_replica_ops import cross_replica_mean
from strategies.jax.gradients.model_state import accumulated
from strategies.jax.replicas.reduction_ops import current
from strategies.jax.updates.optimizers import AnyOptimizer
from strategies.typing import AccumulationDtype, Gradients, Key, Leaf, OptimizerState, Variables

_current: ContextVar[CallVariables | None] = ContextVar("variables of a model_fn", default=None)


class CallVariables:
    """The variables of one call of a `model_fn`, or of the function of a `host_call`.

    Args:
        given: Values by name; if there is none, variables begin with their initial values.
        key: Random key of the replica and the micro-batch; None on the host.
        global_step: Number of iterations before the loop, an int32 scalar; on the host, after the step.
        seed: Seed of initial values.

    Attributes:
        values: Values at the beginning of the call by name.
        trained: Objects by which the program names variables that an optimizer may train, by name.
        assigned: Values that layers of Keras assigned to other variables by name.
    """

    def __init__(self, given: Mapping[str, Leaf], key: Key, global_step: Leaf, seed: int) -> None:
        self.values: dict[str, Leaf] = {}
        self.trained: dict[str, Leaf] = {}
        self.assigned: dict[str, Leaf] = {}
        self.global_step, self.seed = global_step, seed
        self._given, self._key = given, key

    def read(self, name: str, initial: Callable[[], Leaf], is_trained: bool, handle: Leaf = None) -> Leaf:
        """Return the value of a variable that the call reads for the first time."""
        value = self._given.get(name)
        if self._key is None:  # on the host
            if not isinstance(value, np.ndarray):  # no value yet, or a list of a checkpoint
                first = np.array(initial())
                value = first if value is None else np.asarray(value, first.dtype)
            self.values[name] = value
            return value
        if self._given and value is None:
            known = ", ".join(self._given)
            raise ValueError(f"model_fn reads variable {name!r}, but the model has {known}; read the same in each call")
        if not isinstance(value, jax.Array):  # an array of the host, or no value yet
            with jax.ensure_compile_time_eval():
                value = jnp.asarray(initial() if value is None else value)
        self.values[name] = value
        if is_trained:
            self.trained[name] = value if handle is None else handle
        return value

    def next_key(self) -> Key:
        """Return a random key, different for each replica, step and call; raise RuntimeError on the host."""
        if self._key is None:
            raise RuntimeError("a host_call has no random key; draw in model_fn, and give the host_call the numbers")
        self._key, own = jax.random.split(self._key)
        return own

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make these the variables that `get_variable` reads inside the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def current_call(what: str) -> CallVariables:
    """Return the variables of the present call; raise RuntimeError outside of one."""
    found = _current.get()
    if found is None:
        raise RuntimeError(f"{what} is called outside of model_fn; call it while the estimator calls model_fn")
    return found


def get_variable(
    name: str,
    shape: Sequence[int] | None = None,
    dtype: DTypeLike = np.float32,
    initializer: Leaf = None,
    trainable: bool = True,
) -> Leaf:
    """Return the value of a variable of the model; its first value is that of worker 0.

    In the function of a `host_call`, return a NumPy array of this worker, which the function may change in place, as
    with `calls += 1`. Checkpoints keep worker 0's.

    Args:
        name: Name, which a call may use once.
        shape: Shape; None for that of the initial value.
        dtype: Dtype.
        initializer: Array, number, or function `(key, shape, dtype)` such as those of `jax.nn.initializers`; None for
            Glorot's uniform, or zeros for fewer than two dimensions.
        trainable: Whether an optimizer may change it.

    Raises:
        RuntimeError: Outside of a `model_fn` or `host_call`.
        ValueError: If the name is in use.
    """
    call = current_call("get_variable")
    if name in call.values:
        raise ValueError(f"Variable {name} already exists; give each variable a name of its own")
    shape = np.shape(0 if initializer is None or callable(initializer) else initializer) if shape is None else shape
    default = jax.nn.initializers.glorot_uniform() if len(shape) > 1 else jax.nn.initializers.zeros
    given = default if initializer is None else initializer

    def initial() -> Leaf:
        key = jax.random.fold_in(jax.random.key(call.seed), zlib.crc32(name.encode()))
        return given(key, shape, dtype) if callable(given) else jnp.full(shape, given, dtype)

    return call.read(name, initial, trainable)


def get_global_step() -> Leaf:
    """Return the global step before the present loop, an int32 scalar; in a `host_call`, that after its step."""
    return current_call("get_global_step").global_step


def get_random_key() -> Key:
    """Return a random key, different for each replica, step and call; raise RuntimeError outside of a `model_fn`."""
    return current_call("get_random_key").next_key()


@dataclass(frozen=True, eq=False)
class Gradient:
    """A handle of the gradient of a loss by a variable."""

    optimizer: EstimatorOptimizer
    loss: Leaf
    name: str
    variable: Leaf


@dataclass(frozen=True, eq=False)
class Update:
    """An update of variables by the gradients of a loss."""

    optimizer: EstimatorOptimizer
    loss: Leaf
    names: frozenset[str]


class EstimatorOptimizer:
    """An optimizer of optax with the methods of TensorFlow's.

    A step averages the gradients of all workers, as if each had divided its loss by their number and they were added.
    """

    def __init__(self, opt: AnyOptimizer | EstimatorOptimizer, averages_replicas: bool = False) -> None:
        self.opt: AnyOptimizer = opt.opt if isinstance(opt, EstimatorOptimizer) else opt
        self.averages_replicas = averages_replicas

    def init(self, params: Variables) -> OptimizerState:
        """Return the optimizer state for variables, as a gradient transformation of optax does."""
        return _transformation(self).init(params)

    def update(
        self, updates: Gradients, state: OptimizerState, params: Variables | None = None, **extra: Leaf
    ) -> tuple[Gradients, OptimizerState]:
        """Return the changes of variables by gradients, and the new state, as a gradient transformation of optax does.

        In `strategy.run`, a `CrossReplicaOptimizer` averages gradients over all replicas. The gradients of a `Trainer`
        are averages already.
        """
        is_wrapper = isinstance(state, _Accumulation)  # its inner optimizer averages, once for each change
        if self.averages_replicas and not is_wrapper and current.get() is not None:
            updates = cross_replica_mean(updates)
        result: tuple[Gradients, OptimizerState] = _transformation(self).update(updates, state, params, **extra)
        return result

    def minimize(self, loss: Leaf, global_step: object = None, var_list: Sequence[Leaf] | None = None) -> Update:
        """Return the update by the gradients of a loss, as a `train_op`."""
        return self.apply_gradients(self.compute_gradients(loss, var_list), global_step)

    def compute_gradients(self, loss: Leaf, var_list: Sequence[Leaf] | None = None) -> list[tuple[Gradient, Leaf]]:
        """Return a handle of the gradient for each variable, and the variable.

        Args:
            loss: Floating-point scalar, or an `Outcome`.
            var_list: Results of `get_variable`, or Keras variables; None for all that `model_fn` has read.

        Raises:
            ValueError: If there is no variable, or one is not known.
        """
        known = current_call("compute_gradients").trained
        asked = list(known.values()) if var_list is None else list(var_list)
        chosen = [(name, one) for own in asked for name, one in known.items() if one is own]
        if not chosen or len(chosen) < len(asked):
            raise ValueError(f"No variables to optimize, or other ones than {', '.join(known) or 'none'}")
        return [(Gradient(self, loss, name, one), one) for name, one in chosen]

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Leaf, Leaf]], global_step: object = None) -> Update:
        """Return the update by gradients that `compute_gradients` of this optimizer returned, as a `train_op`.

        Raises:
            TypeError: If a gradient is anything else, for example a changed one.
            ValueError: If there is no gradient, gradients are of several losses, or a variable is not the gradient's
                own. If there is a `global_step`, because the estimator counts the steps.
        """
        pairs = list(grads_and_vars)
        if not pairs or global_step is not None:
            raise ValueError("No gradients provided for any variable, or a global_step, which the estimator increments")
        for one, variable in pairs:
            if not isinstance(one, Gradient) or one.optimizer is not self:
                raise TypeError(
                    f"apply_gradients gets {one!r}, not a gradient of its optimizer's compute_gradients; to change "
                    "gradients, give EstimatorOptimizer a MapGradientOptimizer or an optax.chain"
                )
            if variable is not one.variable or one.loss is not pairs[0][0].loss:
                raise ValueError("a gradient is of another variable or loss; keep the pairs, and add several losses")
        return Update(self, pairs[0][0].loss, frozenset(one.name for one, _ in pairs))


def CrossReplicaOptimizer(opt: AnyOptimizer | EstimatorOptimizer, name: str | None = None) -> EstimatorOptimizer:
    """Return an optimizer that averages over the replicas of a worker too; needed if `num_replicas` is above 1."""
    return EstimatorOptimizer(opt, averages_replicas=True)


def accumulating(
    opt: AnyOptimizer | EstimatorOptimizer,
    num_mini_batches: int,
    offload_weight_update_variables: bool | None = None,
    replicated_optimizer_state_sharding: bool | None = False,
    dtype: AccumulationDtype = None,
    reduction_method: GradientAccumulationReductionMethod | str = GradientAccumulationReductionMethod.SUM,
) -> EstimatorOptimizer:
    """Return an optimizer that accumulates gradients and changes variables at each `num_mini_batches`-th update.

    Semantics: the original's `GradientAccumulationOptimizerV2`. Replicas average the accumulated gradients, if they do.

    Args:
        opt: Optimizer of optax, or the result of `CrossReplicaOptimizer`.
        num_mini_batches: Number of updates whose gradients are accumulated.
        offload_weight_update_variables: Checked, without effect.
        replicated_optimizer_state_sharding: Checked, without effect; `Trainer` has an option of that name.
        dtype: Dtype of the accumulators, as `gradient_accumulation_dtype` of `StepOptions`.
        reduction_method: Reduction of the gradients over the updates.

    Raises:
        ValueError: If a number is below 1, or optimizer state is to be sharded but not offloaded.
    """
    count = positive("num_mini_batches", num_mini_batches)
    method = GradientAccumulationReductionMethod.parse(reduction_method)
    if replicated_optimizer_state_sharding and offload_weight_update_variables is False:
        raise ValueError(
            "optimizer state must be offloaded to be sharded: leave offload_weight_update_variables out, or "
            "replicated_optimizer_state_sharding"
        )
    own = EstimatorOptimizer(opt, isinstance(opt, EstimatorOptimizer) and opt.averages_replicas)
    return EstimatorOptimizer(_accumulating(own, count, dtype, method), own.averages_replicas)


class _Accumulation(NamedTuple):
    """The number of gradients accumulated so far, their accumulators, and the state of the optimizer."""

    number: jax.Array
    sums: Gradients
    optimizer: OptimizerState


def _transformation(own: EstimatorOptimizer) -> optax.GradientTransformationExtraArgs:
    if not isinstance(own.opt, optax.GradientTransformation):
        raise TypeError(f"the optimizer is {own.opt!r}; use a gradient transformation of optax outside of a model_fn")
    return optax.with_extra_args_support(own.opt)


def _accumulating(
    own: EstimatorOptimizer, count: int, dtype: AccumulationDtype, method: GradientAccumulationReductionMethod
) -> optax.GradientTransformation:
    _transformation(own)  # refuses others

    def init(params: Variables) -> _Accumulation:
        return _Accumulation(jnp.zeros((), np.int32), accumulators_of(params, dtype), own.init(params))

    def update(
        gradients: Gradients, state: _Accumulation, params: Variables | None = None, **extra: Leaf
    ) -> tuple[Gradients, _Accumulation]:
        def add(accumulator: jax.Array, gradient: jax.Array) -> jax.Array:
            return accumulated(method, accumulator, gradient, state.number, count)

        def changed(sums: Gradients) -> tuple[Gradients, _Accumulation]:
            changes, new = own.update(sums, state.optimizer, params, **extra)
            return changes, _Accumulation(jnp.zeros((), np.int32), jax.tree.map(jnp.zeros_like, sums), new)

        def waiting(sums: Gradients) -> tuple[Gradients, _Accumulation]:
            still = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            return still, _Accumulation(state.number + 1, sums, state.optimizer)

        sums = jax.tree.map(add, state.sums, gradients)
        shapes, _ = jax.eval_shape(changed, sums)
        result: tuple[Gradients, _Accumulation] = jax.lax.cond(state.number + 1 == count, changed, waiting, sums)
        return result

    return optax.GradientTransformation(init, update)
