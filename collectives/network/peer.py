"""The knowledge that one worker has of another one."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from collectives.clock import Clock
from collectives.network.addresses import Address, Endpoint
from collectives.network.claims import Claim
from collectives.network.identity import Runner
from collectives.network.lanes import Outbox

SILENCE_S = 2.0  # workers say that they live several times in this time


@dataclass
class Peer:
    """Another worker.

    Attributes:
        rank: its rank.
        name: what it is called in messages, with its address.
        address: where it listens.
        clock: of this worker.
        drawn: the incarnation of this process for it alone, see `Claim`.
        claim: which process it is.
        cancel: ends the stream of who has said hello in its name.
        runner: who that is.
        is_here: whether that one was welcomed.
        trouble: why the last attempt to reach it came to nothing.
        was_there_first: whether it listened already when it was first called.
        endpoint: what of its address has accepted the connection to it.
        channel: the connection to it.
        incoming: the lanes on which it has begun to send.
        heard_at: when something last came from it, in seconds of the clock.
        farewell: what it said when it left.
        has_left: whether it has left in order.
        is_lost: whether it is gone otherwise.
    """

    rank: int
    name: str
    address: Address
    clock: Clock = field(repr=False)
    drawn: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    claim: Claim = field(default_factory=Claim)
    cancel: Callable[[], None] | None = None
    runner: Runner | None = None
    is_here: bool = False
    trouble: str = "not called yet"
    was_there_first: bool | None = None
    endpoint: Endpoint | None = None
    channel: grpc.Channel | None = None
    control: grpc.Future | None = None
    outboxes: dict[str, tuple[Outbox, grpc.Future]] = field(default_factory=dict)
    incoming: set[str] = field(default_factory=set)
    heard_at: float = field(init=False)
    farewell: str = ""
    has_left: bool = False
    is_lost: bool = False
    is_being_probed: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.hear()

    def hear(self) -> None:
        """Note that something has come from it."""
        self.heard_at = self.clock.now_s()

    @property
    def is_silent(self) -> bool:
        """Whether nothing has come for so long that it may be stopped or lost."""
        return self.silent_s > SILENCE_S

    @property
    def silent_s(self) -> float:
        """The seconds since something has come."""
        return self.clock.now_s() - self.heard_at

    @property
    def is_connected(self) -> bool:
        """Whether streams lead both ways, to and from one process."""
        return self.is_here and self.claim.is_settled

    @property
    def has_welcomed(self) -> bool:
        """Whether what listens at its address has welcomed this process."""
        return bool(self.claim.answered)
