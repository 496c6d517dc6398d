"""The parts of a state that not all instances have, and their update, which all instances make or none.

An update uses up the state before it. So an instance begins it only if the others have all that they need to make it
too. If an instance is lost meanwhile, the others either still have the state before the step, or all complete the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import jax
import numpy as np

from strategies.core.survival import LOSSES
from strategies.exchange.shard_fetcher import ShardFetcher
from strategies.jax.gradients.computation import Trainable
from strategies.jax.gradients.model_state import PER_REPLICA
from strategies.jax.options import StepOptions
from strategies.jax.preparation import StepPrograms
from strategies.jax.replicas.devices import borrow
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.updates.update import Updated, VariableUpdate
from strategies.stored_shards import StoredShards, bytes_of
from strategies.typing import Gradients, Leaf, Tree
from strategies.values import TrainState, are_used_up


class ShardBackups:
    """Backups of each instance's shards on a neighbour; after a loss all shards are divided again.

    Without copies (the job ends after a loss, or all instances have the same state) every method does nothing.

    Args:
        replicas: Places of the replicas.
        programs: Programs of the steps.
        options: Options of the step.
    """

    def __init__(self, replicas: Replicas, programs: StepPrograms, options: StepOptions) -> None:
        self._replicas = replicas
        self._programs = programs
        self._options = options
        self._newest: tuple[weakref.ref[TrainState], TrainState] | None = None  # see `_noted`

    @property
    def is_needed(self) -> bool:
        """Whether shards are backed up, because the job must survive the loss of an instance."""
        return self._options.unrecoverable_part is not None and self._replicas.can_carry_on

    # ---- copies

    def begun(self, state: TrainState) -> TrainState:
        """Return a first state, whose replicas have equal arrays, with backups for another instance."""
        if not self.is_needed:
            return state
        stored, own = self._replicas.stored, self._own(state)
        rows = [self._rows(leaf, len(stored.own))[:1] for leaf in own]
        one = np.concatenate([np.zeros((1, 0), np.uint8), *rows], axis=1)
        return replace(state, held=StoredShards(stored, own, np.repeat(one, len(stored.kept), axis=0)))

    def copied(self, state: TrainState) -> TrainState:
        """Return the state with copies of the present arrays of single replicas. Collective if there are new ones."""
        held = state.held
        if held is None or held.is_of(own := self._own(state)):
            return state
        stored = held.stored
        if not stored.distance:
            return replace(state, held=StoredShards(stored, own, held.copies))
        rows = [self._rows(leaf, len(stored.own)) for leaf in own]
        message = np.zeros((stored.slots, sum(each.shape[1] for each in rows)), np.uint8)
        np.concatenate(rows, axis=1, out=message[: len(stored.own)])
        name = "copies of arrays of single replicas"
        received = self._replicas.communicator.shift(message, distance=stored.distance, name=name)
        return replace(state, held=StoredShards(stored, own, received[: len(stored.kept)]))

    def _own(self, state: TrainState) -> tuple[Leaf, ...]:
        """Return the arrays that have the local replicas along their first axis."""
        rule = self._options.rule_of(state.model_state)
        return tuple(rule.pick(state.model_state, PER_REPLICA))

    @staticmethod
    def _rows(leaf: Leaf, local: int) -> np.ndarray:
        """Return an array as one row of bytes for each local replica, without a copy if possible."""
        return bytes_of(borrow(leaf), local)

    # ---- another spread of the replicas

    def fitted(self, state: TrainState) -> TrainState:
        """Return the state with the parts of the replicas that this instance drives now, and copies of these parts.

        Collective if instances have been lost or have joined since the parts were cut, or if the program has replaced
        arrays of single replicas; once for each such change.

        Args:
            state: State of the same step on all instances.

        Raises:
            LostPartError: On all instances, if a part was lost with its copy.
        """
        return self._noted(state, self.copied(self.cut(state)))

    def cut(self, state: TrainState) -> TrainState:
        """Return the state with this instance's shards, like `fitted`, but do not renew the backups."""
        newest = state if self._newest is None or self._newest[0]() is not state else self._newest[1]
        held = newest.held
        if held is not None and held.stored.spread != self._replicas.spread:
            newest = self._cut_anew(newest, held)
        return self._noted(state, newest)

    def _noted(self, state: TrainState, newest: TrainState) -> TrainState:
        """Note the newest form of a state that the program still holds in its first form."""
        self._newest = None if newest is state else (weakref.ref(state), newest)
        return newest

    def _cut_anew(self, state: TrainState, held: StoredShards) -> TrainState:
        replicas, had, present = self._replicas, held.stored, self._replicas.stored
        rows = ShardFetcher(replicas.communicator, replicas.num_replicas_in_sync, had, state.step)
        optimizer_state = self._programs.update_of(state.variables).cut_anew(state.optimizer_state, rows, had)
        before = self._own(state)
        if not held.is_of(before):  # the copies are of other arrays, which the program has replaced
            only_own = replace(had, kept=range(0))
            rows = ShardFetcher(replicas.communicator, replicas.num_replicas_in_sync, only_own, state.step)
        own, copies = [], [np.zeros((len(present.kept), 0), np.uint8)]
        widths = [leaf.nbytes // len(had.own) for leaf in before]
        for number, (leaf, start) in enumerate(zip(before, accumulate(widths, initial=0), strict=False)):
            find = held.finder(self._rows(leaf, len(had.own)), start)
            mine, kept = rows.fetch([present.own, present.kept], find, widths[number], f"replicas' arrays/{number}")
            own.append(_like(leaf, mine))
            copies.append(kept)
        after = replace(state, optimizer_state=optimizer_state, model_state=self._put(state, own))
        return replace(after, held=StoredShards(present, self._own(after), np.concatenate(copies, axis=1)))

    def _put(self, state: TrainState, own: Sequence[np.ndarray]) -> object:
        """Return the model state with other arrays of single replicas, on the devices."""
        placed = self._replicas.devices.place(list(own))
        rule = self._options.rule_of(state.model_state)
        return rule.put(state.model_state, {PER_REPLICA: placed}) if placed else state.model_state


def _like(leaf: Leaf, rows: np.ndarray) -> np.ndarray:
    """Return rows of bytes as an array like `leaf`, whose first axis may have another length."""
    array: np.ndarray = rows.reshape(-1).view(np.dtype(leaf.dtype)).reshape(-1, *leaf.shape[1:])
    return array


def receive_buffers(tree: Tree) -> Tree:
    """Return a tree to receive values into, with zeros in place of donated arrays."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype) if are_used_up(leaf) else leaf, tree)


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
        rows = ShardFetcher(replicas.communicator, replicas.num_replicas_in_sync, held.stored, step.after.step)
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
    return jax.tree.map(lambda leaf: jax.device_put(np.array(borrow(leaf)), _place(leaf), may_alias=False), tree)


def _place(leaf: Leaf) -> object:
    return getattr(leaf, "sharding", None)
