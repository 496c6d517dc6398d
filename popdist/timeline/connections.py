"""What the kernel counts of this process's connections to other hosts, whichever library has opened them. Linux only.

The program counts nothing itself, so this costs a step nothing: TCP_INFO (tcp(7), linux/tcp.h) has the bytes that have
arrived, how long any were on their way, and how long a message takes there and back. Connections within a host, and
networks that are no TCP, are not seen.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

_DESCRIPTORS = "/proc/self/fd"
_LONGEST_INFO = 256
_SENT, _ROUND_TRIP, _BUSY = struct.Struct("<120xQ"), struct.Struct("<148xI"), struct.Struct("<168xQQ")
"""Where `tcp_info` has the bytes that have arrived, the shortest round trip, for how long any were on their way, and
for how much of that the receiver had no room for more; in us."""
_INFO_BYTES = _BUSY.size

SENT, BUSY, ROUND_TRIP = "bytes sent", "seconds sending", "round trip in s"
_FROM, _TO = " from ", " to "


@dataclass(frozen=True)
class Ends:
    """Two addresses between which there are connections.

    Attributes:
        local: of this host.
        peer: of the other one.
    """

    local: str
    peer: str

    def named(self, what: str) -> str:
        """How what is measured of them is called."""
        return f"{what}{_FROM}{self.local}{_TO}{self.peer}"


def ends_in(name: str, what: str) -> Ends | None:
    """Of which connections a measurement is this, by its name; None if it is another one."""
    before, is_from, ends = name.partition(_FROM)
    local, is_to, peer = ends.partition(_TO)
    return Ends(local, peer) if before == what and is_from and is_to else None


def read_connections() -> dict[str, float]:
    """What is counted now, by name; of several connections between two addresses the sums, and the shortest round trip.

    Seconds in which the receiver had no room are left out: then it is not the network that is slow.
    """
    found: dict[str, float] = {}
    for ends, info in _infos():
        (sent,), (round_trip_us,), (busy_us, full_us) = (each.unpack_from(info) for each in (_SENT, _ROUND_TRIP, _BUSY))
        names = [ends.named(what) for what in (SENT, BUSY, ROUND_TRIP)]
        found[names[0]] = found.get(names[0], 0.0) + sent
        found[names[1]] = found.get(names[1], 0.0) + (busy_us - full_us) / 1e6
        found[names[2]] = min(found.get(names[2], float("inf")), round_trip_us / 1e6)
    return found


def _infos() -> Iterator[tuple[Ends, bytes]]:
    """The connections to other hosts; whatever is closed meanwhile is left out."""
    descriptors: list[str] = []
    with suppress(OSError):
        descriptors = os.listdir(_DESCRIPTORS)
    for descriptor in map(int, descriptors):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                ends, info = _look_at(descriptor)
                if ends.local != ends.peer and len(info) >= _INFO_BYTES:
                    yield ends, info


def _look_at(descriptor: int) -> tuple[Ends, bytes]:
    """The ends of a connection, and what is counted; OSError where it is none of TCP."""
    # AF_INET6 has room for addresses of both families; to ask each socket for its own takes longer than all the rest.
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, os.dup(descriptor)) as same:
        info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LONGEST_INFO)
        return Ends(_plain(same.getsockname()[0]), _plain(same.getpeername()[0])), info


@lru_cache(256)
def _plain(address: str) -> str:
    """IPv4 addresses that are written as IPv6 as what they are."""
    read = ip_address(address.partition("%")[0])
    return str((read.ipv4_mapped if isinstance(read, IPv6Address) else None) or read)
