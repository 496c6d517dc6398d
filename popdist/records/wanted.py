"""The active instances that poprun wants: one word of the progress page, written by poprun through the agents.

poprun writes a wish twice. First every page gets it, and no instance acts on it. When all pages have it, every page
gets it as complete. So at each membership change the processes agree which of them are barred, also if an instance is
lost while the wish is under way.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_INSTANCES = (1 << 16) - 1
"""The largest number of active instances in a wish."""
MOST_NUMBER = (1 << 14) - 1
"""The largest number of a wish."""
_BARRED, _COMPLETE, _NUMBER_SHIFT = 1 << 16, 1 << 17, 18
_LOW = (1 << 32) - 1


@dataclass(frozen=True)
class Wanted:
    """A wish of poprun about the active instances, as one process of the job gets it.

    Attributes:
        number: Number of the wish, from 1; a new wish has another number than the one before. 0: no wish.
        count: Number of active instances.
        is_barred: Whether this process must not be active, for example because its host is to be left.
        is_complete: Whether every process of the job has the wish; before that, no instance acts on it.
    """

    number: int = 0
    count: int = 0
    is_barred: bool = False
    is_complete: bool = False

    def pack(self) -> int:
        """Return the wish as a number of 32 bits, for a message to the agent."""
        flags = _BARRED * self.is_barred | _COMPLETE * self.is_complete
        return self.number << _NUMBER_SHIFT | flags | self.count

    @classmethod
    def unpack(cls, packed: int) -> Wanted:
        """Return the wish in the number of `pack`."""
        return cls(packed >> _NUMBER_SHIFT, packed & MOST_INSTANCES, bool(packed & _BARRED), bool(packed & _COMPLETE))


def number_after(number: int) -> int:
    """Return the number of the wish after the wish with this number; after the largest number comes 1 again."""
    return number % MOST_NUMBER + 1


def unpack_wanted(word: int) -> Wanted:
    """Return the wish in a word of the page; no wish if the word is damaged.

    The upper half of the word is the complement of the lower half. A word that was read while the agent wrote it, or
    that the program has overwritten, does not fit.
    """
    low = word & _LOW
    return Wanted.unpack(low) if word >> 32 == low ^ _LOW else Wanted()
