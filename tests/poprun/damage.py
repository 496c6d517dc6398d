"""Damaged and forged recordings, made from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from popdist.timeline import events as blocks
from poprun.trace.recordings import InstanceRecording

Harm = Callable[[random.Random, bytes], bytes]


def header_of(recording: InstanceRecording) -> dict[str, object]:
    """Return the header that an instance writes first."""
    names = ("instance", "instances", "host", "attempt", "clock", "began_ns", "began_at_s")
    return {name: getattr(recording, name) for name in names} | {"program": ["train.py"], "replicas": [0, 1, 2]}


def file_of(recording: InstanceRecording, parts: int = 4) -> bytes:
    """Return the file of a recording, with its events in `parts` blocks."""
    data = blocks.MAGIC + blocks.json_block(blocks.HEADER, header_of(recording))
    data += blocks.json_block(blocks.JOINED, {"job": recording.job, "clocks": [recording.clock]})
    data += blocks.names_block(recording.names)
    size = -(-len(recording.events) // parts) or 1
    for begin in range(0, len(recording.events), size):
        data += blocks.block(blocks.EVENTS, blocks.pack_events(recording.events[begin : begin + size]))
    return data + (blocks.block(blocks.END, b"") if recording.is_complete else b"")


def flipped(chance: random.Random, data: bytes) -> bytes:
    """Flip some bits."""
    harmed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 20))):
        harmed[chance.randrange(len(harmed))] ^= 1 << chance.randrange(8)
    return bytes(harmed)


def overwritten(chance: random.Random, data: bytes) -> bytes:
    """Overwrite a piece with noise or zeros."""
    begin, size = chance.randrange(len(data)), chance.randrange(1, 64)
    noise = chance.randbytes(size) if chance.random() < 0.5 else bytes(size)
    return data[:begin] + noise + data[begin + size :]


def torn(chance: random.Random, data: bytes) -> bytes:
    """Remove a piece from the middle."""
    begin = chance.randrange(len(data) - 1)
    return data[:begin] + data[begin + chance.randrange(1, max(len(data) // 4, 2)) :]


def doubled(chance: random.Random, data: bytes) -> bytes:
    """Repeat a piece."""
    begin = chance.randrange(len(data))
    end = begin + chance.randrange(1, 100)
    return data[:end] + data[begin:]


def replaced(chance: random.Random, data: bytes) -> bytes:
    """Replace the whole file by another one."""
    return chance.choice((b"", b"{}", b"[" * 100_000, b"\x1f\x8b", chance.randbytes(300), data[::-1]))


HARMS: tuple[Harm, ...] = (flipped, overwritten, torn, doubled, replaced)


def damaged(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield `count` different damaged copies of a file."""
    chance = random.Random(seed)
    while count:
        harmed = chance.choice(HARMS)(chance, data)
        if harmed != data:
            count -= 1
            yield harmed


ODD = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    1e308,
    float("nan"),
    "",
    "x",
    "\n",
    [],
    {},
    [1],
    {"name": 3},
    "a" * 9999,
)


def forged(recording: InstanceRecording, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield `count` files with correct checksums and contents that no instance writes."""
    chance = random.Random(seed)
    while count:
        count -= 1
        header, joined, names = header_of(recording), {"job": "a", "clocks": ["one"]}, dict(recording.names)
        events = recording.events.copy()
        profile = {"profiler": "jax", "file": "a.profile/x.json.gz", "markers": [[1, 2]]}
        what = chance.randrange(6)
        if what == 0:
            header[chance.choice(list(header))] = chance.choice(ODD)
        elif what == 1:
            joined[chance.choice(list(joined))] = chance.choice(ODD)
        elif what == 2:
            names[chance.choice([*names, 10**9, -1])] = chance.choice([*ODD, {"name": "a", "call": 1}])
        elif what == 3:
            profile[chance.choice(list(profile))] = chance.choice(ODD)
        else:
            field = chance.choice(("when_ns", "kind", "track", "name", "value"))
            for place in chance.choices(range(len(events)), k=chance.choice((1, 3, len(events)))):
                size = 16 if field in ("kind", "track") else 32 if field == "name" else 63
                events[field][place] = chance.getrandbits(chance.randrange(1, size + 1))
        data = blocks.MAGIC + blocks.json_block(blocks.HEADER, header) + blocks.json_block(blocks.JOINED, joined)
        data += blocks.json_block(blocks.NAMES, [[number, said] for number, said in names.items()])
        data += blocks.block(blocks.EVENTS, blocks.pack_events(events))
        data += blocks.json_block(blocks.PROFILE, profile) if what == 3 else b""
        yield data + blocks.block(blocks.END, b"")
