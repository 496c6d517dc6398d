"""The parts of a state that not all instances have: sharded optimizer state, and arrays of single replicas."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import jax
import numpy as np

from strategies.exchange.copies import Rows
from strategies.holding import HeldArrays, bytes_of
from strategies.jax.gradients.model_state import PER_REPLICA
from strategies.jax.options import StepOptions
from strategies.jax.preparation import StepPrograms
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.shards import on_host
from strategies.train_state import TrainState
from strategies.typing import Leaf, Tree


class HeldParts:
    """The copies that instances keep of each other's parts, and the new cut of all parts after a loss.

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
        """Whether states have parts whose loss the job has to survive."""
        return self._options.own_part is not None and self._replicas.can_carry_on

    # ---- copies

    def begun(self, state: TrainState) -> TrainState:
        """Return a state whose replicas all have equal arrays of their own, with copies for another instance."""
        if not self.is_needed:
            return state
        holding, own = self._replicas.holding, self._own(state)
        rows = [self._rows(leaf, len(holding.own))[:1] for leaf in own]
        one = np.concatenate([np.zeros((1, 0), np.uint8), *rows], axis=1)
        return replace(state, held=HeldArrays(holding, own, np.repeat(one, len(holding.kept), axis=0)))

    def copied(self, state: TrainState) -> TrainState:
        """Return the state with copies of the present arrays of single replicas. Collective if there are new ones."""
        held = state.held
        if held is None or held.is_of(own := self._own(state)):
            return state
        holding = held.holding
        if not holding.distance:
            return replace(state, held=HeldArrays(holding, own, held.copies))
        rows = [self._rows(leaf, len(holding.own)) for leaf in own]
        message = np.zeros((holding.slots, sum(each.shape[1] for each in rows)), np.uint8)
        np.concatenate(rows, axis=1, out=message[: len(holding.own)])
        name = "copies of arrays of single replicas"
        received = self._replicas.communicator.shift(message, distance=holding.distance, name=name)
        return replace(state, held=HeldArrays(holding, own, received[: len(holding.kept)]))

    def _own(self, state: TrainState) -> tuple[Leaf, ...]:
        """Return the arrays that have the local replicas along their first axis."""
        rule = self._options.rule_of(state.model_state)
        return (*(state.residuals or ()), *rule.pick(state.model_state, PER_REPLICA))

    @staticmethod
    def _rows(leaf: Leaf, local: int) -> np.ndarray:
        """Return an array as one row of bytes for each local replica, without a copy if possible."""
        return bytes_of(on_host(leaf), local)

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
        """Return what `fitted` returns, but with copies as they are."""
        newest = state if self._newest is None or self._newest[0]() is not state else self._newest[1]
        held = newest.held
        if held is not None and held.holding.spread != self._replicas.spread:
            newest = self._cut_anew(newest, held)
        return self._noted(state, newest)

    def _noted(self, state: TrainState, newest: TrainState) -> TrainState:
        """Note the newest form of a state that the program still holds in its first form."""
        self._newest = None if newest is state else (weakref.ref(state), newest)
        return newest

    def _cut_anew(self, state: TrainState, held: HeldArrays) -> TrainState:
        replicas, had, present = self._replicas, held.holding, self._replicas.holding
        rows = Rows(replicas.communicator, replicas.num_replicas_in_sync, had, state.step)
        optimizer_state = self._programs.update_of(state.variables).cut_anew(state.optimizer_state, rows, had)
        before = self._own(state)
        if not held.is_of(before):  # the copies are of other arrays, which the program has replaced
            only_own = replace(had, kept=range(0))
            rows = Rows(replicas.communicator, replicas.num_replicas_in_sync, only_own, state.step)
        own, copies = [], [np.zeros((len(present.kept), 0), np.uint8)]
        widths = [leaf.nbytes // len(had.own) for leaf in before]
        for number, (leaf, start) in enumerate(zip(before, accumulate(widths, initial=0), strict=False)):
            find = held.finder(self._rows(leaf, len(had.own)), start)
            mine, kept = rows.fetch([present.own, present.kept], find, widths[number], f"replicas' arrays/{number}")
            own.append(_like(leaf, mine))
            copies.append(kept)
        residuals, model_state = self._put(state, own)
        after = replace(state, optimizer_state=optimizer_state, residuals=residuals, model_state=model_state)
        return replace(after, held=HeldArrays(present, self._own(after), np.concatenate(copies, axis=1)))

    def _put(self, state: TrainState, own: Sequence[np.ndarray]) -> tuple[list[Leaf] | None, object]:
        """Return the residuals and the model state with other arrays of single replicas, on the devices."""
        placed = self._replicas.devices.place(list(own))
        if state.residuals is not None:
            return placed, state.model_state
        rule = self._options.rule_of(state.model_state)
        return None, rule.put(state.model_state, {PER_REPLICA: placed}) if placed else state.model_state


def _like(leaf: Leaf, rows: np.ndarray) -> np.ndarray:
    """Return rows of bytes as an array like `leaf`, whose first axis may have another length."""
    array: np.ndarray = rows.reshape(-1).view(np.dtype(leaf.dtype)).reshape(-1, *leaf.shape[1:])
    return array


def rooms(tree: Tree) -> Tree:
    """Return a tree with zeros in place of arrays whose memory was used again, to receive new values."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype) if _is_used_up(leaf) else leaf, tree)


def _is_used_up(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()
