"""Events of a few numbers, one of them a reference to a name; and the blocks of an instance's file.

A block is a kind (4 bytes), the length of the content and its CRC-32 (4 bytes each), and the content. So a file that is
cut off anywhere can be read up to there. The first block is a header in JSON. Names precede the events that use them.
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
"""Track of the program's own thread; tracks of replicas are numbered from 1."""

EVENT = np.dtype([("when_ns", "<i8"), ("kind", "<u2"), ("track", "<u2"), ("name", "<u4"), ("value", "<i8")])
"""An event for readers; times are those of its host's monotonic clock."""

MAGIC = b"popdist timeline 1\n"
HEADER, NAMES, EVENTS, CLOCKS, JOINED, PROFILE, END = b"HEAD", b"NAME", b"EVNT", b"CLCK", b"JOIN", b"PROF", b"DONE"
_KINDS = (HEADER, NAMES, EVENTS, CLOCKS, JOINED, PROFILE, END)
MOST_RATIO = 64
"""Maximum bytes of events per byte of their file; real recordings have about 5."""
_HEAD = struct.Struct("<4sII")
_COUNT = struct.Struct("<I")


class EventKind(IntEnum):
    """The kinds of events; the text below each gives the meaning of its fields."""

    STEP_BEGINS = 1
    """Value: number of the step. Other events of the step may have been left out."""
    STEP_ENDS = 2
    """Value: rows of data that this instance has processed."""
    PHASE_BEGINS = 3
    """Name: the phase."""
    PHASE_ENDS = 4
    """The phase succeeded. A phase without an end has failed."""
    OPERATION_BEGINS = 5
    """Name: the collective. Value: its number in its communicator, from 1."""
    DATA_MOVES = 6
    """All ranks have come to the collective. Value: bytes of each contribution that begin to move."""
    OPERATION_ENDS = 7
    """The collective succeeded."""
    WAITS_FOR = 8
    """Value: an instance for which this one has waited for some time."""
    MEASURED = 9
    """Name: the measured quantity. Value: the bits of a float64."""
    REPLICA_BEGINS = 10
    """Track: 1 + stage. Name: index of the replica."""
    REPLICA_ENDS = 11
    """Track: 1 + stage. Name: index of the replica. Value: part of its gradients, or micro-batch; the next begins."""
    EVENTS_LOST = 12
    """Value: number of events that came too fast to be kept."""
    RENUMBERED = 13
    """The members have changed. Track: number of the change, from 1. Value: the new index of this instance times 2**32,
    plus the number of active instances; this number is 0 if the instance sleeps as a spare from now on."""
    SEEN_AT = 14
    """Name: a line of the program at which its thread was, between two steps and outside phases and collectives."""


def bits_of(number: float) -> int:
    """Return the value of a MEASURED event for a number."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


@dataclass(frozen=True)
class EventBlock:
    """One block of a file.

    Attributes:
        kind: Kind, e.g. `EVENTS`.
        content: Content.
    """

    kind: bytes
    content: bytes


def block(kind: bytes, content: bytes) -> bytes:
    """Encode a block."""
    return _HEAD.pack(kind, len(content), zlib.crc32(content)) + content


def json_block(kind: bytes, value: object) -> bytes:
    """Encode a block of JSON."""
    return block(kind, json.dumps(value).encode())


def read_blocks(data: bytes) -> Iterator[EventBlock]:
    """Yield the blocks of a file, up to the place at which it is cut off.

    Raises:
        ValueError: The file is damaged, or is not a recording.
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
    """Return the complete block at a position, or None."""
    if position + _HEAD.size > len(data):
        return None
    kind, length, checksum = _HEAD.unpack_from(data, position)
    content = data[position + _HEAD.size : position + _HEAD.size + length]
    is_whole = len(content) == length and zlib.crc32(content) == checksum
    return EventBlock(kind, content) if is_whole and kind in _KINDS else None


def _is_cut(data: bytes, position: int) -> bool:
    """Return whether the file ends within the block at a position, so that no complete block follows."""
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
    """Compress events: times become differences, and bytes are grouped by their position in the event.

    Bytes that are always 0 then take no room. About 5 bytes per event remain.
    """
    apart = events.copy()
    later = apart["when_ns"][1:]
    later -= events["when_ns"][:-1]
    columns = apart.view(np.uint8).reshape(-1, EVENT.itemsize).T.tobytes()
    return _COUNT.pack(len(events)) + zlib.compress(columns, 1)


def unpack_events(content: bytes, most_bytes: int | None = None) -> np.ndarray:
    """Decompress the events of `pack_events`.

    Args:
        content: Content of the block.
        most_bytes: Memory limit of the events; None: no limit.

    Raises:
        ValueError: The block has another number of events than it says, or they exceed the limit.
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
    """Encode exchanges of `popdist.timeline.clocks`."""
    return np.asarray(exchanges, "<i8").tobytes()


def unpack_exchanges(content: bytes) -> np.ndarray:
    """Decode the exchanges of `pack_exchanges`, as int64 of shape (number, 4)."""
    return np.frombuffer(content, "<i8").reshape(-1, 4)


def names_block(names: Mapping[int, Mapping[str, object]]) -> bytes:
    """Encode the block that defines names."""
    return json_block(NAMES, [[number, dict(said)] for number, said in names.items()])
