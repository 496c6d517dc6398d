"""The paths of PyTorch's gradients between instances, and the choice of one."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import cast, final
from weakref import WeakKeyDictionary

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
from popdist.membership.leaving import has_failed
from strategies.core.agreement import broadcast_text
from strategies.errors import StrategyError
from strategies.exchange.choice import AUTO, COMPILED, GPU, HOST, WINDOW, DevicePath, asked_exchange
from strategies.exchange.flat import fusion_groups
from strategies.exchange.window_path import (
    LOOPBACK,
    LocalPath,
    WindowPath,
    memory_of,
    own_address_towards,
    windows_if_possible,
)
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.agreement import gather_bytes
from strategies.torch.tensors import ReplicaMemory, TorchArithmetic, TorchViews, event_on, torch_dtype

logger = logging.getLogger("strategies.exchange")

FUSED_BYTES = 64 << 20
"""Largest size of buffers that travel together. Copying them costs less than a collective for each."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable by which a user names the network interface for gloo."""
_POLL_S = 0.001


@final
class TorchCompiledPath(DevicePath):
    """An all-to-all of slices, the sum of the own slice in the order of the tree, an all-gather of the slices' means.

    So 2 (n - 1) / n of the bytes pass each link, as in a ring all-reduce (Patarasuk & Yuan, 2009). The path is a
    process group of all instances: NCCL for tensors on GPUs, gloo for tensors on the host. It is built directly on a
    store of its own. So it does not touch the default group of `torch.distributed`, which the program may use, and it
    sets no environment variable. The constructor is a collective call.

    Instances pass a barrier on the host before each exchange. The barrier detects an instance that never comes, so no
    collective of PyTorch waits for it. All instances call collectives in the same order, from one thread at a time. On
    a GPU, collectives are queued on the current stream, before later work there; on the host they return when they are
    done. A collective raises `CollectiveTimeoutError` after `timeout_s`, or `PeerLostError` if another instance has
    failed or ended.

    Args:
        communicator: The communicator of all instances, for the barriers and to connect.
        spread: The spread of the replicas over the instances.
        device: The device of the sums. It need not be the current device of the calling thread.

    Raises:
        StrategyError: On all instances, if one of them cannot connect.
    """

    path_name = COMPILED

    def __init__(self, communicator: Communicator, spread: Spread, device: torch.device) -> None:
        super().__init__(spread, communicator.rank)
        self._communicator, self._device = communicator, device
        self._arithmetic = TorchArithmetic()
        self._all_nodes = tuple(node for nodes in spread.sums for node in nodes)
        self._travels_narrow = all(node.is_leaf for node in self._all_nodes)
        self._limit_s = communicator.limits.timeout_s
        self._store: Store | None = None
        self._backend: dist.ProcessGroup | None = None
        hosts, limit, reason = _hosts_of(communicator), timedelta(seconds=self._limit_s), ""
        try:
            self._store = _store(communicator, hosts, limit)
            if device.type == "cpu":
                self._backend = _gloo(self._store, self.rank, hosts, spread.size, limit)
            else:
                self._backend = _nccl(self._store, self.rank, spread.size, limit)
            own = torch.zeros(1, dtype=torch.uint8, device=device)
            self._all_gather(own.new_empty(spread.size), own)  # NCCL connects with the first collective
            if device.type != "cpu":
                torch.cuda.synchronize(device)
        except (RuntimeError, OSError) as error:  # PyTorch's errors are RuntimeErrors
            reason = f"{type(error).__name__}: {error}"
        failed = np.flatnonzero(communicator.all_gather(np.array(bool(reason)), name="instances that cannot connect"))
        if len(failed):
            self.close()
            why = f"; here: {reason}" if reason else ""
            raise StrategyError(
                f"the instances {failed.tolist()} could not join a process group of PyTorch for tensors on {device}"
                f"{why}; use POPDIST_EXCHANGE=host, or look for the reason with NCCL_DEBUG=INFO"
            )

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
                dtype = dtypes[numbers[0]]
                wire = torch_dtype(dtype if self._travels_narrow else accumulator_dtype(dtype, "mean"))
                rows = [
                    _joined([sums[number][node].to(wire) for number in numbers], _multiple(dtype))
                    for node in range(len(self.nodes))
                ]
                means, start = self._exchange(rows, dtype), 0
                for number in numbers:
                    size = sums[number][0].numel()
                    found[number] = means[start : start + size]
                    start += _rounded_up(size, _multiple(dtype))
            return found

    @override
    def gather(self, name: str, own: torch.Tensor) -> torch.Tensor:
        self._meet(name)
        with torch.no_grad():
            rows = own.new_empty((self.spread.size, own.numel()))
            if own.numel():
                self._all_gather(rows.view(-1), own.contiguous().view(-1))
            return rows

    @override
    def close(self) -> None:
        """Release connections, threads and memory. Not collective. A second call does nothing.

        Other instances may still need work that is queued on the GPU, so the call waits for it, at most `timeout_s`.
        """
        backend, self._backend = self._backend, None
        if backend is not None and self._device.type != "cpu":
            if not has_failed():
                self._wait_for_device()
            backend.abort()  # unlike shutdown(), it waits for no other instance
        del backend  # ends gloo's threads, and the store's
        self._store = None

    def _wait_for_device(self) -> None:
        event, end_s = event_on(self._device), time.monotonic() + self._limit_s
        with suppress(RuntimeError):  # a collective may have failed
            while event is not None and not event.query() and time.monotonic() < end_s:
                time.sleep(_POLL_S)

    def _meet(self, name: str) -> None:
        if self._backend is None:
            raise ClosedError(f"this process group of {self.spread.size} instances has been closed")
        self._communicator.barrier(name=f"compiled exchange of {name}")

    # ---- collectives

    def _all_to_all(
        self, into: torch.Tensor, given: torch.Tensor, into_counts: Sequence[int], given_counts: Sequence[int]
    ) -> None:
        """Send each instance its part of a flat tensor, and receive this instance's part from each of them.

        Args:
            into: The tensor that receives the parts, in the order of the instances; flat and contiguous.
            given: The tensor to send, flat and contiguous, of the same dtype.
            into_counts: The number of elements from each instance.
            given_counts: The number of elements for each instance.
        """
        received, sent = ([given.itemsize * count for count in counts] for counts in (into_counts, given_counts))
        options = AllToAllOptions()
        options.asyncOp = False
        self._run("all-to-all", lambda one: one.alltoall_base(_bytes(into), _bytes(given), received, sent, options))

    def _all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """Receive the flat contiguous tensors of all instances, equally long, one behind the other."""
        options = AllgatherOptions()
        options.asyncOp = False
        self._run("all-gather", lambda one: one._allgather_base(_bytes(into), _bytes(own), options))

    def _run(self, what: str, start: Callable[[dist.ProcessGroup], Work | None]) -> None:
        begun_s = time.monotonic()
        assert self._backend is not None
        try:
            if (work := start(self._backend)) is not None:
                work.wait()
        except RuntimeError as error:
            waited_s, others = time.monotonic() - begun_s, self.spread.size - 1
            text = f"the {what} of instance {self.rank} with {others} others failed after {waited_s:.1f} s"
            if waited_s >= self._limit_s:
                raise CollectiveTimeoutError(f"{text}; timeout_s is {self._limit_s:g}: {error}") from error
            raise PeerLostError(f"{text}; one of them has failed or ended: {error}") from error

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
        self._all_to_all(
            received.view(-1),
            given,
            [len(nodes) * own for nodes in self.spread.sums],
            [len(rows) * count for count in counts],
        )
        mean = self._arithmetic.mean(self._all_nodes, list(received), dtype, self.spread.replicas)
        if own < part:
            mean = torch.nn.functional.pad(mean, (0, part - own))
        means = mean.new_empty(instances * part)
        self._all_gather(means, mean)
        return means[:size]


