"""The update of a step: the optimizer, applied once per instance to the mean gradients of all replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from strategies.exchange.copies import Rows
from strategies.exchange.on_device import DevicePath
from strategies.exchange.shards import Shards
from strategies.holding import Holding
from strategies.jax.gradients.accumulation import accumulator_dtypes
from strategies.jax.gradients.tail import LOSS_SCALE, STEP, loss_of, weight_of, widened
from strategies.jax.programs.compilation import compiled_in_turn
from strategies.jax.programs.program import jit, shapes_of
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.shards import PartOfArray, ShardedTree, shards_of
from strategies.jax.updates.arithmetic import add_stochastically
from strategies.jax.updates.optimizers import AnyOptimizer, Arithmetic, Known, OptaxOptimizer, StepOptimizer
from strategies.typing import AccumulationDtype, Function, Gradients, Leaf, OptimizerState, Tree, Variables

HOST_MEMORY = "pinned_host"
_ROUNDING = 1 << 31  # no step has this number, so the keys for rounding differ from those of replicas


@dataclass(frozen=True)
class UpdateSettings:
    """The settings of an update, independent of the optimizer.

    Attributes:
        seed: Seed of stochastic rounding.
        gradient_dtype: Dtype in which the optimizer gets the gradients.
        unscales: Whether the mean gradients are divided by the loss scale.
        rounds_stochastically: Whether variables of 16 bits are rounded stochastically.
        offloads_state: Whether optimizer state lies in host memory between updates.
        shards_state: Whether every replica keeps a part of the optimizer state.
        min_elements: Least number of elements of a variable whose state is cut.
    """

    seed: int = 0
    gradient_dtype: AccumulationDtype = None
    unscales: bool = False
    rounds_stochastically: bool = False
    offloads_state: bool = False
    shards_state: bool = False
    min_elements: int = 32


@dataclass(frozen=True)
class Updated:
    """The results of an update on this instance, of which other instances may need parts.

    Attributes:
        optimizer_state: New optimizer state of this instance, in its place between updates.
        variables: New variables; None if they have yet to be put together.
        whole: New variables of which this instance has all elements, if `variables` is None.
        own: This instance's parts of the other variables, in flat buffers.
        kept: Its copies of another instance's parts, in flat buffers; empty without copies.
    """

    optimizer_state: OptimizerState
    variables: Variables = None
    whole: Sequence[jax.Array] = ()
    own: Sequence[jax.Array] = ()
    kept: Sequence[jax.Array] = ()


class VariableUpdate(ABC):
    """The update of variables and optimizer state by mean gradients. Subclasses divide the state among instances.

    The step calls `init` or `adopt` once, and then in each step `apply`, or one after the other the three functions of
    which `apply` consists. It calls `wait` before it overwrites the mean gradients. An error of `compute` is final: the
    variables may be used up. Each part of the state lies on two instances if the job goes on after a loss.

    Args:
        replicas: Replicas whose variables are updated.
        optimizer: An optax gradient transformation, or a `StepOptimizer`.
        settings: Settings of the update.

    Attributes:
        mean_shards: Shards of the mean gradients, if `apply` takes this instance's part only; None if it takes whole
            means.
        path: Path that gathers parts on devices; None if they are gathered on the host.
        first: First replica of each block of whose parts this instance has the optimizer state.
    """

    def __init__(self, replicas: Replicas, optimizer: AnyOptimizer, settings: UpdateSettings) -> None:
        self.mean_shards: Shards | None = None
        self.path: DevicePath | None = None
        self._state_shards: ShardedTree | None = None  # None: every instance has all of the optimizer state
        self._replicas = replicas
        self._optimizer = optimizer if isinstance(optimizer, StepOptimizer) else OptaxOptimizer(optimizer)
        self._settings = settings
        self._holding = replicas.holding
        self.first = np.array(self._holding.starts, np.int32)
        self._reading: jax.Array | None = None  # ready when the last update has read the gradients

    @abstractmethod
    def begun(self, variables: Variables, first: jax.Array) -> OptimizerState:
        """Return the optimizer state before the first step; traceable.

        Args:
            variables: Trained variables, whole.
            first: First replica of each block of the instance whose part is returned, int32.
        """

    @abstractmethod
    def prepare(self, optimizer_state: OptimizerState) -> OptimizerState:
        """Return the optimizer state as `compute` takes it; the given one stays valid. May be collective."""

    @abstractmethod
    def compute(self, variables: Variables, prepared: OptimizerState, means: Gradients, control: Leaf) -> Updated:
        """Return this instance's results; the variables and the prepared state are used up. Not collective.

        Args:
            variables: Trained variables, whole.
            prepared: Result of `prepare`.
            means: Arrays like the variables, or their parts if there are `mean_shards`. Arrays of the host are read
                until `wait` returns.
            control: Control words with the mean loss, see `control_words` and `TailLayout.with_means`.
        """

    def finish(self, variables: Variables, updated: Updated) -> Variables:
        """Return the new variables. May be collective.

        Args:
            variables: Variables that were given to `compute`, whose memory may be used again.
            updated: Result of `compute`.
        """
        return updated.variables

    def restored(self, variables: Variables, updated: Updated, rows: Rows) -> Variables:
        """Return the new variables in place of `finish`, after instances were lost. May be collective.

        Args:
            variables: Variables as in `finish`; shapes and dtypes are enough.
            updated: Result of `compute`.
            rows: Source of the parts, which are cut for the spread of this object.
        """
        return updated.variables

    @abstractmethod
    def programs(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: np.ndarray
    ) -> Mapping[str, jax.stages.Traced]:
        """Return the programs of `apply` by name, the same on every instance.

        Args:
            variables: Trained variables; shapes and dtypes are enough.
            optimizer_state: Optimizer state of this instance; shapes and dtypes are enough.
            means: Means as for `apply`, or whole; shapes and dtypes are enough.
            control: Control words.
        """

    # ---- common to all subclasses

    @final
    def apply(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: Leaf
    ) -> tuple[Variables, OptimizerState]:
        """Return new variables and optimizer state; the old ones are used up. May be collective.

        Args:
            variables: Trained variables, whole.
            optimizer_state: Last result of `init`, `adopt` or `apply`.
            means: Mean gradients as in `compute`.
            control: Control words as in `compute`.
        """
        updated = self.compute(variables, self.prepare(optimizer_state), means, control)
        return self.finish(variables, updated), updated.optimizer_state

    def init(self, variables: Variables) -> OptimizerState:
        """Return this instance's optimizer state before the first step, in its place between updates."""
        self._optimizer.check(*self._shapes_of(variables))
        return self._placed(self._compiled(self.begun), variables, self.first)

    def adopt(self, optimizer_state: OptimizerState) -> OptimizerState:
        """Return this instance's part of a whole optimizer state; used instead of `init`."""
        if self._state_shards is None:
            return self._placed(lambda: optimizer_state)
        return self._placed(self._compiled(self._state_shards.take), optimizer_state, self.first)

    def cut_anew(self, optimizer_state: OptimizerState, rows: Rows, had: Holding) -> OptimizerState:
        """Return this instance's part, and copies, for the present spread of the replicas. Collective.

        Args:
            optimizer_state: Parts for an earlier spread.
            rows: Source of parts.
            had: Holding of this instance in that spread.
        """
        if self._state_shards is None:
            return optimizer_state
        return self._placed(partial(self._state_shards.cut_anew, rows=rows, had=had), optimizer_state)

    def whole(self, optimizer_state: OptimizerState) -> OptimizerState:
        """Return the optimizer state for checkpoints, with a `PartOfArray` for each array that is here only in part."""
        return optimizer_state if self._state_shards is None else self._state_shards.whole(optimizer_state)

    @property
    def has_parts(self) -> bool:
        """Whether this instance keeps only a part of the optimizer state."""
        return self._state_shards is not None

    @property
    def is_outdated(self) -> bool:
        """Whether it has parts for another spread of the replicas than the present one."""
        return self.has_parts and self._holding.spread != self._replicas.spread

    def wait(self) -> None:
        """Wait until the last update has read its mean gradients."""
        if self._reading is not None:
            self._reading.block_until_ready()

    def _placed(self, init: Function, *arguments: Tree) -> OptimizerState:
        """Return the result of `init` in the place of optimizer state between updates.

        It is committed to that device, as results of `apply` are, because JAX compiles again for uncommitted arguments.
        """
        device = self._replicas.variables_device
        with jax.default_device(device):
            return self.offloaded(jax.device_put(init(*arguments), device))

    def _compiled(self, function: Function) -> Function:
        return self.in_turn(jit(function))

    def in_turn(self, program: jax.stages.Wrapped) -> Function:
        """Return the program, which only one instance of the host compiles if executables are kept."""
        return compiled_in_turn(program, self._replicas.devices.executables)

    def _shapes_of(self, variables: Variables) -> tuple[Gradients, Variables]:
        """Return the shapes and dtypes of the gradients that the optimizer gets, and of the variables."""
        leaves, structure = jax.tree.flatten(variables)
        dtypes = accumulator_dtypes(variables, self._settings.gradient_dtype)
        given = [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        return jax.tree.unflatten(structure, given), shapes_of(variables)

    def _gradients(self, variables: Variables, means: Gradients, control: jax.Array) -> tuple[Gradients, jax.Array]:
        """Return the mean gradients in the form that the optimizer gets, and their norm."""
        leaves, structure = jax.tree.flatten(means)
        divisors = [jax.lax.bitcast_convert_type(control[LOSS_SCALE], jnp.float32)] if self._settings.unscales else []
        if (weight := weight_of(control)) is not None:
            divisors.append(weight)
        if divisors:
            leaves = [_divided(leaf, divisors) for leaf in leaves]
        dtypes = accumulator_dtypes(variables, self._settings.gradient_dtype)
        leaves = [jnp.asarray(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        # Behind a barrier, so that the sums have the same bits whatever else is done with the gradients.
        squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.lax.optimization_barrier(leaves)]
        return jax.tree.unflatten(structure, leaves), jnp.sqrt(sum(squares, start=jnp.zeros(())))

    def _adding(self, bits_of: Callable[[int, jax.Array], jax.Array]) -> Arithmetic:
        """Return the arithmetic of an update, with random bits for stochastic rounding: see `add_stochastically`."""
        if not self._settings.rounds_stochastically:
            return Arithmetic()
        return Arithmetic(lambda variables, changes: add_stochastically(variables, changes, bits_of))

    def _bits(self, number: int, shape: tuple[int, ...], control: jax.Array) -> jax.Array:
        """Return random bits for a variable in a step, the same on every instance."""
        own = jax.random.fold_in(jax.random.key(self._settings.seed), _ROUNDING)
        key = jax.random.fold_in(jax.random.fold_in(own, control[STEP]), number)
        return jax.random.bits(key, shape, jnp.uint32)

    # ---- the place of the state

    def offloaded(self, optimizer_state: OptimizerState) -> OptimizerState:
        """Move the state to its place between updates."""
        return self._moved(optimizer_state, HOST_MEMORY)

    def on_device(self, optimizer_state: OptimizerState) -> OptimizerState:
        """Move the state to the device of the update."""
        return self._moved(optimizer_state, None)

    def _moved(self, optimizer_state: OptimizerState, kind: str | None) -> OptimizerState:
        if not self._settings.offloads_state:
            return optimizer_state
        device = self._replicas.variables_device
        return jax.device_put(optimizer_state, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))


def _divided(leaf: Leaf, divisors: Sequence[jax.Array]) -> jax.Array:
    """Return an array divided by one scalar after another, with the same bits for a part and for the whole.

    XLA multiplies by the reciprocal of a scalar instead, or does not, depending on shapes and on the rest of the
    program. It does not see here that all elements are divided by one number.
    """
    quotient = widened(leaf)
    for divisor in divisors:
        quotient = quotient / jnp.where(quotient == quotient, divisor, 1)  # NaN stays NaN
    return quotient


@final
class WholeStateUpdate(VariableUpdate):
    """The update with whole optimizer state on every instance, by the same program for every optimizer.

    Between updates each instance has all of the state, or (local replicas / R) of it. In the second case instances send
    their parts to each other before each update.

    Args:
        replicas: Replicas whose variables are updated.
        optimizer: An optax gradient transformation, or a `StepOptimizer`.
        settings: Settings; arrays with fewer elements than its `min_elements` are whole on every instance.
        variables: None if each instance keeps all of the state. Otherwise the trained variables; shapes and dtypes are
            enough.
    """

    def __init__(
        self, replicas: Replicas, optimizer: AnyOptimizer, settings: UpdateSettings, variables: Variables = None
    ) -> None:
        super().__init__(replicas, optimizer, settings)
        self._jitted = jit(self.traced, donate_argnums=(0, 1))
        self._program = self.in_turn(self._jitted)
        self._is_plain = variables is None and not settings.offloads_state
        if variables is not None:
            shards = shards_of(replicas, settings.min_elements, keeps_copies=True)
            shapes = jax.eval_shape(self._optimizer.init, variables)
            is_cut = jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, np.number) and shards.divides(leaf), shapes)
            self._state_shards = ShardedTree(replicas, shards, shapes, is_cut)
            self._cut = self._compiled(self._state_shards.take)

    @override
    def begun(self, variables: Variables, first: jax.Array) -> OptimizerState:
        state = self._optimizer.init(variables)
        if self._state_shards is None:
            return state
        # Behind a barrier: if XLA fused it with the cut, it could round differently.
        return self._state_shards.take(jax.lax.optimization_barrier(state), first)

    @override
    def prepare(self, optimizer_state: OptimizerState) -> OptimizerState:
        """Return the whole optimizer state on the device. Collective if the state is in parts."""
        if self._is_plain:
            return optimizer_state
        state = self.on_device(optimizer_state)
        return state if self._state_shards is None else self._gathered(self._state_shards.whole(state))

    @override
    def compute(self, variables: Variables, prepared: OptimizerState, means: Gradients, control: Leaf) -> Updated:
        variables, state, self._reading = self._program(variables, prepared, means, control)
        if self._is_plain:
            return Updated(state, variables)
        if self._state_shards is not None:
            state = self._cut(state, self.first)
        return Updated(self.offloaded(state), variables)

    def _gathered(self, whole: OptimizerState) -> OptimizerState:
        leaves, structure = jax.tree.flatten(whole)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, PartOfArray):
                array = leaf.gather(f"optimizer state/{number}")
                leaves[number] = jax.device_put(array, self._replicas.variables_device, may_alias=False)
        return jax.tree.unflatten(structure, leaves)

    @override
    def programs(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: np.ndarray
    ) -> Mapping[str, jax.stages.Traced]:
        state = optimizer_state if self._state_shards is None else self._state_shards.shapes
        return {"update": self._jitted.trace(*shapes_of((variables, state, means)), control)}

    def traced(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: jax.Array
    ) -> tuple[Variables, OptimizerState, jax.Array]:
        """Return new variables, new optimizer state, and a token that is ready when they are; traceable."""
        gradients, norm = self._gradients(variables, means, control)
        arithmetic = self._adding(lambda number, leaf: self._bits(number, leaf.shape, control))
        known = Known(norm, loss_of(control))
        variables, optimizer_state = self._optimizer.apply(gradients, optimizer_state, variables, known, arithmetic)
        return variables, optimizer_state, jnp.zeros(())
