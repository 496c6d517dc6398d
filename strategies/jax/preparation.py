"""The programs of a step, compiled once per shape of a batch and compared between instances."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strategies.core.agreement import insist_on_agreement
from strategies.core.survival import lost_with_an_instance, warn_of_loss
from strategies.exchange.choice import asked_exchange
from strategies.exchange.means import Allocate, Bucket, Means
from strategies.exchange.on_device import AUTO, DevicePath
from strategies.exchange.shards import Shards
from strategies.jax.comparing.agreement import digest_of_programs, lines_of, terms_of
from strategies.jax.comparing.exactness import OfReplicas, have_same_gradients, is_so_everywhere
from strategies.jax.gradients.arguments import Trainable, check_takes_state
from strategies.jax.gradients.computation import ReplicaGradients, ReplicaPlan
from strategies.jax.gradients.copies import copies_for
from strategies.jax.gradients.gradient_programs import JaxGradientPlan
from strategies.jax.gradients.model_state import PER_REPLICA
from strategies.jax.gradients.replica_program import ReplicaProgram, ReplicaShapes
from strategies.jax.gradients.tail import control_words
from strategies.jax.on_device.gradients import DeviceGradients
from strategies.jax.on_device.paths import path_for
from strategies.jax.on_device.step import DeviceStep
from strategies.jax.on_device.update import FlatUpdate
from strategies.jax.options import StepOptions
from strategies.jax.programs.captures import Reads
from strategies.jax.programs.compilation import explain_recompilation
from strategies.jax.programs.program import key_of, shapes_of
from strategies.jax.programs.recomputation import recomputing
from strategies.jax.programs.xla_pitfalls import refuse_cut_integers
from strategies.jax.replicas.dealing import unchanging
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.updates.in_place import in_place
from strategies.jax.updates.optimizers import AnyOptimizer
from strategies.jax.updates.sharded_update import update_for
from strategies.jax.updates.update import VariableUpdate
from strategies.train_state import TrainState
from strategies.typing import Batch, Function, Gradients, Leaf, LossFunction, Tree, Variables

logger = logging.getLogger("strategies.jax")


@dataclass(frozen=True)
class PreparedStep:
    """A step for batches of some shapes.

    Attributes:
        program: Computation of a replica.
        gradients: Programs that compute it on all local replicas.
        means: Memory of the mean gradients, as a pytree like the trained variables.
        state_means: Memory of the means of leaves of the model state.
        exchange: Exchange that computes the means on all instances.
        update: Update of the variables by the means.
        read_means: Mean gradients as the update reads them, in the same memory.
        tail: Memory of the mean tail.
    """

    program: ReplicaProgram
    gradients: ReplicaGradients
    means: Gradients
    state_means: Sequence[np.ndarray]
    exchange: Means
    update: VariableUpdate
    read_means: Gradients
    tail: np.ndarray

    @property
    def arrived_means(self) -> Gradients:
        """The mean gradients in the memory from which the update reads: on a GPU if they were copied there."""
        copies = self.gradients.copies
        return self.read_means if copies is None else copies.means(self.means)


@dataclass(frozen=True)
class _Plan:
    """The plan of a replica's step, independent of the number of local replicas, without memory for gradients.

    Attributes:
        program: Computation of a replica.
        gradients: Compiled programs of it.
        lines: Lines of the computation, to compare with other instances; empty if nothing is compared.
        is_on_device: Whether gradients stay on the device.
    """

    program: ReplicaProgram
    gradients: ReplicaPlan
    lines: Sequence[str]
    is_on_device: bool = False


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
    step: PreparedStep | DeviceStep

    @classmethod
    def of(cls, structure: jax.tree_util.PyTreeDef, leaves: Sequence[Leaf], step: PreparedStep | DeviceStep) -> _Latest:
        """Return the latest step, given the leaves that it was made with."""
        avals = [leaf.aval for leaf in leaves] if all(isinstance(leaf, jax.Array) for leaf in leaves) else None
        return cls(structure, avals, step)

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
        self._functions = (loss_fn, *others)
        self._loss_fn = recomputing(loss_fn, options.recompute)
        self._reads: Reads | None = None  # the values that the loss function read when it was traced
        self.optimizer = optimizer
        self._options = options
        self._updates: dict[Any, VariableUpdate] = {}  # by the shapes of the trained variables
        self._is_recorded = is_recorded
        self._plans: dict[Any, _Plan] = {}  # by the shapes of one replica's arguments
        self.agreed: dict[str, str] = {}
        self._has_warned = False  # whether `warn_of_loss` was called
        self._path: DevicePath | None = None  # made before the first step that stays on the device
        self._closing: Callable[[], object] = lambda: None  # closes the path
        self._is_on_device = False
        self._claim_replicas()

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

    def _claim_replicas(self) -> None:
        """Start again with the replicas that this instance drives now."""
        self._devices = self._replicas.devices
        self._close_path()
        self._is_on_device = self._replicas.exchange.is_on_device
        self._indices = self._placed_indices()
        self._steps: dict[Any, PreparedStep | DeviceStep] = {}
        self._latest: _Latest | None = None
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
        kept = self._devices.parts((state.residuals or [], own))
        parts = zip(self._devices.parts(batch), self._indices, kept, strict=True)
        return state.variables, [(rows, index, control, of_one) for rows, index, of_one in parts], shared

    def _divided(self, model_state: Tree) -> tuple[list[Tree], Tree]:
        """Split a model state into the leaves that each replica owns, and the rest with None in their places."""
        if model_state is None:
            return [], None
        rule = self._options.rule_of(model_state)
        return rule.pick(model_state, PER_REPLICA), rule.map_own(lambda leaf: None, rule.begun(model_state))

    def gradients_of(self, programs: ReplicaGradients, state: TrainState, batch: Batch) -> OfReplicas:
        """Return the gradients of each local replica, computed by `programs`."""
        programs.dispatch(*self.arguments(state, batch, control_of(state)))
        return programs.leaves()

    # ---- preparing

    def trained(self, variables: Variables) -> Variables:
        """Return the variables that are trained, or their shapes, with None in the places of the others."""
        return Trainable.of(variables, self._options.trainable).pick(variables)

    def update_of(self, variables: Variables) -> VariableUpdate:
        """Return the update of variables of these shapes.

        Args:
            variables: All variables, also untrained ones; shapes and dtypes are enough.
        """
        trained = self.trained(shapes_of(variables))
        key = key_of(trained)
        found = self._updates.get(key)
        if found is None or found.is_outdated:
            found = update_for(self._replicas, self.optimizer, self._options.of_update, trained)
            self._updates[key] = found
        return found

    def prepare(self, state: TrainState, batch: Batch) -> PreparedStep | DeviceStep:
        """Return the step for this batch. Collective if its shapes are new.

        Raises:
            TypeError: The batch has a leaf that is not an array.
        """
        if self._devices is not self._replicas.devices:  # an instance was lost outside of a step
            self._claim_replicas()
        if self._reads is not None:
            self._reads.insist("in the batch, the model state or the state of the optimizer, or make a new Trainer")
        self._replicas.dealing.refuse_others(batch)
        leaves, structure = jax.tree_util.tree_flatten((state.variables, state.model_state, batch))
        latest = self._latest
        if latest is None or not latest.fits(structure, leaves):
            latest = _Latest.of(structure, leaves, self._looked_up(state, batch))
            self._latest = latest
        return latest.step

    def is_independent(self, state: TrainState, batch: Batch) -> bool:
        """Return whether the step for this batch, prepared if its shapes are new, has no collectives of replicas."""
        return self.prepare(state, batch).program.is_independent

    def rest(self) -> None:
        """Free the memory of all steps. The next step is prepared again, with the programs that are compiled."""
        self._claim_replicas()

    def unchanging(self, state: TrainState) -> TrainState:
        """Return the state of the step that was prepared last, with copies of its NumPy arrays.

        The program may change its arrays as soon as the step returns, while JAX still reads them.
        """
        if self._latest is not None and self._latest.avals is not None:  # all arrays are JAX's
            return state
        parts = (state.variables, state.optimizer_state, state.model_state)
        if not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(parts)):
            return state
        variables, optimizer_state, model_state = unchanging(parts)
        return replace(state, variables=variables, optimizer_state=optimizer_state, model_state=model_state)

    def _looked_up(self, state: TrainState, batch: Batch) -> PreparedStep | DeviceStep:
        """Return the step for this batch, prepared if its shapes are new. Collective if they are."""
        refuse_cut_integers(batch)
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
            reason = explain_recompilation(self._seen, batch)
            if reason is not None:
                logger.info(reason)
            self._seen.append(shapes_of(batch))
            reads = Reads(*self._functions)
            found = self._steps[key] = self._prepared(state, batch)
            reads.settle()
            self._reads = reads
        return found

    def planned(self, state: TrainState, batch: Batch) -> tuple[ReplicaProgram, ReplicaPlan]:
        """Return a replica's computation, with programs that are not compiled yet. Not collective.

        Whether gradients can be streamed is found out only by running. In this plan they all come at the end.

        Args:
            state: State before the step; shapes and dtypes are enough.
            batch: Batch of the local replicas; shapes and dtypes are enough.
        """
        plan = self._plan(self._shapes_of(state, batch))
        return plan.program, plan.gradients

    def _shapes_of(self, state: TrainState, batch: Batch) -> ReplicaShapes:
        of_replica = self._devices.replica_shape
        return ReplicaShapes(
            shapes_of(state.variables),
            jax.tree.map(of_replica, batch),
            jax.tree.map(of_replica, state.residuals or []),
            self._options.shapes_of_replica(state.model_state),
        )

    def _prepared(self, state: TrainState, batch: Batch) -> PreparedStep | DeviceStep:
        self._open_path()
        shapes = self._shapes_of(state, batch)
        key = key_of((shapes.variables, shapes.batch, shapes.residuals, shapes.model_state))
        kept = self._kept(key)
        plan = kept or self._plan(shapes)
        self._agree(state, batch, shapes, plan)
        if kept is None:
            plan = self._plans[key] = self._streaming(plan, shapes, state, batch)
        self._log_effective_batch(shapes.batch)
        return self._of_device(plan, shapes) if plan.is_on_device else self._of_host(plan, shapes)

    def _of_device(self, plan: _Plan, shapes: ReplicaShapes) -> DeviceStep:
        assert isinstance(plan.gradients, JaxGradientPlan)
        assert self._path is not None
        program, (layout,) = plan.program, plan.gradients.layouts
        update = self.update_of(shapes.variables)
        update.path = self._path
        structure = jax.tree.structure(program.trainable.pick(shapes.variables))
        return DeviceStep(
            program,
            Bucket("gradients", layout, (), frozenset()),
            DeviceGradients(self._devices, plan.gradients, self._path.nodes, self._replicas.num_replicas_in_sync),
            self._path,
            update,
            FlatUpdate(program, update, layout, structure, self._options.scaling is not None),
            self._replicas,
        )

    def _of_host(self, plan: _Plan, shapes: ReplicaShapes) -> PreparedStep:
        communicator = self._replicas.communicator
        gradients = self._programs(plan.gradients, communicator.allocate)
        quantised = plan.program.quantised
        exchange = Means(communicator, self._replicas.num_replicas_in_sync, quantised)
        if quantised is None:
            means = gradients.means[: plan.program.num_gradients]
        else:
            assert exchange.of_payload is not None
            means = quantised.views(exchange.of_payload)
        of_state = gradients.means[plan.program.num_gradients :]
        structure = jax.tree.structure(plan.program.trainable.pick(shapes.variables))
        update = self.update_of(shapes.variables)
        gradients.copies = copies_for(self._devices, communicator, gradients.buckets)
        of_variables = jax.tree.unflatten(structure, means)
        read = in_place(of_variables, self._replicas.variables_device)
        return PreparedStep(plan.program, gradients, of_variables, of_state, exchange, update, read, gradients.tail)

    def _kept(self, key: Any) -> _Plan | None:
        """Return an earlier plan if all instances have it. Collective if instances have been lost.

        If an instance is lost while the first step is prepared, some survivors have a plan and others do not. Then all
        of them must measure and compare again, because these are collective calls.
        """
        found = self._plans.get(key)
        if found is not None and found.is_on_device and not self._is_on_device:
            found = None
        if not self._replicas.has_carried_on:
            return found
        return found if is_so_everywhere(found is not None, self._replicas.communicator, "plans are there") else None

    def _plan(self, shapes: ReplicaShapes) -> _Plan:
        """Return a replica's computation for arguments of these shapes."""
        check_takes_state(self._loss_fn, shapes.model_state is not None)
        options = self._options
        program = ReplicaProgram(
            self._replicas,
            self._loss_fn,
            shapes,
            Trainable.of(shapes.variables, options.trainable),
            options.rule_of(shapes.model_state),
            options.seed,
            options.accumulation,
            options.precision,
            options.transfer,
            options.check_numerics,
        )
        on_device = self._planned_on_device(program, shapes)
        gradients = on_device or self._planned(program, shapes)
        lines = lines_of(gradients.equations()) if self._is_compared else []
        return _Plan(program, gradients, lines, on_device is not None)

    def _planned(self, program: ReplicaProgram, shapes: ReplicaShapes) -> ReplicaPlan:
        if self._options.pipeline is not None:
            return self._options.pipeline.plan(self._replicas, program, shapes, self._mean_shards(program, shapes))
        return self._in_one_program(program, shapes, streams=False)

    def _planned_on_device(self, program: ReplicaProgram, shapes: ReplicaShapes) -> JaxGradientPlan | None:
        """Return the plan of a step that stays on the device, or None if it goes through the host.

        Raises:
            ValueError: The program asks for an exchange on the device, and something in the step needs the host.
        """
        if not self._is_on_device:
            return None
        plan, reason = None, self._options.needs_host
        if reason is None:
            plan = self._in_one_program(program, shapes, streams=False, makes_buffers=True)
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

    def _mean_shards(self, program: ReplicaProgram, shapes: ReplicaShapes) -> Shards | None:
        return None if program.quantised else self.update_of(shapes.variables).mean_shards

    def _in_one_program(
        self, program: ReplicaProgram, shapes: ReplicaShapes, streams: bool, makes_buffers: bool = False
    ) -> JaxGradientPlan:
        own, shared = self._divided(shapes.model_state)
        own = [jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype) for leaf in own]
        control = control_words(0, False, 1.0)
        arguments = (shapes.variables, shapes.batch, np.int32(0), control, shapes.residuals, own, shared)
        shards = self._mean_shards(program, shapes)
        return JaxGradientPlan(self._devices, program, arguments, streams, shards, makes_buffers)

    def _streaming(self, plan: _Plan, shapes: ReplicaShapes, state: TrainState, batch: Batch) -> _Plan:
        """Return the plan, with streamed gradients if they have the same bits. Collective if they can be streamed."""
        is_cut = plan.program.quantised is not None or self._options.pipeline is not None
        if is_cut or not self._replicas.streams_gradients:
            return plan
        cut = self._in_one_program(plan.program, shapes, streams=True)
        if len(cut.segments) == 1:
            return plan
        if not self._replicas.adds_in_order:  # this strategy does not promise bits
            return replace(plan, gradients=cut)
        streamed, at_once = self._programs(cut, np.empty), self._programs(plan.gradients, np.empty)
        is_exact = have_same_gradients(
            lambda *case: self.gradients_of(streamed, *case),
            lambda *case: self.gradients_of(at_once, *case),
            state,
            batch,
            self._options.seed,
        )
        communicator = self._replicas.communicator
        if is_so_everywhere(is_exact, communicator, "streamed gradients have the same bits"):
            return replace(plan, gradients=cut)
        logger.info("gradients are not streamed: streaming would change bits of gradients, the loss or metrics")
        return plan

    def _programs(self, plan: ReplicaPlan, allocate: Allocate) -> ReplicaGradients:
        return plan.gradients_on(self._replicas.grid, allocate, self._replicas.reducer.fail)

    @property
    def _is_compared(self) -> bool:
        """Whether there are other instances to agree with, now or when this instance becomes active."""
        return (self._replicas.communicator.size > 1 or self._replicas.journal.is_kept) and not self._is_recorded

    def _agree(self, state: TrainState, batch: Batch, shapes: ReplicaShapes, plan: _Plan) -> None:
        """Compare everything that decides the result between instances. Collective, once for each shape of a batch."""
        dataset = self._replicas.dataset_of(batch)
        if self._is_compared:
            trained = plan.program.trainable.pick(state.variables)
            means = jax.tree.unflatten(jax.tree.structure(trained), plan.program.means)
            control = control_of_update(plan.program, state)
            update = self.update_of(state.variables).programs(trained, state.optimizer_state, means, control)
            lines = [line for program in update.values() for line in lines_of(program.jaxpr)]
            programs = {"the loss function": plan.lines, "the update": lines}
            options = {**self._options.terms, "step": state.step}
            terms = terms_of(options, dataset, shapes.batch, programs, state.optimizer_state)
            insist_on_agreement(self._replicas, terms)
            if self._replicas.journal.is_kept:
                self.agreed |= digest_of_programs(self._options.terms, shapes.batch, programs)
        if not self._has_warned:
            self._has_warned = True
            warn_of_loss(self._replicas, lost_with_an_instance(plan.program.has_feeds, dataset))

    def _log_effective_batch(self, of_one: Any) -> None:
        leaves = jax.tree.leaves(of_one)
        if not leaves:
            return
        rows = leaves[0].shape[0]
        count, replicas = self._options.accumulation.count, self._replicas.num_replicas_in_sync
        logger.info(
            "effective batch %d = micro-batch %d x %d accumulated x %d replicas",
            rows * replicas,
            rows // count,
            count,
            replicas,
        )


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
