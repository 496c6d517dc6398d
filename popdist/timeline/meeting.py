"""Messages by which hosts learn how far their clocks are apart: small datagrams, sent all through the run.

Instance 0 answers; of each other clock the first instance that has it asks. Instances of one host have one clock and
send nothing. Where no answer comes, because a firewall keeps datagrams out, nothing is known of that clock.
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
        clock: names the clock that it reads.
        host: where it runs; the first 64 bytes count.
        token: names the job and keeps strangers out; that of instance 0 counts.
        port: where it answers; 0: nowhere.
        addresses: of its host, IPv4.
    """

    clock: str
    host: str
    token: bytes
    port: int = 0
    addresses: tuple[str, ...] = ()

    def pack(self) -> bytes:
        """As bytes, always equally many."""
        addresses = [socket.inet_aton(each) for each in self.addresses[:_MOST_ADDRESSES]]
        addresses += [bytes(4)] * (_MOST_ADDRESSES - len(addresses))
        return _CARD.pack(self.clock.encode()[:32], self.host.encode()[:64], self.token, self.port, *addresses)

    @classmethod
    def unpack(cls, data: bytes) -> Card:
        """Return what `pack` has packed."""
        clock, host, token, port, *addresses = _CARD.unpack(data)
        known = tuple(socket.inet_ntoa(each) for each in addresses if any(each))
        return cls(clock.rstrip(b"\0").decode(), host.rstrip(b"\0").decode(errors="replace"), token, port, known)


@dataclass(frozen=True)
class HostClock:
    """A clock that all processes of a host read.

    Attributes:
        name: the same in all that read it, and no other clock's.
        now_ns: reads it.
    """

    name: str
    now_ns: Callable[[], int] = time.monotonic_ns


def this_clock() -> HostClock:
    """Return the monotonic clock of this process: processes of one boot and one time namespace share it."""
    name = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:20]
    with suppress(OSError):
        name = f"{name}.{os.stat('/proc/self/ns/time').st_ino}"
    return HostClock(name)


def asks(cards: Sequence[Card], index: int) -> bool:
    """Return whether an instance asks instance 0 for the time: the first of those whose clock is another one."""
    clocks = [card.clock for card in cards]
    return clocks[index] != clocks[0] and clocks.index(clocks[index]) == index


def answers(cards: Sequence[Card]) -> bool:
    """Return whether instance 0 has anybody to answer."""
    return any(card.clock != cards[0].clock for card in cards)


def own_addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of this host, the loopback's last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24]))
    return tuple(sorted(found, key=lambda address: address.startswith("127.")))


@final
class Answering:
    """Answers whoever knows the token, in a thread, until it is closed.

    Args:
        now_ns: the clock.

    Attributes:
        token: which one has to know.
        port: where.
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
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, if it was started; may be called again."""
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
    """Asks again and again, in a thread, until it is closed.

    Args:
        card: of instance 0.
        now_ns: the clock of this host.

    Attributes:
        exchanges: that nobody has taken yet.
    """

    def __init__(self, card: Card, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.exchanges: deque[Exchange] = deque(maxlen=4096)
        self._card = card
        self._now_ns = now_ns
        self._addresses = card.addresses
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="timeline clocks", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Ask once more, and end."""
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
        """Ask so often; not again in this round where no answer came, so that nobody waits long at the end."""
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
        except OSError:  # no answer in time, or no way there
            return False
        self.exchanges.append((sent, received, answered, returned))
        return True
