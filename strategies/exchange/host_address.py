"""The address of this host as other hosts see it, for the runtimes of frameworks."""

from __future__ import annotations

import contextlib
import socket

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # the discard service (RFC 863); nothing is sent there


def own_address_towards(host: str) -> str:
    """Return the address from which this machine sends to a host, or this machine's name if the address is unknown.

    Nothing is sent: the kernel looks up the route.

    Args:
        host: Name or address of the host.
    """
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    return socket.gethostname()
