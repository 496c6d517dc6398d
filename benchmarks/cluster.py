"""What workers without a launcher are told: TF_CONFIG, and addresses on loopback that are free."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Sequence
from contextlib import suppress

PORTS = range(20_000, 32_768)  # below those that kernels give by themselves, even before a worker comes to listen


def free_addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    """`host:port` of different ports at which nobody listens."""
    free: list[str] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(free) == count:
            break
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            free.append(f"{host}:{port}")
    return free


def tf_config(addresses: Sequence[str], index: int) -> str:
    """TF_CONFIG of one worker."""
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}})
