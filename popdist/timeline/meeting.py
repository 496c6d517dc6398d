"""The comparison of the hosts' clocks by datagrams throughout a run.

Instance 0 answers. For every other clock, the first instance that reads it asks. Instances of one host share a clock
and send nothing. If no answer comes, e.g. because a firewall drops datagrams, that clock remains unknown.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from popdist.timeline.clocks import Exchange

TOKEN_BYTES = 16
_QUESTION = struct.Struct(f"<{TOKEN_BYTES}sq")
_ANSWER = struct.Struct(f"<{TOKEN_BYTES}sqqq")
_CARD = struct.Struct(f"<32s64s{TOKEN_BYTES}sH4s4s4s4s4s4s")
CARD_BYTES = _CARD.size
_MOST_ADDRESSES = 6
_SIOCGIFADDR = 0x8915
ROUND_S = 0.25
_AT_FIRST, _EACH_ROUND = 16, 3
_ANSWER_LIMIT_S = 0.1


@dataclass(frozen=True)
class Card:
    """The facts that an instance tells the others when they meet.

    Attributes:
        clock: Name of the clock that it reads.
        host: Name of its host; the first 64 bytes count.
        token: Secret of the job, which keeps strangers out; the token of instance 0 counts.
        port: Port at which it answers; 0: none.
        addresses: IPv4 addresses of its host.
    """

    clock: str
    host: str
    token: bytes
    port: int = 0
    addresses: tuple[str, ...] = ()

    def pack(self) -> bytes:
        """Encode the card as CARD_BYTES bytes."""
        addresses = [socket.inet_aton(each) for each in self.addresses[:_MOST_ADDRESSES]]
        addresses += [bytes(4)] * (_MOST_ADDRESSES - len(addresses))
        return _CARD.pack(self.clock.encode()[:32], self.host.encode()[:64], self.token, self.port, *addresses)

    @classmethod
    def unpack(cls, data: bytes) -> Card:
        """Decode a card of `pack`."""
        clock, host, token, port, *addresses = _CARD.unpack(data)
        known = tuple(socket.inet_ntoa(each) for each in addresses if any(each))
        return cls(clock.rstrip(b"\0").decode(), host.rstrip(b"\0").decode(errors="replace"), token, port, known)


@dataclass(frozen=True)
class HostClock:
    """A clock that all processes of a host read.

    Attributes:
        name: Name that is unique to the clock and the same in all processes that read it.
        now_ns: Function that reads it.
    """

    name: str
    now_ns: Callable[[], int] = time.monotonic_ns


def this_clock() -> HostClock:
    """Return the monotonic clock of this process; processes of one boot and one time namespace share it."""
    name = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:20]
    with suppress(OSError):
        name = f"{name}.{os.stat('/proc/self/ns/time').st_ino}"
    return HostClock(name)


def asks(cards: Sequence[Card], index: int) -> bool:
    """Return whether an instance asks instance 0 for the time: for each other clock, its first instance does."""
    clocks = [card.clock for card in cards]
    return clocks[index] != clocks[0] and clocks.index(clocks[index]) == index


def answers(cards: Sequence[Card]) -> bool:
    """Return whether any instance asks instance 0 for the time."""
    return any(card.clock != cards[0].clock for card in cards)


def own_addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of this host, loopback addresses last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24]))
    return tuple(sorted(found, key=lambda address: address.startswith("127.")))


@final
class Answering:
    """A thread that answers askers who know the token, until it is closed.

    Args:
        now_ns: Clock.

    Attributes:
        token: Secret that an asker must know.
        port: UDP port at which it answers.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self.port: int = self._socket.getsockname()[1]
        self._now_ns = now_ns
        self._is_closed = False
        self._thread = threading.Thread(target=self._answer, name="timeline clocks", daemon=True)

    def start(self) -> None:
        """Start to answer."""
        self._thread.start()

    def close(self) -> None:
        """End the thread if it was started; repeated calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.is_alive():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waking, suppress(OSError):
                waking.sendto(b"", ("127.0.0.1", self.port))
            self._thread.join(1)
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                question, sender = self._socket.recvfrom(_QUESTION.size + 1)
            except OSError:
                return
            received = self._now_ns()
            if self._is_closed:
                return
            if len(question) != _QUESTION.size:
                continue
            token, sent = _QUESTION.unpack(question)
            if secrets.compare_digest(token, self.token):
                with suppress(OSError):
                    self._socket.sendto(_ANSWER.pack(token, sent, received, self._now_ns()), sender)


@final
class Asking:
    """A thread that asks for the time repeatedly, until it is closed.

    Args:
        card: Card of instance 0.
        now_ns: Clock of this host.

    Attributes:
        exchanges: Exchanges that nobody has taken yet.
    """

    def __init__(self, card: Card, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.exchanges: deque[Exchange] = deque(maxlen=4096)
        self._card = card
        self._now_ns = now_ns
        self._addresses = card.addresses
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="timeline clocks", daemon=True)

    def start(self) -> None:
        """Start to ask."""
        self._thread.start()

    def close(self) -> None:
        """Ask once more, and end the thread."""
        self._closing.set()
        self._thread.join(5)

    def _ask(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
            mine.settimeout(_ANSWER_LIMIT_S)
            self._round(mine, _AT_FIRST)
            while not self._closing.wait(ROUND_S):
                self._round(mine, _EACH_ROUND)
            self._round(mine, _EACH_ROUND)

    def _round(self, mine: socket.socket, questions: int) -> None:
        """Ask `questions` times, but stop at the first missing answer, so that the end of the run is not delayed."""
        for _ in range(questions):
            answering = next((each for each in self._addresses if self._exchange(mine, each)), None)
            if answering is None:
                return
            self._addresses = (answering,)

    def _exchange(self, mine: socket.socket, address: str) -> bool:
        sent = self._now_ns()
        try:
            mine.sendto(_QUESTION.pack(self._card.token, sent), (address, self._card.port))
            while True:
                answer = mine.recv(_ANSWER.size + 1)
                returned = self._now_ns()
                if len(answer) != _ANSWER.size:
                    continue
                token, echoed, received, answered = _ANSWER.unpack(answer)
                if token == self._card.token and echoed == sent:
                    break
        except OSError:  # no answer in time, or no route
            return False
        self.exchanges.append((sent, received, answered, returned))
        return True
