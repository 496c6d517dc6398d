"""All replicas of a job: the replicas that this instance drives, and its connection with the other instances."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, final
from weakref import WeakSet

import numpy as np

import strategies.trees as trees
from collectives import Communicator
from collectives.buffers import refuse_masked
from collectives.instruments import Instruments
from collectives.reduction import normalise_op
from popdist.environments.poprun import process_index
from popdist.errors import LifeCycleError
from popdist.instance import Instance
from popdist.records.distribution_settings import DistributionSettings
from popdist.records.faults import FaultInjector
from popdist.records.progress import ProgressPage
from popdist.records.watched import Waits
from popdist.xla import POOL_VARIABLE, shared_memory_setting, thread_pool_size
from strategies.argument_checks import Axis, checked_axis, parts_along
from strategies.core.agreement import ReplicaPrograms, gather_arrays
from strategies.core.engine import RowResults
from strategies.core.journal import InstanceProgress, Journal, Recorded
from strategies.core.survival import LOSSES, collectively, join, warn_where_none_goes_on
from strategies.data.datasets import DistributedDataset
from strategies.defaults import Defaults
from strategies.errors import DeviceError, StrategyError
from strategies.exchange.choice import CPU, GPU, ON_CPUS, ExchangeChoice
from strategies.jax.programs.compilation import CapturedVariables, DeviceProgram, executables_folder, usual_folder
from strategies.jax.programs.xla_pitfalls import check_integers_fit, insist_on_right_sums, use_deterministic_operations
from strategies.jax.replicas.devices import (
    DeviceGrid,
    ReplicaDevices,
    borrow,
    choose_grid,
    exchange_of,
    expected_platform,
    is_key,
    prepare_environment,
    prepare_start,
    set_number_of_devices,
)
from strategies.jax.replicas.processes import Membership, connect_processes
from strategies.jax.replicas.reduction_ops import check_dtype
from strategies.jax.replicas.sharding import BatchSharding, TreeNodes, replication_of
from strategies.late_jax import is_jax_array, is_jax_loaded, jax, jnp, when_jax_is_imported
from strategies.placeholders import Placeholder, packed, unpacked
from strategies.sinks.sink import JobFacts
from strategies.sinks.sinks import asked_sinks
from strategies.stored_shards import StoredReplicas
from strategies.typing import Batch, Leaf, Tree
from strategies.values import PerReplica

if TYPE_CHECKING:
    from strategies.jax.replicas.replica_context import CrossReplicaReducer, ReplicaContext


Same = TypeVar("Same")

logger = logging.getLogger(__name__)


UNKNOWN_BATCH = (
    "an instance was lost or has joined, and this batch does not come from strategy.distribute_dataset, so it may be "
    "for the replicas that this instance had before; use the batches of strategy.distribute_dataset as they are"
)


class _NoPrograms:
    """The programs of replicas for which JAX has not started."""

    def begin(self) -> None:
        pass

    def ending(self) -> AbstractContextManager[None]:
        return nullcontext()


_NO_PROGRAMS = _NoPrograms()


@final
class Replicas:
    """The replicas of a job, as steps, checkpoints and variables need them. A strategy chooses the membership.

    Args:
        kind: Name of the strategy for messages.
        membership: Membership of this instance, with the replicas that it drives.
        progress: Connection to the supervisor of this instance.
        add_cross_replica_reductions: Whether reductions inside compiled functions are carried out.
        variables_on_host: Whether variables and optimizer state live in host memory.

    Attributes:
        kind: Name of the strategy for messages.
        first_index: First index of this instance, of a spare its rank; poprun names it so also after others were lost.
        num_replicas_in_sync: R, the number of replicas of all instances, also after instances were lost.
        done_so_far: Progress of this instance, for the survivors of a loss.
        journal: Results of the operations, for spares.
        spread: How often the replicas have been spread over other instances.
        has_carried_on: Whether instances were lost or have joined.
        has_unknown_batches: Whether this happened in an operation, so that the program may still make batches for the
            replicas of before.
        progress: Connection to the supervisor of this instance.
        faults: Faults that the user has planned for this instance.
        variables_on_host: Whether variables and optimizer state live in host memory.
        sharding: The sharding of values over the local replicas.
        programs: Programs that `Strategy.run` has compiled for these devices; each with the state that it holds, and
            functions that say whether a constant of it is unchanged.
        exchange: Way in which gradients on a device become means; chosen anew when an instance is lost.
        sinks: Sinks of the metrics of every step: those that the environment names, and others added later.
        looks: Steps in which norms and histograms are taken whatever sinks are open, by the environment.
    """

    def __init__(
        self,
        kind: str,
        membership: Membership,
        progress: ProgressPage | None = None,
        add_cross_replica_reductions: bool = True,
        variables_on_host: bool = False,
    ) -> None:
        self.kind = kind
        self._membership = membership
        self.first_index = process_index(os.environ, membership.instance)
        self.num_replicas_in_sync = membership.instance.total_replicas
        self.done_so_far = InstanceProgress()
        self._journal_member = membership.journal_member
        self.journal = Journal(self._journal_member, self.done_so_far, TreeNodes())
        self.variables_on_host = variables_on_host
        self.progress = progress or ProgressPage()
        attached = self.instruments.attached
        self.faults = next((each for each in attached if isinstance(each, FaultInjector)), FaultInjector())
        self._add_cross_replica_reductions = add_cross_replica_reductions
        self._datasets: WeakSet[DistributedDataset] = WeakSet()
        self._batch_sizes: set[int] = set()
        self.spread = 0
        self.has_carried_on = self.has_unknown_batches = False
        self._finding = threading.RLock()
        instance = membership.instance
        # The place of the variables, which stay there when this instance takes over replicas of another one.
        self._first_device = instance.local_index * instance.local_replicas * instance.ipus_per_replica
        self._claim()
        self.sinks = asked_sinks(self.job, os.environ)
        self.looks = DistributionSettings.from_environ(os.environ)
        warn_where_none_goes_on(self)

    def _claim(self) -> None:
        """Choose the exchange for the local replicas, and drop devices and programs of earlier ones.

        On CPUs, JAX and its devices wait until something needs them, because programs of PyTorch never do. If JAX is
        imported, or the exchange depends on its devices, JAX starts at once.
        """
        instance = self.instance
        self._platform = platform = expected_platform()
        self.exchange = exchange_of(self._membership, platform, self.variables_on_host)
        if self._has_same_bits:
            use_deterministic_operations(os.environ)
        if self.exchange.shares_gpu:
            os.environ.update(shared_memory_setting(os.environ))
        if self.exchange.connects:
            connect_processes(self.communicator)
        self._found: tuple[DeviceGrid, CrossReplicaReducer] | None = None
        self.sharding = BatchSharding(
            instance.local_replica_range, instance.total_replicas, self._batch_sizes, lambda: self.devices
        )
        self.programs: dict[Any, tuple[DeviceProgram, CapturedVariables, list[Callable[[], bool]]]] = {}
        self._program_numbers = itertools.count()
        if is_jax_loaded() or platform != CPU or self.exchange != ON_CPUS:
            self._find()
        else:
            prepare = partial(prepare_environment, instance.total_replicas)
            prepare()
            when_jax_is_imported(prepare)  # a program may have put back the variables that it had before
            insist_on_right_sums(os.environ)
            executables_folder(os.environ, self.defaults.executables)
            when_jax_is_imported(partial(set_number_of_devices, len(instance.local_replica_range)))

    @property
    def distributions(self) -> DistributionSettings | None:
        """The steps in which norms and histograms are taken, by the environment or for an open sink; None if never."""
        if self.looks.are_on:
            return self.looks
        return next((each.looks for each in self.sinks if each.looks is not None), None)

    @property
    def _has_same_bits(self) -> bool:
        """Whether GPUs compute the same bits in every run."""
        return self._platform == GPU and self.defaults.deterministic

    def _find(self) -> tuple[DeviceGrid, CrossReplicaReducer]:
        """Return the devices, and the executor of collectives on them; the first call starts JAX."""
        with self._finding:
            if self._found is None:
                self._found = self._claimed()
            return self._found

    def _claimed(self) -> tuple[DeviceGrid, CrossReplicaReducer]:
        from strategies.jax.replicas.replica_context import CrossReplicaReducer  # imports JAX

        instance = self.instance
        total = instance.total_replicas
        executables = prepare_start(
            len(instance.local_replica_range),
            total,
            self.defaults.executables or (usual_folder(os.environ) if self._has_same_bits else ""),
            runs_ahead=self.exchange.is_on_device,
        )
        grid = choose_grid(
            instance.local_replica_range,
            instance.local_index,
            executables,
            instance.ipus_per_replica,
            self.instruments,
            is_spread=self.exchange.is_on_device,
            first_device=self._first_device,
        )
        if grid.first.is_cpu:
            insist_on_right_sums(os.environ)
            if os.environ[POOL_VARIABLE] != str(thread_pool_size(total)):
                logger.info("%s is %s; set the same value for all instances", POOL_VARIABLE, os.environ[POOL_VARIABLE])
        if grid.first.is_cpu and self._platform != CPU:
            raise DeviceError(
                f"JAX was expected to compute on {self._platform!r}, but started on the CPU; make its accelerator work "
                "(JAX logs the reason), or set JAX_PLATFORMS=cpu on all instances"
            )
        reducer = CrossReplicaReducer(
            self.communicator, grid.first, total, not self._add_cross_replica_reductions, is_of_spare=self.is_spare
        )
        return grid, reducer

    @property
    def grid(self) -> DeviceGrid:
        """The devices of the local replicas: replicas x the devices that one replica spans."""
        return (self._found or self._find())[0]

    @property
    def devices(self) -> ReplicaDevices:
        """The first column of the grid, on which everything outside of pipelines runs."""
        return self.grid.first

    @property
    def reducer(self) -> CrossReplicaReducer:
        """The executor of collectives between replicas."""
        return (self._found or self._find())[1]

    @property
    def running_programs(self) -> ReplicaPrograms:
        """The programs of the local replicas; none can run before JAX has started."""
        return _NO_PROGRAMS if self._found is None else self._found[1]

    def exchange_on(self, platform: str, gpu: str) -> ExchangeChoice:
        """Return the exchange for a device of another framework than JAX. Collective.

        Args:
            platform: Platform of the device, see `InstanceFacts`.
            gpu: UUID of the device.
        """
        return exchange_of(self._membership, platform, self.variables_on_host, gpu)

    # ---- instances and replicas

    @property
    def instance(self) -> Instance:
        """The identity of this process and its replicas, by the present numbers of the instances."""
        return self._membership.instance

    @property
    def defaults(self) -> Defaults:
        """The defaults for objects made for the strategy, see `Strategy.defaults`."""
        return self._membership.defaults

    @property
    def communicator(self) -> Communicator:
        """The communicator of the instances that are left.

        Raises:
            ForkedProcessError: This process is a forked child of the instance.
        """
        self.refuse_in_child()
        return self._membership.communicator

    def refuse_in_child(self) -> None:
        """Raise `ForkedProcessError` in a forked child of the instance, which lacks JAX's threads as well."""
        self._membership.communicator.refuse_in_child()

    @property
    def instruments(self) -> Instruments:
        """The instruments attached to this instance."""
        return self.communicator.instruments

    @property
    def num_instances(self) -> int:
        """The number of instances, n."""
        return self.instance.count

    @property
    def instance_index(self) -> int:
        """The index of this instance, 0 to n - 1."""
        return self.instance.index

    @property
    def local_replicas(self) -> range:
        """The global indices of this instance's replicas."""
        return self.instance.local_replica_range

    @property
    def stored(self) -> StoredReplicas:
        """The replicas whose parts of the state this instance has, if each part is kept twice in case of a loss."""
        hosts = self.communicator.hosts if self.can_carry_on else ()
        own, number = self.local_replicas, self.num_replicas_in_sync
        if len(hosts) > 1:
            return StoredReplicas.of(self.instance_index, hosts, number, self.spread)
        return StoredReplicas(own, range(0), -(-number // self.num_instances), self.spread)

    @property
    def is_chief(self) -> bool:
        """Whether this instance prints and writes for all of them, see `Strategy.is_chief`."""
        return self._membership.is_chief and not self.is_spare

    def on_chief(self, function: Callable[[], object]) -> None:
        """Call a function on the chief only, as `Strategy.on_chief` describes. Collective."""
        is_done = False

        def attempt() -> bool:
            nonlocal is_done
            communicator = self.communicator
            if self.is_chief and not is_done:
                function()
                is_done = True
            communicator.barrier(name="duty of the chief")
            return True

        recorded = Recorded[bool]("duty of the chief", lambda done: bool, lambda results: True)
        collectively(self, attempt, lambda done, root: done, lambda: True, recorded)

    @property
    def variables_device(self) -> jax.Device:
        """The device of variables, optimizer state and updates: the host's CPU, or the first device."""
        first = self.devices.devices[0]
        if first.platform != "cpu" and self.variables_on_host:
            return jax.local_devices(backend="cpu")[0]
        return first

    @property
    def streams_gradients(self) -> bool:
        """Whether a step of PyTorch sends finished gradients to other instances while it computes the others."""
        return self.variables_on_host and self.num_instances > 1

    @property
    def job(self) -> JobFacts:
        """The facts about the job that sinks of metrics need."""
        at_first = self.num_instances
        waits = next((each for each in self.instruments.attached if isinstance(each, Waits)), None)
        return JobFacts(lambda: self.is_chief, lambda: at_first - self.num_instances, waits=waits)

    # ---- losses of instances

    @property
    def can_carry_on(self) -> bool:
        """Whether the other instances go on if one is lost: under poprun --on-failure shrink."""
        return self._membership.can_carry_on

    @property
    def is_spare(self) -> bool:
        """Whether this instance waits to take the place of a lost one."""
        return self._journal_member.is_spare()

    def wait_for_values(self) -> None:
        """Wait on a spare, outside of operations, until its placeholders have values; see `Journal.wait_for_values`."""
        self.journal.wait_for_values(partial(join, self))

    def carry_on(self) -> None:
        """Take over the replicas of lost instances, together with the other survivors. Collective among them.

        If this instance is a spare that was chosen, it drives replicas from now on. If fewer instances are wanted than
        before, it may be a spare from now on.

        The number of replicas stays; each instance drives other replicas than before, and reads their data.

        Raises:
            LifeCycleError: The job cannot go on; or this instance has another number, or counts other instances, than
                its communicator.
        """
        self.journal.flush()
        is_claimed = False
        while not is_claimed:
            self._membership.carry_on()  # an error here is final
            self.spread += 1
            self._insist_on_place()
            try:
                self._claim()
                is_claimed = True
            except LOSSES as loss:  # during the choice of the exchange
                logger.info("another instance is lost: %s", loss)
        self.has_carried_on = self.has_unknown_batches = True
        for dataset in self._datasets:
            dataset.redistribute(self.local_replicas)

    def _insist_on_place(self) -> None:
        """Raise if this instance would drive other replicas than those of its rank."""
        instance, communicator = self.instance, self.communicator
        own, place = (instance.index, instance.count), (communicator.rank, communicator.size)
        if not self.is_spare and own != place:
            raise LifeCycleError(
                f"after a change of the instances this one is instance {own[0]} of {own[1]}, but rank {place[0]} of "
                f"{place[1]}, so it would drive wrong replicas; this is a fault of PopDist: please report it"
            )

    def adopt(self, dataset: DistributedDataset, rows: int) -> None:
        """Redistribute a data set whenever this instance drives other replicas than before.

        Args:
            dataset: Data set of all replicas.
            rows: Rows of each replica in a batch; other arrays of that length are taken for parts of batches.
        """
        self._datasets.add(dataset)
        self._batch_sizes.add(rows)

    def replicas_batch(self, batch: Batch) -> Batch:
        """Return the batch of the same step for the replicas that this instance drives after a loss.

        Raises:
            StrategyError: The batch is not the last one of a data set that this strategy has distributed.
        """
        dataset = self.dataset_of(batch)
        if dataset is not None:
            return dataset.read_again(batch)
        raise StrategyError(
            "an instance is lost, and its part of this batch cannot be read again; train on the batches of "
            "strategy.distribute_dataset in their order"
        )

    def up_to_date(self, batch: Batch) -> Batch:
        """Return the batch, or the batch of the same step for the present replicas if an instance was lost since.

        Raises:
            StrategyError: An instance was lost or has joined, and nobody knows for which replicas the batch is.
        """
        if not self.has_carried_on:
            return batch
        dataset = self.dataset_of(batch)
        if dataset is not None:
            return dataset.read_again(batch)
        self.sharding.check_batch(batch)
        if self.has_unknown_batches and any(replication_of(leaf) is None for leaf in trees.leaves(batch)):
            raise StrategyError(UNKNOWN_BATCH)
        return batch

    def check_known_batches(self, batches: Iterable[Batch]) -> None:
        """Refuse batches without a data set of a strategy after instances were lost or have joined.

        Raises:
            StrategyError: Nobody knows for which replicas the batches are.
        """
        if self.has_unknown_batches and not isinstance(batches, DistributedDataset):
            raise StrategyError(UNKNOWN_BATCH)

    def real_batch(self, batch: Batch) -> Batch:
        """Return the batch with values, on a spare whose data sets give batches without values."""
        dataset = self.dataset_of(batch)
        return batch if dataset is None else dataset.with_values()

    def position_of(self, batch: Batch) -> tuple[int, int] | None:
        """Return the epoch and the step of the batch that a data set has given last; None for any other batch."""
        dataset = self.dataset_of(batch)
        return None if dataset is None else dataset.consumed

    def dataset_of(self, batch: Batch) -> DistributedDataset | None:
        """Return the data set that gave this batch last, or None."""
        return next((dataset for dataset in self._datasets if dataset.has_given(batch)), None)

    # ---- values

    def per_replica(self, function: Callable[[int], Tree]) -> PerReplica:
        """Return `function(r)` for the global index r of each local replica."""
        return PerReplica(tuple(function(replica) for replica in self.local_replicas), self.local_replicas)

    def broadcast(self, tree: Same, root: int = 0) -> Same:
        """Return the values of instance `root` on every instance, as `Strategy.broadcast` describes. Collective."""
        if any(isinstance(leaf, PerReplica) for leaf in trees.leaves(tree)):
            raise TypeError(
                "a PerReplica has a value for each local replica, but broadcast sends one value per instance; give it "
                "one of the values, or reduce them"
            )
        paths, structure = trees.flatten_with_path(tree)

        def of_root() -> list[np.ndarray]:
            received = []
            for path, leaf in paths:
                array = np.array(jax.random.key_data(leaf) if is_key(leaf) else as_jax_would(leaf), order="C")
                received.append(self.communicator.broadcast(array, root, name=trees.keystr(path)))
            self.communicator.barrier(name=f"end of broadcast of {len(paths)} leaves")
            return received

        arrays = self.recorded("broadcast", of_root)
        whole: Same = trees.unflatten(
            structure, [self._placed(array, leaf) for array, (_, leaf) in zip(arrays, paths, strict=True)]
        )
        return whole

    def hand_over(self, tree: Same, root: int, joins: bool) -> Same:
        """Return the values of instance `root` if this one joins; otherwise return the tree. Collective.

        Instances that do not join allocate nothing but room for the largest array: filling new memory takes longer than
        the messages (40 of 53 ms for 22 MB).
        """
        paths, structure = trees.flatten_with_path(tree)
        is_root = self.communicator.rank == root
        own = [_borrowed(leaf) if is_root or is_key(leaf) or not is_jax_array(leaf) else leaf for _, leaf in paths]
        room = np.empty(0 if joins or is_root else max((each.nbytes for each in own), default=0), np.uint8)
        received = []
        for (path, _), like in zip(paths, own, strict=True):
            memory = np.empty(like.nbytes, np.uint8) if joins else room[: like.nbytes]
            array = np.asarray(like) if is_root else memory.view(like.dtype).reshape(like.shape)
            received.append(self.communicator.broadcast(array, root, name=trees.keystr(path)))
        self.communicator.barrier(name=f"end of handing over {len(paths)} leaves")
        if not joins:
            return tree
        whole: Same = trees.unflatten(
            structure, [self._placed(array, leaf) for array, (_, leaf) in zip(received, paths, strict=True)]
        )
        return whole

    def _placed(self, array: np.ndarray, like: Leaf) -> jax.Array:
        """Return an array that was broadcast where variables are; a random key if `like` is one."""
        if isinstance(array, Placeholder):
            return array
        placed: jax.Array = jax.device_put(array, self.variables_device, may_alias=False)
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(like)) if is_key(like) else placed

    def recorded(self, kind: str, collect: Callable[[], Same]) -> Same:
        """Return host arrays that a collective call returns, on a spare those of the active instances."""
        recorded = Recorded[Same](kind, packed, lambda results: unpacked(results, self.wait_for_values))
        return self.journal.perform(recorded, collect, survives=False)

    def reduce(self, op: str, value: Tree, axis: Axis | None = None) -> Tree:
        """Reduce over all replicas of all instances, as `Strategy.reduce` describes. Collective."""
        op = normalise_op(op)
        leaves, structure = self.local_leaves(value)
        along = "" if axis is None else f" along {axis}"

        def reduced() -> list[np.ndarray]:
            found = []
            for number, arrays in enumerate(leaves):
                parts = arrays if axis is None else [part for array in arrays for part in parts_along(axis, array)]
                found.append(self.communicator.ordered_all_reduce(parts, op=op, name=f"reduce/{number}{along}"))
            return found

        return trees.unflatten(structure, self.recorded("reduce", reduced))

    def local_leaves(self, value: Tree) -> tuple[list[list[np.ndarray]], Tree]:
        """Return the arrays of the local replicas for each leaf of a value, and the structure.

        Raises:
            ValueError: The replicas' trees differ, or the value cannot be distributed.
        """
        value = self.sharding.shard_argument(value)
        values = value.values if isinstance(value, PerReplica) else [value] * len(self.local_replicas)
        flat = [trees.flatten(one) for one in values]
        structure = flat[0][1]
        structures = sorted({str(tree) for _, tree in flat})
        if len(structures) > 1:
            raise ValueError(f"replicas have values of different structures, {', '.join(structures)}; make them alike")
        of_replicas = zip(*(leaves for leaves, _ in flat), strict=True)
        return [[_host_array(leaf) for leaf in leaves] for leaves in of_replicas], structure

    # ---- programs

    def new_context(self, replica_index: jax.Array, program: str, is_watched: bool = False) -> ReplicaContext:
        """Return the context of a replica whose program is about to be traced.

        Programs with collectives are numbered in the order of tracing, which is the same on every instance.

        Args:
            replica_index: Global index of the replica.
            program: Kind of the program, for names of collectives.
            is_watched: Whether the caller reads `reducer.last_error` after the program has ended.
        """
        from strategies.jax.replicas.replica_context import ReplicaContext  # imports JAX

        numbers = self._program_numbers
        return ReplicaContext(self.reducer, replica_index, lambda: f"{program}{next(numbers)}", is_watched)


def _host_array(leaf: Leaf) -> np.ndarray:
    refuse_masked(leaf)
    return np.asarray(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), order="C")


