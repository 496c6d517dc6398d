"""The exchange before every collective: all ranks see the calls of all ranks, and receive small arrays with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from collectives.arrays import aligned_empty
from collectives.caches import BoundedCache
from collectives.errors import PeerLostError
from collectives.plans.comparing import Relay, relays
from collectives.point_to_point.gathering import GatheredSums
from collectives.point_to_point.link import EXCHANGE, Link, Transfer
from collectives.point_to_point.opening import OpeningLink
from collectives.transport import Parts
from collectives.waiting import Watch

_HEADER_BYTES = 64
_FINGERPRINT, _COUNT, _NBYTES = 0, 1, 2  # the words of a header
_WORDS = 3
COMPARED_BYTES = 8 * _WORDS
_TOO_LARGE = (1 << 64) - 1
_OPENED = _TOO_LARGE - 1  # the arrays are too large, and the first messages of the reduction follow the block
_MOST_ARRAYS = 1 << 20  # maximum number of arrays from one rank

Opened = OpeningLink | GatheredSums
"""Holds the first messages of a reduction to other hosts, and receives those of others by `deliver`."""

Opening = Callable[[], Opened]
"""Runs the part of a reduction that precedes the first messages to other hosts."""

Complete = Callable[[Sequence[Transfer], Sequence[int]], None]


class LinkExchange:
    """The exchange between the ranks of a link. Each rank's block consists of a header and its arrays.

    Args:
        link: Link between the ranks.
        watch: Watch whose names and call appear in errors.
        complete: Function that waits for transfers; its second argument has the rank of each transfer.

    Attributes:
        away: Ranks of other hosts that send to this rank.
        pairs: Pairs (sender, receiver) whose messages leave a host, if all these messages are in one round; else empty.
        is_flat: Whether each rank sends one message to each other rank, with its block alone.
        has_delivered: Whether the last exchange also began the reduction.
    """

    def __init__(self, link: Link, watch: Watch, complete: Complete) -> None:
        self._link = link
        self._watch = watch
        self._complete = complete
        self._rank = link.rank
        self._size = link.size
        self._others = [(self._rank + distance) % self._size for distance in range(1, self._size)]
        self._inline_bytes = link.sizes.inline_bytes
        self._parity = 0
        self._inline: BoundedCache[tuple[np.dtype, int, int], list[_Inline]] = BoundedCache()
        hosts = link.nearby or tuple(range(self._size))
        self._beside = [rank for rank in self._others if hosts[rank] == hosts[self._rank]]
        rounds = relays(hosts)
        leaving = [each for each in rounds if hosts[each[0].source] != hosts[each[0].to]]
        self.pairs = {(source, to) for source, to, _ in leaving[0]} if len(leaving) == 1 else set()
        opening_bytes = link.sizes.opening_bytes if self.pairs else 0
        block = self._block_bytes = _HEADER_BYTES + self._inline_bytes
        self._rounds = [_Round(each, self._rank, block, opening_bytes, each in leaving) for each in rounds]
        self.away = frozenset(rank for each in self._rounds if each.leaves for rank in each.sources)
        rooms = [block + opening_bytes * (rank in self.away) for rank in range(self._size)]
        self._blocks = [[aligned_empty(room) for room in rooms] for _ in (0, 1)]
        self._headers = [[block[:_HEADER_BYTES].data.cast("Q") for block in blocks] for blocks in self._blocks]
        self._heads = [[block[:COMPARED_BYTES].data for block in blocks] for blocks in self._blocks]
        self.is_flat = len(self._rounds) == 1 and len(self.away) == self._size - 1
        self._received: dict[int, int | None] = {}  # lengths of messages with one block; None if the link does not know
        self._behind: dict[int, np.ndarray] = {}  # bytes that followed the blocks of other hosts
        self.has_delivered = False
        self._is_told = False

    def expect_told(self) -> None:
        """Let the next exchange begin after its messages were sent, which `head` describes."""
        self._is_told = True

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of arrays that each rank contributed to the last exchange."""
        return tuple(header[_COUNT] for header in self._headers[self._parity])

    def head(self, fingerprint: int, count: int, nbytes: int, opens: bool) -> bytes:
        """Return the header of a block; `opens` says that the first messages of a reduction follow it."""
        words = np.array([fingerprint, count, _OPENED if opens else nbytes], np.uint64).tobytes()
        return words + bytes(_HEADER_BYTES - len(words))

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
        # Two sets of blocks: the arrays of one exchange stay readable until the next exchange but one.
        parity = self._parity = 1 - self._parity
        blocks, headers = self._blocks[parity], self._headers[parity]
        is_told, self._is_told = self._is_told, False
        header = headers[self._rank]
        nbytes = len(arrays) and arrays[0].nbytes * count
        inline = None
        if nbytes > self._inline_bytes:
            nbytes = _TOO_LARGE if opening is None else _OPENED
        elif nbytes:
            first = arrays[0]
            inline = (self._inline.get((first.dtype, first.size, count)) or self._plan_inline(first, count))[parity]
            for slot, array in zip(inline.slots, arrays, strict=True):
                slot[...] = array
        header[_FINGERPRINT], header[_COUNT], header[_NBYTES] = fingerprint, count, nbytes
        self.has_delivered = False
        if self.is_flat and nbytes != _OPENED:
            own = blocks[self._rank][:_HEADER_BYTES] if inline is None else inline.block
            if self._tell_at_once(blocks, self._heads[parity], own, is_told):
                return True, Parts((count,) * self._size, ()) if inline is None else inline.parts
            opened = None
        else:
            self._behind.clear()
            opened = self._tell(blocks, headers, opening if nbytes == _OPENED else None, is_told)
        return self._compared(arrays, headers, opened)

    def _compared(
        self, arrays: Sequence[np.ndarray], headers: Sequence[memoryview], opened: Opened | None
    ) -> tuple[bool, Parts]:
        """Compare the headers of all ranks; return the result of the exchange."""
        fingerprint, count, nbytes = headers[self._rank][:_WORDS]
        alike = True
        for other in self._others:
            theirs = headers[other]
            if theirs[_FINGERPRINT] != fingerprint:
                return False, Parts((), ())
            if theirs[_COUNT] != count or theirs[_NBYTES] != nbytes:
                alike = False
        own_bytes = self._bytes_of(headers[self._rank])
        for other in self._others:
            come = self._received.get(other)
            expected = own_bytes if opened is None else own_bytes + opened.nbytes_from(other)
            if not alike or come not in (None, expected):
                self._check_header(other, headers[other], come, arrays, alike)
        if alike and opened is not None:
            for source, payload in self._behind.items():
                opened.deliver(source, payload)
            self.has_delivered = True
        counts = tuple(header[_COUNT] for header in headers)
        if not nbytes or any(header[_NBYTES] >= _OPENED for header in headers):
            return True, Parts(counts, ())
        return True, Parts(counts, self._views(self._parity, counts, arrays[0]))

    def _tell_at_once(
        self, blocks: Sequence[np.ndarray], heads: Sequence[memoryview], own: np.ndarray, is_told: bool
    ) -> bool:
        """Exchange blocks with all others, which are all on hosts of their own; return whether they are like `own`."""
        others, receive = self._others, self._link.receive
        receives = [receive(blocks[other], other, EXCHANGE) for other in others]
        sends: Sequence[Transfer] = () if is_told else self._link.send_all(own, others, EXCHANGE)
        self._complete(receives, others)
        self._complete(sends, others)
        own_head, are_alike = heads[self._rank], True
        for other, come in zip(others, receives, strict=True):
            self._received[other] = come.received
            are_alike = are_alike and heads[other] == own_head and come.received in (None, own.size)
        return are_alike

    def _tell(
        self, blocks: Sequence[np.ndarray], headers: Sequence[memoryview], opening: Opening | None, is_told: bool
    ) -> Opened | None:
        """Send all blocks to all ranks; return what has begun a reduction meanwhile, or None."""
        opened: Opened | None = None
        for each in self._rounds:
            if opening is not None and each.leaves and self._is_agreed_here(headers):
                opened = opening()
            rooms = [blocks[ranks[0]] if len(ranks) == 1 else room for ranks, room in each.rooms]
            fetches = [
                self._link.fetch_up_to(room, source, EXCHANGE) for room, source in zip(rooms, each.sources, strict=True)
            ]
            sends = [] if is_told else self._send(each, blocks, headers, opened if each.leaves else None)
            self._complete(fetches, each.sources)
            self._complete(sends, each.receivers)
            for (ranks, _), room, source, fetch in zip(each.rooms, rooms, each.sources, fetches, strict=True):
                message = fetch.message
                if message is not room:
                    parts = message[: len(ranks) * self._block_bytes]
                    room[: parts.size] = parts
                if len(ranks) == 1:
                    self._received[ranks[0]] = fetch.received
                start = self._unpack(ranks, room, blocks, headers)
                if each.leaves:
                    self._behind[source] = message[start:]
        return opened

    def _send(
        self, each: _Round, blocks: Sequence[np.ndarray], headers: Sequence[memoryview], opened: Opened | None
    ) -> list[Transfer]:
        """Send the messages of a round, followed by the first messages of a reduction if one was opened."""
        sends: list[Transfer] = []
        for ranks, to in each.sent:
            parts = [blocks[rank][: self._bytes_of(headers[rank])] for rank in ranks]
            if opened is not None:
                for one in to:
                    sends += self._link.send_joined([*parts, *opened.held_for(one)], one, EXCHANGE)
            else:
                sends += self._link.send_all(parts[0] if len(parts) == 1 else np.concatenate(parts), to, EXCHANGE)
        return sends

    def _is_agreed_here(self, headers: Sequence[memoryview]) -> bool:
        """Return whether all ranks of this host have equal headers."""
        own = headers[self._rank][:_WORDS].tolist()
        return all(headers[rank][:_WORDS].tolist() == own for rank in self._beside)

    def _unpack(
        self, ranks: Sequence[int], room: np.ndarray, blocks: Sequence[np.ndarray], headers: Sequence[memoryview]
    ) -> int:
        """Copy the blocks of a message to their places, if they are not there yet; return their total length."""
        if len(ranks) == 1:
            return self._bytes_of(headers[ranks[0]])
        start = 0
        for rank in ranks:
            blocks[rank][:_HEADER_BYTES] = room[start : start + _HEADER_BYTES]
            nbytes = self._bytes_of(headers[rank])
            blocks[rank][_HEADER_BYTES:nbytes] = room[start + _HEADER_BYTES : start + nbytes]
            start += nbytes
        return start

    def _bytes_of(self, header: memoryview) -> int:
        """Return the length of a block. If the header is invalid, that is the length of the header alone."""
        nbytes = header[_NBYTES]
        return _HEADER_BYTES + (nbytes if nbytes <= self._inline_bytes else 0)

    def _check_header(
        self, rank: int, theirs: memoryview, received: int | None, arrays: Sequence[np.ndarray], alike: bool
    ) -> None:
        """Refuse an invalid header: a faulty rank could exhaust memory or spoil sums.

        If headers are alike, only the length of the message is wrong. If they differ between ranks, it is unknown which
        ranks have begun to reduce, and with how many bytes.
        """
        count, nbytes = theirs[_COUNT], theirs[_NBYTES]
        each = arrays[0].nbytes if arrays else 0
        is_left_at_home = nbytes >= _OPENED and bool(arrays)
        inline = 0 if is_left_at_home else nbytes
        fits = is_left_at_home or (nbytes == count * each <= self._inline_bytes if arrays else nbytes == 0)
        is_plausible = fits and (not arrays or 0 < count <= _MOST_ARRAYS)
        has_its_length = received in (None, _HEADER_BYTES + inline) or nbytes == _OPENED
        if alike or not is_plausible or not has_its_length:
            raise PeerLostError(
                f"{self._watch.names[rank]} is lost: it announced {count} arrays of {nbytes} bytes in a message of "
                f"{received}, in {self._watch.call.title}; it is faulty"
            )

    def _plan_inline(self, like: np.ndarray, count: int) -> list[_Inline]:
        """Return views of all blocks for `count` arrays like `like` from each rank, for even and odd exchanges."""
        counts = (count,) * self._size
        plan = []
        for parity in (0, 1):
            views = self._views(parity, counts, like)
            own = self._blocks[parity][self._rank][: _HEADER_BYTES + count * like.nbytes]
            plan.append(_Inline(views[self._rank * count : (self._rank + 1) * count], own, Parts(counts, views)))
        self._inline[like.dtype, like.size, count] = plan
        return plan

    def _views(self, parity: int, counts: Sequence[int], like: np.ndarray) -> list[np.ndarray]:
        start, step = _HEADER_BYTES, like.nbytes
        return [
            self._blocks[parity][rank][start + number * step : start + (number + 1) * step].view(like.dtype)
            for rank, count in enumerate(counts)
            for number in range(count)
        ]


class _Inline(NamedTuple):
    """Views for arrays that travel with the exchange, of one dtype, size and number.

    Attributes:
        slots: Places of this rank's arrays.
        block: Block of this rank.
        parts: Arrays of all ranks.
    """

    slots: list[np.ndarray]
    block: np.ndarray
    parts: Parts


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
