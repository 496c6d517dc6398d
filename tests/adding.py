"""The sum that all replicas together have to have, in plain operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def added(parts: Sequence[Any]) -> Any:
    """The sum of those before the largest power of two below their number, and of the others: so for each of these."""
    if len(parts) == 1:
        return parts[0]
    middle = 1
    while 2 * middle < len(parts):
        middle *= 2
    return added(parts[:middle]) + added(parts[middle:])
