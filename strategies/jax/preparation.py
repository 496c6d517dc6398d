"""The programs of a step, compiled once per shape of a batch and compared between instances."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from strategies.core.agreement import insist_on_agreement
from strategies.core.survival import lost_with_an_instance, warn_of_loss
from strategies.exchange.choice import AUTO, DevicePath, asked_exchange
from strategies.exchange.flat import Shards
from strategies.exchange.means import Means
from strategies.jax.comparing.agreement import digest_of_programs, lines_of, terms_of
from strategies.jax.gradients.computation import Trainable, check_takes_state
from strategies.jax.gradients.gradient_programs import JaxGradientPlan, ReplicaGradients, ReplicaPlan, copies_for
from strategies.jax.gradients.model_state import MEAN, PER_REPLICA, asks_for_each, control_words
from strategies.jax.gradients.replica_program import ReplicaProgram, ReplicaShapes
from strategies.jax.on_device.paths import path_for
from strategies.jax.on_device.step import DeviceGradients, DeviceStep, FlatUpdate, model_state_after
from strategies.jax.options import StepOptions
from strategies.jax.programs.captures import CapturedValues, RepeatedTrace
from strategies.jax.programs.compilation import explain_recompilation, key_of, shapes_of
from strategies.jax.programs.recomputation import recomputing
from strategies.jax.programs.xla_pitfalls import check_integers_fit
from strategies.jax.replicas.devices import borrow
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.sharding import unchanging
from strategies.jax.step_record import facts_in_common
from strategies.jax.updates.optimizers import AnyOptimizer
from strategies.jax.updates.update import VariableUpdate, in_place, update_for
from strategies.loss_scaling import LossScaling
from strategies.typing import Batch, Function, Gradients, Leaf, LossFunction, Tree, Variables
from strategies.values import TrainState

logger = logging.getLogger("strategies.jax")

_WAY_OUT = "; start all with the same arguments, settings and versions, on hosts of one kind"


@dataclass(frozen=True)
class HostStep:
    """A step for batches of some shapes whose gradients go through the host.

    Attributes:
        program: Computation of a replica.
        gradients: Programs that compute it on all local replicas.
        means: Memory of the mean gradients, as a pytree like the trained variables.
        exchange: Exchange that computes the means on all instances.
        update: Update of the variables by the means.
        read_means: Mean gradients as the update reads them, in the same memory.
        replicas: Places of the replicas.
    """

    program: ReplicaProgram
    gradients: ReplicaGradients
    means: Gradients
    exchange: Means
    update: VariableUpdate
    read_means: Gradients
    replicas: Replicas
    scale_after: ClassVar = staticmethod(LossScaling.after)

    def mean_gradients(self, buffers: Sequence[np.ndarray], control: Leaf) -> tuple[Gradients, Shards | None]:
        """Return the mean gradients, and how they are cut."""
        return self.means, self.update.mean_shards

    @property
    def update_means(self) -> Gradients:
        """The mean gradients in the memory from which the update reads: on a GPU if they were copied there."""
        copies = self.gradients.copies
        return self.read_means if copies is None else copies.means(self.means)

    def update_arguments(self, buffers: Sequence[np.ndarray], control: Leaf, tail: Leaf) -> tuple[Gradients, Leaf]:
        """Return the mean gradients for the update, and the control words with the mean loss and weight."""
        return self.update_means, self.program.places.with_means(control, tail)

    def model_state(self, before: TrainState, buffers: Sequence[np.ndarray], is_finite: Leaf) -> Tree:
        """Return the model state after the step. Collective if several instances take leaves of replica 0."""
        means = self.gradients.means[self.program.num_gradients :]
        result = self.program.rule.put_means(before.model_state, means, np)
        if result[MEAN]:
            copies = [mean.copy() for mean in result[MEAN]]  # the next step overwrites the means
            result = {**result, MEAN: jax.device_put(copies, self.replicas.variables_device)}
        kept = self.gradients.kept()
        return model_state_after(self.program, self.replicas, before.step, before.model_state, kept, result, _joined)


def _joined(kept: Sequence[Sequence[jax.Array]]) -> list[Tree]:
    """Join the values that replicas keep, along a first axis of replicas."""
    if len(kept) == 1:
        return list(kept[0])
    return [np.concatenate([borrow(leaf) for leaf in leaves]) for leaves in zip(*kept, strict=True)]


PreparedStep: TypeAlias = HostStep | DeviceStep
"""A step for batches of some shapes: the paths of gradients through the host, and on the devices."""


@dataclass(frozen=True)
class _Latest:
    """The step that was made last, found again by few comparisons if a state and a batch have the same shapes.

    Attributes:
        structure: Structure of the variables, the model state and the batch.
        avals: Abstract values of their leaves; None if a leaf is not an array of JAX, and has to be checked each time.
        step: Step.
    """

    structure: jax.tree_util.PyTreeDef
    avals: Sequence[object] | None
    step: PreparedStep

    def fits(self, structure: jax.tree_util.PyTreeDef, leaves: Sequence[Leaf]) -> bool:
        """Return whether leaves of this structure have the same shapes and dtypes."""
        if self.avals is None or structure != self.structure:
            return False
        # Results of one program share their abstract values, and lists compare the identity of their items first.
        return [getattr(leaf, "aval", None) for leaf in leaves] == self.avals


class StepPrograms:
    """The prepared steps of a Trainer, by the shapes of their batches.

    Args:
        replicas: Places of the replicas.
        loss_fn: Loss function, see `Trainer`.
        optimizer: Optimizer, see `Trainer`.
        options: Options of the step.
        is_recorded: Whether `poprun verify` records steps; then instances may differ.
        others: Other functions of the user that a step traces.

    Attributes:
        agreed: Digests of the options and programs on which the instances agree, by the shapes of a batch; empty
            without spares.
    """

    def __init__(
        self,
        replicas: Replicas,
        loss_fn: LossFunction,
        optimizer: AnyOptimizer,
        options: StepOptions,
        is_recorded: bool,
        others: Sequence[Function] = (),
    ) -> None:
        self._replicas = replicas
        asked = (options.map_gradient, options.trainable, options.gradient_accumulation_dtype)
        self._functions = (loss_fn, *filter(asks_for_each, asked), *others)
        self._loss_fn = recomputing(loss_fn, options.recompute)
        self._repeated: RepeatedTrace | None = None  # of the functions for the shapes that came last
        self._trace_s = 0.0  # seconds that their trace took
        self.optimizer = optimizer
        self._options = options
        self._updates: dict[Any, VariableUpdate] = {}  # by the shapes of the trained variables
        self._trainables: dict[Hashable, Trainable] = {}  # by the shapes of all variables
        self._is_recorded = is_recorded
        self._plans: dict[Any, ReplicaPlan] = {}  # by the shapes of one replica's arguments
        self.agreed: dict[str, str] = {}
        self._has_warned = False  # whether `warn_of_loss` was called
        self._path: DevicePath | None = None  # made before the first step that stays on the device
        self._closing: Callable[[], object] = lambda: None  # closes the path
        self._is_on_device = False
        self.rest()

    def _close_path(self) -> None:
        self._closing()
        self._path = None
        for update in self._updates.values():
            update.path = None

    def _open_path(self) -> None:
        """Make the path between devices before the first step. Collective."""
        if not self._is_on_device or self._path is not None:
            return
        self._path = path_for(self._replicas)
        if self._path is None:  # memory of these devices cannot be mapped
            self._is_on_device = False
            return
        # Windows are as large as all gradients: they must not wait for the garbage collector.
        closing = weakref.finalize(self, self._path.close)
        closing.atexit = False
        self._closing = closing

    def rest(self) -> None:
        """Free the memory of all steps, and start again with the replicas that this instance drives now.

        The next step is prepared again, with the programs that are compiled.
        """
        self._devices = self._replicas.devices
        self._close_path()
        self._is_on_device = self._replicas.exchange.is_on_device
        self._indices = self._placed_indices()
        self._steps: dict[Any, PreparedStep] = {}
        self._latest: _Latest | None = None
        if self._repeated is not None:
            self._repeated.trace = None  # it would give the program for the replicas of before
        self._seen: list[Any] = []  # shapes of the batches for which a step exists
        # Collectives and feeds in a loss function belong to the instances for which it was traced.
        self._plans = {key: plan for key, plan in self._plans.items() if plan.program.is_independent}

    def _placed_indices(self) -> list[Leaf]:
        """Return the index of each local replica; on JAX's only device, if gradients pass through a CPU's host."""
        indices: list[Leaf] = [np.int32(replica) for replica in self._replicas.local_replicas]
        if self._is_on_device or not self._devices.is_cpu:
            return indices
        placed: list[Leaf] = jax.device_put(indices, self._devices.devices[0])
        return placed

    def arguments(self, state: TrainState, batch: Batch, control: Leaf) -> tuple[Tree, Sequence[Tree], Tree]:
        """Return the arguments of `ReplicaGradients.dispatch`.

        Args:
            state: State that stays valid until all buckets are collected.
            batch: Batch of all local replicas.
            control: Control words, see `control_words`.
        """
        own, shared = self._divided(state.model_state)
        parts = zip(self._devices.parts(batch), self._indices, self._devices.parts(own), strict=True)
        return state.variables, [(rows, index, control, of_one) for rows, index, of_one in parts], shared

    def _divided(self, model_state: Tree) -> tuple[list[Tree], Tree]:
        """Split a model state into the leaves that each replica owns, and the rest with None in their places."""
        if model_state is None:
            return [], None
        rule = self._options.rule_of(model_state)
        return rule.pick(model_state, PER_REPLICA), rule.map_own(lambda leaf: None, rule.begun(model_state))

    # ---- preparing

    def trained(self, variables: Variables) -> Variables:
        """Return the variables that are trained, or their shapes, with None in the places of the others."""
        return self._trainable(variables).pick(variables)

    def _trainable(self, variables: Variables) -> Trainable:
        """Return the choice of the trained variables.

        Raises:
            RuntimeError: The filter now chooses others than it did at first; programs and states are made for those.
        """
        found = Trainable.of(variables, self._options.trainable)
        known = self._trainables.setdefault(key_of(shapes_of(variables)), found)
        flags = zip(jax.tree_util.tree_leaves_with_path(variables), known.flags, found.flags, strict=True)
        changed = [keystr(path) for (path, _), before, now in flags if before is not now]
        if changed:
            raise RuntimeError(
                f"trainable has changed its answer for {', '.join(changed)}, but the optimizer state and the compiled "
                "step are for its first answers; make a new Trainer, and give its init the variables so far"
            )
        return known

    def update_of(self, variables: Variables) -> VariableUpdate:
        """Return the update of variables of these shapes.

        Args:
            variables: All variables, also untrained ones; shapes and dtypes are enough.
        """
        trained = self.trained(shapes_of(variables))
        key = key_of(trained)
        found = self._updates.get(key)
        if found is None or found.is_outdated:
            found = self._updates[key] = self._new_update(trained)
        return found

    def _new_update(self, trained: Variables) -> VariableUpdate:
        return update_for(self._replicas, self.optimizer, self._options, trained)

    def prepare(self, state: TrainState, batch: Batch) -> PreparedStep:
        """Return the step for this batch. Collective if its shapes are new.

        Raises:
            TypeError: The batch has a leaf that is not an array.
        """
        if self._devices is not self._replicas.devices:  # an instance was lost outside of a step
            self.rest()
        if self._repeated is not None:
            self._insist_on_same_program(self._repeated, state.step)
        self._replicas.sharding.check_batch(batch)
        leaves, structure = jax.tree_util.tree_flatten((state.variables, state.model_state, batch))
        latest = self._latest
        if latest is None or not latest.fits(structure, leaves):
            avals = [leaf.aval for leaf in leaves] if all(isinstance(leaf, jax.Array) for leaf in leaves) else None
            latest = self._latest = _Latest(structure, avals, self._looked_up(state, batch))
        return latest.step

    def unchanging(self, state: TrainState) -> TrainState:
        """Return the state of the step that was prepared last, with copies of its NumPy arrays.

        The program may change its arrays as soon as the step returns, while JAX still reads them.
        """
        parts = (state.variables, state.optimizer_state, state.model_state)
        latest = self._latest  # with abstract values if the variables and the model state have arrays of JAX alone
        unknown = parts if latest is None or latest.avals is None else state.optimizer_state
        if not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(unknown)):
            return state
        variables, optimizer_state, model_state = unchanging(parts)
        return replace(state, variables=variables, optimizer_state=optimizer_state, model_state=model_state)

    def _looked_up(self, state: TrainState, batch: Batch) -> PreparedStep:
        """Return the step for this batch, prepared if its shapes are new. Collective if they are."""
        check_integers_fit(batch)
        try:
            key = key_of((state.variables, state.model_state, batch))
        except AttributeError as error:
            leaves = jax.tree.leaves((state.variables, state.model_state, batch))
            others = {type(leaf).__name__ for leaf in leaves if not hasattr(leaf, "dtype")}
            raise TypeError(
                f"the batch has a {' and a '.join(sorted(others))}; use arrays with the rows of all local replicas"
            ) from error
        found = self._steps.get(key)
        if found is None:
            if (reason := explain_recompilation(self._seen, batch)) is not None:
                logger.info(reason)
            self._seen.append(shapes_of(batch))
            reads = CapturedValues(*self._functions)
            shapes = self._shapes_of(state, batch)
            plan = self._agreed_plan(state, batch, shapes)
            found = self._of_device(plan, shapes) if plan.is_on_device else self._of_host(plan, shapes)
            self._steps[key] = found
            self._repeated = self._repeated_trace(reads, state, shapes, plan)
            reads.settle()
        return found

    def _insist_on_same_program(self, repeated: RepeatedTrace, step: int) -> None:
        """Refuse functions that would be compiled to another program now. Collective in steps 8, 16, 32, ..."""
        is_alone = (communicator := self._replicas.communicator).size == 1
        doublings = (step if is_alone else step // 8).bit_length()  # in the first steps a collective would cost most
        is_due = repeated.trace is not None and repeated.doublings != doublings  # calls may skip steps
        repeated.doublings = doublings
        if is_due:  # all instances trace, or none, so that all raise
            is_cheap = np.array(repeated.is_cheap(), np.int64)
            is_due = bool(is_cheap if is_alone else communicator.broadcast(is_cheap, name="whether to trace again"))
        instead = "in the batch, the model state or the state of the optimizer, or make a new Trainer"
        repeated.insist(instead, self._agree_on_lines if is_due else None)

    def _agree_on_lines(self, lines: Sequence[str]) -> None:
        if self._is_compared:
            insist_on_agreement(self._replicas, [{"the loss function and the update, traced again,": lines}])

    def _repeated_trace(
        self, reads: CapturedValues, state: TrainState, shapes: ReplicaShapes, plan: ReplicaPlan
    ) -> RepeatedTrace:
        """Return the check that the functions traced anew are the program for these shapes."""
        state = TrainState(shapes.variables, shapes_of(state.optimizer_state), 0, None, None)
        programs: StepPrograms = weakref.proxy(self)  # device memory is freed with a Trainer, without a cycle

        def again() -> list[str]:
            plan, trained = programs._plan(shapes), programs.trained(shapes.variables)
            return [*plan.lines, *_lines_of(plan, programs._new_update(trained), state)]

        begun_s = time.perf_counter()
        before = [*plan.lines, *_lines_of(plan, self.update_of(shapes.variables), state)]
        trace_s = self._trace_s + time.perf_counter() - begun_s
        return RepeatedTrace(reads, before, None if plan.program.has_feeds else again, trace_s)

    def planned(self, state: TrainState, batch: Batch) -> ReplicaPlan:
        """Return a replica's computation, with programs that are not compiled yet. Not collective.

        Args:
            state: State before the step; shapes and dtypes are enough.
            batch: Batch of the local replicas; shapes and dtypes are enough.
        """
        return self._plan(self._shapes_of(state, batch))

    def _shapes_of(self, state: TrainState, batch: Batch) -> ReplicaShapes:
        rows, model_state = jax.tree.map(self._devices.replica_shape, batch), state.model_state
        return ReplicaShapes(shapes_of(state.variables), rows, self._options.shapes_of_replica(model_state))

    def _agreed_plan(self, state: TrainState, batch: Batch, shapes: ReplicaShapes) -> ReplicaPlan:
        """Return a replica's computation on which all instances agree, traced if its shapes are new. Collective."""
        self._open_path()
        key = key_of((shapes.variables, shapes.batch, shapes.model_state))
        plan = self._plans.get(key)
        if plan is None or (plan.is_on_device and not self._is_on_device):
            begun_s = time.perf_counter()
            plan = self._plan(shapes)
            self._trace_s = time.perf_counter() - begun_s
        self._agree(state, batch, shapes, plan)
        self._plans[key] = plan
        self._log_effective_batch(shapes.batch)
        return plan

    def _of_device(self, plan: ReplicaPlan, shapes: ReplicaShapes) -> DeviceStep:
        assert isinstance(plan, JaxGradientPlan)
        assert self._path is not None
        program, layout = plan.program, plan.layout
        update = self.update_of(shapes.variables)
        update.path = self._path
        structure = jax.tree.structure(program.trainable.pick(shapes.variables))
        return DeviceStep(
            program,
            DeviceGradients(self._devices, plan, self._path.nodes, self._replicas.num_replicas_in_sync),
            self._path,
            update,
            FlatUpdate(program, update, layout, structure),
            self._replicas,
        )

    def _of_host(self, plan: ReplicaPlan, shapes: ReplicaShapes) -> HostStep:
        communicator = self._replicas.communicator
        gradients = plan.gradients_on(self._replicas.grid, communicator.allocate, self._replicas.reducer.fail)
        exchange = Means(communicator)
        means = gradients.means[: plan.program.num_gradients]
        structure = jax.tree.structure(plan.program.trainable.pick(shapes.variables))
        update = self.update_of(shapes.variables)
        gradients.copies = copies_for(self._devices, communicator, gradients.buckets)
        of_variables = jax.tree.unflatten(structure, means)
        read = in_place(of_variables, self._replicas.variables_device)
        return HostStep(plan.program, gradients, of_variables, exchange, update, read, self._replicas)

    def _plan(self, shapes: ReplicaShapes) -> ReplicaPlan:
        """Return a replica's computation for arguments of these shapes."""
        check_takes_state(self._loss_fn, shapes.model_state is not None)
        options, pipeline = self._options, self._options.pipeline
        rule, dtype = options.rule_of(shapes.model_state), options.gradient_accumulation_dtype
        trainable = self._trainable(shapes.variables)
        program = ReplicaProgram(self._replicas, self._loss_fn, shapes, trainable, rule, dtype, options)
        on_device = self._planned_on_device(program, shapes)
        if on_device is not None:
            return on_device
        if pipeline is not None:
            return pipeline.plan(self._replicas, program, shapes, self.update_of(shapes.variables).mean_shards)
        return self._in_one_program(program, shapes)

    def _planned_on_device(self, program: ReplicaProgram, shapes: ReplicaShapes) -> JaxGradientPlan | None:
        """Return the plan of a step that stays on the device, or None if it goes through the host.

        Raises:
            ValueError: The program asks for an exchange on the device, and something in the step needs the host.
        """
        if not self._is_on_device:
            return None
        plan, reason = None, None if self._options.pipeline is None else "replicas are pipelines"
        if reason is None:
            plan = self._in_one_program(program, shapes, is_on_device=True)
            plan.equations()  # tracing shows which effects the loss function has
            reason = why_on_host(program)
        if reason is None:
            return plan
        exchange = asked_exchange(self._replicas.defaults.exchange, os.environ)
        if exchange != AUTO:
            raise ValueError(
                f"the exchange {exchange!r} keeps gradients on the device, but {reason}; use exchange 'auto' or 'host'"
            )
        logger.info("gradients go through the host: %s", reason)
        return None

    def _in_one_program(
        self, program: ReplicaProgram, shapes: ReplicaShapes, is_on_device: bool = False
    ) -> JaxGradientPlan:
        own, shared = self._divided(shapes.model_state)
        own = [jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype) for leaf in own]
        control = control_words(0, False, 1.0)
        arguments = (shapes.variables, shapes.batch, np.int32(0), control, own, shared)
        shards = self.update_of(shapes.variables).mean_shards
        return JaxGradientPlan(self._devices, program, arguments, shards, is_on_device)

    @property
    def _is_compared(self) -> bool:
        """Whether there are other instances to agree with, now or when this instance becomes active."""
        return (self._replicas.communicator.size > 1 or self._replicas.journal.is_kept) and not self._is_recorded

    def _agree(self, state: TrainState, batch: Batch, shapes: ReplicaShapes, plan: ReplicaPlan) -> None:
        """Compare everything that decides the result between instances. Collective, once for each shape of a batch."""
        dataset = self._replicas.dataset_of(batch)
        if self._is_compared:
            lines = _lines_of(plan, self.update_of(state.variables), state)
            programs = {"the loss function": plan.lines, "the update": lines}
            options = {**facts_in_common(self._replicas.variables_device), **self._options.terms}
            terms = terms_of({**options, "step": state.step}, dataset, shapes.batch, programs, state.optimizer_state)
            insist_on_agreement(self._replicas, terms, way_out=_WAY_OUT)
            if self._replicas.journal.is_kept:
                self.agreed |= digest_of_programs(options, shapes.batch, programs)
        if not self._has_warned:
            self._has_warned = True
            warn_of_loss(self._replicas, lost_with_an_instance(plan.program.has_feeds, dataset))

    def _log_effective_batch(self, of_one: Batch) -> None:
        leaves = jax.tree.leaves(of_one)
        if not leaves:
            return
        rows = leaves[0].shape[0]
        count, replicas = self._options.gradient_accumulation_count, self._replicas.num_replicas_in_sync
        numbers = rows * replicas, rows // count, count, replicas
        logger.info("effective batch %d = micro-batch %d x %d accumulated x %d replicas", *numbers)


