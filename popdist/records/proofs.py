"""Proofs that both ends of a connection know a token, which is never sent."""

from __future__ import annotations

import hmac

RANDOM_BYTES = 16
"""The number of random bytes that each side draws."""


def prove(token: str, who: bytes, random: bytes) -> bytes:
    """Return a proof of 32 bytes that its sender knows the token.

    Args:
        token: The secret of both sides.
        who: The sender's side, so that no side can send the other's proof back.
        random: The random bytes of both sides, so that no proof can be used again.
    """
    return hmac.digest(token.encode(errors="surrogateescape"), who + random, "sha256")
