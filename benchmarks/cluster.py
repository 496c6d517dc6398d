"""Settings of workers without a launcher: TF_CONFIG, and free addresses on loopback."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Sequence

PORTS = range(20_000, 32_768)  # below the kernel's ephemeral ports, which it may hand out before a worker listens
_holders: list[socket.socket] = []


def free_addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    """Return `host:port` of unused ports, and reserve them until this process ends."""
    free: list[str] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(free) == count:
            break
        holder = socket.socket()
        try:
            holder.bind((host, port))
        except OSError:
            holder.close()
            continue
        # With this option, a server that sets it too may listen on the port, but no other socket can take it.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _holders.append(holder)
        free.append(f"{host}:{port}")
    if len(free) < count:
        raise OSError(f"{host} has no {count} free ports among {PORTS.start} to {PORTS.stop - 1}")
    return free


def tf_config(addresses: Sequence[str], index: int) -> str:
    """Return the TF_CONFIG of one worker."""
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}})
