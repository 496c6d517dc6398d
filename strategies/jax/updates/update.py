"""The update of a step: the optimizer, applied once per instance to the mean gradients of all replicas."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.typing import DTypeLike
from typing_extensions import override

from strategies.errors import StrategyError
from strategies.exchange.choice import DevicePath
from strategies.exchange.flat import ALIGNMENT_BYTES, ShardedArrays, Shards
from strategies.exchange.shard_fetcher import ShardFetcher
from strategies.jax.gradients.gradient_programs import flatten
from strategies.jax.gradients.model_state import LOSS_SCALE, STEP, accumulator_dtypes, loss_of, weight_of, widened
from strategies.jax.options import StepOptions
from strategies.jax.programs.compilation import compiled_once_per_host, jit, shapes_of
from strategies.jax.programs.jaxpr import first_across_elements, is_read, operations
from strategies.jax.replicas.devices import borrow
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.variables import PartOfArray, ShardedTree, replica_rows, shards_of, take
from strategies.jax.updates.optimizers import (
    AS_WRITTEN,
    AnyOptimizer,
    Arithmetic,
    OptaxOptimizer,
    StepFacts,
    StepOptimizer,
)
from strategies.stored_shards import StoredReplicas
from strategies.typing import Function, Gradients, Leaf, OptimizerState, Tree, Variables

# ---- stochastic rounding

_FRACTION_BITS = {"bfloat16": 16, "float16": 13}  # bits of float32's fraction that the dtype lacks
_SMALLEST_NORMAL = {"bfloat16": 2.0**-126, "float16": 2.0**-14}


def round_stochastically(values: jax.Array, dtype: DTypeLike, bits: jax.Array) -> jax.Array:
    """Round to one of the two neighbours in `dtype`, the nearer one more probably, so that the mean is exact.

    Args:
        values: float32 values.
        dtype: bfloat16 or float16. float16 values below its normal range are rounded to nearest.
        bits: Random uint32, of the shape of the values.

    Returns:
        Values of `dtype`, of the same shape. Infinity and NaN stay as they are.
    """
    dropped = _FRACTION_BITS[jnp.dtype(dtype).name]
    noise = bits >> (32 - dropped)
    rounded = (jax.lax.bitcast_convert_type(values, jnp.uint32) + noise) >> dropped << dropped
    truncated = jax.lax.bitcast_convert_type(rounded, jnp.float32)
    is_ordinary = jnp.isfinite(values) & (jnp.abs(values) >= _SMALLEST_NORMAL[jnp.dtype(dtype).name])
    return jnp.where(is_ordinary, truncated, values).astype(dtype)


def add_stochastically(
    variables: Variables, changes: Gradients, bits_of: Callable[[int, jax.Array], jax.Array]
) -> Variables:
    """Add changes in float32, like `optax.apply_updates`, and round variables of 16 bits stochastically.

    Args:
        variables: Pytree of arrays.
        changes: Pytree of the same structure.
        bits_of: Function `(number, leaf)` that returns the random bits for a leaf.
    """
    leaves, structure = jax.tree.flatten(variables)
    changed = []
    for number, (leaf, change) in enumerate(zip(leaves, jax.tree.leaves(changes), strict=True)):
        if leaf.dtype.name in _FRACTION_BITS:
            total = leaf.astype(jnp.float32) + change.astype(jnp.float32)
            changed.append(round_stochastically(total, leaf.dtype, bits_of(number, leaf)))
        else:
            changed.append((leaf + change).astype(leaf.dtype))
    return jax.tree.unflatten(structure, changed)


# ---- clipping, for whole and for sharded optimizer state


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Clip gradients by their global norm (Pascanu et al., 2013).

    It is `optax.clip_by_global_norm` as the first of a chain, with the same bits whether or not optimizer state is
    sharded: `Trainer` gives it the norm of all mean gradients, of which a replica may have only a part.

    Example::

        optimizer = optax.chain(strategies.clip_by_global_norm(1.0), optax.adam(1e-3))

    Args:
        max_norm: Largest norm, above 0.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be above 0")

    def update(
        updates: Gradients, state: OptimizerState, params: Variables = None, *, gradient_norm: jax.Array, **_: object
    ) -> tuple[Gradients, OptimizerState]:
        factor = jnp.where(gradient_norm < max_norm, 1.0, max_norm / gradient_norm)
        return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def in_place(means: Gradients, device: jax.Device) -> Gradients:
    """Return arrays of JAX in the memory of host arrays, made once for all steps.

    JAX turns every NumPy argument of a program into an array of its own, at each call: 2 to 5 us each.

    Args:
        means: Host arrays, which live as long as the results. A program reads the elements that they have when it runs.
        device: Device of the programs. If it is not the host's CPU, or XLA cannot read an array in place, the array
            itself is returned.
    """
    return means if device.platform != "cpu" else jax.tree.map(_in_place, means)


def _in_place(mean: np.ndarray) -> Leaf:
    address: int = mean.__array_interface__["data"][0]
    is_exportable = mean.dtype.kind in "fiu" and mean.dtype.isbuiltin == 1 and mean.flags.c_contiguous
    if not mean.size or not is_exportable or address % ALIGNMENT_BYTES:
        return mean
    return jax.dlpack.from_dlpack(mean, copy=False)


HOST_MEMORY = "pinned_host"
_ROUNDING = 1 << 31  # no step has this number, so the keys for rounding differ from those of replicas


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
        options: Options of the step.

    Attributes:
        mean_shards: Shards of the mean gradients, if `apply` takes this instance's part only; None if it takes whole
            means.
        path: Path that gathers parts on devices; None if they are gathered on the host.
        first: First replica of each block of whose parts this instance has the optimizer state.
    """

    def __init__(self, replicas: Replicas, optimizer: AnyOptimizer, options: StepOptions) -> None:
        self.mean_shards: Shards | None = None
        self.path: DevicePath | None = None
        self._state_shards: ShardedTree | None = None  # None: every instance has all of the optimizer state
        self._replicas = replicas
        self._optimizer = optimizer if isinstance(optimizer, StepOptimizer) else OptaxOptimizer(optimizer)
        self._options = options
        self._stored = replicas.stored
        self.first = np.array(self._stored.starts, np.int32)
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

    def restored(self, variables: Variables, updated: Updated, rows: ShardFetcher) -> Variables:
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

    def cut_anew(self, optimizer_state: OptimizerState, rows: ShardFetcher, had: StoredReplicas) -> OptimizerState:
        """Return this instance's part, and copies, for the present spread of the replicas. Collective.

        Args:
            optimizer_state: Parts for an earlier spread.
            rows: Source of parts.
            had: Stored replicas of this instance in that spread.
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
        """Whether its shards belong to an earlier spread of the replicas."""
        return self.has_parts and self._stored.spread != self._replicas.spread

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
        return self.compiled_once(jit(function))

    def compiled_once(self, program: jax.stages.Wrapped) -> Function:
        """Return the program, which only one instance of the host compiles if executables are kept."""
        return compiled_once_per_host(program, self._replicas.devices.executables)

    def _shapes_of(self, variables: Variables) -> tuple[Gradients, Variables]:
        """Return the shapes and dtypes of the gradients that the optimizer gets, and of the variables."""
        leaves, structure = jax.tree.flatten(variables)
        dtypes = accumulator_dtypes(variables, self._options.gradient_accumulation_dtype)
        given = [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        return jax.tree.unflatten(structure, given), shapes_of(variables)

    def _gradients(self, variables: Variables, means: Gradients, control: jax.Array) -> tuple[Gradients, jax.Array]:
        """Return the mean gradients in the form that the optimizer gets, and their norm."""
        leaves, structure = jax.tree.flatten(means)
        divisors = []
        if self._options.scaling is not None:
            divisors.append(jax.lax.bitcast_convert_type(control[LOSS_SCALE], jnp.float32))
        if (weight := weight_of(control)) is not None:
            divisors.append(weight)
        if divisors:
            leaves = [_divided(leaf, divisors) for leaf in leaves]
        dtypes = accumulator_dtypes(variables, self._options.gradient_accumulation_dtype)
        leaves = [jnp.asarray(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        # Behind a barrier, so that the sums have the same bits whatever else is done with the gradients.
        squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.lax.optimization_barrier(leaves)]
        return jax.tree.unflatten(structure, leaves), jnp.sqrt(sum(squares, start=jnp.zeros(())))

    def _adding(self, bits_of: Callable[[int, jax.Array], jax.Array]) -> Arithmetic:
        """Return the arithmetic of an update, with random bits for stochastic rounding: see `add_stochastically`."""
        if not self._options.stochastic_rounding:
            return Arithmetic()
        return Arithmetic(lambda variables, changes: add_stochastically(variables, changes, bits_of))

    def _bits(self, number: int, shape: tuple[int, ...], control: jax.Array) -> jax.Array:
        """Return random bits for a variable in a step, the same on every instance."""
        own = jax.random.fold_in(jax.random.key(self._options.seed), _ROUNDING)
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
        if not self._options.offload_optimizer_state:
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
        options: Options; arrays with fewer elements than `min_elements_for_sharding` are whole on every instance.
        variables: None if each instance keeps all of the state. Otherwise the trained variables; shapes and dtypes are
            enough.
    """

    def __init__(
        self, replicas: Replicas, optimizer: AnyOptimizer, options: StepOptions, variables: Variables = None
    ) -> None:
        super().__init__(replicas, optimizer, options)
        self._jitted = jit(self.traced, donate_argnums=(0, 1))
        self._program = self.compiled_once(self._jitted)
        self._is_plain = variables is None and not options.offload_optimizer_state
        if variables is not None:
            shards = shards_of(replicas, options.min_elements_for_sharding, keeps_copies=True)
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
        known = StepFacts(norm, loss_of(control))
        variables, optimizer_state = self._optimizer.apply(gradients, optimizer_state, variables, known, arithmetic)
        return variables, optimizer_state, jnp.zeros(())


