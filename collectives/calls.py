"""The description of one collective call, its fingerprint, and safe printing of text from other processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from operator import index

import numpy as np

MISMATCH = "Tensor layouts did not match on all instances"
CROSSING = "Named collectives wait for each other"
MOST = 300
"""Length at which text from an unverified process is cut."""
MOST_OF_PEERS = 2000
"""Length at which text from a verified worker of the job is cut."""
_KINDS = {
    "ordered_all_reduce": "all_reduce",
    "grouped_ordered_all_reduce": "all_reduce",
    "ordered_reduce_scatter": "reduce_scatter",
}
CLOSE = "close"
"""The last call of every rank, made when its program ends."""


@dataclass(frozen=True)
class Call:
    """One collective call; all ranks must make an equal one.

    Attributes:
        operation: Name of the operation: "all_reduce", "broadcast", ...
        name: Name of the tensor; "" if the caller gave none.
        op: "sum", "mean", "min" or "max"; "" if the operation reduces nothing.
        dtype: Name of the tensor's dtype.
        shape: Shape of the tensor.
        root: Sending rank of a broadcast or receiving rank of a gather; otherwise -1.
        into_shared: Whether the result goes into memory that the ranks allocated together.
        group: Member calls of a grouped call.
    """

    operation: str
    name: str = ""
    op: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    root: int = -1
    into_shared: bool = False
    group: tuple[Call, ...] = ()

    @cached_property
    def fingerprint(self) -> int:
        """The 64-bit hash of the call, the same in every process."""
        return int.from_bytes(blake2b(str(self).encode(), digest_size=8).digest(), "little")

    @cached_property
    def label(self) -> bytes:
        """The title as bytes, for progress records: `all_reduce 'gradients'`."""
        return self.title.encode()

    @cached_property
    def kind(self) -> str:
        """The operation without its variant: "all_reduce", "reduce_scatter", "gather", "broadcast", "barrier", ..."""
        return _KINDS.get(self.operation, self.operation)

    @cached_property
    def nbytes(self) -> int:
        """The size of each contribution in bytes; 0 if nothing moves."""
        own = math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.dtype else 0
        return own + sum(each.nbytes for each in self.group)

    @cached_property
    def title(self) -> str:
        """The operation and the tensor's name."""
        return f"{self.operation} {self.name!r}" if self.name else self.operation

    def __str__(self) -> str:
        facts = [self.op] if self.op else []
        if self.dtype:
            facts.append(f"{self.dtype}[{','.join(map(str, self.shape))}]")
        if self.root >= 0:
            facts.append(f"root {self.root}")
        if self.into_shared:
            facts.append("into shared memory")
        facts += map(str, self.group)
        return f"{self.title} ({', '.join(facts)})" if facts else self.title


def checked_root(name: str, root: int, size: int, members: str) -> int:
    """Return the root of a broadcast as an `int`.

    Args:
        name: Name of the argument, for messages.
        root: Value of the argument.
        size: Number of members.
        members: Word for the members in messages, e.g. "ranks".

    Raises:
        TypeError: `root` is not a whole number.
        ValueError: No member has this number.
    """
    try:
        number = int(index(root))
    except TypeError:
        raise TypeError(f"{name} is {root!r}, not a whole number; name one of the {members} 0 to {size - 1}") from None
    if not 0 <= number < size:
        raise ValueError(f"{name} is {number}, but the {members} are 0 to {size - 1}; name one of them")
    return number


def describe_mismatch(calls: Sequence[str]) -> str:
    """Return the text of a layout mismatch: each distinct call with the ranks that made it.

    Args:
        calls: Call of every rank, in rank order.
    """
    facts = _of_each_call(dict(enumerate(calls)), "called")
    way_out = "make the same calls in the same order on every rank"
    if ended := [rank for rank, call in enumerate(calls) if call == CLOSE]:
        way_out = f"see why {_rank_set(ended)} came to the end, or {way_out}"
    return f"{MISMATCH}: {facts}; {way_out}"


def describe_crossing(calls: Mapping[int, str]) -> str:
    """Return the text for named collectives that wait for each other.

    Args:
        calls: Awaited calls of each rank.
    """
    facts = _of_each_call(calls, "waits in", "wait in")
    return (
        f"{CROSSING}: {facts}; wait for names in the same order on every rank, or start them all before the first wait"
    )


def _of_each_call(calls: Mapping[int, str], verb: str, verb_of_many: str = "") -> str:
    """List each distinct call with the ranks that made it."""
    ranks: dict[str, list[int]] = {}
    for rank, call in calls.items():
        ranks.setdefault(call, []).append(rank)
    facts = []
    for call, members in ranks.items():
        said = verb_of_many if verb_of_many and len(members) > 1 else verb
        facts.append(f"{_rank_set(members)} {said} {foreign(call, MOST_OF_PEERS)}")
    return "; ".join(facts)


def _rank_set(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 3` or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def foreign(text: str, most: int = MOST) -> str:
    """Make foreign text safe for terminals and logs: escape unprintable characters, and cut it at `most` characters."""
    kept = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:most])
    return kept if len(text) <= most else f"{kept} ... ({len(text)} characters)"
