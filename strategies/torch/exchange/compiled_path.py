"""The path of gradient sums over PyTorch's own collectives: NCCL on GPUs, gloo on the host."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast, final

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ProcessGroupGloo, Store, TCPStore, Work
from typing_extensions import override

from collectives import Communicator
from collectives.arrays import ALIGNMENT_BYTES, accumulator_dtype
from collectives.errors import ClosedError, CollectiveTimeoutError, PeerLostError
from collectives.plans.spread import Spread
from popdist.instance import this_host
from popdist.process import process
from strategies.errors import StrategyError
from strategies.exchange.fusion import fusion_groups
from strategies.exchange.host_address import LOOPBACK, own_address_towards
from strategies.exchange.on_device import COMPILED, DevicePath
from strategies.torch.exchange.arithmetic import TorchArithmetic, torch_dtype

_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable by which a user names the network interface for gloo."""
_ADDRESS_BYTES = 512
_POLL_S = 0.001


class Backend(Protocol):
    """The backend of a PyTorch process group, used without `ProcessGroup`. PyTorch's type stubs lack these methods."""

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: AllToAllOptions,
    ) -> Work | None:
        """Begin an all-to-all of parts of flat tensors."""

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions) -> Work | None:
        """Begin an all-gather into one flat tensor."""

    def abort(self) -> None:
        """Close the group without waiting for other instances."""


class InstanceGroup:
    """A process group of all instances: NCCL for tensors on GPUs, gloo for tensors on the host.

    It is built directly on a store of its own. So it does not touch the default group of `torch.distributed`, which the
    program may use, and it sets no environment variable. The constructor is a collective call of the communicator.

    All instances call collectives in the same order, from one thread at a time. On a GPU, collectives are queued on the
    current stream, before later work there; on the host they return when they are done. A collective raises
    `CollectiveTimeoutError` after `timeout_s`, or `PeerLostError` if another instance has failed or ended.

    Args:
        communicator: The communicator of all instances.
        device: The device of the tensors.

    Raises:
        StrategyError: On all instances, if one of them could not connect.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._device = device
        self._rank, self._size = communicator.rank, communicator.size
        self._limit_s = communicator.limits.timeout_s
        self._store: Store | None = None
        self._backend: Backend | None = None
        hosts = _hosts_of(communicator)
        reason = ""
        try:
            self._connect(communicator, hosts)
        except (RuntimeError, OSError) as error:  # PyTorch's errors are RuntimeErrors
            reason = f"{type(error).__name__}: {error}"
        self._insist_on_all(communicator, reason)

    def _connect(self, communicator: Communicator, hosts: Sequence[str]) -> None:
        limit = timedelta(seconds=self._limit_s)
        self._store = _store(communicator, hosts, limit)
        if self._device.type == "cpu":
            self._backend = _gloo(self._store, self._rank, hosts, self._size, limit)
        else:
            self._backend = _nccl(self._store, self._rank, self._size, limit)
        own = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self.all_gather(own.new_empty(self._size), own)  # NCCL connects with the first collective
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)

    def _insist_on_all(self, communicator: Communicator, reason: str) -> None:
        failed = np.flatnonzero(communicator.all_gather(np.array(bool(reason)), name="instances that cannot connect"))
        if not len(failed):
            return
        self.close()
        own = f"; here: {reason}" if reason else ""
        raise StrategyError(
            f"the instances {failed.tolist()} could not join a process group of PyTorch for tensors on {self._device}"
            f"{own}; use POPDIST_EXCHANGE=host, or look for the reason with NCCL_DEBUG=INFO"
        )

    # ---- collectives

    def all_to_all(
        self, into: torch.Tensor, given: torch.Tensor, into_counts: Sequence[int], given_counts: Sequence[int]
    ) -> None:
        """Send each instance its part of a flat tensor, and receive this instance's part from each of them.

        Args:
            into: The tensor that receives the parts, in the order of the instances; flat and contiguous.
            given: The tensor to send, flat and contiguous, of the same dtype.
            into_counts: The number of elements from each instance.
            given_counts: The number of elements for each instance.
        """
        width = given.itemsize
        received, sent = ([width * count for count in counts] for counts in (into_counts, given_counts))
        options = AllToAllOptions()
        options.asyncOp = False
        self._run("all-to-all", lambda one: one.alltoall_base(_bytes(into), _bytes(given), received, sent, options))

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """Receive the flat contiguous tensors of all instances, equally long, one behind the other."""
        options = AllgatherOptions()
        options.asyncOp = False
        self._run("all-gather", lambda one: one._allgather_base(_bytes(into), _bytes(own), options))

    def insist_on_being_open(self) -> Backend:
        """Return the backend.

        Raises:
            ClosedError: If the group is closed.
        """
        if self._backend is None:
            raise ClosedError(f"this process group of {self._size} instances has been closed")
        return self._backend

    def _run(self, what: str, start: Callable[[Backend], Work | None]) -> None:
        backend = self.insist_on_being_open()
        begun_s = time.monotonic()
        try:
            work = start(backend)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            waited_s = time.monotonic() - begun_s
            text = f"the {what} of instance {self._rank} with {self._size - 1} others failed after {waited_s:.1f} s"
            if waited_s >= self._limit_s:
                raise CollectiveTimeoutError(f"{text}; timeout_s is {self._limit_s:g}: {error}") from error
            raise PeerLostError(f"{text}; one of them has failed or ended: {error}") from error

    # ---- the end

    def close(self) -> None:
        """Release connections, threads and memory. Not collective. A second call does nothing.

        Other instances may still need work that is queued on the GPU, so the call waits for it, at most `timeout_s`.
        """
        backend, self._backend = self._backend, None
        if backend is not None and self._device.type != "cpu":
            if not process.has_failed:
                self._wait_for_device()
            backend.abort()  # unlike shutdown(), it waits for no other instance
        del backend  # ends gloo's threads, and the store's
        self._store = None

    def _wait_for_device(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        end_s = time.monotonic() + self._limit_s
        with suppress(RuntimeError):  # a collective may have failed
            while not event.query() and time.monotonic() < end_s:
                time.sleep(_POLL_S)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a flat tensor as bytes, because NCCL does not know all dtypes."""
    return tensor.view(torch.uint8)


