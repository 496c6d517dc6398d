"""The costs of messages and sums on a network, stored in a file of numbers, measured or written by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Network:
    """The costs on a network of equal ranks and equal hosts.

    Attributes:
        latency_s: Latency between hosts.
        message_s: Time that a message between hosts takes at its sender, and again at its receiver.
        bytes_per_s: Bandwidth of a host's link in each direction.
        local_latency_s: Latency within a host.
        local_message_s: Time that a message within a host takes at its sender, and again at its receiver.
        local_bytes_per_s: Rate at which a rank sends to others of its host.
        memory_bytes_per_s: Rate at which a rank reads while it adds.
        burst_bytes: Bytes that a link carries at once after a pause, if a token bucket shapes its traffic.

    Raises:
        ValueError: A number is negative, or a rate is 0. Other numbers may be 0.
    """

    latency_s: float = 10e-6
    message_s: float = 2e-6
    bytes_per_s: float = 25e9 / 8
    local_latency_s: float = 1e-6
    local_message_s: float = 1e-6
    local_bytes_per_s: float = 8e9
    memory_bytes_per_s: float = 10e9
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 0 or (value == 0 and "bytes_per_s" in name):
                raise ValueError(f"{name} of a network is {value}; use a positive number")

    @classmethod
    def read(cls, path: Path) -> Network:
        """Read the network from a file.

        Raises:
            ValueError: The file is not a JSON object with these numbers.
        """
        known = [field.name for field in fields(cls)]
        try:
            given = json.loads(path.read_text())
            numbers = {str(name): float(value) for name, value in given.items()}
        except (ValueError, AttributeError, TypeError) as error:
            way_out = f"write a JSON object of numbers: {', '.join(known)}"
            raise ValueError(f"{path} does not describe a network ({error}); {way_out}") from error
        if unknown := sorted(set(numbers) - set(known)):
            raise ValueError(f"{path} has the unknown keys {', '.join(unknown)}; use only {', '.join(known)}")
        return cls(**numbers)

    def write(self, path: Path) -> None:
        """Write the network to a file that `read` accepts."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
