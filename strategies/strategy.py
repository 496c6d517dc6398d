"""The base class of strategies: replicas spread over instances, programs run once per replica, and reductions."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np

import strategies.trees as trees
from collectives import Communicator
from collectives.instruments import Instruments
from popdist.instance import Instance
from popdist.records.progress import ProgressPage
from popdist.records.recording import note_question
from popdist.switches import require_switches
from strategies.argument_checks import Axis, positive, wrong_type
from strategies.data.casts import DTypes
from strategies.data.datasets import DistributedDataset
from strategies.data.iterators import Lockstep
from strategies.data.layout import Remainder
from strategies.data.sources import InputContext
from strategies.defaults import Defaults, current_defaults_of
from strategies.errors import DeviceError, SpareError
from strategies.jax.programs.compilation import NOTHING_CAPTURED, CapturedVariables, DeviceProgram
from strategies.jax.programs.xla_pitfalls import check_integers_fit, check_no_float64
from strategies.jax.replicas.devices import borrow
from strategies.jax.replicas.processes import Membership
from strategies.jax.replicas.reduction_ops import check_outside_replica
from strategies.jax.replicas.replicas import Replicas, as_jax_would, concatenated
from strategies.jax.replicas.variables import (
    MirroredVariable,
    Synchronization,
    SyncOnReadVariable,
    make_variable,
    values_of,
)
from strategies.keras_in_scope import keras_in_scope, keras_room
from strategies.late_jax import is_jax_array, jax, jnp
from strategies.typing import Data, Element, Function, Leaf, Tree
from strategies.values import PerReplica, Shared

if TYPE_CHECKING:
    from strategies.jax.feeds.infeed import Iterators

Same = TypeVar("Same")

_scope: ContextVar[Strategy | None] = ContextVar("strategy", default=None)


@dataclass(frozen=True)
class StrategyExtended:
    """The role of this instance, and the original's names for `Strategy.reduce`.

    Attributes:
        experimental_between_graph: True: every instance runs the program.
        experimental_should_init: True: every instance creates its variables.
        should_checkpoint: Whether this instance writes checkpoints.
        should_save_summary: Whether this instance writes summaries.
    """

    should_checkpoint: bool
    should_save_summary: bool
    _reduce: Callable[[str, Tree], Tree] = field(repr=False, compare=False)
    experimental_between_graph: bool = True
    experimental_should_init: bool = True

    def reduce_to(self, reduce_op: str, value: Tree, destinations: object = None, options: object = None) -> Tree:
        """Return `strategy.reduce(reduce_op, value)`; all instances get the result, whatever the destinations.

        Args:
            reduce_op: "sum", "mean", "min" or "max".
            value: A value per replica, as `Strategy.reduce` takes it.
            destinations: Ignored, as in the original.
            options: Ignored, as in the original.
        """
        return self._reduce(reduce_op, value)

    def batch_reduce_to(
        self, reduce_op: str, value_destination_pairs: Iterable[tuple[Tree, object]], options: object = None
    ) -> list[Tree]:
        """Return `reduce_to` of the value of each pair, in order.

        Args:
            reduce_op: "sum", "mean", "min" or "max".
            value_destination_pairs: Pairs of a value and its destinations.
            options: Ignored, as in the original.
        """
        return [self.reduce_to(reduce_op, value, destinations) for value, destinations in value_destination_pairs]


class Strategy(ABC):
    """R replicas of one program, spread over instances. Results do not depend on the spread.

    Programs use `LocalStrategy`, `PopDistStrategy`, `IPUMultiWorkerStrategy` or `IPUHorovodStrategy`. Each of them only
    chooses a membership; everything else is in this class.

    All instances make the same collective calls (marked "Collective.") in the same order. If the calls differ, every
    instance raises `LayoutMismatchError`, and the strategy stays usable. After any other error of a collective call,
    such as `PeerLostError`, further ones raise `BrokenError` until `carry_on` succeeds.

    Example::

        strategy = strategies.LocalStrategy(num_replicas=4)

        def f(x):
            context = strategies.get_replica_context()
            return context.all_reduce("sum", x * (context.replica_id_in_sync_group + 1))

        y = strategy.run(f, args=(strategy.per_replica(lambda r: float(r)),))
        strategy.reduce("mean", y)  # 20.0: every replica has 0*1 + 1*2 + 2*3 + 3*4

    Args:
        membership: The instances that take part, and the replicas that this process drives.
        progress: Progress record that the supervisor of this process reads; None for no record.
        add_cross_replica_reductions: Whether reductions inside compiled functions are carried out.
        variables_on_host: Whether variables and optimizer state live in host memory.

    Attributes:
        progress: Progress record that the supervisor of this process reads.

    Raises:
        TypeError: If a switch is not True or False.
        DeviceError: If the defaults forbid this process to use devices.
    """

    @abstractmethod
    def __init__(
        self,
        membership: Membership,
        progress: ProgressPage | None = None,
        add_cross_replica_reductions: bool = True,
        variables_on_host: bool = False,
    ) -> None:
        if not membership.defaults.attaches:
            raise DeviceError(
                f"device_connection.type is NEVER in the configuration in force, but {type(self).__name__} would run "
                "programs; set it to ON_DEMAND, or call strategies.config.reset_ipu_configuration()"
            )
        require_switches(  # the original's first argument is a device name, which would count as true
            ", and devices have no names here",
            add_ipu_cross_replica_reductions=add_cross_replica_reductions,
            variables_on_host=variables_on_host,
        )
        self._replicas = Replicas(
            type(self).__name__, membership, progress, add_cross_replica_reductions, variables_on_host
        )
        self.progress = self._replicas.progress

    @functools.cached_property
    def _iterators(self) -> Iterators:
        from strategies.jax.feeds.infeed import Iterators  # imports JAX

        return Iterators()

    @property
    def defaults(self) -> Defaults:
        """The default options of trainers, pipelines, data sets and feeds made for this strategy.

        They are the defaults that the strategy was given. A strategy without its own defaults uses those of the
        configuration that is in force when the object is made (`strategies.config`).
        """
        return self.replicas.defaults

    # ---- instances and replicas

    @property
    def replicas(self) -> Replicas:
        """All replicas, for objects built on strategies: a step, a checkpoint, a variable."""
        return self._replicas

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the number of replicas of all instances; it stays the same after instances are lost."""
        return self._replicas.num_replicas_in_sync

    @property
    def variables_on_host(self) -> bool:
        """Whether variables and optimizer state live in host memory."""
        return self._replicas.variables_on_host

    @property
    def instance(self) -> Instance:
        """The identity of this process and its replicas, as the remaining instances are numbered now."""
        return self.replicas.instance

    @property
    def communicator(self) -> Communicator:
        """The connection of the remaining instances.

        Raises:
            SpareError: If this instance is a spare, which has no connection before it becomes active.
        """
        if self.replicas.is_spare:
            raise SpareError(
                "a spare has no communicator before it becomes active; use strategy.broadcast, reduce, gather and "
                "on_chief, whose results spares get too"
            )
        return self.replicas.communicator

    @property
    def instruments(self) -> Instruments:
        """The instruments attached to this instance."""
        return self.replicas.instruments

    @property
    def num_instances(self) -> int:
        """n, the number of instances."""
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
        """Whether this instance prints and writes for all: instance 0, as the instances are numbered now.

        If instances are lost and the others go on, another instance may become the chief. So ask each time, or use
        `on_chief`. If the chief has ended normally and others go on, none of them is the chief.
        """
        note_question("strategy.is_chief")
        return self.replicas.is_chief

    def on_chief(self, function: Callable[[], object]) -> None:
        """Run a function on one instance only, for example to report a result. Collective.

        The call returns on all instances after the function has returned. If the chief is lost meanwhile and the others
        go on, the next chief runs the function again from its beginning.

        Args:
            function: Function called on the chief only. It must not make collective calls. Its result is dropped.

        Raises:
            BaseException: On the chief, the exception of `function`.
            PeerLostError: On the other instances, if the chief is lost and they cannot go on.
        """
        check_outside_replica("strategy.on_chief")
        self.replicas.on_chief(function)

    @property
    def extended(self) -> StrategyExtended:
        """The role of this instance, under the original's names."""
        return StrategyExtended(self.is_chief, self.is_chief, self.reduce)

    def update_ipu_config(self, config: Tree) -> Tree:
        """Write the number and the index of this instance's process into a configuration.

        Semantics: the original's method of that name, whose documentation says that it returns the configuration.

        Args:
            config: An `IPUConfig`; it is changed, and returned.
        """
        distribution = config.experimental.multi_replica_distribution
        distribution.process_count = self.replicas.num_instances
        distribution.process_index = self.replicas.instance_index
        return config

    def for_stages(self, stages: int) -> Strategy:
        """Return the strategy for a model whose replicas span `stages` devices, a number known only now.

        It is this strategy, unless the number of replicas follows from the number of devices. Then it is a new strategy
        with fewer replicas that span more devices each.

        Raises:
            TypeError: If `stages` is not an integer.
            ValueError: If `stages` is not positive, or the devices are too few.
        """
        positive("stages", stages)
        return self

    # ---- lost instances

    @property
    def can_carry_on(self) -> bool:
        """Whether the other instances can go on if one is lost: under `poprun --on-failure shrink`."""
        return self.replicas.can_carry_on

    def carry_on(self) -> None:
        """Take over the replicas of lost instances, together with the other remaining instances. Collective.

        The number of replicas stays. Each remaining instance may drive other replicas than before, also of data sets.

        Raises:
            LifeCycleError: If the job cannot go on.
        """
        self.replicas.carry_on()
        self.replicas.has_unknown_batches = False  # the program knows of the change

    # ---- values

    def variable(
        self, initial: Tree, synchronization: Synchronization = "on_write", aggregation: str = "mean"
    ) -> MirroredVariable | SyncOnReadVariable:
        """Make a variable that begins with instance 0's `initial` on every instance. Collective.

        Args:
            initial: Pytree of arrays, or a function that returns one.
            synchronization: "on_write" for one value on all replicas; "on_read" for a value of each replica, reduced
                when it is read.
            aggregation: Reduction over the replicas: "sum", "mean" or "only_first_replica".
        """
        check_outside_replica("strategy.variable")
        return make_variable(self.replicas, initial, synchronization, aggregation)

    def per_replica(self, function: Callable[[int], Tree]) -> PerReplica:
        """Return `function(r)` for the global index r of each local replica."""
        return self.replicas.per_replica(function)

    def dealt(self, tree: Tree) -> PerReplica:
        """Split a tree along its first axis into one part per local replica.

        `run` splits batches of a distributed data set by itself. Arrays that Python computed from a batch need this
        call.

        Args:
            tree: Pytree of arrays `[len(local_replicas) * rows, ...]`, in replica order.

        Returns:
            `PerReplica` of arrays `[rows, ...]`.

        Raises:
            ValueError: If the local replicas do not divide the arrays evenly, or the batch is for other replicas.
        """
        return self.replicas.sharding.split(tree)

    def shared(self, tree: Tree) -> Shared:
        """Mark a pytree, so that `run` gives all of it to every replica, even if it looks like a batch."""
        return Shared(tree)

    def broadcast(self, tree: Same, root: int = 0) -> Same:
        """Return the values of instance `root` on every instance, as JAX arrays. Collective.

        Raises:
            LayoutMismatchError: On all instances, if the trees differ in names, shapes or dtypes; it names the leaf.
            TypeError: If a leaf is a `PerReplica`.
            UnsupportedBufferError: If a leaf is a masked array.
            ValueError: If integers do not fit into 32 bits, unless JAX has 64 bits enabled.
        """
        check_outside_replica("strategy.broadcast")
        return self.replicas.broadcast(tree, root)

    def reduce(self, op: str, value: Tree, axis: Axis | None = None) -> Tree:
        """Reduce over all replicas of all instances, in the order of the tree; all get the same result. Collective.

        Args:
            op: "sum" (integers wrap around on overflow), "mean" (integers are truncated towards zero), "min" or "max".
            value: Result of `run` or `per_replica`, a pytree of such results, or a value that all local replicas share.
                Batches are split as in `run`.
            axis: One axis or several of each replica's value, over which to reduce as well. Every element along it
                counts once. So a mean is the mean of all rows of all replicas, and replicas may have different numbers
                of rows. The tree then spans all rows, replica by replica. For long axes reduce inside `run` first.

        Returns:
            A pytree of NumPy arrays.

        Raises:
            TypeError: If an axis is not an integer.
            ValueError: If `op` is unknown, or the replicas' pytrees differ, or the value cannot be split as in `run`.
                If a replica's value lacks the axis, or is empty along it.
        """
        check_outside_replica("strategy.reduce")
        return self.replicas.reduce(op, values_of(value), axis)

    def gather(self, value: Tree, axis: int) -> Tree:
        """Concatenate the values of all replicas along an axis, in replica order, on every instance. Collective.

        Args:
            value: Values as in `reduce`. Replicas may have different lengths along the axis, but the same other
                dimensions, dtypes and structure.
            axis: The axis; a negative axis counts from the end.

        Returns:
            A pytree of NumPy arrays.

        Raises:
            LayoutMismatchError: If instances differ in anything but the lengths along the axis.
            TypeError: If the axis is not an integer.
            UnsupportedBufferError: If instances cannot exchange the values, such as strings.
            ValueError: If the values are scalars, or for a reason of `reduce`.
        """
        check_outside_replica("strategy.gather")
        return concatenated(self.replicas, values_of(value), axis)

    # ---- programs

    def run(self, function: Function, args: Sequence[Tree] = (), kwargs: dict[str, Tree] | None = None) -> Tree:
        """Run a compiled function once per local replica, all replicas in lockstep.

        If the function has collectives, all instances must call `run` with it.

        Args:
            function: JAX-traceable function. In it, `get_replica_context` gives the replica's index and collectives
                over all replicas. It is compiled once per function object and argument shapes, and again if an outside
                value that it reads has changed. It may read and assign models of Keras.
            args: Pytrees. A replica gets its own value of each `PerReplica` and "on_read" variable, at any depth. It
                gets its own rows of a batch of `distribute_dataset`, and all of any other array. With several local
                replicas, other arrays with the length of a batch are refused: mark them with `dealt` or `shared`. The
                function may take elements with `next` from an iterator (of a data set, an infeed or Python). From then
                on only programs may use the iterator.
            kwargs: Pytrees by name, treated as `args` are.

        Returns:
            `PerReplica` with the results.

        Raises:
            RuntimeError: Inside a function that `run` runs; or if the function reads a value that differs each time,
                such as a clock or an iterator of a closure.
            TypeError: If `args` is not a tuple or list, or `kwargs` not a dictionary. If an argument is an object, such
                as a queue, a model or an optimizer, which the function can use by its name. "Unsupported data type" for
                float64 arguments or results, unless JAX has 64 bits enabled.
            UnsupportedBufferError: If a `PerReplica` has a masked array.
            ValueError: If a `PerReplica` does not have one value per local replica, or has values of different shapes.
                If integers do not fit into 32 bits, unless JAX has 64 bits enabled. If a batch or a `PerReplica`
                belongs to other replicas. If an array may or may not be a batch.
        """
        check_outside_replica("strategy.run")
        self.replicas.refuse_in_child()
        kwargs = kwargs or {}
        _require_arguments(args, kwargs)
        given = self._iterators.placed([*args, *kwargs.values()])
        named = [self.replicas.sharding.shard_argument(values_of(value)) for value in given]
        program, state = self._program(function, tuple(kwargs))
        values = [
            _alike(value.values) if isinstance(value, PerReplica) else [self._shared(value)] * len(self.local_replicas)
            for value in named
        ]
        held = self._shared(state.values())
        arguments = [
            (np.int32(replica), held, *of_replica)
            for replica, *of_replica in zip(self.local_replicas, *values, strict=True)
        ]
        try:
            executables = [
                program.compiled(self.replicas.devices.device_of(position), *of_replica)
                for position, of_replica in enumerate(arguments)
            ]
        except TypeError:
            _check_argument_types(given)
            raise
        if not state.is_current:  # the function has built a model, and nothing has run yet
            return self.run(function, args, kwargs)
        if held:
            changed = program.results(*arguments[0])[1]
            arguments = [(index, self._shared(state.values(int(index), changed)), *own) for index, _, *own in arguments]
        results = self._run(executables, arguments)
        state.put([changes for _, changes in results])
        return PerReplica(tuple(result for result, _ in results), self.local_replicas)

    def experimental_run_v2(self, *arguments: object, **named: object) -> NoReturn:
        """Refuse the former name of `run`, as the original does.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "strategy.experimental_run_v2 is gone, here as in the original; call strategy.run with the same arguments"
        )

    def _shared(self, value: Tree) -> Tree:
        """Return a value that all replicas get as a whole, on whatever device it lies."""
        check_integers_fit(check_no_float64(value))
        return trees.map(lambda leaf: borrow(leaf) if _is_on_one_device(leaf) else leaf, value)

    def _run(self, executables: Sequence[jax.stages.Compiled], arguments: Sequence[Sequence[Tree]]) -> list[Tree]:
        """Run the program on the arguments of each local replica, and return the results."""

        def compute(position: int) -> Tree:
            result, changes, _ = jax.block_until_ready(executables[position](*arguments[position]))
            return trees.map(borrow, result), changes

        reducer = self.replicas.reducer
        reducer.begin()
        with reducer.ending():
            results = self.replicas.devices.each(compute, reducer.fail)
        if reducer.last_error is not None:  # a feed has failed, and the program ran to its end without it
            raise reducer.last_error
        return results

    def _program(self, function: Function, names: tuple[str, ...]) -> tuple[DeviceProgram, CapturedVariables]:
        """Return the compiled function, and the Keras variables that it reads besides its arguments."""
        from strategies.jax.programs.captures import CapturedValues  # imports JAX

        key = function, names
        found = self.replicas.programs.get(key)
        if found is not None and all(is_same() for is_same in found[2]):
            return found[:2]
        objects = CapturedValues(function, follows_keras=True).of_keras
        state = keras_room().KerasState(objects, self.replicas) if objects else NOTHING_CAPTURED
        constants: list[Callable[[], bool]] = [lambda: state.is_current]
        program = self.replicas.devices.compile(self._for_one_replica(function, names, state, constants))
        self.replicas.programs[key] = program, state, constants
        return program, state

    def _for_one_replica(
        self, function: Function, names: tuple[str, ...], state: CapturedVariables, constants: list[Callable[[], bool]]
    ) -> Function:
        from strategies.jax.feeds.infeed import drawn  # imports JAX, as the next two
        from strategies.jax.programs.captures import CapturedValues
        from strategies.jax.replicas.replica_context import replica_context

        def one_replica(index: jax.Array, held: Sequence[Tree], *values: Tree) -> Tree:
            first_named, values = len(values) - len(names), tuple(drawn(list(values)))
            context = self.replicas.new_context(index, "run", is_watched=True)
            reads = CapturedValues(function, follows_keras=True)
            with replica_context(context), state.inside(held) as changes:
                result = function(*values[:first_named], **dict(zip(names, values[first_named:], strict=True)))
                made = changes()
            reads.settle()
            constants.extend([*context.feeds.constants, reads.is_same])
            # The token makes a result that is ready only after the program's last feed.
            results = (check_no_float64(result, "output"), made, context.feeds.token)
            return trees.map(jnp.asarray, results)

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
        """Return a data set that gives each replica its part of `source`; see `DistributedDataset`.

        With several instances, taking a batch is a collective call, unless `source` is a pytree of arrays or has random
        access.

        Example::

            dataset = strategy.distribute_dataset({"image": x, "label": y}, batch_size=32, seed=0)
            for epoch in range(3):
                for batch in dataset.epoch(epoch):  # leaves [len(local_replicas) * 32, ...]
                    state, metrics = trainer.step(state, batch)

        Args:
            source: Pytree of arrays; `grain.MapDataset`, `GrainSource` or another object with a length and `[i]`;
                object with `shard(n, i)`; iterable; or `PerReplica` of iterables.
            batch_size: Elements per replica and micro-batch.
            seed: Seed of the shuffle, the same on all instances.
            shuffle: Whether to shuffle arrays and random access, differently in each epoch.
            remainder: "drop" the elements that do not fill the last global batch, or "pad" that batch.
            gradient_accumulation_count: Micro-batches that each replica takes in one step.
            transfer_dtype: Smaller dtype in which arrays travel to the devices, or one dtype per entry of a batch;
                `strategies.casting` casts them back on the device.
            prefetch: Number of batches prepared ahead; None for two, or for none if `defaults` switch this off.

        Raises:
            TypeError: If `source` is of no known kind, or an argument has the wrong type.
            ValueError: If `source` is empty or inconsistent, or smaller than one global batch.
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
            place=lambda batch: self.replicas.sharding.batch(batch),
            communicator=self.replicas.communicator,
            instruments=self.instruments,
            is_spare=lambda: self.replicas.is_spare,
            is_read_again=self.can_carry_on,
        )
        self.replicas.adopt(dataset, gradient_accumulation_count * batch_size)
        return dataset

    def distribute_datasets_from_function(
        self, function: Callable[[InputContext], Iterable[Element]]
    ) -> Iterable[Element]:
        """Return the data set that `function` makes for this instance; with one instance, unchanged.

        With several instances, taking a batch is a collective call. All instances end at the step at which the first
        of them has no batch, with a warning.

        Args:
            function: Function of an `InputContext`, called once per instance. It returns an iterable of instance
                batches; their leaves hold the batches of all local replicas in order along the first axis.
        """
        batches = function(InputContext(self.num_instances, self.instance_index, self.num_replicas_in_sync))
        return batches if self.num_instances == 1 else Lockstep(batches, self.replicas.communicator)

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make this the current strategy inside the block: `get_strategy` returns it, and new Keras models use it.

        Raises:
            ImportError: From the first `import keras` of a program inside a scope; import Keras before the scope.
        """
        with keras_in_scope(get_strategy), current_defaults_of(lambda: self.defaults):
            token = _scope.set(self)
            try:
                yield self
            finally:
                _scope.reset(token)


def get_strategy() -> Strategy | None:
    """Return the strategy whose scope is open, or None."""
    return _scope.get()


def _require_arguments(args: object, kwargs: object) -> None:
    """Refuse a value given in place of a tuple, before its parts count as arguments."""
    if not isinstance(args, tuple | list):
        raise wrong_type("args", args, "give a tuple, such as args=(value,)")
    if not isinstance(kwargs, dict):
        raise wrong_type("kwargs", kwargs, "give a dictionary")


def _check_argument_types(arguments: Sequence[Tree]) -> None:
    """Raise an error for the first leaf that no program can take as an argument, if there is one."""
    for leaf in trees.leaves(arguments):
        if not (hasattr(leaf, "shape") or isinstance(leaf, bool | int | float | complex | PerReplica)):
            raise TypeError(
                f"strategy.run gets {leaf!r}, a {type(leaf).__name__}, as an argument, but a program takes arrays and "
                "iterators; leave it out of the arguments, and use it in the function by its name"
            )


def _is_on_one_device(leaf: Leaf) -> bool:
    is_array = is_jax_array(leaf) and not isinstance(leaf, jax.core.Tracer)
    return is_array and len(leaf.devices()) == 1 and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _alike(values: Sequence[Tree]) -> list[Tree]:
    """Return the replicas' values on the host, checked to have the same shapes."""
    hosted = [trees.map(as_jax_would, check_no_float64(value)) for value in values]
    trees.map(_check_shapes, *hosted)
    return hosted


def _check_shapes(first: np.ndarray, *others: np.ndarray) -> None:
    for leaf in others:
        if leaf.shape != first.shape:
            raise ValueError(
                f"the replicas' values have different shapes, {list(first.shape)} and {list(leaf.shape)}; "
                "one compiled program runs on all of them, so make them alike"
            )