# ---- rendezvous


def _hosts_of(communicator: Communicator) -> list[str]:
    """Return the names of the instances' hosts, or an empty list if all reach each other by loopback. Collective."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    words = [boot.read_text() if boot.exists() else this_host()]
    with suppress(OSError):
        words.append(os.readlink("/proc/self/ns/net"))
    place = hashlib.sha256(" ".join(words).encode()).hexdigest()
    found = communicator.all_gather(_packed(f"{place} {this_host()}"), name="hosts of PyTorch")
    places, hosts = zip(*(_text(row).split() for row in found), strict=True)
    return [] if len(set(places)) == 1 else list(hosts)


def _store(communicator: Communicator, hosts: Sequence[str], limit: timedelta) -> Store:
    """Return a store that all instances share. Collective. A thread of instance 0 serves it."""
    told = np.zeros((communicator.size, _ADDRESS_BYTES), np.uint8)
    store = None
    if communicator.rank == 0:
        store, port = _listening(not hosts, limit)
        towards = map(own_address_towards, hosts) if hosts else [LOOPBACK] * communicator.size
        told[:] = [_packed(f"{address} {port}") for address in towards]
    communicator.broadcast(told, name="address of a store")
    host, port_of_store = _text(told[communicator.rank]).split()
    return store or TCPStore(host, int(port_of_store), is_master=False, timeout=limit, wait_for_workers=False)


def _listening(is_local: bool, limit: timedelta) -> tuple[Store, int]:
    """Return a listening store and its port. If all instances are on this host, it listens to this host only."""
    if not is_local:
        store = TCPStore(this_host(), 0, is_master=True, timeout=limit, wait_for_workers=False)
        return store, store.port
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # the store owns it from here on
    store = TCPStore(LOOPBACK, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=descriptor)
    return store, port


def _packed(text: str) -> np.ndarray:
    return np.frombuffer(text.encode()[:_ADDRESS_BYTES].ljust(_ADDRESS_BYTES, b"\0"), np.uint8).copy()


def _text(row: np.ndarray) -> str:
    return row.tobytes().rstrip(b"\0").decode()


def _gloo(store: Store, rank: int, hosts: Sequence[str], size: int, limit: timedelta) -> Backend:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined, unused-ignore]
    options._timeout = limit
    if _INTERFACE in os.environ:
        options._devices = [ProcessGroupGloo.create_default_device()]
    else:  # a host's name may stand for an address that other hosts cannot reach
        address = own_address_towards(hosts[rank == 0]) if hosts else LOOPBACK
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return cast(Backend, ProcessGroupGloo(store, rank, size, options))


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> Backend:
    if not dist.is_nccl_available():
        raise RuntimeError("this PyTorch has no NCCL")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return cast(Backend, dist.ProcessGroupNCCL(store, rank, size, options))


FUSED_BYTES = 64 << 20
"""Largest size of buffers that travel together. Copying them costs less than a collective for each."""


@final
class TorchCompiledPath(DevicePath):
    """An all-to-all of slices, the sum of the own slice in the order of the tree, an all-gather of the slices' means.

    So 2 (n - 1) / n of the bytes pass each link, as in a ring all-reduce (Patarasuk & Yuan, 2009). The constructor is a
    collective call.

    Instances pass a barrier on the host before each exchange. The barrier detects an instance that never comes, so no
    collective of PyTorch waits for it.

    Args:
        communicator: The communicator of all instances, for the barriers only.
        spread: The spread of the replicas over the instances.
        device: The device of the sums. It need not be the current device of the calling thread.

    Raises:
        StrategyError: On all instances, if one of them cannot connect.
    """

    word = COMPILED

    def __init__(self, communicator: Communicator, spread: Spread, device: torch.device) -> None:
        super().__init__(spread, communicator.rank)
        self._communicator = communicator
        self._device = device
        self._arithmetic = TorchArithmetic()
        self._all_nodes = tuple(node for nodes in spread.sums for node in nodes)
        self._travels_narrow = all(node.is_leaf for node in self._all_nodes)
        self._group = InstanceGroup(communicator, device)

    @override
    def means(
        self, name: str, sums: Sequence[Sequence[torch.Tensor]], dtypes: Sequence[np.dtype]
    ) -> Sequence[torch.Tensor]:
        """Return the mean of each buffer. Buffers that travel together become 64-byte-aligned views of one tensor."""
        self._meet(name)
        with torch.no_grad():
            found = [torch.empty(0, dtype=torch_dtype(dtype), device=self._device) for dtype in dtypes]
            nbytes = [of_buffer[0].numel() * dtype.itemsize for of_buffer, dtype in zip(sums, dtypes, strict=True)]
            for numbers in fusion_groups(nbytes, dtypes, FUSED_BYTES):
                for number, mean in zip(numbers, self._parcel(sums, numbers, dtypes[numbers[0]]), strict=True):
                    found[number] = mean
            return found

    @override
    def gather(self, name: str, own: torch.Tensor) -> torch.Tensor:
        self._meet(name)
        with torch.no_grad():
            rows = own.new_empty((self.spread.size, own.numel()))
            if own.numel():
                self._group.all_gather(rows.view(-1), own.contiguous().view(-1))
            return rows

    @override
    def close(self) -> None:
        self._group.close()

    def _meet(self, name: str) -> None:
        self._group.insist_on_being_open()
        self._communicator.barrier(name=f"compiled exchange of {name}")

    # ---- one parcel

    def _parcel(
        self, sums: Sequence[Sequence[torch.Tensor]], numbers: Sequence[int], dtype: np.dtype
    ) -> list[torch.Tensor]:
        wire = torch_dtype(dtype if self._travels_narrow else accumulator_dtype(dtype, "mean"))
        rows = [
            _joined([sums[number][node].to(wire) for number in numbers], _multiple(dtype))
            for node in range(len(self.nodes))
        ]
        means = self._exchange(rows, dtype)
        found, start = [], 0
        for number in numbers:
            size = sums[number][0].numel()
            found.append(means[start : start + size])
            start += _rounded_up(size, _multiple(dtype))
        return found

    def _exchange(self, rows: Sequence[torch.Tensor], dtype: np.dtype) -> torch.Tensor:
        """Return the means of flat tensors, given one for each node of this instance."""
        instances, size = self.spread.size, rows[0].numel()
        part = _rounded_up(-(-size // instances), _multiple(dtype))
        bounds = [min(size, part * instance) for instance in range(instances + 1)]
        cuts = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
        counts = [cut.stop - cut.start for cut in cuts]
        given = rows[0] if len(rows) == 1 else torch.cat([row[cut] for cut in cuts for row in rows])
        own = counts[self.rank]
        received = given.new_empty((len(self._all_nodes), own))
        self._group.all_to_all(
            received.view(-1),
            given,
            [len(nodes) * own for nodes in self.spread.sums],
            [len(rows) * count for count in counts],
        )
        mean = self._arithmetic.mean(self._all_nodes, list(received), dtype, self.spread.replicas)
        if own < part:
            mean = torch.nn.functional.pad(mean, (0, part - own))
        means = mean.new_empty(instances * part)
        self._group.all_gather(means, mean)
        return means[:size]


def _joined(parts: Sequence[torch.Tensor], multiple: int) -> torch.Tensor:
    """Concatenate flat tensors, each padded to a multiple of elements; a single tensor stays as it is."""
    if len(parts) == 1:
        return parts[0].contiguous()
    pieces = []
    for part in parts:
        pieces += [part, part.new_zeros(_rounded_up(part.numel(), multiple) - part.numel())]
    return torch.cat(pieces)


def _multiple(dtype: np.dtype) -> int:
    return ALIGNMENT_BYTES // dtype.itemsize


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
