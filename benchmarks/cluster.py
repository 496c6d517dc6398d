"""What workers without a launcher are told: TF_CONFIG, and addresses on loopback that are free."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Sequence

PORTS = range(20_000, 32_768)  # below those that kernels give by themselves, even before a worker comes to listen
_holders: list[socket.socket] = []


def free_addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    """`host:port` of different ports that nobody uses, and that nobody else finds free until this process ends."""
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
        # A server, which asks for the same, may listen where this is set and nobody listens; from others it is kept.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _holders.append(holder)
        free.append(f"{host}:{port}")
    if len(free) < count:
        raise OSError(f"no {count} of the ports {PORTS.start} to {PORTS.stop - 1} of {host} are free")
    return free


def tf_config(addresses: Sequence[str], index: int) -> str:
    """TF_CONFIG of one worker."""
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}})
