"""What an attribute may be that is one of a few words. In dictionaries and JSON they are numbers."""

from __future__ import annotations

from enum import Enum


class SelectionOrder(Enum):
    """In which order the original gives IPUs to shards. Simulated devices are all equally near."""

    AUTO = 0
    ZIGZAG = 1
    SNAKE = 2
    HOOF = 3


class DeviceConnectionType(Enum):
    """When the original attaches to devices: when it is configured, when a program needs them, or never."""

    ALWAYS = 0
    ON_DEMAND = 1
    NEVER = 2
    PRE_COMPILE = 3


class MergeRemoteBuffersBehaviour(Enum):
    """Whether the original makes one remote buffer of several."""

    NO_MERGING = 0
    MERGE = 1
    IF_BENEFICIAL = 2


class SchedulingAlgorithm(Enum):
    """How the original orders the instructions of a program."""

    CHOOSE_BEST = 0
    CLUSTERING = 1
    POST_ORDER = 2
    LOOK_AHEAD = 3
    SHORTEST_PATH = 4


class StochasticRoundingBehaviour(Enum):
    """Whether 16-bit numbers are rounded up or down by chance, in the mean to what they were.

    Here updates of variables are, which are the same on all replicas: ON and REPLICA_IDENTICAL_ONLY are one.
    """

    OFF = 0
    ON = 1
    REPLICA_IDENTICAL_ONLY = 2

    @classmethod
    def parse(cls, value: StochasticRoundingBehaviour | bool) -> StochasticRoundingBehaviour:
        """The member that a truth value stands for, as programs of the original's first versions say it."""
        return value if isinstance(value, cls) else cls.ON if value else cls.OFF
