"""The update of a state whose parts lie on several instances: all instances make it, or none does.

An update uses up the state before it. So an instance begins it only if the others have all that they need to make it
too. If an instance is lost meanwhile, the others either still have the state before the step, or all complete the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np

from strategies.core.survival import LOSSES
from strategies.exchange.copies import Rows
from strategies.jax.gradients.arguments import Trainable
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.shards import on_host
from strategies.jax.updates.update import Updated, VariableUpdate
from strategies.train_state import TrainState
from strategies.typing import Gradients, Leaf, Tree

COMMIT = "all instances can make the update"


@dataclass(frozen=True)
class ReadyStep:
    """A step whose mean gradients have arrived.

    Attributes:
        update: Update of the variables.
        trainable: Choice of the trained variables.
        means: Mean gradients.
        control: Control words with the mean loss.
        before: State before the step.
        after: State after it, still with the variables and the optimizer state before it.
    """

    update: VariableUpdate
    trainable: Trainable
    means: Gradients
    control: Leaf
    before: TrainState
    after: TrainState

    def computed(self, variables: Tree, prepared: Tree) -> Updated:
        """Return this instance's results; the trained variables and the prepared optimizer state are used up."""
        return self.update.compute(variables, prepared, self.means, self.control)

    def state(self, trained: Tree, updated: Updated) -> TrainState:
        """Return the state after the step, given the new variables."""
        variables = self.trainable.put(self.before.variables, trained)
        return replace(self.after, variables=variables, optimizer_state=updated.optimizer_state)


class PartedUpdate:
    """The updates of a state in parts, one after another.

    Args:
        replicas: Places of the replicas.
        is_recorded: Whether instances still meet after an update, to record it.
    """

    def __init__(self, replicas: Replicas, is_recorded: bool) -> None:
        self._replicas = replicas
        self._is_recorded = is_recorded
        self._step: ReadyStep | None = None
        self._updated: Updated | None = None

    def begin(self) -> None:
        """Forget the last step: all instances have completed it."""
        self._step = self._updated = None

    def apply(self, step: ReadyStep) -> TrainState:
        """Return the state after a step; the state before it is used up. Collective."""
        trained, prepared = step.trainable.pick(step.before.variables), step.update.prepare(step.before.optimizer_state)
        communicator, self._step = self._replicas.communicator, step
        if communicator.size > 1:
            try:
                communicator.barrier(name=COMMIT)
            except LOSSES:  # others may have passed the barrier, and complete the step
                self._updated = step.computed(*_copied((trained, prepared)))
                raise
        self._replicas.done_so_far.is_past = True
        self._updated = step.computed(trained, prepared)
        made = step.state(step.update.finish(trained, self._updated), self._updated)
        if not self._is_recorded:
            self.begin()
        return made

    def completed(self) -> TrainState:
        """Return the state after the interrupted step, which no instance has completed. Collective."""
        step, updated, replicas = self._step, self._updated, self._replicas
        assert step is not None
        assert updated is not None
        held = step.before.held
        assert held is not None
        rows = Rows(replicas.communicator, replicas.num_replicas_in_sync, held.holding, step.after.step)
        trained = step.update.restored(step.trainable.pick(step.before.variables), updated, rows)
        return step.state(trained, updated)

    def parts_at(self, number: int) -> TrainState | None:
        """Return a state with this instance's parts after step `number`, if this is the step interrupted last."""
        step, updated = self._step, self._updated
        if step is None or updated is None or step.after.step != number:
            return None
        return replace(step.after, optimizer_state=updated.optimizer_state)


def _copied(tree: Tree) -> Tree:
    """Return copies of arrays, which an update may use up."""
    return jax.tree.map(lambda leaf: jax.device_put(np.array(on_host(leaf)), _place(leaf), may_alias=False), tree)


def _place(leaf: Leaf) -> object:
    return getattr(leaf, "sharding", None)
