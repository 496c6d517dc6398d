"""A step of the only replica in one program, where that has the same bits as its parts: nothing leaves XLA in between.

Where there are several replicas each runs a program that does not know of the others, and the means of their gradients
are made between two programs. One replica alone has nothing to wait for: gradients need not be written to buffers, nor
read from them. It is compiled after as many steps as make up for that, and its bits are compared first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from strategies.comparing.exactness import are_same, probe_of
from strategies.core.metrics import Metrics
from strategies.gradients.model_state import ALIKE, FIRST, MEAN, SUM
from strategies.gradients.replica_program import ReplicaProgram, with_loss
from strategies.programs.compilation import compiled_in_turn
from strategies.programs.program import jit
from strategies.replicas.devices import is_key
from strategies.step.preparation import PreparedStep
from strategies.train_state import TrainState
from strategies.typing import Batch, OptimizerState, Tree, Variables
from strategies.updates.update import VariableUpdate

logger = logging.getLogger("strategies.step")

WORTH_AFTER = 32
"""Steps of a shape that are made in parts before they are made in one program. (Of an MLP with 1.9 million variables
one takes 6.6 ms of CPU time then, and 7.4 before.)"""

MakeStep: TypeAlias = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
Made: TypeAlias = tuple[TrainState, jax.Array]
"""The state after a step, and the tail of the replica, which may still be being computed."""


@dataclass
class _Tried:
    """The results of trying to make the steps of a replica's program in one program.

    Attributes:
        program: of the replica.
        count: how many of them were made in parts.
        run: makes them; None where their bits would be others, and before that is known.
        is_known: whether it is known.
    """

    program: ReplicaProgram
    count: int = 0
    run: StepProgram | None = None
    is_known: bool = False


@dataclass
class InOneProgram:
    """Knows which steps are made in one program.

    Attributes:
        update: of the variables.
        seed: of what is compared besides a step itself.
        executables: the folder where compiled programs are kept, or None.
    """

    update: VariableUpdate
    seed: int
    executables: Path | None = None
    _tried: dict[int, _Tried] = field(default_factory=dict)

    def found(
        self, step: PreparedStep, state: TrainState, batch: Batch, control: np.ndarray, in_parts: MakeStep
    ) -> StepProgram | None:
        """Return the program that makes such a step; None if the step is to be made in parts.

        Args:
            step: of the only replica.
            state: with which it begins; it stays.
            batch: of the replica.
            control: see `control_words`.
            in_parts: makes a step otherwise, with a state that it may use up.
        """
        tried = self._tried.setdefault(id(step.program), _Tried(step.program))
        if not tried.is_known:
            tried.count += 1
            if tried.count <= WORTH_AFTER:
                return None
            tried.is_known = True
            tried.run = self._compared(tried.program, state, batch, control, in_parts)
        return tried.run

    def _compared(
        self, program: ReplicaProgram, state: TrainState, batch: Batch, control: np.ndarray, in_parts: MakeStep
    ) -> StepProgram | None:
        """Return the program, if it has the same bits for a step and for random values."""
        run = StepProgram(program, self.update, self.executables)
        if run.has_effects(state, batch, control):
            logger.info("steps are made in parts: the loss function calls back into Python")
            return None
        for given, rows in ((state, batch), probe_of(state, batch, self.seed)):
            wanted, metrics = in_parts(_copy(given), rows)
            found, tail = run(_copy(given), rows, control)
            seen = len(metrics.names)
            if not are_same((_arrays(wanted), metrics.means[:seen]), (_arrays(found), tail[:seen])):
                logger.info("steps are made in parts: in one program they would have other bits")
                return None
        logger.info("steps are made in one program from step %d on", state.step)
        return run


class StepProgram:
    """Computes the gradients of one replica, and updates its variables with them.

    Args:
        program: what the replica computes.
        update: of the variables.
        executables: the folder where compiled programs are kept, or None.
    """

    def __init__(self, program: ReplicaProgram, update: VariableUpdate, executables: Path | None) -> None:
        self._program = program
        self._update = update
        self._jitted = jit(self._step, donate_argnums=(0, 2))
        self._run = compiled_in_turn(self._jitted, executables)

    def __call__(self, state: TrainState, batch: Batch, control: np.ndarray) -> Made:
        """Make a step; return the state after it, and the tail of the replica. The state before it is used up."""
        arguments = self._arguments(state, batch, control)
        trained, optimizer_state, new, tail = self._run(*arguments)
        after = replace(
            state,
            variables=self._program.trainable.put(state.variables, trained),
            optimizer_state=self._update.offloaded(optimizer_state),
            model_state=None if state.model_state is None else self._program.rule.put(state.model_state, new),
            step=state.step + 1,
        )
        return after, tail

    def has_effects(self, state: TrainState, batch: Batch, control: np.ndarray) -> bool:
        """Return whether the program calls back into Python."""
        return bool(self._jitted.trace(*self._arguments(state, batch, control)).jaxpr.effects)

    def _arguments(self, state: TrainState, batch: Batch, control: np.ndarray) -> tuple[Tree, ...]:
        trainable = self._program.trainable
        trained, frozen = trainable.pick(state.variables), trainable.frozen(state.variables)
        optimizer_state = self._update.on_device(state.optimizer_state)
        return trained, frozen, optimizer_state, state.model_state, batch, np.int32(0), control

    def _step(
        self,
        trained: Variables,
        frozen: Variables,
        optimizer_state: OptimizerState,
        model_state: Tree,
        batch: Batch,
        index: jax.Array,
        control: jax.Array,
    ) -> tuple[Variables, OptimizerState, Mapping[str, Sequence[jax.Array]], jax.Array]:
        program, rule = self._program, self._program.rule
        variables = jax.tree.map(
            lambda own, other: other if own is None else own, trained, frozen, is_leaf=lambda leaf: leaf is None
        )
        results = program(variables, batch, index, control, [], [], rule.begun(model_state))
        # What the parts compute in programs of their own must not be fused here either.
        tail, *results = jax.lax.optimization_barrier(tuple(results))
        count, end = program.num_gradients, len(program.results)
        means = jax.tree.unflatten(jax.tree.structure(trained), results[:count])
        kept = program.unpack_kept(results[end:])[1]
        new = {**self._arrived(model_state, results[count:end]), FIRST: kept[FIRST], ALIKE: kept[ALIKE]}
        words = with_loss(control, tail)
        trained, optimizer_state, _ = self._update.traced(trained, optimizer_state, means, words)
        return trained, optimizer_state, new, tail

    def _arrived(self, model_state: Tree, means: Sequence[jax.Array]) -> dict[str, list[jax.Array]]:
        """Return the new leaves of a model state that other replicas would have a part in."""
        averaged = self._program.rule.words.count(MEAN)
        pairs = zip(self._program.rule.pick(model_state, SUM), means[averaged:], strict=True)
        return {MEAN: list(means[:averaged]), SUM: [old + mean for old, mean in pairs]}


def _arrays(state: TrainState) -> list[Tree]:
    leaves = jax.tree.leaves((state.variables, state.optimizer_state, state.model_state))
    return [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]


def _copy(state: TrainState) -> TrainState:
    variables, optimizer_state = jax.tree.map(jnp.copy, (state.variables, state.optimizer_state))
    return replace(state, variables=variables, optimizer_state=optimizer_state)
