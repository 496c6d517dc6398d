"""The layers of a step on JAX, whose norms and distributions go to sinks of metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from strategies.core.engine import ExchangeResult
from strategies.core.metrics import Layers, UnreadArray, layer_names
from strategies.jax.gradients.replica_program import ReplicaProgram
from strategies.jax.options import StepOptions
from strategies.jax.preparation import StepPrograms
from strategies.jax.programs.compilation import jit
from strategies.jax.replicas.devices import borrow
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.variables import PartOfArray
from strategies.typing import Leaf
from strategies.values import TrainState


@final
class JaxLayers:
    """The layers of the steps of one Trainer.

    Args:
        replicas: Places of the replicas.
        programs: Programs of the steps.
        options: Options of the step.

    Attributes:
        variable_names: Names of the trained variables in the order of the pytree; None for their paths in it.
    """

    def __init__(self, replicas: Replicas, programs: StepPrograms, options: StepOptions) -> None:
        self.variable_names: Sequence[str] | None = None
        self._replicas = replicas
        self._programs = programs
        self._options = options
        self._known: tuple[object, tuple[str, ...]] | None = None  # the names, and what they were made of

    def of(self, state: TrainState, program: ReplicaProgram, tail: UnreadArray, result: ExchangeResult) -> Layers:
        """Return the layers of a step whose exchange has arrived.

        Args:
            state: State before the step.
            program: Computation of a replica.
            tail: Values that travelled behind the gradients.
            result: Results of the exchange.
        """
        paths, structure = jax.tree_util.tree_flatten_with_path(self._programs.trained(state.variables))
        chosen = None if self.variable_names is None else tuple(self.variable_names)
        if self._known is None or self._known[0] != (structure, chosen):
            of_paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
            if chosen is not None and len(chosen) != len(paths):
                raise ValueError(
                    f"variable_names has {len(chosen)} names, but {len(paths)} variables are trained: "
                    f"{', '.join(of_paths)}; give each of them a name, in this order"
                )
            self._known = (structure, chosen), layer_names(of_paths if chosen is None else chosen)
        names, variables = self._known[1], [leaf for _, leaf in paths]
        means, shards = result.gradients()

        def gathered(number: int, part: Leaf) -> np.ndarray:
            assert shards is not None
            whole = jax.ShapeDtypeStruct(variables[number].shape, part.dtype)
            return PartOfArray(part, whole, shards, self._replicas).gather(f"the gradient of {names[number]}")

        norms = None if self._replicas.variables_device.platform == "cpu" else self.device_norms
        divisor = self._divisor(state, program, tail)
        return Layers(names, variables, jax.tree.leaves(means), divisor, shards, borrow, gathered, norms)

    def _divisor(self, state: TrainState, program: ReplicaProgram, tail: UnreadArray) -> UnreadArray:
        divisor: UnreadArray = 1.0
        if state.loss_scale is not None and self._options.scaling is not None:
            divisor = state.loss_scale.scale
        if program.places.is_weighted:
            divisor = divisor * float(np.asarray(tail)[program.places.weight])
        return divisor

    @cached_property
    def device_norms(self) -> Callable[[Sequence[Leaf]], jax.Array]:
        """The function that returns the norm of each array, float32, without waiting for it."""
        return jit(lambda leaves: jnp.stack([_norm(leaf.astype(jnp.float32)) for leaf in leaves]))


def _norm(leaf: jax.Array) -> jax.Array:
    """Return the norm of an array, whose squares may be beyond the range of float32; traceable."""
    largest = jnp.max(jnp.abs(leaf), initial=0.0)
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    return jnp.sqrt(jnp.sum(jnp.square(leaf / unit))) * unit
