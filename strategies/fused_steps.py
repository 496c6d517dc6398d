"""Many steps in one program, where one instance drives all replicas.

XLA compiles the body of a loop otherwise than a program of its own: some gradients of convolutions differ in their last
bits (seen on CPU), so `Trainer` compares before it relies on this. And on CPU each of several simulated devices repeats
the update, which takes longer than single steps do (two replicas of the MLP of `benchmarks/train_step.py`: 1.7 times),
so there it is for one replica only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from strategies.devices import AXIS, ReplicaDevices
from strategies.reduction_ops import reduce_in_order
from strategies.replica_program import STEP, ReplicaProgram, control_words
from strategies.updates import Update

_WHOLE, _SPLIT = PartitionSpec(), PartitionSpec(AXIS)


class FusedSteps:
    """Runs steps one after another on the devices of the replicas, without returning to Python in between.

    Gradients are added in replica order, and updated, with the same operations as in single steps.

    Args:
        devices: of all replicas, in one wave.
        program: what a replica computes.
        update: of the variables.
    """

    @classmethod
    def suits(cls, devices: ReplicaDevices, communicator_size: int) -> bool:
        """Whether it may be used, and may save time, for these replicas."""
        is_quick = devices.width == 1 or devices.devices[0].platform != "cpu"
        return communicator_size == 1 and devices.is_lockstep and is_quick

    def __init__(self, devices: ReplicaDevices, program: ReplicaProgram, update: Update) -> None:
        self._devices = devices
        self._program = program
        self._update = update
        self._run = jax.jit(self._steps, donate_argnums=(0, 1) if devices.width == 1 else ())

    def __call__(
        self, variables: Any, optimizer_state: Any, batches: Sequence[Any], step: int
    ) -> tuple[Any, Any, jax.Array]:
        """Make one step with each of the batches.

        Args:
            variables: on the first device; used up.
            optimizer_state: likewise.
            batches: of equal shapes.
            step: the number of the first one.

        Returns:
            New variables and optimizer state, and the mean tails of all steps, float32 [steps, tail size].
        """
        indices = np.array(self._devices.replicas, np.int32)
        shared = self._devices.share((variables, optimizer_state))
        results = self._run(*shared, tuple(batches), indices, control_words(step, False, 1.0))
        if self._devices.width > 1:  # all of them have the same
            results = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, results)
        variables, optimizer_state, tails = results
        return variables, optimizer_state, tails

    def has_effects(self, variables: Any, optimizer_state: Any, batches: Sequence[Any]) -> bool:
        """Whether the program calls back into Python."""
        indices = np.array(self._devices.replicas, np.int32)
        words = control_words(0, False, 1.0)
        traced = jax.make_jaxpr(self._steps)(variables, optimizer_state, tuple(batches), indices, words)
        return bool(traced.effects)

    def last_gradients(self, variables: Any, batches: Sequence[Any], step: int) -> list[np.ndarray]:
        """The gradients of the last replica for the last of the batches, computed in such a loop; for comparison.

        The variables stay as they are.
        """
        indices = np.array(self._devices.replicas, np.int32)
        words = control_words(step, False, 1.0)
        shared = self._devices.share(variables)
        found = jax.jit(self._gradients_in_loop)(shared, tuple(batches), indices, words)
        return [np.asarray(leaf.addressable_shards[-1].data if self._devices.width > 1 else leaf) for leaf in found]

    def _gradients_in_loop(
        self, variables: Any, batches: Sequence[Any], indices: jax.Array, control: jax.Array
    ) -> Sequence[jax.Array]:
        def of_one_replica(variables: Any, batches: Any, index: jax.Array, control: jax.Array) -> Sequence[jax.Array]:
            def step(_: Any, batch: Any) -> tuple[Any, None]:
                return jax.lax.optimization_barrier(self._program(variables, batch, index, control)[1:]), None

            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
            zeros = tuple(jnp.zeros(result.shape, result.dtype) for result in self._program.results)
            last: Sequence[jax.Array] = jax.lax.scan(step, zeros, stacked)[0]
            return last

        gradients: Sequence[jax.Array] = self._spread(of_one_replica, (_WHOLE, _SPLIT, _SPLIT, _WHOLE), _SPLIT)(
            variables, batches, indices, control
        )
        return gradients

    def _steps(
        self, variables: Any, optimizer_state: Any, batches: Sequence[Any], indices: jax.Array, control: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        def of_one_replica(
            variables: Any, optimizer_state: Any, batches: Any, index: jax.Array, control: jax.Array
        ) -> tuple[Any, Any, jax.Array]:
            def step(carried: Any, batch: Any) -> tuple[Any, jax.Array]:
                variables, optimizer_state, control = carried
                tail, *gradients = self._program(variables, batch, index, control)
                # What single steps compute in programs of their own must not be fused here either.
                tail, *gradients = jax.lax.optimization_barrier((tail, *gradients))
                tail, *means = [self._mean(leaf) for leaf in (tail, *gradients)]
                tree = jax.tree.unflatten(jax.tree.structure(variables), jax.lax.optimization_barrier(means))
                variables, optimizer_state, _ = self._update.traced(variables, optimizer_state, tree, control)
                return (*jax.lax.optimization_barrier((variables, optimizer_state)), control.at[STEP].add(1)), tail

            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
            (variables, optimizer_state, _), tails = jax.lax.scan(step, (variables, optimizer_state, control), stacked)
            return variables, optimizer_state, tails

        after: tuple[Any, Any, jax.Array] = self._spread(
            of_one_replica, (_WHOLE, _WHOLE, _SPLIT, _SPLIT, _WHOLE), (_WHOLE, _WHOLE, _WHOLE)
        )(variables, optimizer_state, batches, indices, control)
        return after

    def _spread(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The function on the devices of all replicas; as it is where there is one."""
        if self._devices.width == 1:
            return function
        spread: Callable[..., Any] = jax.shard_map(
            function, mesh=self._devices.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return spread

    def _mean(self, value: jax.Array) -> jax.Array:
        """Over all replicas, in their order."""
        if self._devices.width == 1:
            return value
        gathered = jax.lax.all_gather(value, AXIS)
        return reduce_in_order("mean", [gathered[replica] for replica in range(self._devices.width)])
