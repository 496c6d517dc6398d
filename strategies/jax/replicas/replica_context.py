"""The context of a replica inside a compiled function: its index, and collectives over all replicas."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol
from weakref import WeakSet

import jax
import jax.numpy as jnp
import numpy as np

from collectives import Communicator
from collectives.reduction import normalise_op
from popdist.instance import replica_blocks
from strategies.data.layout import Replication
from strategies.errors import DeviceError, EndOfDataError, FeedError, SpareError
from strategies.jax.programs.feed_program import FeedProgram, tracing
from strategies.jax.replicas.collective_equations import (
    Collective,
    CollectiveKind,
    OfReplica,
    Reduce,
    ReplicaGroups,
    without_gradient,
)
from strategies.jax.replicas.devices import ReplicaDevices
from strategies.jax.replicas.reduction_ops import check_dtype, current
from strategies.typing import Leaf, Tree


class ProgramEndListener(Protocol):
    """Objects, such as outfeeds, that are notified when a program that uses them ends.

    `CrossReplicaReducer.end` calls it once, after all local replicas have ended the program, also if they have failed.
    """

    def end_program(self) -> None:
        """Check that all local replicas have used the object alike; drop values from only some of them.

        Raises:
            FeedError: The replicas have used it differently.
        """


class ReplicaContext:
    """A replica while its program is traced.

    Attributes:
        replica_id_in_sync_group: Global index of this replica, a traced int32 scalar.
        num_replicas_in_sync: Number of replicas of all instances.
        feeds: Program as infeeds and outfeeds see it.
        reducer: Reducer that carries out collectives.
    """

    def __init__(
        self,
        reducer: CrossReplicaReducer,
        replica_index: jax.Array,
        name_program: Callable[[], str],
        is_watched: bool = False,
    ) -> None:
        self.replica_id_in_sync_group = replica_index
        self.num_replicas_in_sync = reducer.total_replicas
        self.reducer = reducer
        self._program = functools.cache(name_program)
        self._calls = 0
        self.feeds = FeedProgram(
            replica=replica_index,
            replication=reducer.replication,
            report=reducer.fail if is_watched else reducer.fail_and_raise,
            token=jnp.zeros_like(replica_index),
            meets=reducer.meets,
        )

    def all_reduce(self, op: str, value: Tree) -> Tree:
        """Reduce a pytree over all replicas of all instances; every replica gets the result.

        Sums are taken in the order of the tree over replicas; 16-bit floats are added in float32; a mean of integers is
        truncated. Its gradient is the same reduction of the gradients, as in
        `tf.distribute.ReplicaContext.all_reduce`, and may be differentiated again.

        Args:
            op: "sum", "mean", "min" or "max"; the last two have no gradient.
            value: Arrays of this replica, with the same shapes and dtypes on all replicas.

        Raises:
            ValueError: `op` is anything else.
        """
        op = normalise_op(op)

        def reduce(name: str, index: jax.Array, leaf: jax.Array) -> jax.Array:
            return self.reducer.reduce(op, index, leaf, name)

        def all_reduce(leaf: Leaf) -> jax.Array:
            named: OfReplica = functools.partial(reduce, self.next_name())
            if op not in ("sum", "mean"):
                named = without_gradient(named, f"all_reduce({op!r}) has no gradient; use 'sum' or 'mean'")
            return named(self.replica_id_in_sync_group, jnp.asarray(leaf))

        return jax.tree.map(all_reduce, value)

    def next_name(self) -> str:
        """Return the name of the next collective of this program, the same on every replica."""
        name = f"{self._program()}/{self._calls}"
        self._calls += 1
        return name

    @property
    def is_independent(self) -> bool:
        """Whether its program has used no collective and no feed so far, so that it may run on other replicas."""
        return not self.has_collectives and not self.has_feeds

    @property
    def has_collectives(self) -> bool:
        """Whether its program has used a collective so far."""
        return self._calls > 0

    @property
    def has_feeds(self) -> bool:
        """Whether its program has used a feed so far."""
        return bool(self.feeds.infeeds or self.feeds.outfeeds)


def get_replica_context() -> ReplicaContext:
    """Return the context of the replica whose program is being traced.

    Raises:
        RuntimeError: No program is being traced: the call is outside of `strategy.run` and of a loss function.
    """
    context = current.get()
    if not isinstance(context, ReplicaContext):
        raise RuntimeError("no replica runs here; call get_replica_context inside strategy.run or a loss function")
    return context


@contextmanager
def replica_context(context: ReplicaContext) -> Iterator[None]:
    """Make `context` the result of `get_replica_context`."""
    token = current.set(context)
    try:
        with tracing(context.feeds):
            yield
    finally:
        current.reset(token)


@dataclass
class _CollectiveCall:
    """The local replicas in one collective.

    Attributes:
        contributions: Values by the global indices of the replicas.
        is_over: Event set when the results or the error are there.
        results: Results by the global indices of the replicas.
        error: Error of the collective, or None.
    """

    contributions: dict[int, np.ndarray] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)
    results: Mapping[int, np.ndarray] = field(default_factory=dict)
    error: BaseException | None = None


class CrossReplicaReducer:
    """The executor of the collectives of compiled programs.

    The local replicas meet in callbacks. The last one to arrive combines their values, or takes them into a collective
    of the instances. That collective has a name, because instances may reach collectives in different orders.

    Args:
        communicator: Communicator of the instances.
        devices: Devices of the local replicas.
        total_replicas: Number of replicas of all instances.
        is_identity: Whether `reduce` leaves values as they are (the original's
            `add_ipu_cross_replica_reductions=False`).
        is_of_spare: Whether this instance is a spare, whose programs have no collectives.

    Attributes:
        last_error: First error since the running program began, or None.
    """

    def __init__(
        self,
        communicator: Communicator,
        devices: ReplicaDevices,
        total_replicas: int,
        is_identity: bool = False,
        is_of_spare: bool = False,
    ) -> None:
        self.total_replicas = total_replicas
        self.last_error: BaseException | None = None
        self._communicator = communicator
        self._devices = devices
        self._is_identity = is_identity
        self._is_of_spare = is_of_spare
        self._blocks = replica_blocks(communicator.size, total_replicas)
        self._lock = threading.Lock()
        self._calls: dict[str, _CollectiveCall] = {}
        self._outfeeds: WeakSet[ProgramEndListener] | None = None  # those that the running program enqueues

    def begin(self) -> None:
        """Prepare for a program; drop remains of a program that failed half-way."""
        self.end()
        self.last_error = None

    def meets(self, outfeed: ProgramEndListener) -> None:
        """Note that a replica of the running program enqueues an outfeed. Called from any thread."""
        met = self._outfeeds
        if met is None or outfeed not in met:
            with self._lock:
                if self._outfeeds is None:
                    self._outfeeds = WeakSet()
                self._outfeeds.add(outfeed)

    def end(self) -> None:
        """End the program; drop values enqueued by only some local replicas, and note this as an error."""
        if self._outfeeds is None:
            return
        with self._lock:
            outfeeds, self._outfeeds = list(self._outfeeds), None
        for outfeed in outfeeds:
            try:
                outfeed.end_program()
            except FeedError as error:
                self.last_error = self.last_error or error

    def ending(self) -> AbstractContextManager[None]:
        """End the program with the block; if JAX raises, raise the error of the collective or feed that caused it."""
        return self  # an object of its own, or a generator, would cost each step some microseconds

    def __enter__(self) -> None:
        """Enter the block of `ending`."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the block of `ending`."""
        try:
            if isinstance(error, jax.errors.JaxRuntimeError) and self.last_error not in (None, error):
                raise self.last_error from error
        finally:
            self.end()

    @property
    def replication(self) -> Replication:
        """The replicas that run the programs."""
        return Replication(self._devices.replicas, self.total_replicas)

    def fail(self, error: BaseException) -> None:
        """Note that a replica of the running program has failed. Called from any thread.

        After an `EndOfDataError` all replicas finish their programs, because the data end at the same place on all
        instances. After any other error replicas may be at different places. So replicas that wait for others, now or
        later, end with the error. The first such error stays.
        """
        with self._lock:
            if not self._has_failed:
                self.last_error = error
            if isinstance(error, EndOfDataError):
                return
            for call in self._calls.values():
                call.error = error
                call.is_over.set()
            self._calls.clear()

    @property
    def _has_failed(self) -> bool:
        return self.last_error is not None and not isinstance(self.last_error, EndOfDataError)

    def fail_and_raise(self, error: BaseException) -> None:
        """Note the error as `fail` does, and raise it in the callback of this replica."""
        self.fail(error)
        raise error

    def reduce(self, op: str, index: jax.Array, value: jax.Array, name: str) -> jax.Array:
        """Reduce one array over all replicas as `collect` does, or return it unchanged if `is_identity`."""
        return value if self._is_identity else self.collect(Reduce(op), ReplicaGroups(), index, value, name)

    def collect(
        self, kind: CollectiveKind, groups: ReplicaGroups, index: jax.Array, value: jax.Array, name: str
    ) -> jax.Array:
        """Return a replica's result of a collective within its group. Called while its program is traced.

        A group of one makes no call. The program depends only on the number of replicas, and not on where they run.

        Args:
            kind: Kind of the collective.
            groups: Groups of replicas.
            index: Global index of the replica, an int32 scalar.
            value: Value of this replica, of the same shape and dtype on all replicas.
            name: Name of the collective; see `ReplicaContext.next_name`.

        Raises:
            UnsupportedBufferError: Instances do not exchange this dtype; also raised if there is one instance.
            ValueError: The replicas cannot be divided into these groups.
            DeviceError: The local replicas do not all run at once.
        """
        check_dtype(value.dtype, reduces=kind.reduces)
        collective = Collective(name, kind, groups, self.total_replicas, self._carry_out)
        if len(collective.members[0]) == 1:
            return value.reshape(collective.shape(value.shape))
        if not self._devices.is_lockstep:
            raise DeviceError(
                f"{len(self._devices.replicas)} replicas have to wait for each other on {self._devices.width} devices; "
                "give each replica a device, with fewer replicas or more instances"
            )
        self._communicator.expect_callbacks()
        return collective(index, value)

    def _carry_out(self, collective: Collective, replica: int, value: np.ndarray) -> np.ndarray:
        """Return a replica's result, once all other replicas of this instance have contributed."""
        with self._lock:
            if self.last_error is not None and self._has_failed:
                raise self.last_error
            call = self._calls.setdefault(collective.name, _CollectiveCall())
            call.contributions[replica] = np.asarray(value, order="C")
            is_last = len(call.contributions) == len(self._devices.replicas)
            if is_last:
                del self._calls[collective.name]
        if is_last:
            try:
                call.results = self._results(collective, call.contributions)
            except BaseException as error:
                call.error = error
                self.fail(error)
            finally:
                call.is_over.set()
        call.is_over.wait()
        if call.error is not None:
            raise call.error
        return call.results[replica]

    def _results(self, collective: Collective, contributions: Mapping[int, np.ndarray]) -> Mapping[int, np.ndarray]:
        """Return the result of each local replica."""
        kind, members = collective.kind, collective.members
        if self._is_of_spare:
            raise SpareError(
                "a spare takes part in no collective, so strategy.run cannot run this function here; train with "
                "strategies.Trainer, or start the job without spares"
            )
        if isinstance(kind, Reduce) and len(members) == 1 and self._communicator.size > 1:
            ordered = [contributions[replica] for replica in self._devices.replicas]
            out = np.empty_like(ordered[0])
            handle = self._communicator.start_ordered_all_reduce(ordered, out, kind.op, name=collective.name)
            return dict.fromkeys(self._devices.replicas, handle.wait())
        stay_inside = all(any(set(group) <= set(block) for block in self._blocks) for group in members)
        values = contributions if stay_inside else self._gather(contributions, collective.name)
        here = [group for group in members if not values.keys().isdisjoint(group)]
        return {
            replica: result
            for group in here
            for replica, result in zip(group, kind.combine([values[one] for one in group]), strict=True)
        }

    def _gather(self, contributions: Mapping[int, np.ndarray], name: str) -> Mapping[int, np.ndarray]:
        """Return the values of all replicas. Instances with one replica less send one more row, which is ignored."""
        ordered = [contributions[replica] for replica in self._devices.replicas]
        mine = np.empty((max(map(len, self._blocks)), *ordered[0].shape), ordered[0].dtype)
        for row, contribution in enumerate(ordered):
            mine[row] = contribution
        whole = self._communicator.start_all_gather(mine, name=name).wait()
        return {
            replica: whole[rank, row, ...]
            for rank, block in enumerate(self._blocks)
            for row, replica in enumerate(block)
        }
