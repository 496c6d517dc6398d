"""Sharded optimizer state (ZeRO: Rajbhandari et al., 2020): every replica keeps, and updates, its part."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from typing_extensions import override

from strategies.errors import StrategyError
from strategies.exchange.copies import Rows
from strategies.exchange.shards import ShardedArrays
from strategies.jax.gradients.leaving import flatten
from strategies.jax.gradients.tail import loss_of
from strategies.jax.programs.dataflow import first_across_elements, operations
from strategies.jax.programs.jaxpr import is_read
from strategies.jax.programs.program import jit, shapes_of
from strategies.jax.replicas.devices import borrow
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.shards import ShardedTree, replica_rows, shards_of, take
from strategies.jax.updates.optimizers import AS_WRITTEN, AnyOptimizer, Known
from strategies.jax.updates.update import Updated, UpdateSettings, VariableUpdate, WholeStateUpdate
from strategies.typing import Gradients, Leaf, OptimizerState, Tree, Variables

logger = logging.getLogger(__name__)

_PARTS = "parts of variables"


class AcrossElementsError(StrategyError):
    """An optimizer computes elements of one part from another part; it is handled inside of `updates`."""


@final
class ShardedStateUpdate(VariableUpdate):
    """The update with (local replicas / R) of the optimizer state on each instance; new variables are gathered.

    Args:
        replicas: Replicas whose variables are updated.
        optimizer: Optimizer that computes every element of the state and the changes from the same elements of the
            gradients, state and variables. Values that depend on all elements are in `Known`.
        settings: Settings of the update.
        variables: Trained variables; shapes and dtypes are enough.

    Raises:
        AcrossElementsError: The optimizer looks across elements.
    """

    def __init__(
        self, replicas: Replicas, optimizer: AnyOptimizer, settings: UpdateSettings, variables: Variables
    ) -> None:
        super().__init__(replicas, optimizer, settings)
        self._shards = shards_of(replicas, settings.min_elements, keeps_copies=True)
        whole = shapes_of(variables)
        of_whole = self._trace(whole)
        self._refuse_across_elements(whole, of_whole)
        needs_norm = is_read(of_whole.jaxpr, of_whole.jaxpr.invars[-1])
        if replicas.communicator.scatters_reductions and not needs_norm and self._shards.blocks == 1:
            self.mean_shards = self._shards
        self._parts = ShardedArrays(self._shards, jax.tree.leaves(whole), _PARTS)
        self._state_shards = ShardedTree(replicas, self._shards, *self._shapes_of_state(whole))
        self._jitted = jit(self._divided, donate_argnums=(1,))
        self._divide = self.in_turn(self._jitted)
        self._unite = jit(self._united, static_argnums=(2,), donate_argnums=(0,), keep_unused=True)

    @override
    def begun(self, variables: Variables, first: jax.Array) -> OptimizerState:
        return self._optimizer.init(self._take(variables, first))

    @override
    def prepare(self, optimizer_state: OptimizerState) -> OptimizerState:
        return self.on_device(optimizer_state)

    @override
    def compute(self, variables: Variables, prepared: OptimizerState, means: Gradients, control: Leaf) -> Updated:
        own, kept, small, state, self._reading = self._divide(variables, prepared, means, control, self.first)
        return Updated(self.offloaded(state), None, small, own, kept)

    @override
    def finish(self, variables: Variables, updated: Updated) -> Variables:
        """Return the new variables, put together from the parts of all instances. Collective."""
        leaves, structure = jax.tree.flatten(variables)
        for number, members in self._parts.members.items():
            gathered = self._gathered(number, updated.own[number])
            old, starts = [leaves[leaf] for leaf in members], self._parts.layout.buffers[number].starts
            with jax.default_device(self._replicas.variables_device):
                united, self._reading = self._unite(old, gathered, starts)
            for leaf, new in zip(members, united, strict=True):
                leaves[leaf] = new
        return self._with_whole(structure, leaves, updated)

    @override
    def restored(self, variables: Variables, updated: Updated, rows: Rows) -> Variables:
        leaves, structure = jax.tree.flatten(variables)
        everybody, shards, layout = range(self._shards.replicas), self._shards, self._parts.layout
        own, kept = ([borrow(buffer) for buffer in buffers] for buffers in (updated.own, updated.kept))
        for place, number in enumerate(self._parts.cut):
            leaf = leaves[number]
            parts = np.concatenate([layout.view(place, buffers) for buffers in (own, kept) if buffers])
            found = replica_rows(parts, self._holding)
            [whole] = rows.fetch([everybody], found, shards.part(leaf) * leaf.dtype.itemsize, f"variable {number}")
            flat = whole.reshape(-1).view(leaf.dtype)[: leaf.size]
            leaves[number] = jnp.array(flat.reshape(leaf.shape))
        return self._with_whole(structure, leaves, updated)

    def _with_whole(self, structure: Tree, leaves: list[jax.Array], updated: Updated) -> Variables:
        for number, new in zip(self._parts.uncut, updated.whole, strict=True):
            leaves[number] = new
        placed = jax.device_put(leaves, self._replicas.variables_device)  # committed, as the old variables were
        return jax.tree.unflatten(structure, placed)

    def _gathered(self, number: int, buffer: jax.Array) -> Leaf:
        """Return the parts of all instances in a buffer, one row for each instance. Collective."""
        if self.path is not None:
            return self.path.gather(f"{_PARTS}/{number}", buffer)
        self.wait()  # the previous variables may still be made from this memory
        return self._parts.gather(number, borrow(buffer), self._replicas.communicator)

    @override
    def programs(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: np.ndarray
    ) -> Mapping[str, jax.stages.Traced]:
        """Return the program that computes this instance's parts."""
        given = shapes_of((variables, optimizer_state, means))
        return {"update of parts": self._jitted.trace(*given, control, self.first)}

    # ---- programs

    def _take(self, tree: Tree, first: jax.Array) -> Tree:
        """Return this instance's parts, behind a barrier: if XLA fused them with the cut, it would round otherwise."""
        return jax.lax.optimization_barrier(jax.tree.map(lambda leaf: take(self._shards, leaf, first), tree))

    def _divided(
        self,
        variables: Variables,
        optimizer_state: OptimizerState,
        means: Gradients,
        control: jax.Array,
        first: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], list[jax.Array], Tree, jax.Array]:
        """Return new variables and optimizer state.

        They are this instance's parts in flat buffers, its copies of other parts in such buffers, the new variables
        that are not cut, the optimizer state, and a token.
        """
        whole, layout = jax.tree.leaves(variables), self._parts.layout
        parts = self._take(variables, first)
        gradients, known = self._known(variables, means, control, first)
        arithmetic = self._adding(lambda number, _: self._take(self._bits(number, whole[number].shape, control), first))
        shards, optimizer_state = self._optimizer.apply(gradients, optimizer_state, parts, known, arithmetic)
        leaves = jax.tree.leaves(shards)
        cut, small = ([leaves[number] for number in numbers] for numbers in (self._parts.cut, self._parts.uncut))
        zeros = [jnp.zeros(buffer.size, buffer.dtype) for buffer in layout.buffers]
        blocks = [jnp.split(leaf.reshape(-1), self._shards.blocks) for leaf in cut]
        own, *kept = (
            flatten(layout, [parts[block] for parts in blocks], None, zeros) for block in range(self._shards.blocks)
        )
        return own, kept[0] if kept else (), small, optimizer_state, jnp.zeros(())

    def _known(
        self, variables: Variables, means: Gradients, control: jax.Array, first: jax.Array
    ) -> tuple[Gradients, Known]:
        """Return this instance's parts of the gradients, and the results that depend on all gradients."""
        _, norm = self._gradients(variables, means, control)
        if self.mean_shards is not None:
            norm = jnp.full_like(norm, jnp.nan)  # this would be the norm of a part; the optimizer does not read it

        def rest(mean: jax.Array, variable: jax.Array) -> jax.Array:  # some means are this instance's parts already
            return take(self._shards, mean, first) if mean.shape == variable.shape else mean

        # Cut before they are converted: if XLA fuses the conversion with the cut, it rounds the update differently.
        own = jax.lax.optimization_barrier(jax.tree.map(rest, means, variables))
        return self._gradients(variables, own, control)[0], Known(norm, loss_of(control))

    def _united(
        self, old: Sequence[jax.Array], gathered: jax.Array, starts: tuple[int, ...]
    ) -> tuple[list[jax.Array], jax.Array]:
        """Return the new variables, from the parts of all instances in one buffer, in the memory of the old ones."""
        united = []
        for whole, start in zip(old, starts, strict=True):
            stop = start + self._shards.local * self._shards.part(whole)
            united.append(self._shards.join(gathered[:, start:stop], whole, jnp))
        return united, jnp.zeros(())

    # ---- whether the optimizer allows it

    def _refuse_across_elements(self, whole: Variables, of_whole: core.ClosedJaxpr) -> None:
        """Raise an AcrossElementsError if the optimizer, whose update is `of_whole`, looks across elements."""
        if self._optimizer.needs_whole:
            raise AcrossElementsError("the optimizer needs whole arrays")
        parts = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(self._shards.shape(leaf), leaf.dtype), whole)
        of_parts, of_others = self._trace(parts), self._trace(self._others(whole))
        found = first_across_elements(of_parts) or first_across_elements(jax.make_jaxpr(self._optimizer.init)(parts))
        if found is None and not operations(of_whole) == operations(of_parts) == operations(of_others):
            found = "other operations or numbers for arrays of other shapes"
        if found is not None:
            raise AcrossElementsError(f"the optimizer's update has {found}, but a replica has a part of the elements")

    def _shapes_of_state(self, whole: Variables) -> tuple[Tree, Tree]:
        """Return the shapes of the whole optimizer state, and whether each follows from a variable's shape."""
        shapes, changed = (jax.eval_shape(self._optimizer.init, tree) for tree in (whole, self._others(whole)))
        return shapes, jax.tree.map(lambda one, other: one.shape != other.shape, shapes, changed)

    def _others(self, whole: Variables) -> Variables:
        """Return the shapes of the variables; each variable that is cut has the shape of a part of another size."""

        def other(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((leaf.size + 1, *[1] * (leaf.ndim - 1)), leaf.dtype)

        return jax.tree.map(lambda leaf: other(leaf) if self._shards.divides(leaf) else leaf, whole)

    def _trace(self, tree: Tree) -> core.ClosedJaxpr:
        """Return the equations of the update of a tree with these shapes."""
        state = jax.eval_shape(self._optimizer.init, tree)
        given, _ = self._shapes_of(tree)

        def update(
            gradients: Gradients, state: OptimizerState, variables: Variables, loss: jax.Array, norm: jax.Array
        ) -> tuple[Variables, OptimizerState]:
            return self._optimizer.apply(gradients, state, variables, Known(norm, loss), AS_WRITTEN)

        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.make_jaxpr(update)(given, state, tree, scalar, scalar)


def update_for(
    replicas: Replicas, optimizer: AnyOptimizer, settings: UpdateSettings, variables: Variables
) -> VariableUpdate:
    """Return the update of variables: sharded if the settings ask for it and the optimizer allows it, else whole.

    Args:
        replicas: Replicas whose variables are updated. The part of a single replica is the whole state.
        optimizer: An optax gradient transformation, or a `StepOptimizer`.
        settings: Settings of the update.
        variables: Trained variables; shapes and dtypes are enough.
    """
    if not settings.shards_state or replicas.num_replicas_in_sync == 1:
        return WholeStateUpdate(replicas, optimizer, settings)
    try:
        return ShardedStateUpdate(replicas, optimizer, settings, variables)
    except AcrossElementsError as error:
        logger.info("%s: its state is kept in parts, and put together for each update", error)
        return WholeStateUpdate(replicas, optimizer, settings, variables)
