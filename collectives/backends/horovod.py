"""The backend over Horovod: Horovod's own collectives on the memory of NumPy arrays.

Horovod differs from the other backends in:

* Sums. Each rank adds its own contributions in order. Horovod's all-reduce then adds the partial sums in an order that
  MPI chooses. All ranks get the same bits, but the bits depend on how the contributions are spread over ranks. At most
  CARRIED_BYTES per rank travel with the comparison of the calls instead, and are added in rank order.
* dtypes. Horovod adds int32, int64, float32 and float64. Smaller integers travel as int32, unsigned integers as signed
  ones of the same width, and 16-bit floats as float32. The results equal those of the other backends.
* Minimum and maximum. MPI's comparison loses NaN, so every rank gathers the contributions and compares them itself.
* Waiting. Only Horovod's coordinator knows which ranks are late, so a message names all other ranks.
* Groups. Horovod makes its process sets collectively in all processes; a subgroup uses the MPI backend instead.

Horovod negotiates in cycles of CYCLE_TIME_MS, unless HOROVOD_CYCLE_TIME is set. It fuses arrays smaller than
FUSION_BYTES, unless HOROVOD_FUSION_THRESHOLD is set. Horovod's thread waits inside MPI. MPI is told to yield
(OMPI_MCA_mpi_yield_when_idle), so that this thread does not occupy the core of the computing thread.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from typing_extensions import override

from collectives import forks
from collectives.agreement import agree, exchange_bytes
from collectives.arrays import MOVABLE, REDUCIBLE, accumulator_dtype, aligned_empty
from collectives.calls import MISMATCH, Call, checked_root
from collectives.communicator import Communicator
from collectives.errors import (
    BusyError,
    CollectiveError,
    LayoutMismatchError,
    MissingBackendError,
    PeerLostError,
    UnsupportedBufferError,
)
from collectives.factory import RankGroup, Settings
from collectives.named import NamedQueue
from collectives.open_mpi import open_mpi_prepared
from collectives.reduction import Reduction, join, shares
from collectives.transport import Contributions, Parts, Reducing, Transport
from collectives.waiting import Watch

try:
    import torch
    from horovod import torch as hvd
    from horovod.common.exceptions import HorovodInternalError
except ImportError as error:
    raise MissingBackendError(
        f"the horovod backend needs Horovod and torch ({error}); build and install them with: "
        "sh launch_scripts/install_horovod.sh"
    ) from error

CARRIED_BYTES = 1 << 12
CYCLE_TIME_MS = 0.2
FUSION_BYTES = 1 << 20
_PIECE_BYTES = 1 << 30  # MPI counts elements in 31 bits
_GATHERED_BYTES = 1 << 25  # limit for each rank in an all-gather, because Horovod gathers through its own buffer
_FIRST_SLEEP_S = 2e-5
_LONGEST_SLEEP_S = 1e-3
_SLEEPS_GROW = 1.02  # reaches _LONGEST_SLEEP_S after about 0.05 s

_CARRIERS = {
    np.dtype(dtype): np.dtype(carrier)
    for carrier, dtypes in (
        ("int32", ("int8", "uint8", "int16", "uint16", "int32", "uint32")),
        ("int64", ("int64", "uint64")),
        ("float32", ("float32",)),
        ("float64", ("float64",)),
    )
    for dtype in dtypes
}
"""The dtype in which Horovod adds the partial sums of each dtype. Signed and unsigned integers wrap around alike."""

_FITS = 2.0**63 - 2.0**40  # the bound of values that fit into 64 bits, with a margin for float64 rounding
_HEAD_BYTES = 24  # header of a message: fingerprint, number of contributions, number of bytes that follow
_LEFT_AT_HOME = (1 << 64) - 1  # marks, in place of the number of bytes, arrays that are too large to be carried
_SUBGROUP_TAG = 8

_numbers = itertools.count()  # numbers of communicators; equal on all ranks, because ranks connect collectively
_started_in: int | None = None  # `forks.generation` of the process in which Horovod runs; None: it was not seen yet


# ---- Horovod itself, for NumPy arrays


def start(comm: object = None) -> None:
    """Start Horovod in this process, unless it is running; a collective call.

    Args:
        comm: Argument of `hvd.init`: None, ranks, or an mpi4py communicator.
    """
    global _started_in
    if not hvd.is_initialized():
        os.environ.setdefault("HOROVOD_CYCLE_TIME", f"{CYCLE_TIME_MS:g}")
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(FUSION_BYTES))
        with open_mpi_prepared():
            hvd.init(comm)
    elif _started_in is not None:
        return
    _started_in = forks.generation
    os.register_at_fork(after_in_child=end_at_once)


def end_at_once() -> None:
    """Let this process end without Horovod's exit handler and destructor, which wait for the other processes."""
    atexit.unregister(hvd.mpi_ops._basics.shutdown)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # runs with the exit status, after Python has ended


