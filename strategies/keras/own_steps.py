"""The training of models with their own `train_step`: each replica runs it, and optimizers get mean gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from keras import tree
from keras.utils import pack_x_y_sample_weight

from strategies.errors import StrategyError
from strategies.jax.gradients.model_state import ALIKE, CONSTANT
from strategies.jax.programs.dataflow import depends_on, looks
from strategies.jax.programs.program import jit
from strategies.jax.replicas.replica_context import get_replica_context
from strategies.keras.averaging import Mean, averaging, mean_over_replicas
from strategies.keras.divisors import by_mean_of_replicas, dividing_by
from strategies.keras.protocols import Array, Logs, ModelClass, ModelLike, State, Values
from strategies.keras.state import METRICS, VARIABLES, Seeds, results_of, seeds_of, shape_of, words_of, words_of_metrics
from strategies.outcome import Outcome
from strategies.strategy import Strategy
from strategies.train_state import TrainState
from strategies.trainer import Trainer
from strategies.typing import Batch, Data, Key, Number, Variables

TRAINED, OPTIMIZER = "trained", "optimizer"
_PARTS = (TRAINED, VARIABLES, OPTIMIZER, METRICS)
"""The parts of the state that a `train_step` takes and returns, in its order."""

Parts: TypeAlias = dict[str, Values]
"""A state by its parts."""


def _flat(logs: Mapping[str, Number]) -> Logs:
    """Return logs as Keras reports them, with one name for each result of a metric."""
    found: Logs = {}
    for name, value in logs.items():
        found |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return found


class OwnTrainFunction:
    """The train function of a model with its own `train_step`, for `fit` and `train_on_batch`.

    Args:
        model: Model of Keras, built and compiled.
        stock: Its class, as the user knows it.
        strategy: Strategy whose replicas train.
        steps_per_execution: Number of steps of a call.

    Attributes:
        steps_made: Number of steps so far, up to the last call.
    """

    def __init__(self, model: ModelLike, stock: ModelClass, strategy: Strategy, steps_per_execution: int) -> None:
        self.steps_made = 0
        self._model = model
        self._strategy = strategy
        self._steps = steps_per_execution
        self._train_step: Callable[[State, Data], tuple[Logs, State]] = stock.train_step.__get__(model)
        self._seeds = Seeds(seeds_of(model))
        self._results = jit(partial(results_of, model))
        self._trainer: Trainer | None = None
        self._logs: tuple[str, ...] = ()
        self._names: tuple[str, ...] = ()  # names of logs that do not come from metrics
        self._state: TrainState | None = None

    def unite(self) -> None:
        """Do nothing: Keras has the whole state."""

    def begin(self) -> None:
        """Broadcast instance 0's state before the next step: the user may have changed it."""
        self._state = None

    def __call__(self, state: State, iterator: Iterator[Batch]) -> tuple[Logs, State]:
        """Make steps with the next batches.

        Args:
            state: State of Keras's loop.
            iterator: Batches of this instance.

        Returns:
            The logs, and the new state.

        Raises:
            StopIteration: If there is no batch.
        """
        batch = next(iterator)
        begun = self._begun(dict(zip(_PARTS, map(list, state), strict=True)), batch)
        assert self._trainer is not None
        for each in itertools.chain([batch], itertools.islice(iterator, self._steps - 1)):
            begun, told = self._trainer.step(begun, each)
        self._state, self.steps_made = begun, begun.step
        results = dict(self._results(begun.model_state[METRICS]))
        logs = {name: results[name] if name in results else told[f"log {name}"] for name in self._logs}
        return logs, tuple(begun.model_state[part] for part in _PARTS)

    def _begun(self, parts: Parts, batch: Batch) -> TrainState:
        if self._trainer is None:
            self._trainer = self._made(parts, batch)
        if self._state is None:
            begun = self._trainer.init({"nothing": np.zeros((), np.float32)}, parts)
            return replace(begun, step=self.steps_made)
        device = self._strategy.replicas.variables_device
        return replace(self._state, model_state=jax.device_put(parts, device))

    def _made(self, parts: Parts, batch: Batch) -> Trainer:
        rows = jax.tree.map(self._strategy.replicas.devices.replica_shape, batch)
        words = self._looked_at(*jax.tree.map(shape_of, (parts, rows)))
        return Trainer(self._strategy, self._loss, optax.set_to_zero(), model_state_aggregation=words)

    def _step(self, state: Mapping[str, Values], batch: Batch, mean: Mean) -> tuple[Logs, Parts]:
        """Return the logs and the new state; traceable by JAX.

        Args:
            state: State by its parts; see `_PARTS`.
            batch: `(x, y, sample_weight)` of one replica.
            mean: Function applied to the gradients given to `optimizer.stateless_apply`, for all optimizers of the
                model.
        """
        optimizers = [one for one in tree.flatten(list(vars(self._model).values())) if isinstance(one, keras.Optimizer)]
        with averaging(optimizers, mean):
            logs, new = self._train_step(tuple(list(state[part]) for part in _PARTS), pack_x_y_sample_weight(*batch))
        return _flat(logs), dict(zip(_PARTS, map(list, new), strict=True))

    def _loss(self, variables: Variables, batch: Batch, key: Key, model_state: Parts) -> Outcome:
        """Make the step of a replica. All state is model state, so `variables` has nothing to train."""
        seeds, given = self._seeds, model_state[VARIABLES]
        own = seeds.of_replica(given, get_replica_context().replica_id_in_sync_group)
        with dividing_by(by_mean_of_replicas):
            logs, new = self._step({**model_state, VARIABLES: own}, batch, mean_over_replicas)
        new[VARIABLES] = seeds.after(given, own, new[VARIABLES])
        told = {f"log {name}": jnp.mean(jnp.asarray(logs[name], jnp.float32)) for name in self._names}
        return Outcome(0 * variables["nothing"], told, new)

    def _looked_at(self, parts: Parts, batch: Batch) -> dict[str, list[str]]:
        """Return, for each variable of each part of the state, how replicas agree on its value."""
        old, structure = jax.tree.flatten(parts)
        split = partial(jax.tree.unflatten, structure)

        def after(leaves: Values, batch: Batch, mean: Mean = lambda gradients: gradients) -> list[Array]:
            logs, new = self._step(split(leaves), batch, mean)
            self._logs = tuple(logs)
            self._names = tuple(name for name in logs if name not in results_of(self._model, new[METRICS]))
            return jax.tree.leaves(new)

        changed, adds = map(split, looks(after, old, batch))
        flags = self._seeds.flags
        none = {part: [False] * len(parts[part]) for part in _PARTS}
        own = jax.tree.leaves({**none, VARIABLES: flags, METRICS: [True] * len(parts[METRICS])})
        without_gradients = partial(after, mean=partial(jax.tree.map, jnp.zeros_like))
        depends = split(depends_on(without_gradients, old, own, batch))
        self._refuse_other_changes(depends)
        words = words_of(self._model.non_trainable_variables, flags, changed[VARIABLES])
        is_own = zip(words, depends[VARIABLES], strict=True)
        return {
            TRAINED: [ALIKE if is_changed else CONSTANT for is_changed in changed[TRAINED]],
            VARIABLES: [word if is_of_rows or word == CONSTANT else ALIKE for word, is_of_rows in is_own],
            OPTIMIZER: [ALIKE if is_changed else CONSTANT for is_changed in changed[OPTIMIZER]],
            METRICS: words_of_metrics(self._model.metrics_variables, changed[METRICS], adds[METRICS]),
        }

    def _refuse_other_changes(self, depends: Mapping[str, Sequence[bool]]) -> None:
        """Refuse a step that computes variables from a replica's rows without the mean over replicas."""
        assert self._model.optimizer is not None  # refuse_optimizer has raised if there is none
        variables = {TRAINED: self._model.trainable_variables, OPTIMIZER: self._model.optimizer.variables}
        for part, of_part in variables.items():
            for variable, is_own in zip(of_part, depends[part], strict=True):
                if is_own:
                    raise StrategyError(
                        f"train_step computes {variable.path!r} from the rows of a replica, and not by "
                        "optimizer.stateless_apply of an optimizer that is an attribute of the model, so replicas "
                        "would have different values; use stateless_apply, or strategies.Trainer"
                    )
