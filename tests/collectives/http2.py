"""The part of HTTP/2 needed to send invalid messages (RFC 9113; header fields as in RFC 7541, 6.2.2)."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterable, Iterator

from collectives.network.addresses import Address

LIMIT_S = 60.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
LONGEST_FRAME = (1 << 24) - 1


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", announced: int | None = None) -> bytes:
    """Return one frame; `announced` is the length in its header."""
    length = len(payload) if announced is None else announced
    return struct.pack(">I", length)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(content: bytes, announced: int | None = None) -> bytes:
    """Return one uncompressed message of gRPC."""
    return struct.pack(">BI", 0, len(content) if announced is None else announced) + content


def field(name: str, value: str) -> bytes:
    """Return a header field in literal form, without a table."""
    return b"\0" + _string(name) + _string(value)


def _string(text: str) -> bytes:
    return _integer(len(text.encode()), 7) + text.encode()


def _integer(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    rest = bytearray([most])
    value -= most
    while value >= 128:
        rest.append(value % 128 + 128)
        value //= 128
    return bytes([*rest, value])


def request(path: str, metadata: Iterable[tuple[str, str]] = ()) -> bytes:
    """Return the header fields that begin a call."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    ]
    return b"".join(field(name, value) for name, value in fields)


def opening() -> bytes:
    """Return the first bytes of a client."""
    return PREFACE + frame(SETTINGS, 0, 0)


def frames_of(connection: socket.socket) -> Iterator[tuple[int, int]]:
    """Yield the kind and the stream of every frame from a client, until it closes the connection.

    A client that only probes the address sends no frame.
    """
    with connection.makefile("rb") as file:
        file.read(len(PREFACE))
        while len(head := file.read(9)) == 9:
            length, kind, _, stream = struct.unpack(">IBBI", b"\0" + head)
            file.read(length)
            yield kind, stream


def call(path: str, metadata: Iterable[tuple[str, str]] = (), *messages: bytes, stream: int = 1) -> bytes:
    """Return a complete call without its end."""
    begin = frame(HEADERS, END_HEADERS, stream, request(path, metadata))
    return begin + b"".join(frame(DATA, 0, stream, each) for each in messages)


def random_frames(chance: random.Random, count: int) -> bytes:
    """Return frames of all kinds, some with a wrong length."""
    frames = []
    for _ in range(count):
        payload = chance.randbytes(chance.choice([0, 4, 8, 9, 100, 5000]))
        announced = chance.choice([len(payload)] * 6 + [0, LONGEST_FRAME])
        stream = chance.choice([0, 1, 2, 3, 5, 1 << 31, (1 << 32) - 1])
        frames.append(frame(chance.randrange(16), chance.randrange(256), stream, payload, announced))
    return b"".join(frames)


def connected(address: str) -> socket.socket:
    """Return a connection to the address."""
    (endpoint, *_) = Address.parse(address).endpoints()
    connection = socket.socket(endpoint.family, socket.SOCK_STREAM)
    connection.settimeout(LIMIT_S)
    connection.connect(endpoint.location)
    return connection


def throw(address: str, data: bytes) -> None:
    """Connect, send data and disconnect; the other side may disconnect earlier."""
    with connected(address) as connection:
        try:
            connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return


def throw_and_listen(address: str, data: bytes, limit_s: float = LIMIT_S) -> bytes:
    """Connect, send data and return the answer, until the other side disconnects or is silent for the limit."""
    heard = bytearray()
    with connected(address) as connection:
        connection.settimeout(limit_s)
        try:
            connection.sendall(data)
            while some := connection.recv(1 << 16):
                heard += some
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            pass
    return bytes(heard)
