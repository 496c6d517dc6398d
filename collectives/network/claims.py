"""The claim to be a certain worker; the claiming process must also listen at that worker's address."""

from __future__ import annotations

import hashlib
import hmac

from collectives.network.hello import Refusal


def digest_incarnation(incarnation: str) -> str:
    """Return the digest of a peer's nonce, which is safe to show to unverified callers."""
    return hashlib.sha256(incarnation.encode()).hexdigest()[:32]


def taken(name: str, holder: str) -> Refusal:
    """Return the refusal of a process whose rank is held by another process."""
    return Refusal(f"{name} is taken by another process{holder and ', '}{holder}; give each worker an index of its own")


class Claim:
    """The knowledge about one other worker; the owner guards it with a lock.

    Any process can say hello in the name of a worker, but only the process at the worker's address can answer there. A
    nonce (called incarnation) shows that both are one process: the hello carries the nonce, the answer its digest.

    Attributes:
        incarnation: Nonce of the process that has said hello; "" before any hello.
        answered: Digest from the worker's address; "" before any answer.
        is_over: Whether no process can be this worker any more.
    """

    def __init__(self) -> None:
        self.incarnation = ""
        self.answered = ""
        self.is_over = False

    @property
    def is_settled(self) -> bool:
        """Whether the process that says hello is known to listen at the address as well."""
        return bool(self.incarnation) and digest_incarnation(self.incarnation) == self.answered

    def is_held_by(self, incarnation: str) -> bool:
        """Return whether this is the nonce of the process that has said hello."""
        return bool(self.incarnation) and hmac.compare_digest(self.incarnation.encode(), incarnation.encode())

    def greet(self, incarnation: str, name: str, holder: str = "") -> None:
        """Accept a hello in the name of the worker.

        Args:
            incarnation: Nonce of the process that says hello.
            name: Name of the worker in messages.
            holder: Process that holds the claim, in messages; "" if unknown.

        Raises:
            Refusal: Another process holds the claim. Not final while the worker's address has not answered.
        """
        if self.is_held_by(incarnation):
            raise Refusal(f"{name} has said hello already", is_final=False)
        if self.is_over or self.is_settled or not incarnation:
            raise taken(name, holder)
        if self.incarnation:
            raise Refusal(f"{name} was claimed before, but its address has not answered yet", is_final=False)
        if self.answered and digest_incarnation(incarnation) != self.answered:
            raise Refusal(f"{name} is another process, the one that listens at its address", is_final=False)
        self.incarnation = incarnation

    def answer(self, digest: str) -> bool:
        """Note the answer from the worker's address; return whether a different process has said hello and must go."""
        self.answered = digest
        is_wrong = bool(self.incarnation) and not self.is_settled
        if is_wrong:
            self.incarnation = ""
        return is_wrong

    def hang_up(self) -> None:
        """Note the end of the process at the address."""
        self.answered = ""

    def leave(self, incarnation: str) -> None:
        """Note the end of the process with this nonce."""
        if self.is_held_by(incarnation):
            self.incarnation = ""
