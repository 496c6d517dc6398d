"""The hello that begins every stream of a worker, and the reasons to refuse it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from collectives.calls import foreign
from collectives.network.identity import Runner

PROTOCOL = 4
_LARGEST = 1 << 32
_LONGEST = 100  # maximum length of a text
_LONGEST_LANE = 4096  # maximum length of a lane, which names all members of its group
CONTROL = ""  # the lane of the control stream, which only carries beats


@dataclass(frozen=True)
class Hello:
    """The sender of a stream.

    Attributes:
        protocol: Version of the protocol.
        cluster: Digest of the cluster as the sender sees it.
        source: Rank of the sender.
        to: Rank that the sender wants to reach.
        incarnation: Random nonce of the sender's process, sent only to this receiver.
        lane: Content of the stream: CONTROL or "group/channel/lane".
        heard: On a lane, the receiver's nonce for the sender, which only the process at the sender's address has heard.
        program: Program of the sender, as in `Runner`.
        user: Name of the sender's user.
        user_id: Number of that user.
        process: Process id of the sender.
        host: Host of the sender.
        epoch: Number of the membership to which a lane belongs, see `collectives.network.survivors`.
    """

    protocol: int
    cluster: str
    source: int
    to: int
    incarnation: str
    lane: str = CONTROL
    heard: str = ""
    program: str = ""
    user: str = ""
    user_id: int = 0
    process: int = 0
    host: str = ""
    epoch: int = 0

    @property
    def runner(self) -> Runner:
        """The sender's process, with its texts made safe to print."""
        texts = [foreign(text) for text in (self.program, self.user, self.host)]
        return Runner(texts[0], texts[1], self.user_id, self.process, texts[2])

    def encode(self) -> str:
        """Encode the hello as one line of text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def decode(cls, text: str) -> Hello:
        """Decode the text of `encode`.

        Raises:
            ValueError: The text is not a hello.
        """
        try:
            values = json.loads(text)
            hello = cls(**values)
        except (TypeError, RecursionError) as error:
            raise ValueError(foreign(repr(str(error)))) from error
        for entry in fields(cls):
            expected = int if entry.type == "int" else str
            if type(getattr(hello, entry.name)) is not expected:
                raise ValueError(f"{entry.name} is not of type {expected.__name__}")
            if expected is int and abs(getattr(hello, entry.name)) > _LARGEST:
                raise ValueError(f"{entry.name} is too large a number")
            if expected is str:
                _check_text(entry.name, getattr(hello, entry.name))
        return hello


def _check_text(name: str, text: str) -> None:
    longest = _LONGEST_LANE if name == "lane" else _LONGEST
    if len(text) > longest:
        raise ValueError(f"{name} has {len(text)} characters, and {longest} at most are allowed")
    if any("\ud800" <= each <= "\udfff" for each in text):  # surrogates cannot be encoded
        raise ValueError(f"{name} has an unpaired surrogate")


@dataclass(frozen=True)
class Refusal(Exception):
    """The reason why a stream is refused.

    Attributes:
        reason: Reason in words, for both sides.
        is_final: Whether asking again soon is useless.
        is_usual: Whether it belongs to a change of the members, so that no user needs to know.
    """

    reason: str
    is_final: bool = True
    is_usual: bool = False


def digest_cluster(addresses: Sequence[str], description: str) -> str:
    """Return a digest that is equal for workers with equal addresses, in equal order, and equal descriptions."""
    return hashlib.sha256(json.dumps([list(addresses), description]).encode()).hexdigest()[:16]