def _borrowed(leaf: Leaf) -> np.ndarray:
    """Return a view of an array on the host, on CPUs without a copy; a random key as its numbers."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return borrow(leaf) if is_jax_array(leaf) else as_jax_would(leaf)


def as_jax_would(leaf: Leaf) -> np.ndarray:
    """Convert a leaf like `jnp.asarray`, but on the host, because that compiles a program for each shape and dtype."""
    array: np.ndarray = check_integers_fit(_host_array(leaf))
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


# ---- gathering


def row_results(tree: Tree, mask: np.ndarray) -> RowResults:
    """Return the results of one replica for the rows of a mask, from a tree of host arrays."""
    leaves, structure = trees.flatten(tree)
    return RowResults(leaves, partial(trees.unflatten, structure), mask)


def concatenated(replicas: Replicas, value: Tree, axis: int) -> Tree:
    """Return the values of all replicas one after another along an axis, as `Strategy.gather` describes. Collective."""
    leaves, structure = replicas.local_leaves(value)

    def gathered() -> list[np.ndarray]:
        return [_concatenated(replicas, arrays, axis, f"gather/{number}") for number, arrays in enumerate(leaves)]

    return trees.unflatten(structure, replicas.recorded("gather", gathered))


def _concatenated(replicas: Replicas, arrays: Sequence[np.ndarray], axis: int, name: str) -> np.ndarray:
    """Return the arrays of all replicas one after another; each is padded to the longest one to travel."""
    check_dtype(arrays[0].dtype, reduces=False)
    place = checked_axis(axis, arrays[0].shape)
    rows = [np.moveaxis(array, place, 0) for array in arrays]
    rest, dtype = _alike(rows)
    lengths = np.concatenate(gather_arrays(replicas, [[np.array(len(one))] for one in rows], name)).tolist()
    padded = [np.zeros((max(lengths), *rest), dtype) for _ in rows]
    for own, into in zip(rows, padded, strict=True):
        into[: len(own)] = own
    found = gather_arrays(replicas, [[one] for one in padded], f"{name} of {dtype}{list(rest)} along {place}")
    whole = np.concatenate([each[:length] for [each], length in zip(found, lengths, strict=True)])
    return np.ascontiguousarray(np.moveaxis(whole, 0, place))


def _alike(rows: Sequence[np.ndarray]) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape of a row and the dtype, which are the same on all replicas."""
    kinds = {(one.shape[1:], one.dtype) for one in rows}
    if len(kinds) > 1:
        shown = " and ".join(sorted(f"{dtype}{list(rest)}" for rest, dtype in kinds))
        raise ValueError(
            f"replicas have {shown} along the gathered axis, but only their lengths along it may differ; make them "
            "alike otherwise"
        )
    return next(iter(kinds))
