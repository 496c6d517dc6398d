"""The base class of strategies: replicas spread over instances, programs that run once per replica, and reductions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from collectives import Communicator
from collectives.instruments import Instruments
from popdist.instance import Instance
from popdist.records import Progress
from popdist.records.recording import note_question
from popdist.switches import require_switches
from strategies.argument_checks import Axis, positive
from strategies.data.casts import DTypes
from strategies.data.datasets import DistributedDataset
from strategies.data.iterators import Lockstep
from strategies.data.layout import Remainder
from strategies.data.sources import InputContext
from strategies.defaults import Defaults, current_defaults_of
from strategies.errors import DeviceError
from strategies.extended import StrategyExtended
from strategies.jax.feeds.drawing import Iterators, drawn
from strategies.jax.programs.captures import Reads
from strategies.jax.programs.program import NOTHING_HELD, DeviceProgram, HeldState
from strategies.jax.programs.xla_pitfalls import refuse_cut_integers, refuse_float64
from strategies.jax.replicas.devices import borrow
from strategies.jax.replicas.gathering import concatenated
from strategies.jax.replicas.membership import Membership
from strategies.jax.replicas.replica_context import refuse_in_replica, replica_context
from strategies.jax.replicas.replicas import Replicas, as_jax_would
from strategies.jax.replicas.variables import (
    MirroredVariable,
    Synchronization,
    SyncOnReadVariable,
    make_variable,
    values_of,
)
from strategies.keras_in_scope import keras_in_scope, keras_room
from strategies.per_replica import PerReplica, Shared
from strategies.typing import Data, Element, Function, Leaf, Tree

Same = TypeVar("Same")

_scope: ContextVar[Strategy | None] = ContextVar("strategy", default=None)


class Strategy(ABC):
    """R replicas of one program, spread over instances; what they compute does not depend on how.

    Programs use `IPUStrategy`, `PopDistStrategy`, `IPUMultiWorkerStrategy` or `IPUHorovodStrategy`, which choose a
    membership and are otherwise this class.

    Args:
        membership: who takes part, and which replicas this process drives.
        progress: the line to its supervisor.
        add_cross_replica_reductions: whether reductions inside compiled functions are carried out.
        variables_on_host: whether variables and optimizer state live in host memory.

    Attributes:
        progress: see above.

    Raises:
        TypeError: a switch is not True or False.
        DeviceError: its defaults keep this process from devices.
    """

    @abstractmethod
    def __init__(
        self,
        membership: Membership,
        progress: Progress | None = None,
        add_cross_replica_reductions: bool = True,
        variables_on_host: bool = False,
    ) -> None:
        if not membership.defaults.attaches:
            raise DeviceError(
                f"device_connection.type is NEVER in the configuration in force, and {type(self).__name__} would run "
                "programs; make it ON_DEMAND, or call strategies.config.reset_ipu_configuration()"
            )
        require_switches(  # the original's first argument is the name of a device, which would count as true
            ", and devices have no names here",
            add_ipu_cross_replica_reductions=add_cross_replica_reductions,
            variables_on_host=variables_on_host,
        )
        self._replicas = Replicas(
            type(self).__name__, membership, progress, add_cross_replica_reductions, variables_on_host
        )
        self.progress = self._replicas.progress
        self._iterators = Iterators()

    @property
    def defaults(self) -> Defaults:
        """The defaults for trainers, pipelines, data sets and feeds that are made for this strategy.

        They are those that the strategy was given. If it was given none, they are those of the configuration that is in
        force (`strategies.config`) when something is made for it.
        """
        return self.replicas.defaults

    # ---- who is there

    @property
    def replicas(self) -> Replicas:
        """All replicas, for what is built on strategies: a step, a checkpoint, a variable."""
        return self._replicas

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the replicas of all instances, also after some were lost."""
        return self._replicas.num_replicas_in_sync

    @property
    def variables_on_host(self) -> bool:
        """Whether variables and optimizer state live in host memory."""
        return self._replicas.variables_on_host

    @property
    def instance(self) -> Instance:
        """The instance with the replicas that this process drives, as the instances are numbered now."""
        return self.replicas.instance

    @property
    def communicator(self) -> Communicator:
        """Connects the instances that are left."""
        return self.replicas.communicator

    @property
    def instruments(self) -> Instruments:
        """The instruments attached to this instance."""
        return self.replicas.instruments

    @property
    def num_instances(self) -> int:
        """n, the processes that drive them."""
        note_question("strategy.num_instances")
        return self.replicas.num_instances

    @property
    def instance_index(self) -> int:
        """The index of this instance, 0 to n - 1."""
        note_question("strategy.instance_index")
        return self.replicas.instance_index

    @property
    def local_replicas(self) -> range:
        """The global indices of this instance's replicas."""
        note_question("strategy.local_replicas")
        return self.replicas.local_replicas

    @property
    def is_chief(self) -> bool:
        """Whether this is the instance that prints and writes for all of them: instance 0, as they are numbered now.

        Where instances are lost and the others carry on it may be another one later, so ask when it matters, or let
        `on_chief` ask. It is none where some carry on after the chief has come to its end.
        """
        note_question("strategy.is_chief")
        return self.replicas.is_chief

    def on_chief(self, function: Callable[[], object]) -> None:
        """Have one instance do what is to be done once, such as to report a result; a collective call.

        Returns on all instances when it is done. Where the chief is lost meanwhile and the others carry on, the next
        one does it from the beginning, also what the first had just done.

        Args:
            function: called on the chief only, so it must call no collective; what it returns is dropped.

        Raises:
            BaseException: on the chief, what `function` raises.
            PeerLostError: on the others, if the chief is lost and they cannot carry on.
        """
        refuse_in_replica("strategy.on_chief")
        self.replicas.on_chief(function)

    @property
    def extended(self) -> StrategyExtended:
        """The role of this instance, with the original's names; the chief writes files."""
        return StrategyExtended(self.is_chief, self.is_chief, self.reduce)

    def update_ipu_config(self, config: Tree) -> Tree:
        """Write into a configuration which of how many processes this is.

        Semantics: the original's method of that name, which its documentation says returns the configuration.

        Args:
            config: an `IPUConfig`; it is changed, and returned.
        """
        distribution = config.experimental.multi_replica_distribution
        distribution.process_count = self.replicas.num_instances
        distribution.process_index = self.replicas.instance_index
        return config

    def for_stages(self, stages: int) -> Strategy:
        """Return the strategy for a model whose replicas span so many devices, which is known only when it is made.

        It is this one, unless the number of replicas follows from that of the devices: then it is another one, of fewer
        replicas that span more.

        Raises:
            TypeError, ValueError: if the number is not positive, or there are too few devices.
        """
        positive("stages", stages)
        return self

    # ---- instances that are lost

    @property
    def can_carry_on(self) -> bool:
        """Whether the other instances can go on when one is lost: under poprun --on-failure shrink."""
        return self.replicas.can_carry_on

    def carry_on(self) -> None:
        """Take over, with the other instances that are left, the replicas of those that are lost; a collective call.

        The number of replicas stays; each instance drives other ones than before, also of data sets.

        Raises:
            LifeCycleError: the job cannot go on.
        """
        self.replicas.carry_on()

    # ---- values

    def variable(
        self, initial: Tree, synchronization: Synchronization = "on_write", aggregation: str = "mean"
    ) -> MirroredVariable | SyncOnReadVariable:
        """Make a variable that begins with instance 0's `initial` everywhere; a collective call.

        Args:
            initial: a pytree of arrays, or a function that returns one.
            synchronization: "on_write" for one that is the same on all replicas, "on_read" for one that each replica
                has of its own until it is read.
            aggregation: how replicas' values are reduced: "sum", "mean" or "only_first_replica".
        """
        refuse_in_replica("strategy.variable")
        return make_variable(self.replicas, initial, synchronization, aggregation)

    def per_replica(self, function: Callable[[int], Tree]) -> PerReplica:
        """Return `function(r)` for the global index r of each local replica."""
        return self.replicas.per_replica(function)

    def dealt(self, tree: Tree) -> PerReplica:
        """Return each local replica's rows of a tree in which they lie one after another along the first axis.

        A batch of a distributed data set need not be given to it, but what is computed of one outside of `run`.

        Args:
            tree: a pytree of arrays `[len(local_replicas) * rows, ...]`.

        Returns:
            `PerReplica` of arrays `[rows, ...]`.

        Raises:
            ValueError: if the arrays cannot be divided among the local replicas, or are a batch for others.
        """
        return self.replicas.dealing.split(tree)

    def shared(self, tree: Tree) -> Shared:
        """Return a pytree that `run` gives whole to every replica, without asking whether it is a batch."""
        return Shared(tree)

    def broadcast(self, tree: Same, root: int = 0) -> Same:
        """Return the values of instance `root` on every instance, as JAX arrays.

        Raises:
            LayoutMismatchError: on all instances if the trees differ in names, shapes or dtypes; it names the leaf.
            TypeError: a leaf is a `PerReplica`.
            UnsupportedBufferError: for a masked array.
            ValueError: integers do not fit into 32 bits, where JAX has no more.
        """
        refuse_in_replica("strategy.broadcast")
        return self.replicas.broadcast(tree, root)

    def reduce(self, op: str, value: Tree, axis: Axis | None = None) -> Tree:
        """Reduce over all replicas of all instances, in the order of the tree; the same result on every instance.

        Args:
            op: "sum" (of integers: wraps around where it does not fit), "mean" (of integers: truncated), "min" or
                "max".
            value: what `run` or `per_replica` returned, a pytree of such, or one that all local replicas share; see
                `run` for batches.
            axis: also over this axis of each replica's value, or several: every part along it counts once, so a mean
                is that over all rows of all replicas, which may have different numbers of them. The tree is then one
                over all rows, replica by replica. For long axes reduce within `run` first.

        Returns:
            A pytree of NumPy arrays.

        Raises:
            TypeError: if an axis is no whole number.
            ValueError: for another op, if the replicas' pytrees differ, if the value cannot be dealt out, see `run`; if
                there is no such axis, or nothing along it.
        """
        refuse_in_replica("strategy.reduce")
        return self.replicas.reduce(op, values_of(value), axis)

    def gather(self, value: Tree, axis: int) -> Tree:
        """Return the values of all replicas one after another along an axis, in replica order, on every instance.

        Args:
            value: see `reduce`; replicas may have different lengths along the axis, and are alike otherwise.
            axis: counted from the end where it is negative.

        Returns:
            A pytree of NumPy arrays.

        Raises:
            LayoutMismatchError: if the replicas of instances differ in anything else than these lengths.
            TypeError: if the axis is no whole number.
            UnsupportedBufferError: for what instances do not exchange, such as strings.
            ValueError: see `reduce`; or the values are scalars, which have no axis.
        """
        refuse_in_replica("strategy.gather")
        return concatenated(self.replicas, values_of(value), axis)

    # ---- programs

    def run(self, function: Function, args: Sequence[Tree] = (), kwargs: dict[str, Tree] | None = None) -> Tree:
        """Run `function` once per local replica, compiled, all replicas in lockstep.

        Args:
            function: a JAX-traceable function; inside it `get_replica_context` gives the replica's index and
                collectives over all replicas. Compiled once per function object and argument shapes, and anew when
                something has changed that it reads from outside; models of Keras may be read and assigned.
            args: pytrees. Of a `PerReplica` or an "on_read" variable, wherever it stands, each replica gets its value;
                of an array of a batch of `distribute_dataset` its rows; of all else the whole. A new array that is as
                long as such a batch is refused where there are several local replicas: say `dealt` or `shared` of it.
                From an iterator, of a data set or an infeed or of Python, the function draws with `next` while it runs;
                it belongs to programs from then on.
            kwargs: likewise.

        Returns:
            `PerReplica` with the results.

        Raises:
            RuntimeError: inside a function that `run` runs; or the function reads what is another thing each time, such
                as a clock or an iterator of a closure.
            TypeError: `args` is no tuple or list, or `kwargs` no dictionary; "Unsupported data type" for float64
                arguments or results, unless JAX has 64 bits enabled.
            UnsupportedBufferError: a `PerReplica` has a masked array.
            ValueError: a `PerReplica` has not one value per local replica, or its values differ in shape; integers do
                not fit into 32 bits, where JAX has no more; a batch or a `PerReplica` is for other replicas; nobody can
                tell whether an array is a batch.
        """
        refuse_in_replica("strategy.run")
        kwargs = kwargs or {}
        _require_arguments(args, kwargs)
        given = self._iterators.placed([*args, *kwargs.values()])
        named = [self.replicas.dealing.deal_argument(values_of(value)) for value in given]
        program, state = self._program(function, tuple(kwargs))
        is_split = [isinstance(value, PerReplica) for value in named]
        values = [
            _alike(value.values) if split else [self._shared(value)] * len(self.local_replicas)
            for value, split in zip(named, is_split, strict=True)
        ]
        held = self._shared(state.values)
        arguments = [
            (np.int32(replica), held, *of_replica)
            for replica, *of_replica in zip(self.local_replicas, *values, strict=True)
        ]
        executables = [
            program.compiled(self.replicas.devices.device_of(position), *of_replica)
            for position, of_replica in enumerate(arguments)
        ]
        if not state.is_current:  # the function has built a model, and nothing has run yet
            return self.run(function, args, kwargs)
        results = self._run(executables, arguments)
        state.put([changes for _, changes in results])
        return PerReplica(tuple(result for result, _ in results), self.local_replicas)

    def experimental_run_v2(self, *arguments: object, **named: object) -> NoReturn:
        """Refuse the name that `run` once had.

        Raises:
            RuntimeError: always, as of the original.
        """
        raise RuntimeError(
            "strategy.experimental_run_v2 is gone, here as in the original; call strategy.run with the same arguments"
        )

    def _shared(self, value: Tree) -> Tree:
        """Return a value that all replicas get whole; on which device it lies does not matter."""
        refuse_cut_integers(refuse_float64(value))
        return jax.tree.map(lambda leaf: borrow(leaf) if _is_on_one_device(leaf) else leaf, value)

    def _run(self, executables: Sequence[jax.stages.Compiled], arguments: Sequence[Sequence[Tree]]) -> list[Tree]:
        """Run the program on the arguments of each local replica, and return the results."""

        def compute(position: int) -> Tree:
            result, changes, _ = jax.block_until_ready(executables[position](*arguments[position]))
            return jax.tree.map(borrow, result), changes

        reducer = self.replicas.reducer
        reducer.begin()
        with reducer.ending():
            results = self.replicas.devices.each(compute, reducer.fail)
        if reducer.last_error is not None:  # a feed has failed, and the program went on without it to its end
            raise reducer.last_error
        return results

    def _program(self, function: Function, names: tuple[str, ...]) -> tuple[DeviceProgram, HeldState]:
        """Return the compiled function, and the variables that it has besides its arguments."""
        key = function, names
        found = self.replicas.programs.get(key)
        if found is not None and all(is_same() for is_same in found[2]):
            return found[:2]
        objects = Reads(function, follows_keras=True).of_keras
        state = keras_room().KerasState(objects, self.replicas) if objects else NOTHING_HELD
        constants: list[Callable[[], bool]] = [lambda: state.is_current]
        program = self.replicas.devices.compile(self._for_one_replica(function, names, state, constants))
        self.replicas.programs[key] = program, state, constants
        return program, state

    def _for_one_replica(
        self, function: Function, names: tuple[str, ...], state: HeldState, constants: list[Callable[[], bool]]
    ) -> Function:
        def one_replica(index: jax.Array, held: Sequence[Tree], *values: Tree) -> Tree:
            first_named, values = len(values) - len(names), tuple(drawn(list(values)))
            context = self.replicas.new_context(index, "run", is_watched=True)
            reads = Reads(function, follows_keras=True)
            with replica_context(context), state.inside(held) as changes:
                result = function(*values[:first_named], **dict(zip(names, values[first_named:], strict=True)))
                made = changes()
            reads.settle()
            constants.extend([*context.feeds.constants, reads.is_same])
            # With the token the program has a result that is not ready before its last feed.
            results = (refuse_float64(result, "output"), made, context.feeds.token)
            return jax.tree.map(jnp.asarray, results)

        return one_replica

    # ---- data

    def distribute_dataset(
        self,
        source: Data,
        batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        remainder: Remainder = "drop",
        gradient_accumulation_count: int = 1,
        transfer_dtype: DTypes = None,
        prefetch: int | None = None,
    ) -> DistributedDataset:
        """Give each replica its part of a data set; see `DistributedDataset`.

        With several instances, taking a batch is a collective call unless `source` is a pytree of arrays or
        random access.

        Args:
            source: a pytree of arrays, a `grain.MapDataset` or `GrainSource` or another object with a length and `[i]`,
                an object with `shard(n, i)`, an iterable, or `PerReplica` iterables.
            batch_size: elements per replica and micro-batch.
            seed: of the shuffle, the same on all instances.
            shuffle: whether arrays and random access are shuffled.
            remainder: "drop" or "pad" what does not fill the last global batch.
            gradient_accumulation_count: micro-batches that each replica takes in one step, one after another.
            transfer_dtype: a smaller dtype in which arrays travel to the devices, or one for each entry of a batch;
                `strategies.casting` casts them back there.
            prefetch: how many batches are prepared ahead; None: two, or none where `defaults` say so.
        """
        dataset = DistributedDataset(
            source,
            batch_size=batch_size,
            total_replicas=self.num_replicas_in_sync,
            local_replicas=self.local_replicas,
            seed=seed,
            shuffle=shuffle,
            remainder=remainder,
            gradient_accumulation_count=gradient_accumulation_count,
            transfer_dtype=transfer_dtype,
            prefetch=prefetch if prefetch is not None else 2 if self.defaults.prefetches else 0,
            place=lambda batch: self.replicas.dealing.batch(batch),
            communicator=self.communicator,
            instruments=self.instruments,
        )
        self.replicas.adopt(dataset, gradient_accumulation_count * batch_size)
        return dataset

    def distribute_datasets_from_function(
        self, function: Callable[[InputContext], Iterable[Element]]
    ) -> Iterable[Element]:
        """Return the data set that `function` makes for this instance; with one instance untouched.

        With several, taking a batch is a collective call: all end at the step at which the first of them has none,
        with a warning.

        Args:
            function: called once per instance with its `InputContext`; returns an iterable of instance batches,
                whose leaves have the batches of all local replicas one after another along the first axis.
        """
        batches = function(InputContext(self.num_instances, self.instance_index, self.num_replicas_in_sync))
        return batches if self.num_instances == 1 else Lockstep(batches, self.communicator)

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make this the current strategy, which `get_strategy` returns; models of Keras made inside are its own.

        Raises:
            ImportError: by the first `import keras` of a program while a scope is open; import Keras before the scope.
        """
        with keras_in_scope(get_strategy), current_defaults_of(lambda: self.defaults):
            token = _scope.set(self)
            try:
                yield self
            finally:
                _scope.reset(token)


def get_strategy() -> Strategy | None:
    """Return the strategy whose scope this is, or None."""
    return _scope.get()


def _require_arguments(args: object, kwargs: object) -> None:
    """Refuse a value in the place of a tuple of them, before its parts count as arguments."""
    if not isinstance(args, tuple | list):
        raise TypeError(f"args is {args!r}, a {type(args).__name__}; give a tuple, such as args=(value,)")
    if not isinstance(kwargs, dict):
        raise TypeError(f"kwargs is {kwargs!r}, a {type(kwargs).__name__}; give a dictionary")


def _is_on_one_device(leaf: Leaf) -> bool:
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and len(leaf.devices()) == 1 and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _alike(values: Sequence[Tree]) -> list[Tree]:
    """Return the replicas' values on the host, for one program."""
    for value in values:
        refuse_float64(value)
    hosted = [jax.tree.map(as_jax_would, value) for value in values]
    jax.tree.map(_check_shapes, *hosted)
    return hosted


def _check_shapes(first: np.ndarray, *others: np.ndarray) -> None:
    for leaf in others:
        if leaf.shape != first.shape:
            raise ValueError(
                f"the replicas' values have different shapes, {list(first.shape)} and {list(leaf.shape)}; "
                "one compiled program runs on all of them, so make them alike"
            )
