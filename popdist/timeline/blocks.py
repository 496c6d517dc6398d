"""The file of an instance: blocks with a length and a checksum, so that one that ends anywhere is read up to there.

A block is a kind (4 bytes), the length of what follows, its CRC-32 (4 bytes each), and that. The first is a header, in
JSON; names come before the events that have them.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from popdist.timeline.events import EVENT

MAGIC = b"popdist timeline 1\n"
HEADER, NAMES, EVENTS, CLOCKS, JOINED, PROFILE, END = b"HEAD", b"NAME", b"EVNT", b"CLCK", b"JOIN", b"PROF", b"DONE"
_KINDS = (HEADER, NAMES, EVENTS, CLOCKS, JOINED, PROFILE, END)
MOST_RATIO = 64
"""Bytes of events for each byte of their file, at most; recorded ones have some 5."""
_HEAD = struct.Struct("<4sII")
_COUNT = struct.Struct("<I")


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
