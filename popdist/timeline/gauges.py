"""The use that a process makes of its host and of its connections to others, as the kernel counts it. Linux only.

Of its host: memory, time of cores, and waits for a core; and the interval at which they are read. Of its connections,
whichever library has opened them: the program counts nothing itself, so this costs a step nothing. TCP_INFO (tcp(7),
linux/tcp.h) has the bytes that have arrived, how long any were on their way, and how long a message takes there and
back. Connections within a host, and networks that are no TCP, are not seen.
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
"""No gauge takes more than this part of a core's time."""

_DESCRIPTORS = "/proc/self/fd"
_LONGEST_INFO, _ADDRESS_BYTES = 256, 28
_PLACES: dict[int, slice] = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}
"""Where `sockaddr_in` and `sockaddr_in6` have the address itself."""
_SENT, _ROUND_TRIP, _BUSY = struct.Struct("<120xQ"), struct.Struct("<148xI"), struct.Struct("<168xQQ")
"""Where `tcp_info` has the bytes that have arrived, the shortest round trip, for how long any were on their way, and
for how much of that the receiver had no room for more; in us."""
_INFO_BYTES = _BUSY.size

SENT, BUSY, ROUND_TRIP = "bytes sent", "seconds sending", "round trip in s"
_FROM, _TO = " from ", " to "
_Names = tuple[str, str, str]
ReadableBuffer = bytes | ctypes.Array[ctypes.c_char]


@final
class Gauge:
    """A reading that is repeated, the more rarely the longer it takes.

    Args:
        read: returns numbers by their names.
        now_s: a clock.
        spent_s: how much time of a core this thread has taken.
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
        """Read it, unless that was done only just now and this is not the last time; `tell` is given each number."""
        if self._now_s() < self._again_at_s and not is_last:
            return
        before_s = self._spent_s()
        for name, number in self._read().items():
            tell(name, number)
        self._again_at_s = self._now_s() + (self._spent_s() - before_s) / LARGEST_SHARE


def read_gauges() -> dict[str, float]:
    """Return what can be read: bytes that are resident, seconds since the start of the process, and the host's load."""
    found = {CPU_TIME: time.process_time(), HOST_LOAD: os.getloadavg()[0]}
    with suppress(OSError):
        found[MEMORY] = float(_line_of(_STATM).split()[1]) * _PAGE_BYTES
    if (waited := _core_wait_s()) is not None:
        found[CORE_WAIT] = waited
    return found


def _core_wait_s() -> float | None:
    """Return how long the main thread was ready to run and was not; None where the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(_line_of(_SCHEDSTAT.format(os.getpid())).split()[1]) / 1e9
    return None


def _line_of(path: str) -> bytes:
    """Return what such a file says; without the layers of `open`, which cost more than the kernel takes for it."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, _LONGEST_LINE)
    finally:
        os.close(file)


@dataclass(frozen=True)
class Addresses:
    """Two addresses between which there are connections.

    Attributes:
        local: of this host.
        peer: of the other one.
    """

    local: str
    peer: str

    def named(self, what: str) -> str:
        """Return how what is measured of them is called."""
        return f"{what}{_FROM}{self.local}{_TO}{self.peer}"


def ends_in(name: str, what: str) -> Addresses | None:
    """Return the connections of which a measurement is, by its name; None if it is another measurement."""
    before, is_from, ends = name.partition(_FROM)
    local, is_to, peer = ends.partition(_TO)
    return Addresses(local, peer) if before == what and is_from and is_to else None


def read_connections() -> dict[str, float]:
    """Return the counts now, by name: of all connections between two addresses the sums and the shortest round trip.

    Seconds in which the receiver had no room are left out: then it is not the network that is slow.
    """
    return summed(_infos())


def summed(infos: Iterable[tuple[_Names, ReadableBuffer]]) -> dict[str, float]:
    """Return what some `tcp_info` of the kernel say, each with the names of what is read from it."""
    found: dict[str, float] = {}
    for (sent_name, busy_name, trip_name), info in infos:
        (sent,), (round_trip_us,), (busy_us, full_us) = (each.unpack_from(info) for each in (_SENT, _ROUND_TRIP, _BUSY))
        found[sent_name] = found.get(sent_name, 0.0) + sent
        found[busy_name] = found.get(busy_name, 0.0) + (busy_us - full_us) / 1e6
        found[trip_name] = min(found.get(trip_name, float("inf")), round_trip_us / 1e6)
    return found


def _infos() -> Iterator[tuple[_Names, ctypes.Array[ctypes.c_char]]]:
    """Yield the connections to other hosts, each until the next is asked for; leave out those closed meanwhile."""
    descriptors: list[str] = []
    with suppress(OSError):
        descriptors = os.listdir(_DESCRIPTORS)
    info, local, peer = (ctypes.create_string_buffer(size) for size in (_LONGEST_INFO, _ADDRESS_BYTES, _ADDRESS_BYTES))
    libc = _libc()
    for descriptor in map(int, descriptors):
        nbytes = ctypes.c_uint32(_LONGEST_INFO)
        if libc.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(nbytes)):
            continue  # none of TCP
        if _has_end(libc.getsockname, descriptor, local) and _has_end(libc.getpeername, descriptor, peer):
            names = _names(local.raw, peer.raw)
            if names is not None and nbytes.value >= _INFO_BYTES:
                yield names, info


def _has_end(ask: Callable[..., int], descriptor: int, room: ctypes.Array[ctypes.c_char]) -> bool:
    """Return whether it is connected there; then the room has the address, with its port."""
    return ask(descriptor, room, ctypes.byref(ctypes.c_uint32(_ADDRESS_BYTES))) == 0


@cache
def _libc() -> ctypes.PyDLL:
    """Its functions keep Python's lock: to give it up takes longer than they do.

    A socket of Python around the descriptor would take longer too, and no call on the connection would block any more
    where the program has called `socket.setdefaulttimeout`.
    """
    return ctypes.PyDLL(None)


@lru_cache(4096)
def _names(local: bytes, peer: bytes) -> _Names | None:
    """Return how what is measured between two addresses of the kernel is called; None if they are of one host."""
    ends = Addresses(_plain(local), _plain(peer))
    return None if ends.local == ends.peer else (ends.named(SENT), ends.named(BUSY), ends.named(ROUND_TRIP))


def _plain(address: bytes) -> str:
    """IPv4 addresses that are written as IPv6 as what they are."""
    read = ip_address(address[_PLACES[int.from_bytes(address[:2], sys.byteorder)]])
    return str((read.ipv4_mapped if isinstance(read, IPv6Address) else None) or read)
