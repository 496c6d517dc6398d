"""Keras in a strategy's scope: new models train on its replicas, and functions that `strategy.run` runs may use Keras.

The variables of the models and optimizers in such a function are arguments and results of its program.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import jax
import keras
import numpy as np

from strategies.data.randomness import are_kept
from strategies.errors import StrategyError
from strategies.jax.gradients.model_state import FIRST, SUM
from strategies.jax.programs.captures import digest
from strategies.jax.programs.feed_program import current_program
from strategies.jax.replicas.replica_context import get_replica_context
from strategies.jax.replicas.replicas import Replicas
from strategies.keras.checks import check_keras_version
from strategies.keras.extensions import METHODS, Extensions
from strategies.keras.model import FORWARDED, ReplicatedModel
from strategies.keras.patches import ask_before_loops, ask_of_losses, draw_seeds, give_methods, tell_of_new
from strategies.keras.state import OTHER_WAYS, Array, Seeds, Values, reduction_of, seed_variables
from strategies.keras.updates import averaging, present_rule, sum_of_replicas
from strategies.strategy import get_strategy
from strategies.values import PerReplica

__all__ = ["KerasState", "check_keras_version", "hook"]

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_is_hooked = False


def hook(is_scope_open: Callable[[], bool]) -> None:
    """Make new models belong to the strategy whose scope is open. Calls after the first one do nothing.

    A model made in a scope gets the methods of the strategy. A model made outside of any scope is refused inside one.

    Args:
        is_scope_open: Returns whether any thread is in a scope.

    Raises:
        StrategyError: If Keras was imported a second time; models of the second import would train in each instance
            alone.
    """
    global _is_hooked
    if sys.modules["keras"] is not keras:
        raise StrategyError("keras was imported a second time, but only the first one knows strategies; restart Python")

    def join_scope(model: keras.Model) -> None:
        strategy = get_strategy()
        if strategy is not None:
            check_keras_version()
            extensions = Extensions(model)
            replicated = ReplicatedModel(model, type(model), strategy, extensions)
            methods = {name: getattr(replicated, name) for name in FORWARDED}
            give_methods(model, methods | {name: getattr(extensions, name) for name in METHODS})
        elif is_scope_open():
            logger.warning(
                "a model is made in a thread without an open scope, while another thread has one open; it trains in "
                "this instance alone: enter the scope in this thread, or run it in contextvars.copy_context()"
            )

    def check_outside_scope(model: keras.Model) -> None:
        if get_strategy() is not None:
            raise StrategyError(
                f"model {model.name!r} was made outside of strategy.scope() and is used inside of it; make it inside, "
                "or use it outside"
            )

    with _lock:  # so that no call returns before some thread has finished hooking
        if not _is_hooked:
            tell_of_new(keras.Model, join_scope)
            ask_before_loops(check_outside_scope)
            ask_of_losses(present_rule.get, sum_of_replicas)
            draw_seeds(are_kept.get)
            _is_hooked = True


# ---- functions that `strategy.run` runs

Changes: TypeAlias = Mapping[int, Array]
"""The new values of variables by the number of the variable."""


class KerasState:
    """The variables of the models, layers, optimizers and metrics that a function reads.

    All instances begin with instance 0's values. If all replicas assign the same value, the variable gets it. If they
    assign different values, floats are averaged over all replicas, as for moving means, and integers are replica 0's.
    Variables of metrics are summed: replica 0 begins with the value, and the others with zeros. An optimizer applies
    the mean of all replicas' gradients.

    Args:
        objects: Keras objects that the function reads.
        replicas: Replicas that run the function. Making this object is a collective call.
    """

    def __init__(self, objects: Sequence[object], replicas: Replicas) -> None:
        check_keras_version()
        self._objects = objects
        self._replicas = replicas
        self._optimizers = [one for one in objects if isinstance(one, keras.optimizers.Optimizer)]
        self._build_optimizers()
        self._variables = self._found()
        models = [one for one in objects if isinstance(one, keras.Layer)]
        seeds = {id(variable) for model in models for variable in seed_variables(model)}
        self._seeds = Seeds(tuple(id(variable) in seeds for variable in self._variables))
        if replicas.num_instances > 1:
            self._set(dict(enumerate(replicas.broadcast(self.values()))))

    def _build_optimizers(self) -> None:
        trained = [v for one in self._objects if isinstance(one, keras.Layer) for v in one.trainable_variables]
        for optimizer in self._optimizers:
            if not optimizer.built and trained:
                optimizer.build(list({id(variable): variable for variable in trained}.values()))

    def _found(self) -> list[keras.Variable]:
        every: list[keras.Variable] = [v for one in self._objects for v in getattr(one, "variables", None) or [one]]
        return list({id(variable): variable for variable in every if isinstance(variable, keras.Variable)}.values())

    @property
    def is_current(self) -> bool:
        """Whether the objects still have the same variables."""
        return [id(one) for one in self._found()] == [id(one) for one in self._variables]

    def values(self, replica: int = 0, changed: Iterable[int] = ()) -> list[Array]:
        """Return the values with which a replica begins a program.

        Args:
            replica: Global index of the replica.
            changed: Numbers of the variables that the program changes.

        Raises:
            StrategyError: If one of these is to be summed, and is not of a metric.
        """
        zeros = {number for number in changed if self._reduction(number) == SUM and replica}
        values = [variable.value for variable in self._variables]
        return [np.zeros_like(one) if number in zeros else one for number, one in enumerate(values)]

    @contextmanager
    def inside(self, values: Values) -> Iterator[Callable[[], Changes]]:
        """Give the variables these values while a function is traced; yield a function that returns the changes."""
        begun = self._seeds.of_replica(values, get_replica_context().replica_id_in_sync_group)
        with ExitStack() as stack:
            scope = stack.enter_context(_scope(zip(self._variables, begun, strict=True)))
            first = [scope.get_current_value(variable) for variable in self._variables]
            stack.enter_context(averaging(self._optimizers))

            def changes() -> Changes:
                made = [scope.get_current_value(variable) for variable in self._variables]
                self._check_made_outside_loops(made)
                after = self._seeds.after(values, first, made)
                return {
                    number: new
                    for number, (new, one, old) in enumerate(zip(after, made, first, strict=True))
                    if one is not old
                }

            yield changes

    def _check_made_outside_loops(self, made: Values) -> None:
        """Refuse values that belong to a loop or branch inside the program.

        Raises:
            RuntimeError: If a variable has such a value.
        """
        program = current_program()
        for variable, value in zip(self._variables, made, strict=True):
            if isinstance(value, jax.core.Tracer) and not program.is_here(value):
                raise RuntimeError(
                    f"variable {variable.path!r} was assigned inside a loop or branch of JAX, which does not pass the "
                    "value on; assign it in a Python loop, and with a LossScaleOptimizer use its stateless_apply"
                )

    def put(self, of_replicas: Sequence[Changes]) -> None:
        """Assign the changes that the local replicas have made. Collective if there are changes."""
        own = {number: [np.asarray(changes[number]) for changes in of_replicas] for number in sorted(of_replicas[0])}
        compared = [number for number in own if self._reduction(number) != SUM]
        alike = dict(zip(compared, self._alike([own[number] for number in compared]), strict=True))
        self._set(
            {number: values[0] if alike.get(number) else self._agreed(number, values) for number, values in own.items()}
        )

    def _alike(self, own: Sequence[Sequence[np.ndarray]]) -> list[bool]:
        """Return, for each variable, whether its value has the same bits on all replicas of all instances."""
        if self._replicas.num_replicas_in_sync == 1 or not own:
            return [True] * len(own)
        mine = np.array([[digest(value, most_bytes=None) | 1 for value in values] for values in own], np.uint64).T
        is_alike = (mine == mine[0]).all(axis=0)
        name = "whether replicas assign the same"
        every = self._replicas.communicator.all_gather(np.where(is_alike, mine[0], np.uint64(0)), name=name)
        found: list[bool] = ((every == every[0]) & (every != 0)).all(axis=0).tolist()
        return found

    def _agreed(self, number: int, own: Sequence[np.ndarray]) -> Array:
        reduction = self._reduction(number)
        if reduction == FIRST:
            return self._replicas.broadcast(own[0])
        reduced: Array = self._replicas.reduce(reduction, PerReplica(tuple(own), self._replicas.local_replicas))
        return reduced

    def _reduction(self, number: int) -> str:
        variable = self._variables[number]
        is_of_metric = variable.synchronization == "on_read" and variable.aggregation not in OTHER_WAYS
        return SUM if is_of_metric else reduction_of(variable)

    def _set(self, changes: Changes) -> None:
        device = self._replicas.variables_device
        for number, value in changes.items():
            self._variables[number].assign(jax.device_put(value, device, may_alias=False))


@contextmanager
def _scope(values: Iterable[tuple[keras.Variable, Array]]) -> Iterator[keras.StatelessScope]:
    """Give variables other values inside the block; at its end initialise variables made inside, untraced."""
    scope = keras.StatelessScope(values)
    scope.__enter__()
    try:
        yield scope
    finally:
        with jax.ensure_compile_time_eval():
            scope.__exit__(None, None, None)
