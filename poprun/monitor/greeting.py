"""How poprun and those who look at its job from another host know each other: by the token of the job. Pure.

poprun sends a CHALLENGE; the viewer answers with random bytes of its own and a proof that it knows the token; poprun
proves that it knows it too (WELCOME), and from then on sends a SEEN each second. On one machine the kernel says who
calls: there is nothing but SEEN.
"""

from __future__ import annotations

import hmac

from poprun.ipc import wire

TOKEN_VARIABLE = "POPDIST_JOB_TOKEN"  # noqa: S105 - the name of a variable
"""That of the workers of TF_CONFIG, too; forwarded to other hosts by name."""

CHALLENGE = 96
"""poprun: random bytes; only over a network."""
ANSWER = 97
"""viewer: as many random bytes, and a proof; all that a viewer ever sends."""
WELCOME = 98
"""poprun: a proof."""
SEEN = 99
"""poprun: a snapshot."""
FULL = 100
"""poprun: it has as many viewers as it takes; the last message."""

RANDOM_BYTES = 16
_VIEWER, _POPRUN = b"viewer", b"poprun"


def answer_to(token: str, challenge: bytes, own: bytes) -> bytes:
    """The ANSWER of a viewer to a challenge."""
    return wire.pack(ANSWER, own + _prove(token, _VIEWER, challenge + own))


def welcome_to(token: str, challenge: bytes, answer: bytes) -> bytes | None:
    """The WELCOME for whoever has given an answer to a challenge; None: he does not know the token."""
    own, proof = answer[:RANDOM_BYTES], answer[RANDOM_BYTES:]
    if not hmac.compare_digest(proof, _prove(token, _VIEWER, challenge + own)):
        return None
    return wire.pack(WELCOME, _prove(token, _POPRUN, challenge + own))


def is_welcome(token: str, challenge: bytes, own: bytes, proof: bytes) -> bool:
    """Whether whoever has sent a challenge and, to our answer, such a WELCOME knows the token."""
    return hmac.compare_digest(proof, _prove(token, _POPRUN, challenge + own))


def _prove(token: str, who: bytes, random: bytes) -> bytes:
    return hmac.digest(token.encode(errors="surrogateescape"), who + random, "sha256")