def refuse_in_child() -> None:
    """Raise `ForkedProcessError` in a forked child of the process that has started Horovod."""
    if _started_in is not None:
        forks.refuse_in_child(_started_in, "the process that has started Horovod")


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares the memory of `array`. If `array` is read-only, the caller must not write to it."""
    if not array.flags.writeable:  # torch.from_numpy warns about read-only arrays
        array = np.asarray(_Unprotected(array))
    return torch.from_numpy(array)


class _Unprotected:
    """The memory of a read-only array, exported as writable; keeps the array alive."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def finished(begin: Callable[[], int], watch: Watch) -> torch.Tensor:
    """Start an operation of Horovod with `begin`, wait for it, and return its result.

    Raises:
        ForkedProcessError: This process is a forked child of the one that has started Horovod.
        CollectiveError: Horovod reported an error, translated to an error of ours.
        CollectiveTimeoutError: The operation did not end in time.
    """
    refuse_in_child()
    others = [rank for rank in range(len(watch.names)) if rank != watch.rank]
    watch.pausing = _Sleep
    try:
        handle = begin()
        watch.wait_patiently(lambda: hvd.poll(handle), lambda: others)
        result: torch.Tensor = hvd.synchronize(handle)
        return result
    except (HorovodInternalError, ValueError) as error:  # ValueError: Horovod was shut down in the meantime
        raise _translated(error, watch) from error


def _translated(error: Exception, watch: Watch) -> CollectiveError:
    text = " ".join(str(error).split())
    if "ismatched" in text:
        return LayoutMismatchError(f"{MISMATCH}: Horovod says: {text}")
    if "same name" in text:
        return BusyError(f"Horovod says: {text}; give each concurrent operation its own name")
    return PeerLostError(f"{watch.names[watch.rank]} cannot go on with {watch.call.title}: Horovod says: {text}")


class _Sleep:
    """Sleeps of growing length. Horovod's thread may need this core, and Horovod cannot notify when it is done."""

    def __init__(self) -> None:
        self._seconds = _FIRST_SLEEP_S

    def __call__(self, longest_s: float) -> None:
        time.sleep(self._seconds)
        self._seconds = min(_LONGEST_SLEEP_S, self._seconds * _SLEEPS_GROW)


# ---- the transport


