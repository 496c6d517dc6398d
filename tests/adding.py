"""The ordered sum that all replicas must have, in plain operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def added(parts: Sequence[Any]) -> Any:
    """Return the sum of the parts, split at the largest power of two below their number, recursively."""
    if len(parts) == 1:
        return parts[0]
    middle = 1
    while 2 * middle < len(parts):
        middle *= 2
    return added(parts[:middle]) + added(parts[middle:])
