"""The memory of a training on JAX, from the shapes of its state and batches and from its compiled programs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np

from strategies.exchange.flat import not_made
from strategies.exchange.int8 import Int8Layout
from strategies.jax.engine import JaxEngine
from strategies.jax.gradients.leaving import MeansMemory
from strategies.jax.gradients.model_state import PER_REPLICA
from strategies.jax.memory.plan import DEVICE, HOST, Held, MemoryPlan, ProgramMemory, held_by_data, held_by_means
from strategies.jax.options import StepOptions
from strategies.jax.preparation import StepPrograms, control_of_update
from strategies.jax.programs.program import shapes_of
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.updates.optimizers import AnyOptimizer
from strategies.jax.updates.update import VariableUpdate
from strategies.train_state import TrainState
from strategies.typing import Batch, LossFunction, Tree, Variables


@dataclass(frozen=True)
class MemoryPlanner:
    """A planner of a training's memory, which builds the step without running it; it calls no collective."""

    replicas: Replicas
    loss_fn: LossFunction
    optimizer: AnyOptimizer
    options: StepOptions

    def plan(self, variables: Variables, model_state: Tree, batch: Batch) -> MemoryPlan:
        """Return the memory that this instance needs; shapes and dtypes of all arguments are enough.

        Raises:
            TypeError, ValueError: A step with these arguments would raise it.
        """
        replicas, options = self.replicas, self.options
        steps = StepPrograms(replicas, self.loss_fn, self.optimizer, options, is_recorded=True)
        variables = shapes_of(variables)
        update, trained = steps.update_of(variables), steps.trained(variables)
        state = self._state(update, variables, trained, shapes_of(model_state))
        program, plan = steps.planned(state, batch)
        memory = MeansMemory(plan.leaving, not_made)
        buckets = plan.buckets(memory)
        local = len(replicas.local_replicas)
        programs = [ProgramMemory.of(name, each, local) for name, each in plan.executables(replicas.grid).items()]
        leaves = program.means if program.quantised else memory.means[: program.num_gradients]
        means = jax.tree.unflatten(jax.tree.structure(trained), leaves)
        traced = update.programs(trained, state.optimizer_state, means, control_of_update(program, state))
        programs += [ProgramMemory.of(name, each.lower().compile(), 1) for name, each in traced.items()]
        whole = JaxEngine(replicas, steps, options, is_recorded=True).whole(state)
        gradients = sum(each.size * each.dtype.itemsize for bucket in buckets for each in bucket.layout.buffers)
        held = [
            *self._of_state(state, whole),
            Held("gradients", local * gradients, DEVICE, f"of {local} replicas"),
            Held("sums of gradients", local * plan.sum_bytes, DEVICE, "of micro-batches"),
            *held_by_means(replicas, buckets, _nbytes(program.means) if program.quantised else 0, is_private=False),
            *held_by_data(replicas, batch, _nbytes(batch), DEVICE),
        ]
        taken = [each for each in held if each.nbytes]
        return MemoryPlan(replicas.instance.index, local, taken, plan.kept(replicas.grid), programs)

    def _state(self, update: VariableUpdate, variables: Variables, trained: Variables, model_state: Tree) -> TrainState:
        """Return the shapes of a state, as `JaxEngine.restore` would make it."""
        options, local = self.options, len(self.replicas.local_replicas)
        residuals = None
        if options.transfer.is_quantised:
            residuals = shapes_of(Int8Layout.of(jax.tree.leaves(trained)).new_residuals(local))
        own = options.rule_of(model_state).map_own(
            lambda leaf: jax.ShapeDtypeStruct((local, *leaf.shape), leaf.dtype), model_state
        )
        scale = None if options.scaling is None else options.scaling.start()
        return TrainState(variables, jax.eval_shape(update.begun, trained, update.first), 0, scale, residuals, own)

    def _of_state(self, state: TrainState, whole: TrainState) -> list[Held]:
        offloads = self.options.of_update.offloads_state
        variables_lie = HOST if self.replicas.variables_on_host else DEVICE
        is_sharded = self.options.of_update.shards_state
        copied = whole.variables, whole.optimizer_state, whole.residuals, whole.model_state
        kept = self.replicas.holding.kept
        part = "this instance's part, and a copy of another's" if kept else "this instance's part"
        in_checkpoint = 0 if self.replicas.instance.index else _nbytes(copied)  # instance 0 writes checkpoints
        return [
            Held("variables", _nbytes(state.variables), variables_lie, "once for all local replicas"),
            Held(
                "optimizer state",
                _nbytes(state.optimizer_state),
                HOST if offloads else variables_lie,
                part if is_sharded else "",
            ),
            Held("model state", _nbytes(state.model_state), variables_lie),
            Held("residuals", _nbytes(state.residuals), variables_lie, "of int8 gradients"),
            Held(
                "copies",
                self._nbytes_of_one_replica(state) * len(kept),
                HOST,
                "of another instance's residuals and state",
            ),
            Held("checkpoint", in_checkpoint, HOST, "the copy that is written, if any"),
        ]

    def _nbytes_of_one_replica(self, state: TrainState) -> int:
        """Return the size of the arrays that each replica has of its own."""
        own = state.residuals, self.options.rule_of(state.model_state).pick(state.model_state, PER_REPLICA)
        return _nbytes(own) // len(self.replicas.local_replicas)


def _nbytes(tree: Tree) -> int:
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
