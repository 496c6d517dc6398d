"""The difference between the clocks of two hosts, with bounds that hold for any network delay. Pure functions.

Two messages, one in each direction, bound the difference from both sides, because nothing arrives before it was sent.
The delays do not matter. Cristian ("Probabilistic clock synchronization", 1989) and NTP (RFC 5905) also use the middle
and half of the round trip. Between two exchanges the difference changes at most by the clocks' drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

DRIFT = 1e-3
"""Maximum relative drift of two clocks: Linux slews each clock by at most 5e-4 (adjtimex), and crystals are off by at
most 2e-4."""

Exchange = tuple[int, int, int, int]
"""Send time here, receive time there, answer time there, return time here; each in ns of the respective clock."""


@dataclass(frozen=True)
class Difference:
    """The lead of the other clock, in ns of this clock.

    Attributes:
        middle_ns: Estimates, float64.
        uncertainty_ns: Maximum errors of the estimates, float64.
    """

    middle_ns: np.ndarray
    uncertainty_ns: np.ndarray


@dataclass(frozen=True)
class Alignment:
    """The knowledge about another clock from exchanges.

    Attributes:
        when_ns: Times of this clock in the middle of each exchange, int64, increasing.
        lowest_ns: Lower bounds of the difference at these times, float64.
        highest_ns: Upper bounds of the difference at these times, float64.
    """

    when_ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    lowest_ns: np.ndarray = field(default_factory=lambda: np.zeros(0))
    highest_ns: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, exchanges: Sequence[Exchange] | np.ndarray) -> Alignment:
        """Combine exchanges; exchanges with times that run backwards are left out.

        Args:
            exchanges: Exchanges in any order.
        """
        table = np.asarray(exchanges, np.int64).reshape(-1, 4)
        table = table[(table[:, 3] >= table[:, 0]) & (table[:, 2] >= table[:, 1])]
        table = table[np.argsort(table[:, 0], kind="stable")]
        sent, received, answered, returned = table.T
        when = (sent + returned) // 2
        order = np.argsort(when, kind="stable")
        slack = DRIFT * ((returned - sent) / 2 + 1)  # the bounds hold at an unknown time between sending and return
        lowest = (answered - returned - slack)[order]
        highest = (received - sent + slack)[order]
        when = when[order]
        return cls(when, -_nearest(when, -lowest), _nearest(when, highest))

    @property
    def is_known(self) -> bool:
        """Whether there was any exchange."""
        return len(self.when_ns) > 0

    def at(self, times_ns: np.ndarray) -> Difference:
        """Return the difference at some times of this clock.

        Args:
            times_ns: Times in any order.

        Raises:
            ValueError: There was no exchange.
        """
        if not self.is_known:
            raise ValueError("the difference of the clocks is unknown: there was no exchange with the other clock")
        after = np.searchsorted(self.when_ns, times_ns)
        before = np.clip(after - 1, 0, None)
        after = np.clip(after, None, len(self.when_ns) - 1)
        drift_before = DRIFT * np.abs(times_ns - self.when_ns[before])
        drift_after = DRIFT * np.abs(times_ns - self.when_ns[after])
        highest = np.minimum(self.highest_ns[before] + drift_before, self.highest_ns[after] + drift_after)
        lowest = np.maximum(self.lowest_ns[before] - drift_before, self.lowest_ns[after] - drift_after)
        return Difference((lowest + highest) / 2, np.maximum(highest - lowest, 0) / 2)

    @property
    def drift(self) -> tuple[float, float]:
        """The average drift of the other clock and its uncertainty, as fractions."""
        if len(self.when_ns) < 2 or self.when_ns[-1] == self.when_ns[0]:
            return 0.0, DRIFT
        ends = self.at(self.when_ns[[0, -1]])
        lasted = float(self.when_ns[-1] - self.when_ns[0])
        rate = float(ends.middle_ns[1] - ends.middle_ns[0]) / lasted
        return rate, min(float(ends.uncertainty_ns.sum()) / lasted, DRIFT + abs(rate))


def _nearest(when_ns: np.ndarray, highest_ns: np.ndarray) -> np.ndarray:
    """Lower each upper bound to the least of all other bounds plus the largest drift between both times."""
    if not len(when_ns):
        return highest_ns
    drifted = DRIFT * (when_ns - when_ns[0])
    forward = np.minimum.accumulate(highest_ns - drifted) + drifted
    backward = np.minimum.accumulate((highest_ns + drifted)[::-1])[::-1] - drifted
    lowered: np.ndarray = np.minimum(forward, backward)
    return lowered
