"""Events: a few numbers each, of which one may stand for a name."""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np


class EventKind(IntEnum):
    """The kinds of events, and the meaning of their values."""

    STEP_BEGINS = 1
    """Value: the number of the step. What else happened in it may have been left out."""
    STEP_ENDS = 2
    """Value: the rows of data that this instance has worked on."""
    PHASE_BEGINS = 3
    """Name: of the phase."""
    PHASE_ENDS = 4
    """It ended well. A phase without an end has failed."""
    OPERATION_BEGINS = 5
    """Name: of a collective. Value: which one of its communicator, from 1."""
    DATA_MOVES = 6
    """All ranks have come to it. Value: how many bytes of each contribution begin to move."""
    OPERATION_ENDS = 7
    """It ended well."""
    WAITS_FOR = 8
    """Value: an instance that is waited for, and has been for some time."""
    MEASURED = 9
    """Name: of what. Value: the bits of a float64."""
    REPLICA_BEGINS = 10
    """Track: 1 + its stage. Name: the index of the replica."""
    REPLICA_ENDS = 11
    """Track and name: as above. Value: which part of its gradients, or micro-batch; the next part begins now."""
    EVENTS_LOST = 12
    """Value: how many events came too fast to be kept."""
    RENUMBERED = 13
    """Others are lost. Value: the index that this instance has now, times 2**32, plus the number of instances."""
    SEEN_AT = 14
    """Name: of a line of the program, in which its thread was between two steps, outside of phases and collectives."""


MAIN_TRACK = 0
"""The program's own thread; those of replicas are numbered from 1."""

EVENT = np.dtype([("when_ns", "<i8"), ("kind", "<u2"), ("track", "<u2"), ("name", "<u4"), ("value", "<i8")])
"""An event as readers have it: times are those of the monotonic clock of its host."""


def bits_of(number: float) -> int:
    """Return the value of an event that measures so much."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits
