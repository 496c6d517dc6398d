"""What a replica sees inside a compiled function: its index, and collectives over all replicas of all instances."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import Communicator
from collectives.reduction import normalise_op
from popdist.instance import replica_block
from strategies.devices import ReplicaDevices
from strategies.errors import DeviceError, EndOfDataError
from strategies.feed_program import FeedProgram, Replication, tracing
from strategies.host_calls import call_host
from strategies.reduction_ops import check_dtype, reduce_in_order
from strategies.replica_groups import ReplicaGroups

_current: ContextVar[ReplicaContext | None] = ContextVar("replica_context", default=None)


class ReplicaContext:
    """One replica, while its program is traced.

    Attributes:
        replica_id_in_sync_group: this replica's global index, a traced int32 scalar.
        num_replicas_in_sync: the replicas of all instances.
        feeds: what infeeds and outfeeds know of its program.
        reducer: carries out collectives.
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
        )

    def all_reduce(self, op: str, value: Any) -> Any:
        """Reduce a pytree over all replicas of all instances; every replica gets the result.

        Sums are taken in replica order; 16-bit floats are added in float32; a mean of integers is truncated. Its
        gradient is the same reduction of the gradients, as in `tf.distribute.ReplicaContext.all_reduce`.

        Args:
            op: "sum", "mean", "min" or "max" (the last two have no gradient).
            value: arrays of this replica, with the same shapes and dtypes on all replicas.

        Raises:
            ValueError: for another op.
        """
        op = normalise_op(op)
        return jax.tree.map(lambda leaf: self._all_reduce_leaf(op, jnp.asarray(leaf)), value)

    def next_name(self) -> str:
        """A name for the next collective of this program, the same on every replica."""
        name = f"{self._program()}/{self._calls}"
        self._calls += 1
        return name

    @property
    def is_independent(self) -> bool:
        """Whether its program has asked so far for nothing that belongs to these replicas: no collective, no feed."""
        return not self._calls and not self.feeds.infeeds and not self.feeds.outfeeds

    def _all_reduce_leaf(self, op: str, value: jax.Array) -> jax.Array:
        name = self.next_name()
        reduce = self.reducer.reduce

        @jax.custom_vjp
        def all_reduce(x: jax.Array) -> jax.Array:
            return reduce(op, x, name)

        def forward(x: jax.Array) -> tuple[jax.Array, None]:
            return reduce(op, x, name), None

        def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            if op not in ("sum", "mean"):
                raise TypeError(f"all_reduce({op!r}) has no gradient; use 'sum' or 'mean'")
            return (reduce(op, gradient, f"{name}/gradient"),)

        all_reduce.defvjp(forward, backward)
        result: jax.Array = all_reduce(value)
        return result


def get_replica_context() -> ReplicaContext:
    """The replica whose program is being traced.

    Raises:
        RuntimeError: outside of `strategy.run` and of a loss function.
    """
    context = _current.get()
    if context is None:
        raise RuntimeError("there is no replica here; call get_replica_context inside strategy.run or a loss function")
    return context


def refuse_in_replica(call: str) -> None:
    """Stop a call that is for all replicas at once, where a replica's program is being traced.

    Raises:
        RuntimeError: naming the call.
    """
    if _current.get() is not None:
        raise RuntimeError(
            f"{call} was called by a replica, inside strategy.run or a loss function; call it outside, or use "
            "strategies.get_replica_context() there"
        )


@contextmanager
def replica_context(context: ReplicaContext) -> Iterator[None]:
    """Make `context` the one that `get_replica_context` returns."""
    token = _current.set(context)
    try:
        with tracing(context.feeds):
            yield
    finally:
        _current.reset(token)


@dataclass
class _Meeting:
    """The local replicas in one cross-replica call.

    Attributes:
        contributions: by their positions.
        results: in the order of the positions.
    """

    contributions: dict[int, np.ndarray] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)
    results: Sequence[np.ndarray] = ()
    error: BaseException | None = None


Meet = Callable[
    [list[np.ndarray]], Sequence[np.ndarray]
]  # what the local replicas contribute -> what each of them gets


