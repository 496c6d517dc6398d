"""The resources that a process uses on its host and on its network connections, as the kernel counts them. Linux only.

On the host: memory, CPU time, waits for a core, and load. On the network: all TCP connections to other hosts, whichever
library has opened them. The program counts nothing itself, so a step costs nothing. TCP_INFO (tcp(7), linux/tcp.h) has
the acknowledged bytes, the time during which any were in transit, and the round-trip time. Connections within a host
and networks other than TCP are not seen.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from ipaddress import IPv6Address, ip_address
from typing import final

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM, _SCHEDSTAT = "/proc/self/statm", "/proc/self/task/{}/schedstat"
_LONGEST_LINE = 200

MEMORY, CPU_TIME, CORE_WAIT, HOST_LOAD = "memory", "cpu time", "wait for cores", "host load"

LARGEST_SHARE = 0.001
"""Upper limit of a gauge's CPU time, as a part of one core."""

_DESCRIPTORS = "/proc/self/fd"
_LONGEST_INFO, _ADDRESS_BYTES = 256, 28
_PLACES: dict[int, slice] = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}
"""Position of the address itself in `sockaddr_in` and `sockaddr_in6`."""
_SENT, _ROUND_TRIP, _BUSY = struct.Struct("<120xQ"), struct.Struct("<148xI"), struct.Struct("<168xQQ")
"""Positions in `tcp_info` of the acknowledged bytes, the shortest round trip, the time with bytes in transit, and the
part of it in which the receiver had no room for more; in us."""
_INFO_BYTES = _BUSY.size

SENT, BUSY, ROUND_TRIP = "bytes sent", "seconds sending", "round trip in s"
_FROM, _TO = " from ", " to "
_Names = tuple[str, str, str]
ReadableBuffer = bytes | ctypes.Array[ctypes.c_char]


@final
class Gauge:
    """A repeated reading; the longer it takes, the more rarely it is repeated.

    Args:
        read: Function that returns numbers by name.
        now_s: Clock.
        spent_s: Clock of this thread's CPU time.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, float]],
        now_s: Callable[[], float] = time.monotonic,
        spent_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._read = read
        self._now_s = now_s
        self._spent_s = spent_s
        self._again_at_s = float("-inf")

    def look(self, tell: Callable[[str, float], None], is_last: bool = False) -> None:
        """Read and pass each number to `tell`, unless the last reading is too recent and `is_last` is false."""
        if self._now_s() < self._again_at_s and not is_last:
            return
        before_s = self._spent_s()
        for name, number in self._read().items():
            tell(name, number)
        self._again_at_s = self._now_s() + (self._spent_s() - before_s) / LARGEST_SHARE


def read_gauges() -> dict[str, float]:
    """Return the available numbers: resident bytes, CPU seconds, seconds of waiting for a core, and the host's load."""
    found = {CPU_TIME: time.process_time(), HOST_LOAD: os.getloadavg()[0]}
    with suppress(OSError):
        found[MEMORY] = float(_line_of(_STATM).split()[1]) * _PAGE_BYTES
    if (waited := _core_wait_s()) is not None:
        found[CORE_WAIT] = waited
    return found


def _core_wait_s() -> float | None:
    """Return how long the main thread was ready to run but had no core; None if the kernel does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(_line_of(_SCHEDSTAT.format(os.getpid())).split()[1]) / 1e9
    return None


def _line_of(path: str) -> bytes:
    """Read a file of /proc, without the layers of `open`, which would take longer than the kernel."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, _LONGEST_LINE)
    finally:
        os.close(file)


@dataclass(frozen=True)
class Addresses:
    """The two addresses of some connections.

    Attributes:
        local: Address on this host.
        peer: Address on the other host.
    """

    local: str
    peer: str

    def named(self, what: str) -> str:
        """Return the name of a measurement of these connections."""
        return f"{what}{_FROM}{self.local}{_TO}{self.peer}"


def ends_in(name: str, what: str) -> Addresses | None:
    """Return the addresses in the name of a measurement; None if it is another measurement."""
    before, is_from, ends = name.partition(_FROM)
    local, is_to, peer = ends.partition(_TO)
    return Addresses(local, peer) if before == what and is_from and is_to else None


def read_connections() -> dict[str, float]:
    """Return the present counts by name: for each pair of addresses the sums, and the shortest round trip.

    The time in which the receiver had no room is left out, because then the network is not the bottleneck.
    """
    return summed(_infos())


def summed(infos: Iterable[tuple[_Names, ReadableBuffer]]) -> dict[str, float]:
    """Combine `tcp_info` structures of the kernel; each comes with the names of its measurements."""
    found: dict[str, float] = {}
    for (sent_name, busy_name, trip_name), info in infos:
        (sent,), (round_trip_us,), (busy_us, full_us) = (each.unpack_from(info) for each in (_SENT, _ROUND_TRIP, _BUSY))
        found[sent_name] = found.get(sent_name, 0.0) + sent
        found[busy_name] = found.get(busy_name, 0.0) + (busy_us - full_us) / 1e6
        found[trip_name] = min(found.get(trip_name, float("inf")), round_trip_us / 1e6)
    return found


def _infos() -> Iterator[tuple[_Names, ctypes.Array[ctypes.c_char]]]:
    """Yield `tcp_info` of each connection to another host, valid until the next one; skip connections just closed."""
    descriptors: list[str] = []
    with suppress(OSError):
        descriptors = os.listdir(_DESCRIPTORS)
    info, local, peer = (ctypes.create_string_buffer(size) for size in (_LONGEST_INFO, _ADDRESS_BYTES, _ADDRESS_BYTES))
    libc = _libc()
    for descriptor in map(int, descriptors):
        nbytes = ctypes.c_uint32(_LONGEST_INFO)
        if libc.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(nbytes)):
            continue  # not TCP
        if _has_end(libc.getsockname, descriptor, local) and _has_end(libc.getpeername, descriptor, peer):
            names = _names(local.raw, peer.raw)
            if names is not None and nbytes.value >= _INFO_BYTES:
                yield names, info


def _has_end(ask: Callable[..., int], descriptor: int, room: ctypes.Array[ctypes.c_char]) -> bool:
    """Return whether the socket has this address; if so, `room` has received the address and port."""
    return ask(descriptor, room, ctypes.byref(ctypes.c_uint32(_ADDRESS_BYTES))) == 0


@cache
def _libc() -> ctypes.PyDLL:
    """Return libc, called with the interpreter's lock held: releasing the lock would take longer than the calls.

    A Python socket around the descriptor would take longer too. If the program has called `socket.setdefaulttimeout`,
    it would also make the connection non-blocking.
    """
    return ctypes.PyDLL(None)


@lru_cache(4096)
def _names(local: bytes, peer: bytes) -> _Names | None:
    """Return the names of measurements between two kernel addresses; None if both are on one host."""
    ends = Addresses(_plain(local), _plain(peer))
    return None if ends.local == ends.peer else (ends.named(SENT), ends.named(BUSY), ends.named(ROUND_TRIP))


def _plain(address: bytes) -> str:
    """Format an address; an IPv4 address that is mapped to IPv6 becomes IPv4 again."""
    read = ip_address(address[_PLACES[int.from_bytes(address[:2], sys.byteorder)]])
    return str((read.ipv4_mapped if isinstance(read, IPv6Address) else None) or read)