# ---- sharded optimizer state (ZeRO: Rajbhandari et al., 2020): every replica keeps, and updates, its part

logger = logging.getLogger(__name__)

_PARTS = "parts of variables"


class AcrossElementsError(StrategyError):
    """An optimizer computes elements of one part from another part; it is handled inside of `updates`."""


@final
class ShardedStateUpdate(VariableUpdate):
    """The update with (local replicas / R) of the optimizer state on each instance; new variables are gathered.

    Args:
        replicas: Replicas whose variables are updated.
        optimizer: Optimizer that computes every element of the state and the changes from the same elements of the
            gradients, state and variables. Values that depend on all elements are in `StepFacts`.
        options: Options of the step.
        variables: Trained variables; shapes and dtypes are enough.

    Raises:
        AcrossElementsError: The optimizer looks across elements.
    """

    def __init__(self, replicas: Replicas, optimizer: AnyOptimizer, options: StepOptions, variables: Variables) -> None:
        super().__init__(replicas, optimizer, options)
        self._shards = shards_of(replicas, options.min_elements_for_sharding, keeps_copies=True)
        whole = shapes_of(variables)
        of_whole = self._trace(whole)
        self._check_elementwise(whole, of_whole)
        needs_norm = is_read(of_whole.jaxpr, of_whole.jaxpr.invars[-1])
        if replicas.communicator.scatters_reductions and not needs_norm and self._shards.blocks == 1:
            self.mean_shards = self._shards
        self._parts = ShardedArrays(self._shards, jax.tree.leaves(whole), _PARTS)
        self._state_shards = ShardedTree(replicas, self._shards, *self._shapes_of_state(whole))
        self._jitted = jit(self._divided, donate_argnums=(1,))
        self._divide = self.compiled_once(self._jitted)
        self._unite = jit(self._united, static_argnums=(2,), donate_argnums=(0,), keep_unused=True)

    @override
    def begun(self, variables: Variables, first: jax.Array) -> OptimizerState:
        return self._optimizer.init(self._take(variables, first))

    @override
    def prepare(self, optimizer_state: OptimizerState) -> OptimizerState:
        return self.on_device(optimizer_state)

    @override
    def compute(self, variables: Variables, prepared: OptimizerState, means: Gradients, control: Leaf) -> Updated:
        own, kept, small, state, self._reading = self._divide(variables, prepared, means, control, self.first)
        return Updated(self.offloaded(state), None, small, own, kept)

    @override
    def finish(self, variables: Variables, updated: Updated) -> Variables:
        """Return the new variables, put together from the parts of all instances. Collective."""
        leaves, structure = jax.tree.flatten(variables)
        for number, members in self._parts.members.items():
            gathered = self._gathered(number, updated.own[number])
            old, starts = [leaves[leaf] for leaf in members], self._parts.layout.buffers[number].starts
            with jax.default_device(self._replicas.variables_device):
                united, self._reading = self._unite(old, gathered, starts)
            for leaf, new in zip(members, united, strict=True):
                leaves[leaf] = new
        return self._with_whole(structure, leaves, updated)

    @override
    def restored(self, variables: Variables, updated: Updated, rows: ShardFetcher) -> Variables:
        leaves, structure = jax.tree.flatten(variables)
        everybody, shards, layout = range(self._shards.replicas), self._shards, self._parts.layout
        own, kept = ([borrow(buffer) for buffer in buffers] for buffers in (updated.own, updated.kept))
        for place, number in enumerate(self._parts.cut):
            leaf = leaves[number]
            parts = np.concatenate([layout.view(place, buffers) for buffers in (own, kept) if buffers])
            found = replica_rows(parts, self._stored)
            [whole] = rows.fetch([everybody], found, shards.part(leaf) * leaf.dtype.itemsize, f"variable {number}")
            flat = whole.reshape(-1).view(leaf.dtype)[: leaf.size]
            leaves[number] = jnp.array(flat.reshape(leaf.shape))
        return self._with_whole(structure, leaves, updated)

    def _with_whole(self, structure: Tree, leaves: list[jax.Array], updated: Updated) -> Variables:
        for number, new in zip(self._parts.uncut, updated.whole, strict=True):
            leaves[number] = new
        placed = jax.device_put(leaves, self._replicas.variables_device)  # committed, as the old variables were
        return jax.tree.unflatten(structure, placed)

    def _gathered(self, number: int, buffer: jax.Array) -> Leaf:
        """Return the parts of all instances in a buffer, one row for each instance. Collective."""
        if self.path is not None:
            return self.path.gather(f"{_PARTS}/{number}", buffer)
        self.wait()  # the previous variables may still be made from this memory
        return self._parts.gather(number, borrow(buffer), self._replicas.communicator)

    @override
    def programs(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: np.ndarray
    ) -> Mapping[str, jax.stages.Traced]:
        """Return the program that computes this instance's parts."""
        given = shapes_of((variables, optimizer_state, means))
        return {"update of parts": self._jitted.trace(*given, control, self.first)}

    # ---- programs

    def _take(self, tree: Tree, first: jax.Array) -> Tree:
        """Return this instance's parts, behind a barrier: if XLA fused them with the cut, it would round otherwise."""
        return jax.lax.optimization_barrier(jax.tree.map(lambda leaf: take(self._shards, leaf, first), tree))

    def _divided(
        self,
        variables: Variables,
        optimizer_state: OptimizerState,
        means: Gradients,
        control: jax.Array,
        first: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], list[jax.Array], Tree, jax.Array]:
        """Return new variables and optimizer state.

        They are this instance's parts in flat buffers, its copies of other parts in such buffers, the new variables
        that are not cut, the optimizer state, and a token.
        """
        whole, layout = jax.tree.leaves(variables), self._parts.layout
        parts = self._take(variables, first)
        gradients, known = self._known(variables, means, control, first)
        arithmetic = self._adding(lambda number, _: self._take(self._bits(number, whole[number].shape, control), first))
        shards, optimizer_state = self._optimizer.apply(gradients, optimizer_state, parts, known, arithmetic)
        leaves = jax.tree.leaves(shards)
        cut, small = ([leaves[number] for number in numbers] for numbers in (self._parts.cut, self._parts.uncut))
        zeros = [jnp.zeros(buffer.size, buffer.dtype) for buffer in layout.buffers]
        blocks = [jnp.split(leaf.reshape(-1), self._shards.blocks) for leaf in cut]
        own, *kept = (
            flatten(layout, [parts[block] for parts in blocks], None, zeros) for block in range(self._shards.blocks)
        )
        return own, kept[0] if kept else (), small, optimizer_state, jnp.zeros(())

    def _known(
        self, variables: Variables, means: Gradients, control: jax.Array, first: jax.Array
    ) -> tuple[Gradients, StepFacts]:
        """Return this instance's parts of the gradients, and the results that depend on all gradients."""
        _, norm = self._gradients(variables, means, control)
        if self.mean_shards is not None:
            norm = jnp.full_like(norm, jnp.nan)  # this would be the norm of a part; the optimizer does not read it

        def rest(mean: jax.Array, variable: jax.Array) -> jax.Array:  # some means are this instance's parts already
            return take(self._shards, mean, first) if mean.shape == variable.shape else mean

        # Cut before they are converted: if XLA fuses the conversion with the cut, it rounds the update differently.
        own = jax.lax.optimization_barrier(jax.tree.map(rest, means, variables))
        return self._gradients(variables, own, control)[0], StepFacts(norm, loss_of(control))

    def _united(
        self, old: Sequence[jax.Array], gathered: jax.Array, starts: tuple[int, ...]
    ) -> tuple[list[jax.Array], jax.Array]:
        """Return the new variables, from the parts of all instances in one buffer, in the memory of the old ones."""
        united = []
        for whole, start in zip(old, starts, strict=True):
            stop = start + self._shards.local * self._shards.part(whole)
            united.append(self._shards.join(gathered[:, start:stop], whole, jnp))
        return united, jnp.zeros(())

    # ---- whether the optimizer allows it

    def _check_elementwise(self, whole: Variables, of_whole: core.ClosedJaxpr) -> None:
        """Raise an AcrossElementsError if the optimizer, whose update is `of_whole`, looks across elements."""
        if self._optimizer.needs_whole:
            raise AcrossElementsError("the optimizer needs whole arrays")
        parts = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(self._shards.shape(leaf), leaf.dtype), whole)
        try:
            of_parts, of_others = self._trace(parts), self._trace(self._others(whole))
        except (TypeError, ValueError) as error:  # such as a product with a constant of a variable's shape
            raise AcrossElementsError(f"the optimizer's update takes no parts of variables ({error})") from error
        found = first_across_elements(of_parts) or first_across_elements(jax.make_jaxpr(self._optimizer.init)(parts))
        if found is None and not operations(of_whole) == operations(of_parts) == operations(of_others):
            found = "other operations or numbers for arrays of other shapes"
        if found is not None:
            raise AcrossElementsError(f"the optimizer's update has {found}, but a replica has a part of the elements")

    def _shapes_of_state(self, whole: Variables) -> tuple[Tree, Tree]:
        """Return the shapes of the whole optimizer state, and whether each follows from a variable's shape."""
        shapes, changed = (jax.eval_shape(self._optimizer.init, tree) for tree in (whole, self._others(whole)))
        return shapes, jax.tree.map(lambda one, other: one.shape != other.shape, shapes, changed)

    def _others(self, whole: Variables) -> Variables:
        """Return the shapes of the variables; each variable that is cut has the shape of a part of another size."""

        def other(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((leaf.size + 1, *[1] * (leaf.ndim - 1)), leaf.dtype)

        return jax.tree.map(lambda leaf: other(leaf) if self._shards.divides(leaf) else leaf, whole)

    def _trace(self, tree: Tree) -> core.ClosedJaxpr:
        """Return the equations of the update of a tree with these shapes."""
        state = jax.eval_shape(self._optimizer.init, tree)
        given, _ = self._shapes_of(tree)

        def update(
            gradients: Gradients, state: OptimizerState, variables: Variables, loss: jax.Array, norm: jax.Array
        ) -> tuple[Variables, OptimizerState]:
            return self._optimizer.apply(gradients, state, variables, StepFacts(norm, loss), AS_WRITTEN)

        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.make_jaxpr(update)(given, state, tree, scalar, scalar)


def update_for(
    replicas: Replicas, optimizer: AnyOptimizer, options: StepOptions, variables: Variables
) -> VariableUpdate:
    """Return the update of variables: sharded if the options ask for it and the optimizer allows it, else whole.

    Args:
        replicas: Replicas whose variables are updated. The part of a single replica is the whole state.
        optimizer: An optax gradient transformation, or a `StepOptimizer`.
        options: Options of the step.
        variables: Trained variables; shapes and dtypes are enough.
    """
    if not options.shards_state or replicas.num_replicas_in_sync == 1:
        return WholeStateUpdate(replicas, optimizer, options)
    try:
        return ShardedStateUpdate(replicas, optimizer, options, variables)
    except AcrossElementsError as error:
        logger.info("%s: its state is kept in parts, and put together for each update", error)
        return WholeStateUpdate(replicas, optimizer, options, variables)
