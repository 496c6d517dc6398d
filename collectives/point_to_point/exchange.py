"""The exchange before every collective: all ranks see the calls of all ranks, and receive small arrays with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np

from collectives.arrays import aligned_empty
from collectives.errors import PeerLostError
from collectives.plans.comparing import Relay, relays
from collectives.point_to_point.gathering import GatheredSums
from collectives.point_to_point.link import EXCHANGE, Fetch, Link, Transfer
from collectives.point_to_point.opening import OpeningLink
from collectives.transport import Parts
from collectives.waiting import Watch

_HEADER_BYTES = 64
_HEADER = Struct(f"=QQQ{_HEADER_BYTES - 24}x")
_TOO_LARGE = (1 << 64) - 1
_OPENED = _TOO_LARGE - 1  # the arrays are too large, and the first messages of the reduction follow the block
_MOST_ARRAYS = 1 << 20  # maximum number of arrays from one rank

Opened = OpeningLink | GatheredSums
"""Holds the first messages of a reduction to other hosts, and receives those of others by `deliver`."""

Opening = Callable[[], Opened]
"""Runs the part of a reduction that precedes the first messages to other hosts."""

Complete = Callable[[Sequence[Transfer], Sequence[int]], None]


class _Header(NamedTuple):
    """The beginning of a block.

    Attributes:
        fingerprint: 64-bit hash of the call.
        arrays: Number of arrays that the rank contributes.
        nbytes: Size of all these arrays; _TOO_LARGE or _OPENED if they do not follow.
    """

    fingerprint: int
    arrays: int
    nbytes: int


class LinkExchange:
    """The exchange between the ranks of a link. Each rank's block consists of a header and its arrays.

    Args:
        link: Link between the ranks.
        watch: Watch whose names and call appear in errors.
        complete: Function that waits for transfers; its second argument has the rank of each transfer.

    Attributes:
        away: Ranks of other hosts that send to this rank.
        pairs: Pairs (sender, receiver) whose messages leave a host, if all these messages are in one round; else empty.
        has_delivered: Whether the last exchange also began the reduction.
    """

    def __init__(self, link: Link, watch: Watch, complete: Complete) -> None:
        self._link = link
        self._watch = watch
        self._complete = complete
        self._rank = link.rank
        self._size = link.size
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._inline_bytes = link.sizes.inline_bytes
        self._parity = 0
        hosts = link.nearby or tuple(range(self._size))
        self._beside = [rank for rank in self._others if hosts[rank] == hosts[self._rank]]
        rounds = relays(hosts)
        leaving = [each for each in rounds if hosts[each[0].source] != hosts[each[0].to]]
        self.pairs = {(source, to) for source, to, _ in leaving[0]} if len(leaving) == 1 else set()
        opening_bytes = link.sizes.opening_bytes if self.pairs else 0
        block = _HEADER_BYTES + self._inline_bytes
        self._rounds = [_Round(each, self._rank, block, opening_bytes, each in leaving) for each in rounds]
        self.away = frozenset(rank for each in self._rounds if each.leaves for rank in each.sources)
        rooms = [block + opening_bytes * (rank in self.away) for rank in range(self._size)]
        self._rooms = [[aligned_empty(room) for room in rooms] for _ in (0, 1)]
        self._headers = [_Header(0, 0, 0)] * self._size
        self._blocks: list[Sequence[bytes | memoryview]] = [()] * self._size  # each in parts that follow each other
        self._received: dict[int, int | None] = {}  # lengths of messages with one block; None if the link does not know
        self._behind: dict[int, np.ndarray] = {}  # bytes that followed the blocks of other hosts
        self.has_delivered = False

    def run(
        self, fingerprint: int, arrays: Sequence[np.ndarray], count: int, opening: Opening | None = None
    ) -> tuple[bool, Parts]:
        """Exchange as `Transport.exchange` does.

        Args:
            fingerprint: 64-bit hash of the call.
            arrays: Arrays of one dtype and size that may travel with the exchange.
            count: Number of arrays that this rank contributes.
            opening: Function that begins the reduction of arrays that are too large to travel with the exchange. It is
                called only if all ranks of this host agree, and then on all of them.
        """
        self._parity = 1 - self._parity  # received arrays stay readable until the next exchange but one
        nbytes = len(arrays) and arrays[0].nbytes * count
        travelling = arrays
        if nbytes > self._inline_bytes:
            nbytes, travelling = _TOO_LARGE if opening is None else _OPENED, ()
        own = self._headers[self._rank] = _Header(fingerprint, count, nbytes)
        self._blocks[self._rank] = [_HEADER.pack(*own), *map(_bytes_of, travelling)]
        self.has_delivered = False
        opened = self._tell(opening if nbytes == _OPENED else None)
        headers = self._headers
        alike = headers.count(own) == self._size
        if not alike and any(theirs.fingerprint != fingerprint for theirs in headers):
            return False, Parts((), ())
        self._check_headers(arrays, alike, opened)
        if alike and opened is not None:
            for source, payload in self._behind.items():
                opened.deliver(source, payload)
            self.has_delivered = True
        counts = tuple([header.arrays for header in headers])
        if not arrays or any(header.nbytes >= _OPENED for header in headers):
            return True, Parts(counts, ())
        return True, Parts(counts, self._arrays_of_all(arrays))

    def _tell(self, opening: Opening | None) -> Opened | None:
        """Send all blocks to all ranks; return the link of a reduction that was opened meanwhile, or None."""
        opened: Opened | None = None
        link, blocks, own_rooms = self._link, self._blocks, self._rooms[self._parity]
        for each in self._rounds:
            if opening is not None and each.leaves and self._is_agreed_here():
                opened = opening()
            receives = [
                link.fetch_up_to(own_rooms[ranks[0]] if len(ranks) == 1 else room, source, EXCHANGE)
                for (ranks, room), source in zip(each.rooms, each.sources, strict=True)
            ]
            sends: list[Transfer] = []
            for ranks, to in each.sent:
                parts = [part for rank in ranks for part in blocks[rank]]
                if opened is not None and each.leaves:
                    for one in to:
                        message = b"".join([*parts, *map(_bytes_of, opened.held_for(one))])
                        sends += link.send_bytes(message, [one], EXCHANGE)
                else:
                    sends += link.send_bytes(b"".join(parts), to, EXCHANGE)
            self._complete(receives, each.sources)
            if sends:
                self._complete(sends, each.receivers)
            for (ranks, _), source, receive in zip(each.rooms, each.sources, receives, strict=True):
                end = self._unpack(ranks, receive)
                if each.leaves:
                    self._behind[source] = receive.message[end:]
        return opened

    def _is_agreed_here(self) -> bool:
        """Return whether all ranks of this host have equal headers."""
        own = self._headers[self._rank]
        return all(self._headers[rank] == own for rank in self._beside)

    def _unpack(self, ranks: Sequence[int], receive: Fetch) -> int:
        """Note the blocks of a message, copied to aligned memory if it has several; return their total length."""
        message, received = receive.message, receive.received
        if len(ranks) == 1:
            self._received[ranks[0]] = received
            return self._note(ranks[0], message if received is None else message[:received])
        start = 0
        for rank in ranks:
            room = self._rooms[self._parity][rank]
            length = min(room.size, message.size - start)
            room[:length] = message[start : start + length]
            start += self._note(rank, room[:length])
        return start

    def _note(self, rank: int, message: np.ndarray) -> int:
        """Note the header and the block of a rank at the beginning of `message`; return the length of the block."""
        if message.size < _HEADER_BYTES:
            raise self._fault(rank, 0, 0, message.size)
        header = self._headers[rank] = _Header._make(_HEADER.unpack_from(message.data))
        length = _HEADER_BYTES + (header.nbytes if header.nbytes <= self._inline_bytes else 0)
        self._blocks[rank] = (message[:length].data,)
        return length

    def _check_headers(self, arrays: Sequence[np.ndarray], alike: bool, opened: Opened | None) -> None:
        """Refuse invalid headers, and messages that are shorter or longer than their headers say."""
        own = self._headers[self._rank]
        own_bytes = _HEADER_BYTES + (own.nbytes if own.nbytes <= self._inline_bytes else 0)
        for other in self._others:
            come = self._received.get(other)
            expected = own_bytes if opened is None else own_bytes + opened.nbytes_from(other)
            if not alike or come not in (None, expected):
                self._check_header(other, come, arrays, alike)

    def _check_header(self, rank: int, received: int | None, arrays: Sequence[np.ndarray], alike: bool) -> None:
        """Refuse an invalid header: a faulty rank could exhaust memory or spoil sums.

        If headers differ between ranks, it is unknown which ranks have begun to reduce, and with how many bytes.
        """
        _, count, nbytes = self._headers[rank]
        each = arrays[0].nbytes if arrays else 0
        is_left_at_home = nbytes >= _OPENED and bool(arrays)
        inline = 0 if is_left_at_home else nbytes
        fits = is_left_at_home or (nbytes == count * each <= self._inline_bytes if arrays else nbytes == 0)
        is_plausible = fits and (not arrays or 0 < count <= _MOST_ARRAYS)
        may_be_longer = nbytes == _OPENED and not alike
        if not is_plausible or (received not in (None, _HEADER_BYTES + inline) and not may_be_longer):
            raise self._fault(rank, count, nbytes, received)

    def _fault(self, rank: int, count: int, nbytes: int, received: int | None) -> PeerLostError:
        return PeerLostError(
            f"{self._watch.names[rank]} is lost: it announced {count} arrays of {nbytes} bytes in a message of "
            f"{received}, in {self._watch.call.title}; it is faulty"
        )

    def _arrays_of_all(self, own: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays of all ranks in rank order, where they are."""
        dtype, nbytes = own[0].dtype, own[0].nbytes
        found: list[np.ndarray] = []
        for rank, header in enumerate(self._headers):
            if rank == self._rank:
                found += own
            else:
                (block,) = self._blocks[rank]
                starts = [_HEADER_BYTES + number * nbytes for number in range(header.arrays)]
                found += [np.frombuffer(block, dtype, own[0].size, start) for start in starts]
        return found


class _Round:
    """The messages that one rank sends and receives in a round.

    Attributes:
        leaves: Whether messages leave their hosts.
        sent: Ranks whose blocks make up a message, with the receivers of the message.
        receivers: Receiver of each message.
        sources: Sender of each received message.
        rooms: Ranks whose blocks make up each received message, and a buffer for it if it has several blocks.
    """

    def __init__(self, messages: Sequence[Relay], rank: int, block: int, opening_bytes: int, leaves: bool) -> None:
        to: dict[tuple[int, ...], list[int]] = {}
        for message in messages:
            if message.source == rank:
                to.setdefault(message.ranks, []).append(message.to)
        coming = [message for message in messages if message.to == rank]
        behind = opening_bytes if leaves else 0
        self.leaves = leaves
        self.sent = list(to.items())
        self.receivers = [each for others in to.values() for each in others]
        self.sources = [message.source for message in coming]
        self.rooms = [
            (message.ranks, np.empty(len(message.ranks) * block + behind if len(message.ranks) > 1 else 0, np.uint8))
            for message in coming
        ]


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data
