"""Spares: processes of the job that wait to take the place of a lost instance, and the journal that brings them up.

The active instances keep a journal: the results of all operations that they do together. One of them, the feeding
instance, passes it on to the spares. A spare runs the program, takes every result from the journal instead of computing
it, and sleeps at its end.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from popdist.records.progress import Role

if TYPE_CHECKING:
    import numpy as np

    from collectives import PeerLostError
    from collectives.point_to_point.link import Link, Transfer

PASS_ON_EVERY_S = 0.25
"""The interval at which new entries of the journal travel to the spares."""
SLEEP_S = 0.02
"""The time that a spare sleeps between two looks for news. A look takes some 100 us."""

BLOCK = 256
"""The number of entries that are compressed together."""

Bytes = TypeVar("Bytes", bytes, memoryview)

_END = -1
_LANE = 0
_HEADER_BYTES = 16


# ---- who trains


class Standing(NamedTuple):
    """The facts about one process at a change of the members.

    Attributes:
        role: Its role before the change.
        number: Its number among the instances before the change; of a spare, any number.
        host: A number that is the same for all processes of a host.
        entries: The number of results that it knows.
        may_be_active: Whether it may be chosen; False while its host is to be left.
    """

    role: Role
    number: int
    host: int
    entries: int
    may_be_active: bool = True


def choose(standings: Sequence[Standing], target: int) -> list[int]:
    """Return the ranks of the processes that are active after a change, in the order of their new numbers.

    Active instances that are left stay, at most `target` of them. If none of them may stay, the first one stays
    nevertheless, because only active instances have the variables. Then spares join: first the ones whose hosts have
    the fewest active instances. A spare gets the number of a lost instance, so that the others keep their replicas; but
    the chief is never a spare that joins.

    Args:
        standings: The facts about every process, by rank.
        target: The wanted number of active instances.

    Returns:
        The ranks; empty if no active instance is left, because nobody has the variables then.
    """
    active = [rank for rank, each in enumerate(standings) if each.role is Role.ACTIVE]
    stay = [rank for rank in active if standings[rank].may_be_active][:target] or active[:1]
    if not stay:
        return []
    joining: list[int] = []
    waiting = [rank for rank, each in enumerate(standings) if each.role is Role.SPARE and each.may_be_active]
    while waiting and len(stay) + len(joining) < target:
        hosts = [standings[rank].host for rank in (*stay, *joining)]
        joining.append(min(waiting, key=lambda rank: (hosts.count(standings[rank].host), rank)))
        waiting.remove(joining[-1])
    return _numbered(stay, joining, [standings[rank].number for rank in stay])


def _numbered(stay: list[int], joining: list[int], numbers: Sequence[int]) -> list[int]:
    """Return the ranks by their new numbers: those that stay keep their numbers if all numbers are taken again."""
    count = len(stay) + len(joining)
    if len(set(numbers)) < len(stay) or max(numbers) >= count:
        return [*stay, *joining]
    places = dict(zip(numbers, stay, strict=True))
    if 0 not in places:
        places[0] = places.pop(min(places))
    free = iter(joining)
    return [places[number] if number in places else next(free) for number in range(count)]


# ---- the journal


class Entries:
    """Encoded results in their order. Full blocks are compressed, because a long training has millions of them."""

    def __init__(self) -> None:
        self._full: list[bytes] = []
        self._open: list[bytes] = []
        self._seen: tuple[int, list[bytes]] = (-1, [])  # the block that was read last

    def __len__(self) -> int:
        return len(self._full) * BLOCK + len(self._open)

    def append(self, entry: bytes) -> None:
        """Add an entry."""
        self._open.append(entry)
        if len(self._open) == BLOCK:
            self._full.append(zlib.compress(joined(self._open), 1))
            self._open = []

    def __getitem__(self, number: int) -> bytes:
        return self._block(number // BLOCK)[number % BLOCK]

    def since(self, number: int) -> list[bytes]:
        """Return the entries from `number` on."""
        return [self[each] for each in range(number, len(self))]

    def _block(self, number: int) -> list[bytes]:
        if number == len(self._full):
            return self._open
        if self._seen[0] != number:
            self._seen = number, separated(zlib.decompress(self._full[number]))
        return self._seen[1]


def joined(entries: Sequence[bytes]) -> bytes:
    """Return entries as one message; `separated` takes it apart."""
    return b"".join(len(each).to_bytes(8, "little") + each for each in entries)


def separated(data: Bytes) -> list[Bytes]:
    """Return the entries of a message of `joined`; those of a view are views.

    Raises:
        ValueError: The lengths in the message do not fit its size.
    """
    entries: list[Bytes] = []
    at = 0
    while at < len(data):
        begin = at + 8
        at = begin + int.from_bytes(data[at:begin], "little")
        if at > len(data):
            raise ValueError(f"part {len(entries)} ends at byte {at} of {len(data)}")
        entries.append(data[begin:at])
    return entries


@dataclass
class KeptJournal:
    """The results of all operations so far, and where this process is among them.

    Attributes:
        entries: The encoded results.
        read: The number of entries that a spare's program has taken.
    """

    entries: Entries = field(default_factory=Entries)
    read: int = 0
    _pending: deque[Callable[[], bytes]] = field(default_factory=deque)
    _due_s: float = 0.0

    def __len__(self) -> int:
        return len(self.entries) + len(self._pending)

    def add(self, entry: Callable[[], bytes]) -> bool:
        """Add the result of an operation; return whether it is time to pass the new entries on."""
        self._pending.append(entry)
        now_s = time.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + PASS_ON_EVERY_S
        self.encode()
        return True

    def encode(self) -> None:
        """Encode the entries that were added."""
        while self._pending:
            self.entries.append(self._pending[0]())
            self._pending.popleft()


def _message(number: int, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    header = np.array([number, len(data)], np.int64).view(np.uint8)
    return header, np.frombuffer(data, np.uint8)


class Feeding:
    """The instance that passes the journal on to the spares.

    Args:
        link: The link of all processes.
        known: For each rank of a spare, the number of entries that it has.
    """

    def __init__(self, link: Link, known: dict[int, int]) -> None:
        self._link = link
        self._known = known
        self._known_before: dict[int, int] = {}
        self._transfers: dict[int, list[Transfer]] = {rank: [] for rank in known}

    def passed_on_before(self, rank: int) -> int:
        """Return the number of entries that a spare had got before the last message, at least 1; 0 if it is lost.

        A spare cannot have read the last message yet: after a step longer than PASS_ON_EVERY_S, it is sent just before.
        """
        return max(1, self._known_before.get(rank, 0)) if self._known.get(rank) else 0

    def pass_on(self, journal: KeptJournal) -> None:
        """Send new entries to every spare, without waiting. A spare that is lost gets nothing more."""
        journal.encode()
        for rank, known in list(self._known.items()):
            with self._leaving_out_if_lost(rank):
                self._transfers[rank] = [each for each in self._transfers[rank] if not each.done()]
                if fresh := journal.entries.since(known):
                    self._send(rank, len(fresh), joined(fresh))
                    self._known_before[rank], self._known[rank] = known, len(journal.entries)

    def leave_out(self, ranks: Sequence[int]) -> None:
        """Pass nothing more on to some ranks, which have become active."""
        self._known = {rank: known for rank, known in self._known.items() if rank not in ranks}

    def end(self, journal: KeptJournal) -> None:
        """Tell every spare that the job ends."""
        self.pass_on(journal)
        for rank in list(self._known):
            with self._leaving_out_if_lost(rank):
                self._send(rank, _END, b"")

    @contextmanager
    def _leaving_out_if_lost(self, rank: int) -> Iterator[None]:
        from collectives import PeerLostError

        try:
            yield
        except PeerLostError:
            del self._known[rank]

    def _send(self, rank: int, number: int, data: bytes) -> None:
        header, body = _message(number, data)
        most = self._link.sizes.chunk_bytes  # gRPC refuses messages above 2 MiB
        for message in (header, *(body[at : at + most] for at in range(0, body.size, most))):
            self._transfers[rank].append(self._link.send(message, rank, _LANE))


class Fed:
    """A spare's end of the journal. It takes memory for what has come, and never for an announced size.

    Args:
        link: The link of all processes.
        source: The rank of the feeding instance.

    Attributes:
        is_end: Whether the job ends.
    """

    def __init__(self, link: Link, source: int) -> None:
        self.is_end = False
        self._link = link
        self._source = source
        self._number = self._missing_bytes = 0
        self._body: bytearray | None = None  # None while a header is expected
        self._loss: PeerLostError | None = None
        self._receive(_HEADER_BYTES)

    def take(self, journal: KeptJournal) -> bool:
        """Add the entries that have come to the journal; return whether there was news.

        Raises:
            PeerLostError: The feeding instance is lost, or the members change.
            BrokenError: The feeding instance has sent something else than entries.
        """
        if self.is_end or not self._is_done():
            return False
        try:
            self._take_message(journal)
        except ValueError as error:
            from collectives import BrokenError

            raise BrokenError(
                f"the journal that rank {self._source} passes on is damaged: {error}; give all instances the same "
                "versions of their packages, and check the network"
            ) from error
        return True

    def _is_done(self) -> bool:
        """Return whether the transfer is complete. After a loss it has no data, whatever it says."""
        from collectives import PeerLostError

        if self._loss is not None:
            raise self._loss
        try:
            return bool(self._transfer.done())
        except PeerLostError as error:
            self._loss = error
            raise

    def _take_message(self, journal: KeptJournal) -> None:
        received = self._transfer.received
        if received is not None and received != self._room.size:
            raise ValueError(f"a message has {received} bytes in place of {self._room.size}")
        if self._body is None:
            self._number, self._missing_bytes = self._room.view("int64").tolist()
            if self._number < _END or self._missing_bytes < 0:
                raise ValueError(f"it announces {self._number} entries of {self._missing_bytes} bytes")
            self.is_end, self._body = self._number == _END, bytearray()
        else:
            self._body += self._room.data
            self._missing_bytes -= self._room.size
        if self._missing_bytes:
            self._receive(min(self._missing_bytes, self._link.sizes.chunk_bytes))
        elif not self.is_end:
            entries = separated(bytes(self._body))
            if len(entries) != self._number:
                raise ValueError(f"{len(entries)} entries have come in place of {self._number}")
            for entry in entries:
                journal.entries.append(entry)
            self._body = None
            self._receive(_HEADER_BYTES)

    def _receive(self, nbytes: int) -> None:
        import numpy as np

        self._room = np.empty(nbytes, np.uint8)
        self._transfer = self._link.receive(self._room, self._source, _LANE)
