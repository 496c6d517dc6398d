"""The claim to be another worker: the process that says hello in its name has to listen at its address."""

from __future__ import annotations

import hashlib
import hmac

from collectives.network.hello import Refusal


def digest_incarnation(incarnation: str) -> str:
    """Return the digest of a peer's nonce, which is safe to show to unverified callers."""
    return hashlib.sha256(incarnation.encode()).hexdigest()[:32]


def taken(name: str, holder: str) -> Refusal:
    """Return the refusal of a process other than the one that holds a rank."""
    return Refusal(f"{name} is taken by another process{holder and ', '}{holder}; give each worker an index of its own")


class Claim:
    """The knowledge of one other worker; the holder guards it with a lock.

    Anybody may say hello in the name of a worker, but only who listens at its address can give the answer in whose
    place it is. The two are known to be one process by a number that it has drawn: the hello tells it, the answer shows
    its digest.

    Attributes:
        incarnation: the number of who has said hello; "" while nobody has.
        answered: the digest from the worker's address; "" while none has come.
        is_over: nobody can be this worker any more.
    """

    def __init__(self) -> None:
        self.incarnation = ""
        self.answered = ""
        self.is_over = False

    @property
    def is_settled(self) -> bool:
        """Whether who says hello and who listens are known to be one process."""
        return bool(self.incarnation) and digest_incarnation(self.incarnation) == self.answered

    def is_held_by(self, incarnation: str) -> bool:
        """Return whether this is the number of who has said hello."""
        return bool(self.incarnation) and hmac.compare_digest(self.incarnation.encode(), incarnation.encode())

    def greet(self, incarnation: str, name: str, holder: str = "") -> None:
        """Somebody says hello in the name of the worker, which is called `name` and was claimed by `holder`, if at all.

        Raises:
            Refusal: somebody else holds it. Where the address has not answered yet, that need not be final.
        """
        if self.is_held_by(incarnation):
            raise Refusal(f"{name} has said hello already", is_final=False)
        if self.is_over or self.is_settled or not incarnation:
            raise taken(name, holder)
        if self.incarnation:
            raise Refusal(f"{name} was claimed before, and has not answered at its address yet", is_final=False)
        if self.answered and digest_incarnation(incarnation) != self.answered:
            raise Refusal(f"{name} is the process that listens at its address, which is another one", is_final=False)
        self.incarnation = incarnation

    def answer(self, digest: str) -> bool:
        """Note the answer at the worker's address; return whether another process has said hello, and has to go."""
        self.answered = digest
        is_wrong = bool(self.incarnation) and not self.is_settled
        if is_wrong:
            self.incarnation = ""
        return is_wrong

    def hang_up(self) -> None:
        """Note that the process that answered at the address is gone."""
        self.answered = ""

    def leave(self, incarnation: str) -> None:
        """Note that the process that said hello with this number is gone."""
        if self.is_held_by(incarnation):
            self.incarnation = ""
