"""Steps of a single replica as one program, if it gives the same bits as a step in parts.

With several replicas, the means of gradients are made between two programs, and no program knows the other replicas. A
single replica has nothing to wait for: its gradients stay inside of XLA, and so do several steps in a row.

XLA may round differently there, because it compiles the body of a loop in another way than a program of its own. Then
some gradients of convolutions differ in their last bits (seen on CPU). So a program is compared before it is used, for
the given values and for random ones. At the start of a training equal bits would mean little. A last layer of zeros
makes all other gradients zero, and a learning rate that warms up from zero changes no variable.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from strategies.core.metrics import UnreadArray
from strategies.jax.gradients.gradient_programs import GradientPrograms
from strategies.jax.gradients.model_state import ALIKE, FIRST, STEP
from strategies.jax.gradients.replica_program import ReplicaProgram
from strategies.jax.on_device.step import DeviceStep
from strategies.jax.preparation import PreparedStep, StepPrograms, control_of
from strategies.jax.programs.compilation import jit
from strategies.jax.replicas.devices import is_key
from strategies.jax.replicas.sharding import unchanging
from strategies.jax.updates.update import WholeStateUpdate
from strategies.typing import Batch, Leaf, Tree, Variables
from strategies.values import TrainState

logger = logging.getLogger("strategies.jax")

WORTH_AFTER = 32
"""The number of steps of a shape that are made in parts before one program is tried. A step of an MLP with 1.9 million
variables takes 6.6 ms of CPU time in one program, and 7.4 ms in parts."""

_OTHER_BITS = "one program would give other bits"

Made: TypeAlias = tuple[TrainState, UnreadArray]
"""The state after the last step, and the tails: float32 [steps, tail size], for one step [tail size]."""
MakeSteps: TypeAlias = Callable[[PreparedStep, TrainState, Sequence[Batch]], Made]


class FusedPrograms:
    """The programs of one step and of several steps, each used only after a comparison with steps in parts.

    Args:
        programs: Programs of steps in parts.
        seed: Seed of the random values for comparisons.
    """

    def __init__(self, programs: StepPrograms, seed: int) -> None:
        self._programs = programs
        self._seed = seed
        self._in_parts_so_far: Counter[tuple[ReplicaProgram, int]] = Counter()
        self._fused: dict[tuple[ReplicaProgram, int], FusedSteps | None] = {}  # None: other bits

    def made(self, step: PreparedStep, state: TrainState, batches: Sequence[Batch], in_parts: MakeSteps) -> Made | None:
        """Make one step per batch in one program; return None if the caller has to make them in parts.

        Before the program is used, the steps are made once both ways, and the bits are compared. Several steps are
        compared at the first call, a single step after `WORTH_AFTER` steps in parts.

        Args:
            step: Step of a single replica.
            state: State before the steps; used up, unless the result is None.
            batches: Batches of the step's shapes.
            in_parts: Function that makes steps in parts, and uses up their state.
        """
        key = step.program, len(batches)
        if key in self._fused:
            fused = self._fused[key]
            return None if fused is None else fused(state, batches)
        self._in_parts_so_far[key] += 1
        if len(batches) == 1 and self._in_parts_so_far[key] <= WORTH_AFTER:
            return None
        self._fused[key] = None  # stays None if the comparison raises
        return self._made_both_ways(step, state, batches, in_parts)

    def on_device(self, step: DeviceStep, state: TrainState, batch: Batch) -> Made | None:
        """Make a step on an accelerator in one program; return None if the loss function calls back into Python.

        No comparison is made, because it would take the memory of several states. A single replica makes every step in
        this way, from the first one on.

        Args:
            step: Step of a single replica.
            state: State before the step; used up, unless the result is None.
            batch: Batch of the step's shapes.
        """
        key = step.program, 1
        if key not in self._fused:
            assert isinstance(step.update, WholeStateUpdate)
            fused = FusedSteps(step.program, step.update)
            self._fused[key] = None if fused.has_effects(state, [batch]) else fused
        found = self._fused[key]
        return None if found is None else found(state, [batch])

    def _made_both_ways(
        self, step: PreparedStep, state: TrainState, batches: Sequence[Batch], in_parts: MakeSteps
    ) -> Made | None:
        assert isinstance(step.update, WholeStateUpdate)
        fused = FusedSteps(step.program, step.update)
        made, reason = None, self._why_not(fused, step, state, batches, in_parts)
        if not reason:
            found = fused(_copy(state), batches)  # before `in_parts` uses up the state, because this call may raise
            made = in_parts(step, state, batches)
            reason = "" if _have_same_bits(made, found) else _OTHER_BITS
        if reason:
            logger.info("steps are made %s: %s", "in parts" if len(batches) == 1 else "one by one", reason)
        else:
            logger.info("steps are made in one program from step %d on", state.step)
            self._fused[step.program, len(batches)] = fused
        return made

    def _why_not(
        self,
        fused: FusedSteps,
        step: PreparedStep,
        state: TrainState,
        batches: Sequence[Batch],
        in_parts: MakeSteps,
    ) -> str:
        """Return the reason against steps in one program, or an empty text; tried with random values."""
        if len(batches) > 1 and state.model_state is not None:
            return "there is a model state"
        if fused.has_effects(state, batches):
            return "the loss function calls back into Python, as feeds do"
        probe, others = probe_of(state, batches, self._seed)
        # The gradients are compared too, because a learning rate of zero hides them in the variables.
        assert isinstance(step.gradients, GradientPrograms)
        step.gradients.dispatch(*self._programs.arguments(probe, others[-1], control_of(probe)))
        is_same = _are_same(step.gradients.leaves()[-1], fused.last_gradients(probe, others))
        if is_same and len(batches) == 1:
            is_same = _have_same_bits(in_parts(step, _copy(probe), others), fused(_copy(probe), others))
        return "" if is_same else _OTHER_BITS


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
        (trained, optimizer_state), model_state, tails = self._run(*arguments)
        after = replace(
            state,
            variables=self._program.trainable.put(state.variables, trained),
            optimizer_state=self._update.offloaded(optimizer_state),
            model_state=model_state,
            step=state.step + len(batches),
        )
        return after, tails

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
    ) -> tuple[Tree, Tree, jax.Array]:
        """Return the trained variables with the optimizer state, the model state, and the tails; traceable."""

        def step(carried: Tree, batch: Batch) -> tuple[Tree, jax.Array]:
            learned, model_state, control = carried
            *after, results = self._step(learned, model_state, frozen, batch, index, control)
            return (*jax.lax.optimization_barrier(tuple(after)), control.at[STEP].add(1)), results[0]

        if len(batches) == 1:
            learned, model_state, results = self._step(learned, model_state, frozen, batches[0], index, control)
            return learned, model_state, results[0]
        (learned, model_state, _), tails = jax.lax.scan(step, (learned, model_state, control), _stacked(batches))
        return learned, model_state, tails

    def _step(
        self, learned: Tree, model_state: Tree, frozen: Variables, batch: Batch, index: jax.Array, control: jax.Array
    ) -> tuple[Tree, Tree, Sequence[jax.Array]]:
        """Return the results of `_steps` for one batch, and all results of `ReplicaProgram`; traceable."""
        program, rule = self._program, self._program.rule
        trained, optimizer_state = learned
        variables = program.trainable.put(frozen, trained)
        results = program(variables, batch, index, control, [], rule.begun(model_state))
        # Steps in parts compute these values in programs of their own, so XLA must not fuse them here.
        tail, *others = results = jax.lax.optimization_barrier(tuple(results))
        count, end = program.num_gradients, len(program.results)
        means = jax.tree.unflatten(jax.tree.structure(trained), others[:count])
        kept = program.unpack_kept(others[end:])
        new = {**rule.put_means(model_state, others[count:end], jnp), FIRST: kept[FIRST], ALIKE: kept[ALIKE]}
        *learned, _ = self._update.traced(trained, optimizer_state, means, program.places.with_means(control, tail))
        return tuple(learned), rule.put(model_state, new), results

    # ---- for comparison

    def last_gradients(self, state: TrainState, batches: Sequence[Batch]) -> Sequence[jax.Array]:
        """Return the results of `ReplicaProgram` for the last batch: as a single step, or in a loop of several.

        The state is not used up.
        """
        if len(batches) == 1:
            *before, _, index, control = self._arguments(state, batches)
            return _numbers(jit(self._step)(*before, batches[0], index, control)[-1])
        return list(jit(self._gradients_in_loop)(state.variables, tuple(batches), np.int32(0), control_of(state)))

    def _gradients_in_loop(
        self, variables: Variables, batches: Sequence[Batch], index: jax.Array, control: jax.Array
    ) -> Sequence[jax.Array]:
        def step(_: Tree, batch: Batch) -> tuple[Tree, None]:
            return jax.lax.optimization_barrier(self._program(variables, batch, index, control)), None

        of_gradients = [jnp.zeros(result.shape, result.dtype) for result in self._program.results]
        zeros = (jnp.zeros(self._program.places.size, jnp.float32), *of_gradients)
        return jax.lax.scan(step, zeros, _stacked(batches))[0]


def _stacked(batches: Sequence[Batch]) -> Tree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)


def _have_same_bits(one: Made, other: Made) -> bool:
    trees = [(state.variables, state.optimizer_state, state.model_state, tails) for state, tails in (one, other)]
    return _are_same(*map(_numbers, trees))


def _are_same(some: Sequence[Leaf], others: Sequence[Leaf]) -> bool:
    """Return whether arrays are the same to the last bit."""
    pairs = zip(some, others, strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def _numbers(tree: Tree) -> list[jax.Array]:
    """Return the leaves of a tree, with random keys as their numbers."""
    return [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(tree)]


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
