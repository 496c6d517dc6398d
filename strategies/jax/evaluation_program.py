"""The engine on JAX for work without training: one program per replica and batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import final

import jax
import numpy as np
from jax.extend import core

from strategies.core.agreement import insist_on_agreement
from strategies.core.rows import Begun, EvaluationTask, Told
from strategies.data.sources import Masked
from strategies.jax.comparing.agreement import lines_of, terms_of
from strategies.jax.evaluation.tasks import LossOfRows
from strategies.jax.gradients.arguments import naming_missing_keys
from strategies.jax.gradients.model_state import PER_REPLICA
from strategies.jax.options import StepOptions
from strategies.jax.programs.captures import Reads
from strategies.jax.programs.program import key_of, shapes_of
from strategies.jax.replicas.dealing import replication_of
from strategies.jax.replicas.devices import borrow, results_of
from strategies.jax.replicas.gathering import told_rows
from strategies.jax.replicas.replica_context import replica_context
from strategies.jax.replicas.replicas import Replicas
from strategies.train_state import TrainState, check_state
from strategies.typing import Batch, Function, Tree, Variables

AHEAD = 2
"""The number of batches that may have begun before the results of the first of them are read."""


@final
class JaxRows:
    """The engine's evaluation of tasks, by one program per task and shapes of batches.

    Args:
        replicas: Places of the replicas.
        options: Options of the step.
        is_recorded: Whether every step is recorded; then `poprun verify` compares instances instead.
    """

    def __init__(self, replicas: Replicas, options: StepOptions, is_recorded: bool) -> None:
        self._replicas = replicas
        self._devices = replicas.devices
        self._options = options
        self._is_recorded = is_recorded
        self._programs: dict[Hashable, EvaluationProgram] = {}
        self._agreed: set[Hashable] = set()  # keys of programs that the present instances have compared

    def tell(self, task: EvaluationTask, state: TrainState, batch: Masked) -> Begun:
        """Begin a batch of a task, as `Engine.tell` describes."""
        check_state(state)
        if all(replication_of(leaf) is None for leaf in jax.tree.leaves(batch.values)):
            batch = self._replicas.dealing.batch(batch)
        program = self._program(task, state, batch)
        begun = program.begin(state, batch)

        def wait() -> Told:
            try:
                with self._replicas.reducer.ending():  # errors of collectives in the function are raised here
                    return begun()
            finally:
                check_state(state)  # a step that used up the state meanwhile is the first error to report

        return Begun(wait, AHEAD if program.is_independent else 0)  # replicas with collectives run one batch at a time

    def _program(self, task: EvaluationTask, state: TrainState, batch: Masked) -> EvaluationProgram:
        """Return the program for batches of this shape. Collective if the shape is new."""
        replicas = self._replicas
        if self._devices is not replicas.devices:  # an instance was lost
            self._devices = replicas.devices
            self._agreed.clear()
        replicas.dealing.refuse_others(batch)
        of_one = jax.tree.map(replicas.devices.replica_shape, batch)
        model_state = self._options.shapes_of_replica(state.model_state)
        key = task, key_of((state.variables, model_state, of_one))
        found = self._programs.get(key)
        if found is None or not found.fits(replicas):
            self._agreed.discard(key)
            found = self._programs[key] = EvaluationProgram(replicas, task, self._options, state, of_one)
        if key not in self._agreed and replicas.communicator.size > 1 and not self._is_recorded:
            programs = {f"the {task.title}": lines_of(found.equations)}
            options = {"seed": self._options.seed, "step": state.step}
            terms = terms_of(options, replicas.dataset_of(batch), of_one, programs, None)
            insist_on_agreement(replicas, terms)
        self._agreed.add(key)
        return found


class EvaluationProgram:
    """A task, compiled for variables and batches of some shapes.

    Functions get the key `jax.random.key(seed)` for every row, batch and replica.

    Attributes:
        equations: Computation of the program, for comparisons.
        is_independent: Whether it has no collectives, and so may run on other instances and replicas.

    Raises:
        ValueError: The function has feeds, or collectives although each row is evaluated alone; or see
            `EvaluationTask`.
        TypeError: See `EvaluationTask`.
    """

    def __init__(
        self, replicas: Replicas, task: EvaluationTask, options: StepOptions, state: TrainState, rows: Masked
    ) -> None:
        self._replicas = replicas
        self._task = task
        self._options = options
        self._devices = replicas.devices
        self._program = replicas.devices.compile(self._of_replica)
        self._executables: dict[tuple[jax.Device, int], Function] = {}
        self._has_feeds = False
        self.is_independent = True
        variables = shapes_of(state.variables)
        self._shapes = np.int32(0), variables, *rows, options.shapes_of_replica(state.model_state)
        self._reads = Reads(task.code)
        with naming_missing_keys(variables, rows.values):
            self.equations: core.ClosedJaxpr = self._program.equations(*self._shapes)
        self._reads.settle()
        shapes = self._program.results(*self._shapes)
        self._nothing = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes)
        if self._has_feeds:
            raise ValueError(f"the function of the {task.title} has feeds, which only training has; use one without")
        if isinstance(task, LossOfRows) and not self.is_independent:
            raise ValueError(
                "the loss function has collectives, and evaluate calls it for each row alone; give evaluate a "
                "metrics_fn, which gets a whole batch, or a function fn without collectives"
            )

    def fits(self, replicas: Replicas) -> bool:
        """Return whether this instance drives the same replicas, and the values that the program read are unchanged."""
        return (self.is_independent or replicas.devices is self._devices) and self._reads.is_same()

    def begin(self, state: TrainState, batch: Masked) -> Callable[[], Told]:
        """Begin to compute, without waiting.

        Returns:
            A function that waits for, and returns, the results of the local replicas.
        """
        replicas, devices = self._replicas, self._replicas.devices
        parts, masks = devices.parts(batch.values), [np.asarray(mask) for mask in devices.parts(batch.mask)]
        rule = self._options.rule_of(state.model_state)
        shared = devices.share((state.variables, rule.map_own(lambda leaf: None, state.model_state)))
        own = devices.parts(rule.pick(state.model_state, PER_REPLICA))
        positions = range(len(devices.replicas))
        counts = [int(mask.sum()) if self._task.is_exact else len(mask) for mask in masks]
        executables = [self._compiled(devices.device_of(place), counts[place]) for place in positions]

        def compute(position: int) -> Tree:
            variables, model_state = shared[position % len(shared)]
            model_state = rule.with_own(model_state, [one[0] for one in own[position]])
            index = np.int32(devices.replicas[position])
            rows, mask = _first(counts[position], (parts[position], masks[position]))
            return executables[position](index, variables, rows, mask, model_state)

        replicas.reducer.begin()
        if len(positions) == 1:
            computed = [compute(0)]
            return lambda: self._told(computed, masks)
        futures = devices.begin(lambda position: jax.block_until_ready(compute(position)), replicas.reducer.fail)
        return lambda: self._told(results_of(futures), masks)

    def _told(self, computed: Sequence[Tree], masks: Sequence[np.ndarray]) -> Told:
        hosted = [jax.tree.map(np.asarray, of_replica) for of_replica in computed]
        return [told_rows(self._task.told(values, mask), mask) for values, mask in zip(hosted, masks, strict=True)]

    def _compiled(self, device: jax.Device, rows: int) -> Function:
        """Return the program for a number of rows; for no rows a function that returns zeros."""
        if rows == 0:
            return lambda *arguments: self._nothing
        if (device, rows) not in self._executables:
            index, variables, values, mask, state = self._shapes
            values, mask = jax.tree.map(
                lambda one: jax.ShapeDtypeStruct((rows, *one.shape[1:]), one.dtype), (values, mask)
            )
            self._executables[device, rows] = self._program.compiled(device, index, variables, values, mask, state)
        return self._executables[device, rows]

    def _of_replica(
        self, index: jax.Array, variables: Variables, batch: Batch, mask: jax.Array, model_state: Tree
    ) -> Tree:
        key = jax.random.key(self._options.seed)
        cast = self._options.precision.cast
        context = self._replicas.new_context(index, self._task.title)
        with replica_context(context):
            given = () if model_state is None else (model_state,)
            computed = self._task(cast(variables), cast(batch), mask, key, *given)
        self.is_independent &= context.is_independent
        self._has_feeds |= context.has_feeds
        return computed


def _first(rows: int, tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf if len(leaf) == rows else borrow(leaf)[:rows], tree)
