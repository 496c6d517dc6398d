"""What a replica sees inside a compiled function: its index, and collectives over all replicas of all instances."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from collectives import Communicator
from collectives.dtypes import accumulator_dtype
from collectives.reduction import normalise_op
from strategies.devices import AXIS, ReplicaDevices
from strategies.errors import DeviceError

_current: ContextVar[ReplicaContext | None] = ContextVar("replica_context", default=None)


class ReplicaContext:
    """One replica, while its program is traced.

    Attributes:
        replica_id_in_sync_group: this replica's global index, a traced int32 scalar.
        num_replicas_in_sync: the replicas of all instances.
    """

    def __init__(self, reducer: CrossReplicaReducer, replica_index: jax.Array, program: str) -> None:
        self.replica_id_in_sync_group = replica_index
        self.num_replicas_in_sync = reducer.total_replicas
        self._reducer = reducer
        self._program = program
        self._calls = 0

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

    def _all_reduce_leaf(self, op: str, value: jax.Array) -> jax.Array:
        name = f"{self._program}/{self._calls}"
        self._calls += 1
        reduce = self._reducer.reduce

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


@contextmanager
def replica_context(context: ReplicaContext) -> Iterator[None]:
    """Make `context` the one that `get_replica_context` returns."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


@dataclass
class _Meeting:
    """The local replicas in one cross-replica call."""

    contributions: dict[int, np.ndarray] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)
    result: np.ndarray | None = None
    error: BaseException | None = None


class CrossReplicaReducer:
    """Reduces values of compiled programs: within the program where one instance owns all replicas, else outside.

    Outside, the local replicas meet in a callback; the last one takes all their values into a named ordered
    all-reduce, for which instances may come in different orders.

    Args:
        communicator: connects the instances.
        devices: where the local replicas run.
        total_replicas: the replicas of all instances.
        is_identity: leave values as they are (the original's `add_ipu_cross_replica_reductions=False`).
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

    def reduce(self, op: str, value: jax.Array, name: str) -> jax.Array:
        """Reduce one array; called while a replica's program is traced."""
        if self._is_identity:
            return value
        if not self._devices.is_lockstep:
            raise DeviceError(
                f"{len(self._devices.replicas)} replicas have to wait for each other on {self._devices.width} devices; "
                "make the strategy before JAX is used, so that it can simulate one device per replica"
            )
        if self._communicator.size == 1:
            gathered = jax.lax.all_gather(value, AXIS)
            return _reduce_in_order(op, [gathered[replica] for replica in range(self.total_replicas)])
        result = jax.ShapeDtypeStruct(value.shape, value.dtype)
        position = jax.lax.axis_index(AXIS)
        reduced: jax.Array = io_callback(self._meet_for(op, name), result, position, value)
        return reduced

    def _meet_for(self, op: str, name: str) -> Callable[[Any, Any], np.ndarray]:
        def meet(position: Any, value: Any) -> np.ndarray:
            return self._meet(op, name, int(position), np.asarray(value))

        return meet

    def _meet(self, op: str, name: str, position: int, value: np.ndarray) -> np.ndarray:
        with self._lock:
            meeting = self._meetings.setdefault(name, _Meeting())
            meeting.contributions[position] = np.asarray(value, order="C")
            is_last = len(meeting.contributions) == self._devices.width
            if is_last:
                del self._meetings[name]
        if is_last:
            self._reduce_outside(op, name, meeting)
        meeting.is_over.wait()
        if meeting.error is not None:
            raise meeting.error
        assert meeting.result is not None
        return meeting.result

    def _reduce_outside(self, op: str, name: str, meeting: _Meeting) -> None:
        contributions = [meeting.contributions[position] for position in sorted(meeting.contributions)]
        try:
            out = np.empty_like(contributions[0])
            handle = self._communicator.start_ordered_all_reduce(contributions, out, op, name=name)
            meeting.result = handle.wait()
        except BaseException as error:
            meeting.error = self.last_error = error
        finally:
            meeting.is_over.set()


def _reduce_in_order(op: str, values: Sequence[jax.Array]) -> jax.Array:
    """The arithmetic of `collectives.reduction`, inside a compiled program."""
    combine = {"sum": jnp.add, "mean": jnp.add, "min": jnp.minimum, "max": jnp.maximum}[op]
    dtype = values[0].dtype
    total = values[0].astype(accumulator_dtype(np.dtype(dtype), op))
    for value in values[1:]:
        total = combine(total, value.astype(total.dtype))
    if op == "mean":
        # Behind a barrier, because a divisor that the compiler knows becomes a factor, with other bits than NumPy's
        # division. lax.div truncates integers.
        count = jnp.full(total.shape, len(values), total.dtype)
        total = jax.lax.div(total, jax.lax.optimization_barrier(count))
    return total.astype(dtype)
