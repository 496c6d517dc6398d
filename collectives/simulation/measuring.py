"""The measurement of message and sum costs on this machine, or between the ranks of an mpirun job."""

from __future__ import annotations

import math
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from collectives import Limits, Settings, connect
from collectives.hosts.near import NearLink, memory_bytes
from collectives.instruments import Instruments
from collectives.plans.network import Network
from collectives.point_to_point.link import Link, Transfer
from collectives.shared_memory.segment import create_segment, open_segment
from collectives.waiting import Watch

_SMALL_BYTES, _LARGE_BYTES = 64, 1 << 20
_ROUNDS, _BURST, _STREAM = 200, 64, 32
_LANE = 1
_MEMORY_ELEMENTS = 1 << 22


def measured(network: Network, over: str, local: bool) -> Network | None:
    """Return a network with some costs replaced by measurements.

    Args:
        network: Network with the other costs.
        over: Medium to measure: "loopback" (TCP), "grpc" (two workers on this machine), "memory" (two processes as
            ranks of one host among others), or "mpi" (pairs of ranks of this job, all at the same time).
        local: Whether the results are costs within a host.

    Returns:
        The network, or None on a rank that only helps to measure.

    Raises:
        ValueError: The job has a single rank.
    """
    found = {"loopback": _loopback, "grpc": _grpc, "mpi": _mpi, "memory": _memory}[over]()
    if found is None:
        return None
    latency, message, rate = found
    if local:
        costs = {"local_latency_s": latency, "local_message_s": message, "local_bytes_per_s": rate}
    else:
        costs = {"latency_s": latency, "message_s": message, "bytes_per_s": rate}
    return replace(network, memory_bytes_per_s=memory_bytes_per_s(), **costs)


def memory_bytes_per_s() -> float:
    """Return the bytes per second that a rank reads while it adds two float32 arrays outside of all caches."""
    one, other = (np.ones(_MEMORY_ELEMENTS, np.float32) for _ in range(2))
    out = np.empty_like(one)
    seconds = []
    for _ in range(9):
        begun = time.perf_counter()
        np.add(one, other, out=out)
        seconds.append(time.perf_counter() - begun)
    return 2 * one.nbytes / statistics.median(seconds)


def _costs(
    send: Callable[[int], None],
    receive: Callable[[int], None],
    leads: bool,
    streams: bool = True,
    meet: Callable[[], None] = lambda: None,
) -> tuple[float, float, float]:
    """Measure latency, time per message, and bytes per second, between two ranks that both call this.

    Args:
        send: Function that sends a number of bytes to the other rank.
        receive: Function that receives a number of bytes.
        leads: Whether this rank sends first; the other rank receives first.
        streams: Whether to measure bytes per second; if pairs share a link, a single pair does so.
        meet: Function that returns when all pairs have called it.
    """

    def there_and_back(nbytes: int) -> float:
        begun = time.perf_counter()
        for act in (send, receive) if leads else (receive, send):
            act(nbytes)
        return time.perf_counter() - begun

    def all_there(nbytes: int, count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            (send if leads else receive)(nbytes)
        (receive if leads else send)(_SMALL_BYTES)
        return time.perf_counter() - begun

    meet()
    there_and_back(_SMALL_BYTES)
    trip = statistics.median(there_and_back(_SMALL_BYTES) for _ in range(_ROUNDS)) / 2
    message = statistics.median(all_there(_SMALL_BYTES, _BURST) for _ in range(9)) / _BURST
    meet()
    stream = statistics.median(all_there(_LARGE_BYTES, _STREAM) for _ in range(5)) if streams else math.inf
    meet()
    return max(0.0, trip - 2 * message), message, _LARGE_BYTES * _STREAM / stream


def _loopback() -> tuple[float, float, float]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        helper = multiprocessing.get_context("spawn").Process(target=_help_loopback, args=(server.getsockname()[1],))
        helper.start()
        connection, _ = server.accept()
        with connection:
            found = _over_socket(connection, True)
        helper.join()
    return found


def _help_loopback(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        _over_socket(connection, False)


def _over_socket(connection: socket.socket, leads: bool) -> tuple[float, float, float]:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = bytes(_LARGE_BYTES)
    room = memoryview(bytearray(_LARGE_BYTES))

    def receive(nbytes: int) -> None:
        come = 0
        while come < nbytes:
            come += connection.recv_into(room[come:nbytes])

    return _costs(lambda nbytes: connection.sendall(data[:nbytes]), receive, leads)


def _grpc() -> tuple[float, float, float]:
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports.append(server.getsockname()[1])
    addresses = [f"127.0.0.1:{port}" for port in ports]
    helper = multiprocessing.get_context("spawn").Process(target=_over_grpc, args=(addresses, 1))
    helper.start()
    found = _over_grpc(addresses, 0)
    helper.join()
    return found


def _over_grpc(addresses: list[str], rank: int) -> tuple[float, float, float]:
    with connect("grpc", addresses=addresses, rank=rank) as communicator:
        return _over_link(communicator.link, 1 - rank)


def _mpi() -> tuple[float, float, float] | None:
    """Measure between pairs of ranks, one from each half; all pairs at the same time, because ranks may share cores."""
    with connect("mpi", Settings(mechanism="ring", spins=0)) as communicator:
        pairs = communicator.size // 2
        if not pairs:
            raise ValueError(f"this job has {communicator.size} ranks; measure with two or more: mpirun -np 2")
        if communicator.rank >= 2 * pairs:
            for _ in range(3):
                communicator.barrier()
            return None
        other = (communicator.rank + pairs) % (2 * pairs)
        found = _over_link(communicator.link, other, other % pairs == 0, communicator.barrier)
        return found if communicator.rank == 0 else None


def _memory() -> tuple[float, float, float]:
    """Measure between two processes of this machine that act as ranks of one host among others."""
    nbytes = memory_bytes(2)
    segment, path = create_segment(nbytes)
    helper = multiprocessing.get_context("spawn").Process(target=_help_memory, args=(path, nbytes))
    try:
        helper.start()
        found = _over_link(NearLink(memoryview(segment), 0, 2), 1)
        helper.join()
    finally:
        path.unlink()
    return found


def _help_memory(path: Path, nbytes: int) -> None:
    _over_link(NearLink(memoryview(open_segment(path, nbytes)), 1, 2), 0)


def _over_link(
    link: Link | None, other: int, streams: bool = True, meet: Callable[[], None] = lambda: None
) -> tuple[float, float, float]:
    assert link is not None, "ranks that share memory have no link"
    data, room = np.zeros(_LARGE_BYTES, np.uint8), np.empty(_LARGE_BYTES, np.uint8)
    watch = Watch(
        link.rank, [f"rank {rank}" for rank in range(link.size)], range(link.size), Limits(), Instruments(), 0
    )
    watch.pausing = link.pausing

    def wait(transfer: Transfer) -> None:
        watch.wait(transfer.done, lambda: [other])

    return _costs(
        lambda nbytes: wait(link.send(data[:nbytes], other, _LANE)),
        lambda nbytes: wait(link.receive(room[:nbytes], other, _LANE)),
        link.rank < other,
        streams,
        meet,
    )