def _joined(parts: Sequence[torch.Tensor], multiple: int) -> torch.Tensor:
    """Concatenate flat tensors, each padded to a multiple of elements; a single tensor stays as it is."""
    if len(parts) == 1:
        return parts[0].contiguous()
    pairs = [(part, part.new_zeros(_rounded_up(part.numel(), multiple) - part.numel())) for part in parts]
    return torch.cat([one for pair in pairs for one in pair])


def _multiple(dtype: np.dtype) -> int:
    return ALIGNMENT_BYTES // dtype.itemsize


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a flat tensor as bytes, because NCCL does not know all dtypes."""
    return tensor.view(torch.uint8)


# ---- rendezvous: backends have the methods of a `ProcessGroup`, which PyTorch's type stubs lack


def _hosts_of(communicator: Communicator) -> list[str]:
    """Return the names of the instances' hosts, or an empty list if all reach each other by loopback. Collective."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    words = [boot.read_text() if boot.exists() else this_host()]
    with suppress(OSError):
        words.append(os.readlink("/proc/self/ns/net"))
    own = json.dumps([words, this_host()]).encode()
    found = [json.loads(one) for one in gather_bytes(communicator, own, "hosts of PyTorch")]
    return [] if all(place == words for place, _ in found) else [host for _, host in found]


