"""What workers without a launcher are told: TF_CONFIG, and addresses on loopback that are free."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import ExitStack


def free_addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    """`host:port` of ports at which nobody listens; all different, as they are taken together before they are freed."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind((host, 0))
        return [f"{host}:{listener.getsockname()[1]}" for listener in listeners]


def tf_config(addresses: Sequence[str], index: int) -> str:
    """TF_CONFIG of one worker."""
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}})
