"""The memory of a training with JAX, from the shapes of its state and batches and from programs compiled for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from strategies.exchange.flat import not_made
from strategies.exchange.int8 import Int8Layout
from strategies.exchange.means import Bucket
from strategies.gradients.arguments import Trainable
from strategies.gradients.computation import ReplicaPlan
from strategies.gradients.leaving import MeansMemory
from strategies.gradients.model_state import PER_REPLICA
from strategies.gradients.replica_program import ReplicaProgram
from strategies.memory.plan import DEVICE, HOST, SHARED, Held, MemoryPlan, ProgramMemory
from strategies.replicas.replicas import Replicas
from strategies.step.options import StepOptions
from strategies.step.preparation import StepPrograms, control_of
from strategies.train_state import TrainState
from strategies.typing import Batch, LossFunction, Tree, Variables
from strategies.updates.gathered_update import update_for
from strategies.updates.optimizers import AnyOptimizer, as_optimizer
from strategies.updates.update import VariableUpdate


@dataclass(frozen=True)
class MemoryPlanner:
    """Plans the memory of a training, beside the parts that carry it out; calls no collective."""

    replicas: Replicas
    loss_fn: LossFunction
    optimizer: AnyOptimizer
    options: StepOptions

    def plan(self, variables: Variables, model_state: Tree, batch: Batch) -> MemoryPlan:
        """Return what this instance needs; shapes and dtypes of all arguments are enough.

        Raises:
            TypeError, ValueError: as of a step with them.
        """
        replicas, options = self.replicas, self.options
        update = update_for(replicas, self.optimizer, options.of_update)
        state = self._state(update, variables, model_state)
        steps = StepPrograms(replicas, self.loss_fn, options, update, is_recorded=True)
        program, plan = steps.planned(state, batch)
        memory = MeansMemory(plan.leaving, not_made)
        buckets = plan.buckets(memory)
        local = len(replicas.local_replicas)
        programs = [ProgramMemory.of(name, each, local) for name, each in plan.executables(replicas.grid).items()]
        programs += self._of_update(update, state, program, memory)
        held = [*self._of_state(state), *self._of_exchange(plan, buckets, program), *self._of_data(batch)]
        return MemoryPlan(
            replicas.instance.index,
            local,
            [each for each in held if each.nbytes],
            plan.kept(replicas.grid),
            programs,
        )

    def _state(self, update: VariableUpdate, variables: Variables, model_state: Tree) -> TrainState:
        """Return the shapes of a state as `JaxEngine.restore` makes it."""
        variables, model_state = shapes_of(variables), shapes_of(model_state)
        options, local = self.options, len(self.replicas.local_replicas)
        trained = Trainable.of(variables, options.trainable).pick(variables)
        residuals = None
        if options.transfer.is_quantised:
            residuals = shapes_of(Int8Layout.of(jax.tree.leaves(trained)).new_residuals(local))
        own = options.rule_of(model_state).map_own(
            lambda leaf: jax.ShapeDtypeStruct((local, *leaf.shape), leaf.dtype), model_state
        )
        scale = None if options.scaling is None else options.scaling.start()
        return TrainState(variables, update.init_shapes(trained), 0, scale, residuals, own)

    def _of_update(
        self, update: VariableUpdate, state: TrainState, program: ReplicaProgram, memory: MeansMemory
    ) -> list[ProgramMemory]:
        trained = Trainable.of(state.variables, self.options.trainable).pick(state.variables)
        leaves = program.means if program.quantised else memory.means[: program.num_gradients]
        means = jax.tree.unflatten(jax.tree.structure(trained), list(map(_shape, leaves)))
        lowered = update.lowered(trained, state.optimizer_state, means, control_of(state))
        return [ProgramMemory.of(name, each.compile(), 1) for name, each in lowered.items()]

    # ---- what is held

    def _of_state(self, state: TrainState) -> list[Held]:
        offloads = self.options.of_update.offloads_state
        variables_lie = HOST if self.replicas.variables_on_host else DEVICE
        is_sharded = self.options.of_update.shards_state
        held = [
            Held("variables", _nbytes(state.variables), variables_lie, "once for all local replicas"),
            Held(
                "optimizer state",
                _nbytes(state.optimizer_state),
                HOST if offloads else variables_lie,
                "this instance's part" if is_sharded else "",
            ),
            Held("model state", _nbytes(state.model_state), variables_lie),
            Held("residuals", _nbytes(state.residuals), variables_lie, "of int8 gradients"),
        ]
        return [*held, Held("checkpoint", self._checkpoint_bytes(state), HOST, "the copy that is written, if any")]

    def _checkpoint_bytes(self, state: TrainState) -> int:
        """The whole state, of which instance 0 has a copy while it writes a checkpoint."""
        replicas = self.replicas
        if replicas.instance.index:
            return 0
        trained = Trainable.of(state.variables, self.options.trainable).pick(state.variables)
        optimizer_state = jax.eval_shape(as_optimizer(self.optimizer).init, trained)
        own = self.options.rule_of(state.model_state).pick(state.model_state, PER_REPLICA)
        of_replicas = _nbytes((state.residuals, own)) // len(replicas.local_replicas)
        return (
            _nbytes((state.variables, optimizer_state, state.model_state))
            - _nbytes(own)
            + of_replicas * replicas.num_replicas_in_sync
        )

    def _of_exchange(self, plan: ReplicaPlan, buckets: Sequence[Bucket], program: ReplicaProgram) -> list[Held]:
        communicator, local = self.replicas.communicator, len(self.replicas.local_replicas)
        buffers = sum(each.size * each.dtype.itemsize for bucket in buckets for each in bucket.layout.buffers)
        means = [
            (array.nbytes, number not in bucket.scattered and communicator.is_shared(array.nbytes))
            for bucket in buckets
            for number, array in enumerate(bucket.results)
        ]
        shared = sum(nbytes for nbytes, is_shared in means if is_shared)
        quantised = _nbytes(program.means) if program.quantised else 0
        return [
            Held("gradients", local * buffers, DEVICE, f"of {local} replicas"),
            Held("sums of gradients", local * plan.sum_bytes, DEVICE, "of micro-batches"),
            Held("mean gradients", sum(nbytes for nbytes, _ in means) - shared + quantised, HOST),
            Held("mean gradients in the window", shared, SHARED, "once for the instances of a host"),
            Held("window", communicator.window_bytes, SHARED, "through which they exchange"),
        ]

    def _of_data(self, batch: Batch) -> list[Held]:
        dataset = self.replicas.dataset_of(batch)
        ahead = 0 if dataset is None else dataset.num_read_ahead
        return [
            Held("batch", _nbytes(batch), DEVICE),
            Held("batches read ahead", ahead * _nbytes(batch), DEVICE, f"{ahead} of them"),
        ]


def _shape(leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def shapes_of(tree: Tree) -> Tree:
    """The shapes and dtypes of a pytree of arrays and numbers."""
    return jax.tree.map(lambda leaf: _shape(leaf if hasattr(leaf, "dtype") else np.asarray(leaf)), tree)


def _nbytes(tree: Tree) -> int:
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