def _store(communicator: Communicator, hosts: Sequence[str], limit: timedelta) -> TCPStore:
    """Return a store that all instances share. Collective. A thread of instance 0 serves it."""
    store, text = None, ""
    if communicator.rank == 0:
        store = _listening(not hosts, limit)
        towards = map(own_address_towards, hosts) if hosts else [LOOPBACK] * communicator.size
        text = json.dumps([(address, store.port) for address in towards])
    host, port = json.loads(broadcast_text(communicator, text, 0, "address of a store"))[communicator.rank]
    return store or TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)


def _listening(is_local: bool, limit: timedelta) -> TCPStore:
    """Return a listening store. If all instances are on this host, it listens to this host only."""
    if not is_local:
        return TCPStore(this_host(), 0, is_master=True, timeout=limit, wait_for_workers=False)
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # the store owns it from here on
    return TCPStore(LOOPBACK, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=descriptor)


def _gloo(store: Store, rank: int, hosts: Sequence[str], size: int, limit: timedelta) -> dist.ProcessGroup:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined, unused-ignore]
    options._timeout = limit
    if _INTERFACE in os.environ:
        options._devices = [ProcessGroupGloo.create_default_device()]
    else:  # a host's name may stand for an address that other hosts cannot reach
        address = own_address_towards(hosts[rank == 0]) if hosts else LOOPBACK
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return cast(dist.ProcessGroup, ProcessGroupGloo(store, rank, size, options))


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> dist.ProcessGroup:
    if not dist.is_nccl_available():
        raise RuntimeError("this PyTorch has no NCCL")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, rank, size, options))


# ---- the choice of a path


_of_loops: WeakKeyDictionary[Communicator, dict[torch.device, DevicePath | None]] = WeakKeyDictionary()


def path_for(replicas: Replicas, memory: ReplicaMemory) -> DevicePath | None:
    """Return the path by which a device exchanges gradients; None if the host exchanges them.

    A single instance uses its device, unless "host" is requested. Collective, if replicas have a device.

    Args:
        replicas: The replicas of all instances.
        memory: The memory of this instance's replicas.

    Raises:
        DeviceError, ValueError: As `Replicas.exchange_on` and `asked_exchange` do.
        MappingError: If windows are requested, but instances cannot map each other's memory.
    """
    if not memory.is_shared:
        return None
    asked = asked_exchange(replicas.defaults.exchange, os.environ)
    if asked == HOST:
        return None
    if replicas.num_instances == 1:
        return LocalPath(replicas.num_replicas_in_sync, TorchArithmetic())
    return _between_instances(replicas, memory.device, asked)


def path_of_loops(replicas: Replicas, device: torch.device, obstacle: str = "") -> DevicePath | None:
    """Return the path that models in loops of the program's own share; None if the host exchanges their gradients.

    Collective for the first tensors on a device. The path is closed when the communicator is freed, or when
    the process ends.

    Args:
        replicas: The replicas of all instances: two or more instances, with one replica each.
        device: The device of the gradients, of the same type on all instances.
        obstacle: The reason why these gradients need the host's exchange, and the way out; "" if there is none.

    Raises:
        DeviceError, MappingError: If the requested exchange cannot work.
        StrategyError: If there is an obstacle and an exchange on devices was requested, or an instance cannot connect.
    """
    asked = asked_exchange(replicas.defaults.exchange, os.environ)
    if obstacle and asked not in (AUTO, HOST):
        raise StrategyError(f"the exchange {asked!r} was requested, but {obstacle}; or use POPDIST_EXCHANGE=host")
    if obstacle or asked == HOST:
        return None
    found = _of_loops.setdefault(replicas.communicator, {})
    if device not in found:
        found[device] = path = _between_instances(replicas, device, asked)
        if path is not None:
            weakref.finalize(replicas.communicator, path.close)
    return found[device]


def _between_instances(replicas: Replicas, device: torch.device, asked: str) -> DevicePath | None:
    """Return the path that several instances choose for gradients on a device; None for the host. Collective."""
    gpu, uuid = None, ""
    if device.type == "cuda":
        gpu, uuid = device.index or 0, str(torch.cuda.get_device_properties(device).uuid)
    choice = replicas.exchange_on(device.type if gpu is None else GPU, uuid)
    if not choice.is_on_device:
        return None
    communicator = replicas.communicator
    counts = communicator.all_gather(np.array(len(replicas.local_replicas)), name="replicas of each instance")
    spread = Spread.together(counts.tolist())
    if choice.path_name != WINDOW:
        return TorchCompiledPath(communicator, spread, device)
    return windows_if_possible(
        asked, lambda: WindowPath(spread, communicator, memory_of(gpu), TorchArithmetic(), TorchViews())
    )
