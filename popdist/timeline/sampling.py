"""Which steps are recorded where not all of them have room: every second one, every fourth one, ..."""

from __future__ import annotations

_RESERVE = 0.95
"""Steps that are left out leave their beginning, measurements go on."""
_MOST_HALVINGS = 20


def stride_of(written_bytes: int, limit_bytes: int) -> int:
    """Every how manieth step is recorded when a file has so many bytes already.

    Half of the limit is for all steps, a quarter for every second one, and so on: each part lasts as long as the one
    before. Strides are powers of two, so whatever an instance leaves out, those that leave out fewer have its steps.

    Returns:
        A power of two; 0 where nothing is recorded any more.
    """
    room = limit_bytes * _RESERVE
    stride = 1
    for _ in range(_MOST_HALVINGS):
        if written_bytes < room * (1 - 0.5 / stride):
            return stride
        stride *= 2
    return 0
