"""What all strategies are: replicas spread over instances, programs that run once per replica, and reductions."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakSet

import jax
import jax.numpy as jnp
import numpy as np

from collectives import Communicator
from collectives.buffers import refuse_masked
from collectives.instruments import COMPILE, Instruments
from collectives.reduction import normalise_op
from popdist.instance import Instance
from popdist.records import FaultInjector, NoProgress, Progress
from popdist.records.recording import note_question
from strategies.data.casts import DTypes
from strategies.data.datasets import DistributedDataset
from strategies.data.input_context import InputContext
from strategies.data.layout import Remainder
from strategies.data.lockstep import Lockstep
from strategies.errors import StrategyError
from strategies.extended import Extended
from strategies.membership import Membership, Place, meet, surviving, warn_where_none_goes_on
from strategies.per_replica import PerReplica, Shared
from strategies.programs.float64 import refuse_cut_integers, refuse_float64
from strategies.programs.program import Program
from strategies.replicas.dealing import Dealing
from strategies.replicas.devices import borrow, claim_devices, is_key
from strategies.replicas.replica_context import CrossReplicaReducer, ReplicaContext, refuse_in_replica, replica_context
from strategies.replicas.variables import MirroredVariable, Synchronization, SyncOnReadVariable, make_variable
from strategies.roles import Batch, Data, Element, Function, Tree

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

    Raises:
        TypeError: a switch is not True or False.

    Attributes:
        first_index: the number that this instance had at first, by which poprun calls it also after others were lost.
        faults: what the user wants to go wrong in this instance.
        place: how far this instance has come, for those who go on when one is lost.
        grid: where the local replicas run, replicas x the devices that one spans.
        devices: its first column, where all runs that is not in a pipeline.
    """

    @abstractmethod
    def __init__(
        self,
        membership: Membership,
        progress: Progress | None = None,
        add_cross_replica_reductions: bool = True,
        variables_on_host: bool = False,
    ) -> None:
        _require_switches(
            add_ipu_cross_replica_reductions=add_cross_replica_reductions, variables_on_host=variables_on_host
        )
        self._membership = membership
        self.first_index = membership.instance.index
        self.place = Place()
        self.variables_on_host = variables_on_host
        self.progress = progress or NoProgress()
        self.faults = _injector_among(self.instruments)
        self._add_cross_replica_reductions = add_cross_replica_reductions
        self._datasets: WeakSet[DistributedDataset] = WeakSet()
        self._batch_sizes: set[int] = set()
        self._claim_replicas()
        warn_where_none_goes_on(self)

    def _claim_replicas(self) -> None:
        """Find devices for the local replicas; programs for others are of no use any more."""
        instance = self.instance
        self.grid = claim_devices(
            instance.local_replica_range,
            instance.total_replicas,
            instance.local_index,
            instance.ipus_per_replica,
            self.instruments.during[COMPILE],
        )
        self.devices = self.grid.column(0)
        self.reducer = CrossReplicaReducer(
            self.communicator, self.devices, instance.total_replicas, not self._add_cross_replica_reductions
        )
        self.dealing = Dealing(self.devices, instance.total_replicas, self._batch_sizes)
        self._programs: dict[Any, Program] = {}
        self._program_numbers = itertools.count()

    # ---- who is there

    @property
    def instance(self) -> Instance:
        """Which replicas this process drives, as the instances are numbered now."""
        return self._membership.instance

    @property
    def communicator(self) -> Communicator:
        """Connects the instances that are left."""
        return self._membership.communicator

    @property
    def instruments(self) -> Instruments:
        """Those that see what this instance does."""
        return self.communicator.instruments

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the replicas of all instances."""
        return self.instance.total_replicas

    @property
    def num_instances(self) -> int:
        """n, the processes that drive them."""
        note_question("strategy.num_instances")
        return self.instance.count

    @property
    def instance_index(self) -> int:
        """Which instance this is, 0 to n - 1."""
        note_question("strategy.instance_index")
        return self.instance.index

    @property
    def local_replicas(self) -> range:
        """The global indices of this instance's replicas."""
        note_question("strategy.local_replicas")
        return self.instance.local_replica_range

    @property
    def is_chief(self) -> bool:
        """Whether this is the instance that prints and writes for all of them: instance 0, as they are numbered now.

        Where instances are lost and the others carry on it may be another one later, so ask when it matters, or let
        `on_chief` ask. It is none where some carry on after the chief has come to its end.
        """
        note_question("strategy.is_chief")
        return self._membership.is_chief

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
        is_done = False

        def attempt() -> bool:
            nonlocal is_done
            if self.is_chief and not is_done:
                function()
                is_done = True
            self.communicator.barrier(name="duty of the chief")
            return True

        def catch_up() -> bool | None:
            return True if meet(self).is_late else None

        surviving(self, attempt, catch_up)

    @property
    def extended(self) -> Extended:
        """The role of this instance, with the original's names; the chief writes files."""
        return Extended(self.is_chief, self.is_chief)

    @property
    def variables_device(self) -> jax.Device:
        """Where variables and optimizer state lie and are updated: the host's CPU, or the first device."""
        first = self.devices.devices[0]
        if first.platform != "cpu" and self.variables_on_host:
            return jax.local_devices(backend="cpu")[0]
        return first

    @property
    def streams_gradients(self) -> bool:
        """Whether `Trainer` sends gradients to the other instances while it computes the rest of them."""
        return self.variables_on_host and self.num_instances > 1

    # ---- instances that are lost

    @property
    def can_carry_on(self) -> bool:
        """Whether the other instances can go on when one is lost: under poprun --on-failure shrink."""
        return self._membership.can_carry_on

    def carry_on(self) -> None:
        """Take over, with the other instances that are left, the replicas of those that are lost; a collective call.

        The number of replicas stays; each instance drives other ones than before, also of data sets.

        Raises:
            LifeCycleError: the job cannot go on.
        """
        self._membership.carry_on()
        self._claim_replicas()
        for dataset in self._datasets:
            dataset.redistribute(self.local_replicas)

    def replicas_batch(self, batch: Batch) -> Batch:
        """The batch of the same step for the replicas that this instance drives since it has carried on.

        Raises:
            StrategyError: if the batch is not the last one of a data set that this strategy has distributed.
        """
        dataset = self.dataset_of(batch)
        if dataset is not None:
            return dataset.read_again()
        raise StrategyError(
            "an instance is lost, and its part of this batch cannot be read again; train on the batches of "
            "strategy.distribute_dataset as they come"
        )

    def dataset_of(self, batch: Batch) -> DistributedDataset | None:
        """The data set whose last batch this is; None if no data set of this strategy has given it last."""
        return next((dataset for dataset in self._datasets if dataset.has_given(batch)), None)

    # ---- values

    def variable(
        self, initial: Tree, synchronization: Synchronization = "on_write", aggregation: str = "mean"
    ) -> MirroredVariable | SyncOnReadVariable:
        """A variable that begins with instance 0's `initial` everywhere; a collective call.

        Args:
            initial: a pytree of arrays, or a function that returns one.
            synchronization: "on_write" for one that is the same on all replicas, "on_read" for one that each replica
                has of its own until it is read.
            aggregation: how replicas' values are reduced: "sum", "mean" or "only_first_replica".
        """
        return make_variable(self, initial, synchronization, aggregation)

    def per_replica(self, function: Callable[[int], Tree]) -> PerReplica:
        """`function(r)` for the global index r of each local replica."""
        return PerReplica(tuple(function(replica) for replica in self.local_replicas), self.local_replicas)

    def dealt(self, tree: Tree) -> PerReplica:
        """Each local replica's rows of a tree that has those of all of them one after another along the first axis.

        A batch of a distributed data set need not be given to it, but what is computed of one outside of `run`.

        Args:
            tree: a pytree of arrays `[len(local_replicas) * rows, ...]`.

        Returns:
            `PerReplica` of arrays `[rows, ...]`.

        Raises:
            ValueError: if the arrays cannot be divided among the local replicas, or are a batch for others.
        """
        return self.dealing.split(tree)

    def shared(self, tree: Tree) -> Shared:
        """A pytree that `run` gives whole to every replica, and of which it does not ask whether it is a batch."""
        return Shared(tree)

    def broadcast(self, tree: Same, root: int = 0) -> Same:
        """The values of instance `root` on every instance, as JAX arrays.

        Raises:
            LayoutMismatchError: on all instances if the trees differ in names, shapes or dtypes; it names the leaf.
            TypeError: a leaf is a `PerReplica`.
            UnsupportedBufferError: for a masked array.
            ValueError: integers do not fit into 32 bits, where JAX has no more.
        """
        refuse_in_replica("strategy.broadcast")
        if any(isinstance(leaf, PerReplica) for leaf in jax.tree.leaves(tree)):
            raise TypeError(
                "a PerReplica has a value of each local replica, and broadcast sends one of the instance; give it one "
                "of the values, or reduce them"
            )
        paths, structure = jax.tree_util.tree_flatten_with_path(tree)
        received = [self._broadcast_leaf(jax.tree_util.keystr(path), leaf, root) for path, leaf in paths]
        self.communicator.barrier(name=f"end of broadcast of {len(paths)} leaves")
        whole: Same = jax.tree.unflatten(structure, received)
        return whole

    def _broadcast_leaf(self, name: str, leaf: Any, root: int) -> jax.Array:
        array = np.array(jax.random.key_data(leaf) if is_key(leaf) else _as_jax_would(leaf), order="C")
        self.communicator.broadcast(array, root, name=name)
        placed: jax.Array = jax.device_put(array, self.variables_device, may_alias=False)
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf)) if is_key(leaf) else placed

    def reduce(self, op: str, value: Tree) -> Tree:
        """Reduce over all replicas of all instances, in replica order; the same result on every instance.

        Args:
            op: "sum" (of integers: wraps around where it does not fit), "mean" (of integers: truncated), "min" or
                "max".
            value: what `run` or `per_replica` returned, a pytree of such, or one that all local replicas share; see
                `run` for batches.

        Returns:
            A pytree of NumPy arrays.

        Raises:
            ValueError: for another op, if the replicas' pytrees differ, or if the value cannot be dealt out; see `run`.
        """
        op = normalise_op(op)
        refuse_in_replica("strategy.reduce")
        value = self.dealing.deal_argument(value)
        values = value.values if isinstance(value, PerReplica) else [value] * len(self.local_replicas)
        trees = [jax.tree.flatten(one) for one in values]
        structure = trees[0][1]
        structures = sorted({str(tree) for _, tree in trees})
        if len(structures) > 1:
            raise ValueError(f"replicas have values of different structures, {', '.join(structures)}; make them alike")
        reduced = [
            self.communicator.ordered_all_reduce([_host_array(leaf) for leaf in leaves], op=op, name=f"reduce/{number}")
            for number, leaves in enumerate(zip(*(leaves for leaves, _ in trees), strict=True))
        ]
        return jax.tree.unflatten(structure, reduced)

    # ---- programs

    def run(self, function: Function, args: Sequence[Tree] = (), kwargs: dict[str, Tree] | None = None) -> Tree:
        """Run `function` once per local replica, compiled, all replicas in lockstep.

        Args:
            function: a JAX-traceable function; inside it `get_replica_context` gives the replica's index and
                collectives over all replicas. Compiled once per function object and argument shapes.
            args: pytrees. Of a `PerReplica`, wherever it stands, each replica gets its value; of an array of a
                batch of `distribute_dataset` its rows; of all else the whole. A new array that is as long as such a
                batch is refused where there are several local replicas: say `dealt` or `shared` of it.
            kwargs: likewise.

        Returns:
            `PerReplica` with the results.

        Raises:
            RuntimeError: inside a function that `run` runs.
            TypeError: "Unsupported data type" for float64 arguments or results, unless JAX has 64 bits enabled.
            UnsupportedBufferError: a `PerReplica` has a masked array.
            ValueError: a `PerReplica` has not one value per local replica, or its values differ in shape; integers do
                not fit into 32 bits, where JAX has no more; a batch or a `PerReplica` is for other replicas; nobody can
                tell whether an array is a batch.
        """
        refuse_in_replica("strategy.run")
        kwargs = kwargs or {}
        named = [self.dealing.deal_argument(value) for value in (*args, *kwargs.values())]
        program = self._program(function, tuple(kwargs))
        is_split = [isinstance(value, PerReplica) for value in named]
        values = [
            _alike(value.values) if split else [self._shared(value)] * len(self.local_replicas)
            for value, split in zip(named, is_split, strict=True)
        ]
        arguments = [
            (np.int32(replica), *of_replica) for replica, *of_replica in zip(self.local_replicas, *values, strict=True)
        ]
        return PerReplica(tuple(self._run(program, arguments)), self.local_replicas)

    def _shared(self, value: Tree) -> Tree:
        """A value that all replicas get whole; on which device it lies does not matter."""
        refuse_cut_integers(refuse_float64(value))
        return jax.tree.map(lambda leaf: borrow(leaf) if _is_on_one_device(leaf) else leaf, value)

    def _run(self, program: Program, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """What the program returns for the arguments of each local replica."""
        executables = [
            program.compiled(self.devices.device_of(position), *of_replica)
            for position, of_replica in enumerate(arguments)
        ]

        def compute(position: int) -> Any:
            result, _ = jax.block_until_ready(executables[position](*arguments[position]))
            return jax.tree.map(borrow, result)

        self.reducer.begin()
        try:
            results = self.devices.each(compute, self.reducer.fail)
        except jax.errors.JaxRuntimeError as error:
            if self.reducer.last_error not in (None, error):
                raise self.reducer.last_error from error
            raise
        finally:
            self.reducer.end()
        if self.reducer.last_error is not None:  # a feed has failed, and the program went on without it to its end
            raise self.reducer.last_error
        return results

    def _program(self, function: Callable[..., Any], names: tuple[str, ...]) -> Program:
        key = (function, names)
        if key not in self._programs:
            self._programs[key] = self.devices.compile(self._for_one_replica(function, names))
        return self._programs[key]

    def _for_one_replica(self, function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
        def one_replica(index: jax.Array, *values: Any) -> Any:
            first_named = len(values) - len(names)
            context = self.new_context(index, "run", is_watched=True)
            with replica_context(context):
                result = function(*values[:first_named], **dict(zip(names, values[first_named:], strict=True)))
            # With the token the program has a result that is not ready before its last feed.
            results = (refuse_float64(result, "output"), context.feeds.token)
            return jax.tree.map(jnp.asarray, results)

        return one_replica

    def new_context(self, replica_index: jax.Array, program: str, is_watched: bool = False) -> ReplicaContext:
        """The context of a replica whose program is about to be traced.

        Programs with collectives are numbered as they are traced, which happens in the same order on every instance.

        Args:
            replica_index: its global index.
            program: what kind of program.
            is_watched: whether who runs it looks at `reducer.last_error` when it has ended.
        """
        numbers = self._program_numbers
        return ReplicaContext(self.reducer, replica_index, lambda: f"{program}{next(numbers)}", is_watched)

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
        prefetch: int = 2,
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
            prefetch: how many batches are prepared ahead.
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
            prefetch=prefetch,
            place=lambda batch: self.dealing.batch(batch),
            communicator=self.communicator,
            instruments=self.instruments,
        )
        self._datasets.add(dataset)
        self._batch_sizes.add(gradient_accumulation_count * batch_size)
        return dataset

    def distribute_datasets_from_function(
        self, function: Callable[[InputContext], Iterable[Element]]
    ) -> Iterable[Element]:
        """The data set that `function` makes for this instance; with one instance untouched.

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
        """Make this the current strategy, which `get_strategy` returns."""
        token = _scope.set(self)
        try:
            yield self
        finally:
            _scope.reset(token)


def get_strategy() -> Strategy | None:
    """The strategy whose scope this is, or None."""
    return _scope.get()


def _injector_among(instruments: Instruments) -> FaultInjector:
    found = [each for each in instruments.attached if isinstance(each, FaultInjector)]
    return found[0] if found else FaultInjector()


def _require_switches(**switches: bool) -> None:
    """Refuse what the original takes as its first argument, the name of a device, before it counts as true."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it is True or False, and devices have no names here")


def _is_on_one_device(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and len(leaf.devices()) == 1 and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _host_array(leaf: Any) -> np.ndarray:
    refuse_masked(leaf)
    return np.asarray(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), order="C")


def _as_jax_would(leaf: Any) -> np.ndarray:
    """What `jnp.asarray` would make of a leaf, but on the host: that compiles a program for each shape and dtype."""
    array: np.ndarray = refuse_cut_integers(_host_array(leaf))
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _alike(values: Sequence[Any]) -> list[Any]:
    """The replicas' values on the host, for one program."""
    for value in values:
        refuse_float64(value)
    hosted = [jax.tree.map(_as_jax_would, value) for value in values]
    jax.tree.map(_check_shapes, *hosted)
    return hosted


def _check_shapes(first: np.ndarray, *others: np.ndarray) -> None:
    for leaf in others:
        if leaf.shape != first.shape:
            raise ValueError(
                f"the replicas' values have different shapes, {list(first.shape)} and {list(leaf.shape)}; "
                "one compiled program runs on all of them, so make them alike"
            )
