"""How both ends of a connection between hosts notice that the network between them is gone."""

from __future__ import annotations

from math import ceil

TYPE_CHECKING = False  # that of `typing`, which takes too long to load for the agent
if TYPE_CHECKING:
    import socket

MOST_PROBES = 127
LONGEST_PAUSE_S = 32767
"""What Linux accepts (MAX_TCP_KEEPCNT, MAX_TCP_KEEPIDLE in net/tcp.h)."""
_LARGEST_INT = (1 << 31) - 1


def probing_times(silence_s: float, first_s: int = 0) -> tuple[int, int, int]:
    """When TCP asks a silent host: seconds until the first probe and between probes, and how many there are.

    All together take `silence_s`, rounded up to whole seconds that the kernel has numbers for, and at least 2. A host
    that has nothing else to say was heard up to `first_s` before it fell silent, and is given up so much earlier.

    Args:
        silence_s: after which a host is given up.
        first_s: the time until the first probe; 0: a third of that.
    """
    first_s = first_s or min(max(1, int(silence_s / 3)), LONGEST_PAUSE_S)
    rest_s = max(1, ceil(silence_s) - first_s)
    interval_s = min(-(-rest_s // MOST_PROBES), LONGEST_PAUSE_S)
    return first_s, interval_s, min(-(-rest_s // interval_s), MOST_PROBES)


def keep_alive(connection: socket.socket, silence_s: float) -> None:
    """End the connection when the other host has not answered for so long; shorter hiccups do no harm.

    Args:
        connection: over TCP.
        silence_s: how long the kernel goes on asking, and sending again what was not acknowledged.
    """
    import socket

    first_s, interval_s, probes = probing_times(silence_s)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, first_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(silence_s * 1000), _LARGEST_INT))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
