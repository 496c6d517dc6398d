"""Steps of a single replica as one program.

With several replicas, the means of gradients are made between two programs, and no program knows the other replicas. A
single replica has nothing to wait for: its gradients stay inside of XLA, and so do several steps in a row. The program
of one step is the only one for its step, whether somebody looks at the gradients or not: it always returns them.

XLA may round differently in a program of several steps, because it compiles the body of a loop in another way than a
program of its own. Then some gradients of convolutions differ in their last bits (seen on CPU). So this program is
compared with single steps before it is used, for the given values and for random ones. At the start of a training equal
bits would mean little: a last layer of zeros makes all other gradients zero.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from strategies.core.metrics import UnreadArray
from strategies.jax.gradients.model_state import ALIKE, FIRST, STEP
from strategies.jax.gradients.replica_program import ReplicaProgram
from strategies.jax.preparation import PreparedStep, control_of
from strategies.jax.programs.compilation import jit
from strategies.jax.replicas.devices import is_key
from strategies.jax.replicas.sharding import unchanging
from strategies.jax.updates.update import WholeStateUpdate
from strategies.typing import Batch, Gradients, Leaf, Tree, Variables
from strategies.values import TrainState

logger = logging.getLogger("strategies.jax")

Made: TypeAlias = tuple[TrainState, UnreadArray, Gradients]
"""The state after the last step, the tails (float32 [steps, tail size], for one step [tail size]), and the gradients of
the last step."""


class FusedPrograms:
    """The programs of one step, and of several steps, which are used only after a comparison with single steps.

    Args:
        seed: Seed of the random values for comparisons.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._fused: dict[tuple[ReplicaProgram, int], FusedSteps | None] = {}

    def find(self, step: PreparedStep, state: TrainState, batches: Sequence[Batch]) -> FusedSteps | None:
        """Return the program that makes one step per batch; None if steps have to be made one by one, or in parts.

        Args:
            step: Step of a single replica.
            state: State before the steps; not used up.
            batches: Batches of the step's shapes.
        """
        key = step.program, len(batches)
        if key not in self._fused:
            self._fused[key] = self._new(step, state, batches)
        return self._fused[key]

    def _new(self, step: PreparedStep, state: TrainState, batches: Sequence[Batch]) -> FusedSteps | None:
        assert isinstance(step.update, WholeStateUpdate)
        fused = FusedSteps(step.program, step.update)
        if len(batches) == 1:
            if not fused.has_effects(state, batches):
                return fused
            logger.info("steps are made in parts: the loss function calls back into Python, as feeds do")
            return None
        single = self.find(step, state, batches[:1])
        if single is None:
            return None
        starts = (state, batches), probe_of(state, batches, self._seed)
        reason = "there is a model state"
        if state.model_state is None:
            if all(_have_same_bits(fused, single, *start) for start in starts):
                logger.info("steps are made in one program from step %d on", state.step)
                return fused
            reason = "one program would give other bits"
        logger.info("steps are made one by one: %s", reason)
        return None


