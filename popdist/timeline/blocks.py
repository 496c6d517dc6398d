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
from typing import Any

import numpy as np

from popdist.timeline.events import EVENT

MAGIC = b"popdist timeline 1\n"
HEADER, NAMES, EVENTS, CLOCKS, JOINED, PROFILE, END = b"HEAD", b"NAME", b"EVNT", b"CLCK", b"JOIN", b"PROF", b"DONE"
_HEAD = struct.Struct("<4sII")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        kind: see above.
        content: of it.
    """

    kind: bytes
    content: bytes


def block(kind: bytes, content: bytes) -> bytes:
    """A block as it lies in the file."""
    return _HEAD.pack(kind, len(content), zlib.crc32(content)) + content


def json_block(kind: bytes, value: Any) -> bytes:
    """A block of JSON."""
    return block(kind, json.dumps(value).encode())


def read_blocks(data: bytes) -> Iterator[Block]:
    """The blocks of a file, up to where it is cut off or damaged.

    Raises:
        ValueError: it is no such file.
    """
    if not data.startswith(MAGIC[: len(data)]):
        raise ValueError("it does not begin as a recording does")
    position = len(MAGIC)
    while position + _HEAD.size <= len(data):
        kind, length, checksum = _HEAD.unpack_from(data, position)
        position += _HEAD.size
        content = data[position : position + length]
        if len(content) < length or zlib.crc32(content) != checksum:
            return
        position += length
        yield Block(kind, content)


def pack_events(events: np.ndarray) -> bytes:
    """Events, of which times are differences, byte by byte: all first bytes, then all second ones, ...

    Those that are always 0 take no room then: that leaves about 5 bytes of each event.
    """
    apart = events.copy()
    later = apart["when_ns"][1:]
    later -= events["when_ns"][:-1]
    columns = apart.view(np.uint8).reshape(-1, EVENT.itemsize).T.tobytes()
    return _COUNT.pack(len(events)) + zlib.compress(columns, 1)


def unpack_events(content: bytes) -> np.ndarray:
    """What `pack_events` has packed."""
    (count,) = _COUNT.unpack_from(content)
    columns = np.frombuffer(zlib.decompress(content[_COUNT.size :]), np.uint8)
    events = columns.reshape(EVENT.itemsize, count).T.copy().view(EVENT).reshape(count)
    np.cumsum(events["when_ns"], out=events["when_ns"])
    return events


def pack_exchanges(exchanges: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Exchanges of `popdist.timeline.clocks`."""
    return np.asarray(exchanges, "<i8").tobytes()


def unpack_exchanges(content: bytes) -> np.ndarray:
    """What `pack_exchanges` has packed: int64, four for each."""
    return np.frombuffer(content, "<i8").reshape(-1, 4)


def names_block(names: Mapping[int, Mapping[str, Any]]) -> bytes:
    """The block that says what names stand for."""
    return json_block(NAMES, [[number, dict(said)] for number, said in names.items()])