def _lines_of(plan: ReplicaPlan, update: VariableUpdate, state: TrainState) -> list[str]:
    """Return the lines of an update's programs; shapes and dtypes of the variables and optimizer state are enough."""
    trained = plan.program.trainable.pick(state.variables)
    means = jax.tree.unflatten(jax.tree.structure(trained), plan.program.means)
    programs = update.programs(trained, state.optimizer_state, means, control_of_update(plan.program, state))
    return [line for program in programs.values() for line in lines_of(program.jaxpr)]


def why_on_host(program: ReplicaProgram) -> str | None:
    """Return the reason for gradients to go through the host, or None if they may stay on the device.

    Args:
        program: Traced computation of a replica.
    """
    if not program.is_independent:
        return "the loss function has collectives of replicas or feeds"
    if any(not jnp.issubdtype(result.dtype, jnp.floating) for result in program.results):
        return "the model state has a sum of integers"
    return None


def control_of(state: TrainState, notice: bool = False) -> np.ndarray:
    """Return the control words of a step that begins with this state."""
    scale = 1.0 if state.loss_scale is None else float(state.loss_scale.scale)
    return control_words(state.step, notice, scale)


def control_of_update(program: ReplicaProgram, state: TrainState) -> np.ndarray:
    """Return control words with the shape of those that an update gets, for programs that are not run."""
    words: np.ndarray = program.places.with_means(control_of(state), np.zeros(program.places.size, np.float32))
    return words
