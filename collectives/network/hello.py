"""The hello of a worker at the beginning of every stream, and the reasons to refuse it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from collectives.calls import foreign
from collectives.network.identity import Runner

PROTOCOL = 2
_LARGEST = 1 << 32
_LONGEST = 100  # characters of a text
_LONGEST_LANE = 4096  # which names all members of its group
CONTROL = ""  # the lane of the stream that says no more than that its sender lives


@dataclass(frozen=True)
class Hello:
    """The sender of a stream.

    Attributes:
        protocol: the version of what follows.
        cluster: digest of the cluster as the sender sees it.
        source: its rank.
        to: the rank that it means to reach.
        incarnation: drawn at random by its process for the one that it means to reach, and told to nobody else.
        lane: what the stream carries: CONTROL or "group/channel/lane".
        heard: on a lane, what the receiver has drawn for the sender, and told only who listens at its address.
        program: what the sender runs, see `Runner`.
        user: who runs it.
        user_id: and the number of that user.
        process: its number.
        host: where it runs.
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

    @property
    def runner(self) -> Runner:
        """The runner that says it."""
        texts = [foreign(text) for text in (self.program, self.user, self.host)]
        return Runner(texts[0], texts[1], self.user_id, self.process, texts[2])

    def encode(self) -> str:
        """Return one line of text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def decode(cls, text: str) -> Hello:
        """Read what `encode` wrote.

        Raises:
            ValueError: for any other text.
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
    if any("\ud800" <= each <= "\udfff" for each in text):  # cannot be encoded
        raise ValueError(f"{name} has half a character")


@dataclass(frozen=True)
class Refusal(Exception):
    """The reason why a stream is not accepted.

    Attributes:
        reason: in words, for both sides.
        is_final: whether it is useless to ask again soon.
    """

    reason: str
    is_final: bool = True


def digest_cluster(addresses: Sequence[str], description: str) -> str:
    """Return the same for workers that were given the same addresses in the same order, and the same description."""
    return hashlib.sha256(json.dumps([list(addresses), description]).encode()).hexdigest()[:16]
