"""The Horovod interface of the original system, on top of real Horovod: `from popdist import horovod as hvd`.

Semantics: Graphcore's `ipu.distributed` Horovod API and Horovod itself. Tensors are arrays of any kind that NumPy
accepts; results are NumPy arrays. Operations are matched by name, or without a name by order. The import loads nothing;
`init` needs Horovod, which `sh launch_scripts/install_horovod.sh` builds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from math import isnan, nan
from typing import TYPE_CHECKING, Any, TypeVar

from popdist import context
from popdist.errors import LifeCycleError, NotInitializedError
from popdist.membership.connecting import start_mpi
from popdist.membership.leaving import end_before_mpi
from popdist.tensors import copied

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

    from collectives import Communicator, Settings
    from popdist.instance import Instance

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "communicator",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "shutdown",
    "size",
]


class ReduceOp(Enum):
    """A reduction of `allreduce`."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

_LET_GO_S = 0.2
"""Time that Horovod's thread gets to release tensors when a process fails."""
_communicator: Communicator | None = None
_was_shut_down = False


# ---- life cycle


def init(comm: object = None) -> None:
    """Start Horovod in all processes of the job. May be repeated, but not after `shutdown`.

    Args:
        comm: None for all processes, a list of ranks, or an mpi4py communicator. Only the members of a list or a
            communicator call this; they are numbered in its order.

    Raises:
        LifeCycleError: `shutdown` was called before.
        MissingBackendError: Horovod is not installed; the message names the script that builds it.
        RuntimeError: This Horovod was built without MPI.
        ValueError: Ranks do not exist, are repeated, or leave this process out, as COMM_NULL does.
    """
    backend = _backend()
    if not backend.hvd.mpi_built():
        raise RuntimeError(
            "this Horovod was built without MPI; build one that has it: sh launch_scripts/install_horovod.sh"
        )
    if not is_initialized():
        if _was_shut_down:  # Horovod 0.28.1 would crash: it sets parameters that its first start has fixed
            raise LifeCycleError(
                "Horovod was shut down and cannot be started again in the same process; leave out "
                "horovod.shutdown(): it happens automatically at exit"
            )
        start_mpi()
        if not isinstance(comm, Iterable | None) and not comm:  # Horovod would use all processes
            raise ValueError(
                f"comm is {comm!r}, which has no members; only members of a communicator call horovod.init"
            )
        backend.start(_members(comm) if isinstance(comm, Iterable) else comm)
    end_before_mpi(shutdown, _end_without_horovod)


def _members(ranks: Iterable[int]) -> Any:
    """Return an MPI communicator of some processes; None for an empty list, as in Horovod."""
    from mpi4py import MPI

    world, members = MPI.COMM_WORLD, list(ranks)
    if not members:
        return None
    if len(set(members)) != len(members) or not set(members) <= set(range(world.Get_size())):
        raise ValueError(
            f"{members} is no group of this job's ranks; name different ranks of 0 to {world.Get_size() - 1}"
        )
    if world.Get_rank() not in members:
        raise ValueError(f"process {world.Get_rank()} is not among {members}; only these processes call horovod.init")
    return world.Create_group(world.Get_group().Incl(members))


def shutdown() -> None:
    """End Horovod in all processes for good; happens automatically at exit. Does nothing before `init`."""
    global _communicator, _was_shut_down
    if not is_initialized():
        return
    _backend().refuse_in_child()
    if _communicator is not None:
        _communicator.close()
        _communicator = None
    _was_shut_down = True
    _backend().hvd.shutdown()


def _end_without_horovod() -> None:
    """Make this failed process end at once, so that the launcher sees which process failed and ends the others.

    Horovod's exit handler and a destructor of its library would make the others fail too, and wait for them. Horovod's
    thread needs the interpreter to release the last collective's tensors. Without it, the thread would abort this
    process.
    """
    if is_initialized():
        time.sleep(_LET_GO_S)
        _backend().end_at_once()


def is_initialized() -> bool:
    """Return whether Horovod is running in this process."""
    backend = sys.modules.get("collectives.backends.horovod")
    return backend is not None and bool(backend.hvd.is_initialized())


def communicator() -> Communicator:
    """Return the communicator of `popdist.init`'s instances over Horovod. The first call is collective.

    Raises:
        LifeCycleError: `popdist.init` has not been called, or Horovod was started with other processes.
    """
    global _communicator
    if _communicator is None:
        _communicator = context.join_besides(_connect)
    return _communicator


def _connect(settings: Settings, instance: Instance) -> Communicator:
    import collectives

    init()
    return collectives.connect("horovod", settings)


# ---- who is there


_Answer = TypeVar("_Answer", int, bool)


def _query(answer: type[_Answer], name: str, doc: str, *, needs_init: bool = True) -> Callable[[], _Answer]:
    """Make a function without arguments that calls Horovod's function of the same name.

    Args:
        answer: Type of the result.
        name: Name of both functions.
        doc: Docstring.
        needs_init: Whether it raises `NotInitializedError` before `init`.
    """

    def ask() -> _Answer:
        hvd = (_running() if needs_init else _backend()).hvd
        return answer(getattr(hvd if hasattr(hvd, name) else hvd.mpi_ops, name)())

    ask.__name__ = ask.__qualname__ = name
    ask.__doc__ = doc
    return ask


