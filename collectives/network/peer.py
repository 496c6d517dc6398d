"""The knowledge of one worker about another one."""

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
from collectives.point_to_point.link import Link


@dataclass
class Peer:
    """Another worker.

    Attributes:
        rank: Its rank.
        name: Its name in messages, with its address.
        address: Address at which it listens.
        clock: Clock of this worker.
        drawn: Nonce of this process for that worker alone, see `Claim`.
        claim: Knowledge about the process that is this worker, see `Claim`.
        cancel: Function that ends the stream of the process that has said hello in its name.
        runner: Process that has said hello in its name.
        is_here: Whether that process was welcomed.
        trouble: Reason why the last attempt to reach it failed.
        was_there_first: Whether it was already listening when this worker first called.
        endpoint: Endpoint of its address that has accepted the connection.
        channel: Connection to it.
        incoming: Lanes on which it has begun to send.
        heard_at: Time of the last sign of it, in seconds of the clock.
        journal: Link over which it gets the journal while it waits to join.
        has_read: Number of results of the journal that it has read, as it says.
        has_news: Event that is set when this worker has something to tell it before the next beat.
        farewell: Reason that it gave when it left.
        has_left: Whether it has left in order.
        has_finished: Whether it has left because all workers had closed their communicators.
        is_lost: Whether it is gone without leaving in order.
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
    journal: Link | None = None
    has_read: int = 0
    has_news: threading.Event = field(default_factory=threading.Event, repr=False)
    farewell: str = ""
    has_left: bool = False
    has_finished: bool = False
    is_lost: bool = False
    is_being_probed: threading.Lock = field(default_factory=threading.Lock)
    is_being_called: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.hear()

    def hear(self) -> None:
        """Note a sign of the worker."""
        self.heard_at = self.clock.now_s()

    @property
    def silent_s(self) -> float:
        """The seconds since the last sign of the worker."""
        return self.clock.now_s() - self.heard_at

    @property
    def is_connected(self) -> bool:
        """Whether streams to and from one and the same process are open."""
        return self.is_here and self.claim.is_settled

    @property
    def has_welcomed(self) -> bool:
        """Whether the process at the worker's address has welcomed this process."""
        return bool(self.claim.answered)
