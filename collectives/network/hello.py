"""What a worker says of itself at the beginning of every stream, and why another one may refuse it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from collectives.foreign import foreign

PROTOCOL = 1
_LARGEST = 1 << 31
CONTROL = ""  # the lane of the stream that says no more than that its sender lives


@dataclass(frozen=True)
class Hello:
    """The sender of a stream.

    Attributes:
        protocol: the version of what follows.
        cluster: digest of the cluster as the sender sees it.
        source: its rank.
        to: the rank that it means to reach.
        incarnation: drawn at random by each process, so that two that claim one rank can be told apart.
        lane: what the stream carries: CONTROL or "group/channel/lane".
    """

    protocol: int
    cluster: str
    source: int
    to: int
    incarnation: str
    lane: str = CONTROL

    def encode(self) -> str:
        """One line of text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def decode(cls, text: str) -> Hello:
        """Read what `encode` wrote.

        Raises:
            ValueError: for any other text.
        """
        try:
            values = json.loads(text)
            hello = cls(**values)
        except (TypeError, RecursionError) as error:
            raise ValueError(foreign(repr(str(error)))) from error
        for entry in fields(cls):
            expected = int if entry.type == "int" else str
            if type(getattr(hello, entry.name)) is not expected:
                raise ValueError(f"{entry.name} is not of type {expected.__name__}")
            if expected is int and abs(getattr(hello, entry.name)) > _LARGEST:
                raise ValueError(f"{entry.name} is too large a number")
        return hello


@dataclass(frozen=True)
class Refusal(Exception):
    """Why a stream is not accepted.

    Attributes:
        reason: in words, for both sides.
    """

    reason: str


def digest_cluster(addresses: Sequence[str], description: str) -> str:
    """The same for workers that were given the same addresses in the same order, and the same description."""
    return hashlib.sha256(json.dumps([list(addresses), description]).encode()).hexdigest()[:16]