class HorovodTransport(Transport):
    """One channel between all ranks of Horovod.

    Args:
        watch: Limits and messages of waits.
        name: Prefix of the names of operations, the same on all ranks.
    """

    groups_reductions = True
    scatters_reductions = False

    def __init__(self, watch: Watch, name: str) -> None:
        self.rank = hvd.rank()
        self.size = hvd.size()
        self._watch = watch
        self._name = name

    @override
    def exchange(self, fingerprint: int, arrays: Sequence[np.ndarray], count: int) -> tuple[bool, Parts]:
        nbytes = sum(array.nbytes for array in arrays)
        is_carried = nbytes <= CARRIED_BYTES
        head = np.array([fingerprint, count, nbytes if is_carried else _LEFT_AT_HOME], np.uint64)
        carried = [array.view(np.uint8) for array in arrays] if is_carried else []
        messages = self.join(np.concatenate([head.view(np.uint8), *carried]), "all calls")
        heads, bodies = _split(messages)
        counts = tuple(count for _, count, _ in heads)
        if any(theirs != fingerprint for theirs, _, _ in heads):
            return False, Parts(counts, ())
        if not nbytes or any(size == _LEFT_AT_HOME for _, _, size in heads):
            return True, Parts(counts, ())
        step, dtype = arrays[0].nbytes, arrays[0].dtype
        received = [body[at : at + step].copy().view(dtype) for body in bodies for at in range(0, body.size, step)]
        return True, Parts(counts, received)

    @override
    def reduce(self, reducing: Reducing, parts: Parts) -> None:
        contributions, out, _, scatters, _ = reducing
        whole = np.empty_like(contributions[0]) if scatters else out
        self.reduce_group([reducing._replace(out=whole)], parts)
        if scatters:
            np.copyto(out, whole[self.rank * out.size : (self.rank + 1) * out.size])

    @override
    def reduce_group(self, group: Sequence[Reducing], parts: Parts) -> None:
        sums = []
        for contributions, out, reduction, *_ in group:
            if reduction.op in ("sum", "mean"):
                sums.append(_Sum(contributions, out, reduction))
            else:
                self._compare(contributions, out, reduction)
        self._add_up([one.carrier for one in sums])
        for one in sums:
            one.finish(parts.total)

    @override
    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        for piece in _pieces(buffer, _PIECE_BYTES):
            self.run(partial(hvd.broadcast_async_, tensor_of(piece), root), self._watch.call.title)

    @override
    def all_gather(self, block: np.ndarray, out: np.ndarray) -> None:
        start = 0
        for piece in _pieces(block, _GATHERED_BYTES // self.size):
            out[:, start : start + piece.size] = self.join(piece, self._watch.call.title).reshape(self.size, -1)
            start += piece.size

    @override
    def allocate(self, nbytes: int) -> np.ndarray:
        return aligned_empty(nbytes)

    def close(self) -> None:
        """Do nothing: Horovod keeps running for the process."""

    def _add_up(self, arrays: Sequence[np.ndarray]) -> None:
        """Add up the arrays of all ranks in place, as one negotiated group."""
        tensors = [tensor_of(piece) for array in arrays for piece in _pieces(array, _PIECE_BYTES)]
        if tensors:
            self.run(partial(hvd.grouped_allreduce_async_, tensors, op=hvd.Sum), self._watch.call.title)

    def _compare(self, contributions: Contributions, out: np.ndarray, reduction: Reduction) -> None:
        """Reduce by minimum or maximum: gather each rank's partial result, and reduce these locally."""
        chosen = np.empty_like(out)
        reduction.fold(contributions, chosen)
        for piece, result in zip(
            _pieces(chosen, _GATHERED_BYTES // self.size), _pieces(out, _GATHERED_BYTES // self.size), strict=True
        ):
            rows = self.join(piece.view(np.uint8), self._watch.call.title).view(out.dtype).reshape(self.size, -1)
            reduction.reduce(list(rows), result, self.size)

    def join(self, message: np.ndarray, name: str) -> np.ndarray:
        """Concatenate the messages of all ranks, which may differ in size."""
        messages: np.ndarray = self.run(partial(hvd.allgather_async, tensor_of(message)), name).numpy()
        return messages  # typed here because torch may be absent for mypy

    def run(self, begin: Callable[..., int], name: str) -> torch.Tensor:
        """Run the operation of Horovod that `begin(name=...)` starts, and return its result."""
        # With the same name in every step Horovod can cache the result of its negotiation.
        return finished(partial(begin, name=f"{self._name}: {name}"), self._watch)


class _Sum:
    """A sum over all ranks in progress, beginning with the sum of this rank's contributions.

    Attributes:
        carrier: Array that Horovod adds in place to those of the other ranks.
    """

    def __init__(self, contributions: Contributions, out: np.ndarray, reduction: Reduction) -> None:
        is_out = reduction.is_direct and not any(np.may_share_memory(out, other) for other in contributions[2:])
        self._total = out if is_out else np.empty(out.size, reduction.accumulator)
        self._out = out
        self._reduction = reduction
        reduction.fold(contributions, self._total)
        self.carrier = _carrier(self._total)

    def finish(self, count: int) -> None:
        """Store the sum, or the mean of `count` contributions, in `out`."""
        _take(self.carrier, self._total)
        self._reduction.finish(self._total, self._out, count)


def _carrier(total: np.ndarray) -> np.ndarray:
    """Return `total` in a dtype that Horovod adds: a view if the width is the same, else a converted copy."""
    dtype = _CARRIERS[total.dtype]
    return total.view(dtype) if dtype.itemsize == total.itemsize else total.astype(dtype)


def _take(carrier: np.ndarray, total: np.ndarray) -> None:
    """Copy `carrier` back into `total`, unless they share memory."""
    if carrier.itemsize != total.itemsize:
        total[...] = carrier.astype(total.dtype)


def _split(messages: np.ndarray) -> tuple[list[list[int]], list[np.ndarray]]:
    """Split the concatenated messages of all ranks into headers and bodies."""
    heads: list[list[int]] = []
    bodies: list[np.ndarray] = []
    while messages.size:
        head = messages[:_HEAD_BYTES].copy().view(np.uint64).tolist()
        end = _HEAD_BYTES + (0 if head[-1] == _LEFT_AT_HOME else head[-1])
        heads.append(head)
        bodies.append(messages[_HEAD_BYTES:end])
        messages = messages[end:]
    return heads, bodies


def _pieces(array: np.ndarray, nbytes: int) -> list[np.ndarray]:
    """Split the array into pieces of at most `nbytes` bytes."""
    step = max(1, nbytes // array.itemsize)
    return [array[start : start + step] for start in range(0, array.size, step)]


# ---- the operations of Horovod's own interface


class Operations:
    """The operations of one name. Operations without a name are matched by their order.

    All ranks compare their calls before an operation begins.

    Args:
        settings: Limits of waits.
        name: Name of the operations, or "".
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self._name = name
        self._watch = _everybody().watch(settings)
        self._transport = HorovodTransport(self._watch, f"popdist.horovod {name}".strip())

    def all_reduce(self, arrays: Sequence[np.ndarray], op: str, factors: tuple[float, float]) -> list[np.ndarray]:
        """Reduce each array over all ranks, in one operation of Horovod.

        Args:
            arrays: Arrays of any shapes and reducible dtypes.
            op: "Average", or the name of a reduction of `hvd`.
            factors: Factors by which values are multiplied before and after the reduction. Integers are multiplied in
                float64 and truncated.

        Raises:
            ValueError: An average of integers with factors does not fit into their dtype. Raised on all ranks.
        """
        for array in arrays:
            _check_reducible(array, op, factors)
        layouts = tuple(Call("array", dtype=array.dtype.name, shape=array.shape) for array in arrays)
        facts = f"{op}, factors {factors[0]:g} and {factors[1]:g}"
        self._agree(Call("allreduce", self._name, facts, group=layouts))
        pending = [_pending(array, op, factors, self._transport.size) for array in arrays]
        reduce = hvd.Sum if op == "Average" else getattr(hvd, op)
        self._run([one for one in pending if not one.is_scaled], reduce, factors, "allreduce")
        self._run([one for one in pending if one.is_scaled], reduce, (1.0, 1.0), "allreduce of integers")
        return [one.finish().reshape(array.shape) for one, array in zip(pending, arrays, strict=True)]

    def _run(self, pending: Sequence[_Reducing], reduce: object, factors: tuple[float, float], name: str) -> None:
        tensors = [tensor_of(carrier) for one in pending for carrier in one.carriers if carrier.size]
        if tensors:
            scales = {"prescale_factor": factors[0], "postscale_factor": factors[1]}
            self._transport.run(partial(hvd.grouped_allreduce_async_, tensors, op=reduce, **scales), name)

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Concatenate the arrays of all ranks along the first axis, whose length may differ between ranks."""
        if not array.ndim:
            raise ValueError("allgather of a scalar, which has no first dimension; give an array of one element")
        _check_movable(array)
        parts = self._agree(
            Call("allgather", self._name, "rows", array.dtype.name, array.shape[1:]), count=array.shape[0]
        )
        whole = np.empty((sum(parts.counts), *array.shape[1:]), array.dtype)
        if whole.size:
            message = array.reshape(-1).view(np.uint8)
            whole.reshape(-1).view(np.uint8)[...] = self._transport.join(message, "allgather")
        return whole

    def broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        """Overwrite `array` with rank `root`'s array, and return it."""
        root = checked_root("root_rank", root, self._transport.size, "processes")
        _check_movable(array)
        self._agree(Call("broadcast", self._name, "", array.dtype.name, array.shape, root))
        if array.size:
            self._transport.broadcast(array.reshape(-1).view(np.uint8), root)
        return array

    def _agree(self, call: Call, count: int = 1) -> Parts:
        self._watch.call = call
        return agree(self._transport, call, (), count)


@dataclass
class _Reducing:
    """A reduction in progress.

    Attributes:
        carriers: Arrays that Horovod reduces in place.
        finish: Returns the one-dimensional result once the carriers are reduced.
        is_scaled: Whether factors are already applied here, so that Horovod must not apply them.
    """

    carriers: Sequence[np.ndarray]
    finish: Callable[[], np.ndarray]
    is_scaled: bool = False


def _pending(array: np.ndarray, op: str, factors: tuple[float, float], size: int) -> _Reducing:
    flat = array.reshape(-1)
    if op != "Average" or array.dtype.kind not in "iu":
        return _plain(flat, Reduction("mean" if op == "Average" else "sum", flat.dtype), "sum", size)
    if factors != (1.0, 1.0):
        return _scaled_mean(flat, factors, size)
    reduction = Reduction("mean", flat.dtype)
    return _divided_mean(flat, size) if reduction.divides_first else _plain(flat, reduction, "mean", size)


def _plain(flat: np.ndarray, reduction: Reduction, accumulated_as: str, size: int) -> _Reducing:
    total = flat.astype(accumulator_dtype(flat.dtype, accumulated_as))
    carrier = _carrier(total)

    def finish() -> np.ndarray:
        _take(carrier, total)
        result = np.empty_like(flat)
        reduction.finish(total, result, size)
        return result

    return _Reducing([carrier], finish)


def _divided_mean(flat: np.ndarray, size: int) -> _Reducing:
    """Prepare the mean of 64-bit integers, whose sum may overflow."""
    ((quotients,), (remainders,)) = shares([flat], size)
    carriers = [_carrier(quotients), _carrier(remainders)]

    def finish() -> np.ndarray:
        result = np.empty_like(flat)
        join(quotients, remainders, result, size)
        return result

    return _Reducing(carriers, finish)


def _scaled_mean(flat: np.ndarray, factors: tuple[float, float], size: int) -> _Reducing:
    """Prepare the mean of integers with factors; `finish` raises ValueError if the mean or its sum overflows."""
    before, after = factors
    with np.errstate(all="ignore"):  # the sum of absolute values reveals overflows
        scaled = flat if before == 1 else np.trunc(flat.astype(np.float64) * before)
        total, bound = scaled.astype(np.int64), np.abs(scaled.astype(np.float64))

    def finish() -> np.ndarray:
        with np.errstate(all="ignore"):
            product = np.trunc(total.astype(np.float64) * after)
            mean = np.empty_like(total)
            join(0, total if after == 1 else product.astype(np.int64), mean, size)
        limits = np.iinfo(flat.dtype)
        fits = (bound < _FITS) & (np.abs(product) < _FITS) & (mean >= limits.min) & (mean <= limits.max)
        if not fits.all():
            raise ValueError(
                f"the average of {flat.dtype} with the factors {before:g} and {after:g} does not fit into "
                f"{flat.dtype}; convert it to float64 first"
            )
        return mean.astype(flat.dtype)

    return _Reducing([total, bound], finish, is_scaled=True)


def _check_reducible(array: np.ndarray, op: str, factors: tuple[float, float]) -> None:
    if array.dtype not in REDUCIBLE:
        raise UnsupportedBufferError(
            f"allreduce of {array.dtype}: supported are float16, bfloat16, float32, float64 and the integers"
        )
    if array.dtype.kind not in "iu":
        return
    if op == "Adasum":
        raise UnsupportedBufferError(f"Adasum of {array.dtype}: Adasum supports floats only")
    if array.dtype.kind == "u" and array.dtype.itemsize >= 4:  # travels as a signed integer of the same width
        if op in ("Min", "Max"):
            raise UnsupportedBufferError(f"{op} of {array.dtype}: Horovod cannot compare it; convert it to int64")
        if factors != (1.0, 1.0):
            raise UnsupportedBufferError(f"factors for {array.dtype}: Horovod cannot multiply it; convert it to int64")


def _check_movable(array: np.ndarray) -> None:
    if array.dtype not in MOVABLE:
        raise UnsupportedBufferError(
            f"an array of {array.dtype}: supported are float16, bfloat16, float32, float64, the integers and bool"
        )


# ---- connecting


def connect(settings: Settings) -> Communicator:
    """Return a communicator of all Horovod processes, and start Horovod if it is not running; a collective call."""
    start()
    number = next(_numbers)
    group = _everybody()
    watches = (group.watch(settings), group.watch(settings))
    main, named = (HorovodTransport(watch, f"popdist {number}.{channel}") for channel, watch in enumerate(watches))
    hosts = exchange_bytes(main, platform.node().encode())
    for watch in watches:
        watch.names = [f"rank {other} on {host.decode()}" for other, host in enumerate(hosts)]
    queue = NamedQueue(named, watches[1])
    return Communicator(main, watches[0], queue, settings.progress, partial(_connect_some, settings), "horovod")


def _everybody() -> RankGroup:
    return RankGroup(hvd.rank(), [f"rank {rank}" for rank in range(hvd.size())], range(hvd.size()))


def _connect_some(settings: Settings, ranks: Sequence[int]) -> Communicator:
    from mpi4py import MPI

    from collectives import connect as connect_by_name

    world = MPI.COMM_WORLD
    if world.Get_size() != hvd.size():
        raise ValueError(
            f"Horovod was started with {hvd.size()} of {world.Get_size()} processes; "
            "start it with all processes to make groups"
        )
    comm = world.Create_group(world.Get_group().Incl(ranks), _SUBGROUP_TAG)
    return connect_by_name("mpi", settings, comm=comm, instances=ranks)