class FusedSteps:
    """A program of one or several steps of a single replica, without a return to Python in between.

    Args:
        program: Program of the replica.
        update: Update of the variables.
    """

    def __init__(self, program: ReplicaProgram, update: WholeStateUpdate) -> None:
        self._program = program
        self._update = update
        self._jitted = jit(self._steps, donate_argnums=(0,))
        self._run = update.compiled_once(self._jitted)

    def __call__(self, state: TrainState, batches: Sequence[Batch]) -> Made:
        """Make one step with each batch; the batches have equal shapes. The state is used up."""
        arguments = self._arguments(state, [unchanging(batch) for batch in batches])
        (trained, optimizer_state), model_state, tails, gradients = self._run(*arguments)
        after = replace(
            state,
            variables=self._program.trainable.put(state.variables, trained),
            optimizer_state=self._update.offloaded(optimizer_state),
            model_state=model_state,
            step=state.step + len(batches),
        )
        return after, tails, gradients

    def has_effects(self, state: TrainState, batches: Sequence[Batch]) -> bool:
        """Return whether the program calls back into Python."""
        return bool(self._jitted.trace(*self._arguments(state, batches)).jaxpr.effects)

    def _arguments(self, state: TrainState, batches: Sequence[Batch]) -> tuple[Tree, ...]:
        trainable = self._program.trainable
        trained, frozen = trainable.pick(state.variables), trainable.frozen(state.variables)
        learned = trained, self._update.on_device(state.optimizer_state)
        return learned, state.model_state, frozen, tuple(batches), np.int32(0), control_of(state)

    def _steps(
        self,
        learned: Tree,
        model_state: Tree,
        frozen: Variables,
        batches: Sequence[Batch],
        index: jax.Array,
        control: jax.Array,
    ) -> tuple[Tree, Tree, jax.Array, Gradients]:
        """Return trained variables with optimizer state, the model state, tails, and the last gradients; traceable."""

        def step(carried: Tree, batch: Batch) -> tuple[Tree, jax.Array]:
            learned, model_state, control, _ = carried
            *after, tail, gradients = self._step(learned, model_state, frozen, batch, index, control)
            return (*jax.lax.optimization_barrier(tuple(after)), control.at[STEP].add(1), gradients), tail

        if len(batches) == 1:
            return self._step(learned, model_state, frozen, batches[0], index, control)
        zeros = [jnp.zeros(mean.shape, mean.dtype) for mean in self._program.means]
        start = (learned, model_state, control, jax.tree.unflatten(jax.tree.structure(learned[0]), zeros))
        together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        (learned, model_state, _, gradients), tails = jax.lax.scan(step, start, together)
        return learned, model_state, tails, gradients

    def _step(
        self, learned: Tree, model_state: Tree, frozen: Variables, batch: Batch, index: jax.Array, control: jax.Array
    ) -> tuple[Tree, Tree, jax.Array, Gradients]:
        """Return the results of `_steps` for one batch; traceable."""
        program, rule = self._program, self._program.rule
        trained, optimizer_state = learned
        variables = program.trainable.put(frozen, trained)
        results = program(variables, batch, index, control, [], rule.begun(model_state))
        # With several replicas these values leave the program here, so XLA must not fuse them with the update.
        tail, *others = jax.lax.optimization_barrier(results)
        count, end = program.num_gradients, len(program.results)
        means = jax.tree.unflatten(jax.tree.structure(trained), others[:count])
        kept = program.unpack_kept(others[end:])
        new = {**rule.put_means(model_state, others[count:end], jnp), FIRST: kept[FIRST], ALIKE: kept[ALIKE]}
        *learned, _ = self._update.traced(trained, optimizer_state, means, program.places.with_means(control, tail))
        return tuple(learned), rule.put(model_state, new), tail, means


def _have_same_bits(several: FusedSteps, single: FusedSteps, state: TrainState, batches: Sequence[Batch]) -> bool:
    """Return whether several steps in one program have the bits of single steps. The state is not used up.

    The gradients are compared too, because a learning rate of zero hides them in the variables.
    """
    after, tails, gradients = several(_copy(state), batches)
    last, tails_of_each = _copy(state), []
    for batch in batches:
        last, tail, last_gradients = single(last, [batch])
        tails_of_each.append(tail)
    together = (after.variables, after.optimizer_state, tails, gradients)
    one_by_one = (last.variables, last.optimizer_state, np.stack(tails_of_each), last_gradients)
    pairs = zip(*map(_host_arrays, (together, one_by_one)), strict=True)
    return all(one.tobytes() == other.tobytes() for one, other in pairs)


def _host_arrays(tree: Tree) -> list[np.ndarray]:
    """Return the leaves of a tree on the host, with random keys as their numbers."""
    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in leaves]


def probe_of(state: TrainState, batch: Batch, seed: int) -> tuple[TrainState, Batch]:
    """Return a state with random variables, and a random batch, of the same shapes, dtypes and devices.

    Variables are scaled so that outputs have unit variance, as the batch has. Integers, such as labels, are kept.
    """
    variables = _like(state.variables, seed, lambda leaf: max(1, math.prod(leaf.shape[:-1])))
    return replace(state, variables=variables), _like(batch, seed, lambda leaf: 1)


def _like(tree: Tree, seed: int, inputs_of: Callable[[Leaf], int]) -> Tree:
    random = np.random.default_rng(seed)

    def draw(leaf: Leaf) -> Leaf:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        drawn = (random.standard_normal(leaf.shape) / math.sqrt(inputs_of(leaf))).astype(leaf.dtype)
        return jax.device_put(drawn, leaf.sharding) if isinstance(leaf, jax.Array) else drawn

    return jax.tree.map(draw, tree)


def _copy(state: TrainState) -> TrainState:
    variables, optimizer_state = jax.tree.map(jnp.copy, (state.variables, state.optimizer_state))
    return replace(state, variables=variables, optimizer_state=optimizer_state)