class CrossReplicaReducer:
    """Carries out collectives of compiled programs: inside of them where one instance owns all replicas, else outside.

    Outside, the local replicas meet in a callback; the last one takes all their values into a named collective, for
    which instances may come in different orders.

    Args:
        communicator: connects the instances.
        devices: where the local replicas run.
        total_replicas: the replicas of all instances.
        is_identity: have `reduce` leave values as they are (the original's
            `add_ipu_cross_replica_reductions=False`).
    """

    def __init__(
        self,
        communicator: Communicator,
        devices: ReplicaDevices,
        total_replicas: int,
        is_identity: bool = False,
    ) -> None:
        self.total_replicas = total_replicas
        self.last_error: BaseException | None = None
        self._communicator = communicator
        self._devices = devices
        self._is_identity = is_identity
        self._lock = threading.Lock()
        self._meetings: dict[str, _Meeting] = {}

    @property
    def replication(self) -> Replication:
        """Which replicas run the programs."""
        return Replication(self._devices.replicas, self.total_replicas)

    def fail(self, error: BaseException) -> None:
        """Note that a feed of the running program has failed.

        The data end at the same place on all instances, and all of them finish their programs. After any other error
        they may be at different places, and replicas do not wait for other instances any more.
        """
        self.last_error = error
        if isinstance(error, EndOfDataError):
            return
        with self._lock:
            for meeting in self._meetings.values():
                meeting.error = error
                meeting.is_over.set()
            self._meetings.clear()

    def fail_and_raise(self, error: BaseException) -> None:
        """As `fail`, and end the replica whose callback this is."""
        self.fail(error)
        raise error

    def reduce(self, op: str, value: jax.Array, name: str) -> jax.Array:
        """Reduce one array, unless reductions are left out; called while a replica's program is traced."""
        return value if self._is_identity else self.combine(op, value, name)

    def combine(self, op: str, value: jax.Array, name: str) -> jax.Array:
        """Reduce one array over all replicas; called while a replica's program is traced.

        Raises:
            UnsupportedBufferError: for bool and complex numbers, on one instance as on several.
        """
        check_dtype(value.dtype, reduces=True)
        self._require_lockstep()
        if self.total_replicas == 1:
            return reduce_in_order(op, [value])

        def meet(contributions: list[np.ndarray]) -> list[np.ndarray]:
            out = np.empty_like(contributions[0])
            handle = self._communicator.start_ordered_all_reduce(contributions, out, op, name=name)
            return [handle.wait()] * len(contributions)

        return self._call(meet, name, value, value.shape)

    def gather(self, value: jax.Array, groups: ReplicaGroups, name: str) -> jax.Array:
        """The values of the replicas of a replica's group, along a new first axis.

        Within the program where no group crosses instances. Otherwise every instance gets the values of all replicas.

        Raises:
            TypeError: for a dtype that collectives do not carry.
            ValueError: if the replicas cannot be divided into these groups.
        """
        check_dtype(value.dtype, reduces=False)
        self._require_lockstep()
        members = groups.members(self.total_replicas)
        blocks = [
            replica_block(index, self._communicator.size, self.total_replicas)
            for index in range(self._communicator.size)
        ]
        if all(any(set(group) <= set(block) for block in blocks) for group in members):
            first = self._devices.replicas.start
            positions = [
                [replica - first for replica in group] for group in members if group[0] in self._devices.replicas
            ]
            raise NotImplementedError
        group_of = {replica: group for group in members for replica in group}

        def meet(contributions: list[np.ndarray]) -> list[np.ndarray]:
            everything = self._gather_outside(contributions, blocks, name)
            return [
                np.stack([everything[member] for member in group_of[replica]]) for replica in self._devices.replicas
            ]

        return self._call(meet, name, value, (len(members[0]), *value.shape))

    def _require_lockstep(self) -> None:
        if not self._devices.is_lockstep:
            raise DeviceError(
                f"{len(self._devices.replicas)} replicas have to wait for each other on {self._devices.width} devices; "
                "make the strategy before JAX is used, so that it can simulate one device per replica"
            )

    def _gather_outside(
        self, contributions: list[np.ndarray], blocks: Sequence[range], name: str
    ) -> dict[int, np.ndarray]:
        """The values of all replicas; instances with one replica less than others send a row that nobody reads."""
        rows = max(map(len, blocks))
        mine = np.empty((rows, *contributions[0].shape), contributions[0].dtype)
        for row, contribution in zip(mine, contributions, strict=False):
            row[...] = contribution
        whole = self._communicator.start_all_gather(mine, name=name).wait()
        return {replica: whole[rank, row] for rank, block in enumerate(blocks) for row, replica in enumerate(block)}

    def _call(self, meet: Meet, name: str, value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """What a replica gets of a meeting; called while its program is traced."""

        def come(position: Any, contribution: Any) -> np.ndarray:
            return self._meet(meet, name, int(position), np.asarray(contribution))

        result = jax.ShapeDtypeStruct(shape, value.dtype)
        got: jax.Array = call_host(
            come, result, (get_replica_context().replica_id_in_sync_group - self._devices.replicas.start, value)
        )
        return got

    def _meet(self, meet: Meet, name: str, position: int, value: np.ndarray) -> np.ndarray:
        with self._lock:
            if self.last_error is not None and not isinstance(self.last_error, EndOfDataError):
                raise self.last_error
            meeting = self._meetings.setdefault(name, _Meeting())
            meeting.contributions[position] = np.asarray(value, order="C")
            is_last = len(meeting.contributions) == self._devices.width
            if is_last:
                del self._meetings[name]
        if is_last:
            try:
                meeting.results = meet([meeting.contributions[one] for one in sorted(meeting.contributions)])
            except BaseException as error:
                meeting.error = self.last_error = error
            finally:
                meeting.is_over.set()
        meeting.is_over.wait()
        if meeting.error is not None:
            raise meeting.error
        return meeting.results[position]