size = _query(int, "size", "Return the number of processes.")
rank = _query(int, "rank", "Return the number of this process, 0 to `size() - 1`.")
local_size = _query(int, "local_size", "Return the number of processes on this host.")
local_rank = _query(int, "local_rank", "Return the number of this process on its host.")
is_homogeneous = _query(bool, "is_homogeneous", "Return whether all hosts have the same number of processes.")
mpi_threads_supported = _query(bool, "mpi_threads_supported", "Return whether several threads may call MPI.")
mpi_enabled = _query(bool, "mpi_enabled", "Return whether Horovod uses MPI in this process.", needs_init=False)
mpi_built = _query(bool, "mpi_built", "Return whether Horovod was built with MPI.", needs_init=False)
gloo_enabled = _query(bool, "gloo_enabled", "Return whether Horovod uses Gloo in this process.", needs_init=False)
gloo_built = _query(bool, "gloo_built", "Return whether Horovod was built with Gloo.", needs_init=False)
nccl_built = _query(bool, "nccl_built", "Return whether Horovod was built with NCCL.", needs_init=False)
ddl_built = _query(bool, "ddl_built", "Return whether Horovod was built with IBM's DDL.", needs_init=False)


# ---- operations


def allreduce(
    tensor: ArrayLike,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    name: str | None = None,
) -> np.ndarray:
    """Reduce the tensors of all processes.

    Args:
        tensor: Tensor with the same shape and dtype in all processes: 16-bit to 64-bit floats, or integers.
        op: Reduction; default: Average. An average of integers is truncated towards zero; their sum may exceed their
            dtype. Adasum is Horovod's own reduction, for floats and a power of two of processes.
        prescale_factor: Factor of each value before the reduction. Integers are multiplied in
            float64 and truncated towards zero, by both factors.
        postscale_factor: Factor of each value after the reduction.
        name: Name that matches the calls. Threads may call different names in different orders in each process.

    Returns:
        An array of the tensor's shape and dtype, with the same bits in all processes.

    Raises:
        LayoutMismatchError: The calls of the processes differ. Raised in all of them.
        NotInitializedError: `init` has not been called.
        NotImplementedError: Horovod does not offer Adasum here.
        UnsupportedBufferError: Horovod does not support this reduction of the dtype, e.g. uint32 with factors.
        ValueError: The operation is unknown, or a factor is not a number. In all processes: an average of integers with
            factors does not fit into their dtype.
    """
    return grouped_allreduce([tensor], op, prescale_factor, postscale_factor, name=name)[0]


def grouped_allreduce(
    tensors: Sequence[ArrayLike],
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    name: str | None = None,
) -> list[np.ndarray]:
    """Reduce several tensors as `allreduce` does, in one operation with one negotiation."""
    operations = _operations(name)
    op = Average if op is None else op
    if not isinstance(op, ReduceOp):
        known = ", ".join(member.value for member in ReduceOp)
        raise ValueError(f"Unsupported reduce op: {op!r}; use one of popdist.horovod's {known}")
    factors = (_number("prescale_factor", prescale_factor), _number("postscale_factor", postscale_factor))
    arrays = [copied(tensor) for tensor in tensors]
    reduced: list[np.ndarray] = operations.all_reduce(arrays, op.value, factors)
    return reduced


def _number(name: str, factor: float) -> float:
    try:
        number = float(factor)
    except (TypeError, ValueError):
        number = nan
    if isnan(number):
        raise ValueError(f"{name} is {factor!r}; give a number")
    return number


def allgather(tensor: ArrayLike, name: str | None = None) -> np.ndarray:
    """Concatenate the tensors of all processes along their first dimension.

    `popdist.allgather`, in contrast, stacks them along a new dimension.

    Args:
        tensor: Tensor of any dtype of `allreduce`, or bool. The first dimension may differ between processes.
        name: Name that matches the calls, as in `allreduce`.

    Raises:
        LayoutMismatchError: Dtypes or other dimensions differ. Raised in all processes.
        NotInitializedError: `init` has not been called.
        ValueError: The tensor is a scalar, which has no first dimension.
    """
    gathered: np.ndarray = _operations(name).all_gather(copied(tensor))
    return gathered


def broadcast(tensor: ArrayLike, root_rank: int, name: str | None = None) -> np.ndarray:
    """Return the tensor of process `root_rank` in all processes.

    Args:
        tensor: Tensor with the same shape and dtype in all processes; bool is allowed.
        root_rank: Process whose tensor is sent.
        name: Name that matches the calls, as in `allreduce`.

    Raises:
        LayoutMismatchError: Shapes, dtypes or roots differ. Raised in all processes.
        NotInitializedError: `init` has not been called.
        ValueError: The root process does not exist.
    """
    sent: np.ndarray = _operations(name).broadcast(copied(tensor), root_rank)
    return sent


# ---- Horovod


def _backend() -> Any:
    import collectives

    return collectives.load_backend("horovod")


def _running() -> Any:
    if not is_initialized():
        raise NotInitializedError("Horovod has not been initialized; use hvd.init()")
    return _backend()


def _operations(name: str | None) -> Any:
    backend = _running()
    from collectives import Settings
    from popdist.tuning import read_limits

    return backend.Operations(Settings(limits=read_limits(os.environ)), name or "")
