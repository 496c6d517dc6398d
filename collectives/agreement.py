"""The agreement of ranks before data moves: all calls are equal, or every rank raises one error with the same text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from collectives.calls import CLOSE, Call, describe_mismatch
from collectives.errors import LayoutMismatchError, PeerLostError
from collectives.transport import Parts, Transport

_TEXT = Call("message").fingerprint
LEAST_INLINE_BYTES = 512
"""The least room for arrays in an exchange, in bytes; ranks need it to send each other texts."""
_LONGEST_BYTES = 1 << 24


def agree(transport: Transport, call: Call, arrays: Sequence[np.ndarray], count: int) -> Parts:
    """Compare `call` with the calls of all ranks, and send `arrays` along if they are small.

    Raises:
        LayoutMismatchError: The calls differ. Raised on every rank.
    """
    equal, parts = transport.exchange(call.fingerprint, arrays, count)
    if not equal:
        raise_mismatch(transport, call)
    return parts


def raise_mismatch(transport: Transport, call: Call) -> NoReturn:
    """Raise the error that lists the calls of all ranks; a collective call after an exchange of unequal calls."""
    calls = [message.decode(errors="replace") for message in exchange_bytes(transport, str(call).encode())]
    raise layout_mismatch(calls)


def layout_mismatch(calls: Sequence[str]) -> LayoutMismatchError:
    """Build the error that lists the call of each rank; `calls` are in rank order."""
    return LayoutMismatchError(describe_mismatch(calls), [rank for rank, call in enumerate(calls) if call == CLOSE])


def exchange_bytes(transport: Transport, message: bytes) -> list[bytes]:
    """Send `message`, of any length, to all ranks; return the messages of all ranks in rank order."""
    _, parts = transport.exchange(_TEXT, (), len(message))
    lengths = parts.counts
    if max(lengths) > _LONGEST_BYTES:
        raise PeerLostError(
            f"rank {lengths.index(max(lengths))} announced a message of {max(lengths)} bytes; it is faulty"
        )
    gathered = [bytearray() for _ in lengths]
    for start in range(0, max(lengths), LEAST_INLINE_BYTES):
        piece = np.zeros(LEAST_INLINE_BYTES, np.uint8)
        mine = np.frombuffer(message[start : start + LEAST_INLINE_BYTES], np.uint8)
        piece[: mine.size] = mine
        _, parts = transport.exchange(_TEXT, [piece], 1)
        for whole, part in zip(gathered, parts.arrays, strict=True):
            whole += part.tobytes()
    return [bytes(whole[:length]) for whole, length in zip(gathered, lengths, strict=True)]
