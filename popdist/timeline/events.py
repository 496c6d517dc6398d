"""Events, a few numbers each, of which one may stand for a name; and the file of an instance, which has them in blocks.

A block is a kind (4 bytes), the length of what follows, its CRC-32 (4 bytes each), and that: a file that ends anywhere
is read up to there. The first is a header, in JSON; names come before the events that have them.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

MAIN_TRACK = 0
"""The program's own thread; those of replicas are numbered from 1."""

EVENT = np.dtype([("when_ns", "<i8"), ("kind", "<u2"), ("track", "<u2"), ("name", "<u4"), ("value", "<i8")])
"""An event as readers have it: times are those of the monotonic clock of its host."""

MAGIC = b"popdist timeline 1\n"
HEADER, NAMES, EVENTS, CLOCKS, JOINED, PROFILE, END = b"HEAD", b"NAME", b"EVNT", b"CLCK", b"JOIN", b"PROF", b"DONE"
_KINDS = (HEADER, NAMES, EVENTS, CLOCKS, JOINED, PROFILE, END)
MOST_RATIO = 64
"""Bytes of events for each byte of their file, at most; recorded ones have some 5."""
_HEAD = struct.Struct("<4sII")
_COUNT = struct.Struct("<I")


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


def bits_of(number: float) -> int:
    """Return the value of an event that measures so much."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


@dataclass(frozen=True)
class EventBlock:
    """One block.

    Attributes:
        kind: see above.
        content: of it.
    """

    kind: bytes
    content: bytes


def block(kind: bytes, content: bytes) -> bytes:
    """Return a block as it lies in the file."""
    return _HEAD.pack(kind, len(content), zlib.crc32(content)) + content


def json_block(kind: bytes, value: object) -> bytes:
    """Return a block of JSON."""
    return block(kind, json.dumps(value).encode())


def read_blocks(data: bytes) -> Iterator[EventBlock]:
    """Yield the blocks of a file, up to where it is cut off.

    Raises:
        ValueError: the file is damaged, or no such file.
    """
    if not data.startswith(MAGIC[: len(data)]):
        raise ValueError("it does not begin as a recording does")
    position = len(MAGIC)
    while (found := _block_at(data, position)) is not None:
        position += _HEAD.size + len(found.content)
        yield found
    if data[position:].strip(b"\0") and not _is_cut(data, position):
        raise ValueError(f"it is damaged at byte {position}")


def _block_at(data: bytes, position: int) -> EventBlock | None:
    """Return the whole block that begins there; None if there is none."""
    if position + _HEAD.size > len(data):
        return None
    kind, length, checksum = _HEAD.unpack_from(data, position)
    content = data[position + _HEAD.size : position + _HEAD.size + length]
    is_whole = len(content) == length and zlib.crc32(content) == checksum
    return EventBlock(kind, content) if is_whole and kind in _KINDS else None


def _is_cut(data: bytes, position: int) -> bool:
    """Return whether the file ends within the block at a position: no whole block follows."""
    rest = data[position:]
    if len(rest) < _HEAD.size:
        return any(each.startswith(rest[:4]) for each in _KINDS)
    kind, length, _ = _HEAD.unpack_from(rest)
    if kind not in _KINDS or kind == END or _HEAD.size + length <= len(rest):
        return False
    return not any(_block_at(data, place) for each in _KINDS for place in _places(data, each, position + 1))


def _places(data: bytes, sought: bytes, begin: int) -> Iterator[int]:
    while (begin := data.find(sought, begin)) >= 0:
        yield begin
        begin += 1


def pack_events(events: np.ndarray) -> bytes:
    """Events, of which times are differences, byte by byte: all first bytes, then all second ones, ...

    Those that are always 0 take no room then: that leaves about 5 bytes of each event.
    """
    apart = events.copy()
    later = apart["when_ns"][1:]
    later -= events["when_ns"][:-1]
    columns = apart.view(np.uint8).reshape(-1, EVENT.itemsize).T.tobytes()
    return _COUNT.pack(len(events)) + zlib.compress(columns, 1)


def unpack_events(content: bytes, most_bytes: int | None = None) -> np.ndarray:
    """Return what `pack_events` has packed.

    Args:
        content: of the block.
        most_bytes: how much memory the events may take; None: any.

    Raises:
        ValueError: the block has other events than it says, or more.
    """
    (count,) = _COUNT.unpack_from(content)
    nbytes = count * EVENT.itemsize
    if most_bytes is not None and nbytes > most_bytes:
        raise ValueError(f"it has {nbytes} bytes of events, more than {MOST_RATIO} for each byte of the file")
    unpacked = zlib.decompressobj().decompress(content[_COUNT.size :], nbytes + 1)
    columns = np.frombuffer(unpacked, np.uint8)
    if len(columns) != nbytes:
        raise ValueError(f"it does not have the {count} events that it announces")
    events = columns.reshape(EVENT.itemsize, count).T.copy().view(EVENT).reshape(count)
    np.cumsum(events["when_ns"], out=events["when_ns"])
    return events


def pack_exchanges(exchanges: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Exchanges of `popdist.timeline.clocks`."""
    return np.asarray(exchanges, "<i8").tobytes()


def unpack_exchanges(content: bytes) -> np.ndarray:
    """Return what `pack_exchanges` has packed: int64, four for each."""
    return np.frombuffer(content, "<i8").reshape(-1, 4)


def names_block(names: Mapping[int, Mapping[str, object]]) -> bytes:
    """Return the block that says what names stand for."""
    return json_block(NAMES, [[number, dict(said)] for number, said in names.items()])
