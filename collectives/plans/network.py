"""The costs of messages and sums on a network: a file of numbers, measured or written by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Network:
    """The costs on a network; all ranks and hosts are alike.

    Attributes:
        latency_s: from host to host.
        message_s: of its sender's time, and of its receiver's, that a message between hosts takes.
        bytes_per_s: that the link of a host carries in each direction.
        local_latency_s: between ranks of a host.
        local_message_s: as `message_s`, inside of a host.
        local_bytes_per_s: that a rank gives to others of its host.
        memory_bytes_per_s: that a rank reads while it adds.
        burst_bytes: that a link carries at once after a pause, where it is shaped by a bucket of tokens.

    Raises:
        ValueError: for a number that is not positive; latencies, costs of messages and bursts may be 0.
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
                raise ValueError(f"{name} of a network is {value}; it is a positive number")

    @classmethod
    def read(cls, path: Path) -> Network:
        """Return the network of a file.

        Raises:
            ValueError: it is no JSON object of these numbers.
        """
        known = [field.name for field in fields(cls)]
        try:
            given = json.loads(path.read_text())
            numbers = {str(name): float(value) for name, value in given.items()}
        except (ValueError, AttributeError, TypeError) as error:
            way_out = f"it is a JSON object of numbers: {', '.join(known)}"
            raise ValueError(f"{path} is no network ({error}); {way_out}") from error
        if unknown := sorted(set(numbers) - set(known)):
            raise ValueError(f"{path} has {', '.join(unknown)}; a network has {', '.join(known)}")
        return cls(**numbers)

    def write(self, path: Path) -> None:
        """Have it in a file that `read` reads."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
