"""The address at which other hosts reach this one, for the runtimes of frameworks."""

from __future__ import annotations

import contextlib
import socket

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # of "discard"; nothing goes there


def own_address_towards(host: str) -> str:
    """Return the address of this machine from which it sends to a host; where that is unknown, this machine's name.

    Nothing is sent: the kernel looks up the route.

    Args:
        host: its name or number.
    """
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    return socket.gethostname()
