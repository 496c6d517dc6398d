"""The memory of a training on JAX, from the shapes of its state and batches and from its compiled programs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np

from strategies.exchange.flat import not_made
from strategies.jax.engine import JaxEngine
from strategies.jax.gradients.model_state import PER_REPLICA
from strategies.jax.memory.plan import DEVICE, HOST, MemoryBlock, MemoryPlan, ProgramMemory, data_blocks, mean_blocks
from strategies.jax.options import StepOptions
from strategies.jax.preparation import StepPrograms, control_of_update
from strategies.jax.programs.compilation import shapes_of
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.updates.optimizers import AnyOptimizer
from strategies.jax.updates.update import VariableUpdate
from strategies.typing import Batch, LossFunction, Tree, Variables
from strategies.values import TrainState


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
        plan = steps.planned(state, batch)
        program = plan.program
        buckets, means_of_all = plan.gradient_layout.memory(plan.buckets, not_made)
        local = len(replicas.local_replicas)
        programs = [ProgramMemory.of(name, each, local) for name, each in plan.executables(replicas.grid).items()]
        means = jax.tree.unflatten(jax.tree.structure(trained), means_of_all[: program.num_gradients])
        traced = update.programs(trained, state.optimizer_state, means, control_of_update(program, state))
        programs += [ProgramMemory.of(name, each.lower().compile(), 1) for name, each in traced.items()]
        whole = JaxEngine(replicas, steps, options, is_recorded=True).whole(state)
        gradients = sum(each.size * each.dtype.itemsize for bucket in buckets for each in bucket.layout.buffers)
        held = [
            *self._of_state(state, whole),
            MemoryBlock("gradients", local * gradients, DEVICE, f"of {local} replicas"),
            MemoryBlock("sums of gradients", local * plan.sum_bytes, DEVICE, "of micro-batches"),
            *mean_blocks(replicas, buckets, is_private=False),
            *data_blocks(replicas, batch, _nbytes(batch), DEVICE),
        ]
        taken = [each for each in held if each.nbytes]
        return MemoryPlan(replicas.instance.index, local, taken, plan.kept(replicas.grid), programs)

    def _state(self, update: VariableUpdate, variables: Variables, trained: Variables, model_state: Tree) -> TrainState:
        """Return the shapes of a state, as `JaxEngine.restore` would make it."""
        options, local = self.options, len(self.replicas.local_replicas)
        own = options.rule_of(model_state).map_own(
            lambda leaf: jax.ShapeDtypeStruct((local, *leaf.shape), leaf.dtype), model_state
        )
        scale = None if options.scaling is None else options.scaling.start()
        return TrainState(variables, jax.eval_shape(update.begun, trained, update.first), 0, scale, own)

    def _of_state(self, state: TrainState, whole: TrainState) -> list[MemoryBlock]:
        variables_lie = HOST if self.replicas.variables_on_host else DEVICE
        optimizer_lies = HOST if self.options.offload_optimizer_state else variables_lie
        is_sharded = self.options.shards_state
        copied = whole.variables, whole.optimizer_state, whole.model_state
        kept = self.replicas.stored.kept
        part = "this instance's part, and a copy of another's" if kept else "this instance's part"
        in_checkpoint = 0 if self.replicas.instance.index else _nbytes(copied)  # instance 0 writes checkpoints
        own = self.options.rule_of(state.model_state).pick(state.model_state, PER_REPLICA)
        of_one = _nbytes(own) // len(self.replicas.local_replicas)  # the arrays that each replica has of its own
        return [
            MemoryBlock("variables", _nbytes(state.variables), variables_lie, "once for all local replicas"),
            MemoryBlock("optimizer state", _nbytes(state.optimizer_state), optimizer_lies, part if is_sharded else ""),
            MemoryBlock("model state", _nbytes(state.model_state), variables_lie),
            MemoryBlock("copies", of_one * len(kept), HOST, "of another instance's state"),
            MemoryBlock("checkpoint", in_checkpoint, HOST, "the copy that is written, if any"),
        ]


def _nbytes(tree: Tree) -> int:
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
