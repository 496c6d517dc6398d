"""The difference between the clocks of two hosts, with bounds that hold whatever the network does. Pure.

Two messages that cross, one there and one back, bound the difference from both sides, because nothing arrives before
it was sent; how long each of them took does not matter (Cristian, "Probabilistic clock synchronization", 1989, and
NTP, RFC 5905, take the middle and half the round trip too). Between two exchanges the difference changes by no more
than clocks can drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

DRIFT = 1e-3
"""How much faster than another a clock runs at most: Linux slews each by 5e-4 at most (adjtimex), crystals are off by
2e-4 at most."""

Exchange = tuple[int, int, int, int]
"""Sent at this time here, received and answered at these there, returned at this here; in ns of each one's clock."""


@dataclass(frozen=True)
class Difference:
    """By how much the other clock is ahead, in ns of this one.

    Attributes:
        middle_ns: the estimates, float64.
        uncertainty_ns: the true ones differ from them by no more than that, float64.
    """

    middle_ns: np.ndarray
    uncertainty_ns: np.ndarray


@dataclass(frozen=True)
class Alignment:
    """The knowledge of another clock that exchanges give.

    Attributes:
        when_ns: times of this clock in the middle of an exchange, int64, increasing.
        lowest_ns: at those times the difference is this at least, float64.
        highest_ns: and this at most.
    """

    when_ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    lowest_ns: np.ndarray = field(default_factory=lambda: np.zeros(0))
    highest_ns: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, exchanges: Sequence[Exchange] | np.ndarray) -> Alignment:
        """Return what some exchanges say together; those that contradict clocks are left out.

        Args:
            exchanges: in any order.
        """
        table = np.asarray(exchanges, np.int64).reshape(-1, 4)
        table = table[(table[:, 3] >= table[:, 0]) & (table[:, 2] >= table[:, 1])]
        table = table[np.argsort(table[:, 0], kind="stable")]
        sent, received, answered, returned = table.T
        when = (sent + returned) // 2
        order = np.argsort(when, kind="stable")
        slack = DRIFT * ((returned - sent) / 2 + 1)  # the bounds hold somewhere between the two ends
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
            times_ns: in any order.

        Raises:
            ValueError: there was no exchange.
        """
        if not self.is_known:
            raise ValueError("nothing is known of the other clock")
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
        """The drift of the other clock on the average, and its uncertainty; in parts of one."""
        if len(self.when_ns) < 2 or self.when_ns[-1] == self.when_ns[0]:
            return 0.0, DRIFT
        ends = self.at(self.when_ns[[0, -1]])
        lasted = float(self.when_ns[-1] - self.when_ns[0])
        rate = float(ends.middle_ns[1] - ends.middle_ns[0]) / lasted
        return rate, min(float(ends.uncertainty_ns.sum()) / lasted, DRIFT + abs(rate))


def _nearest(when_ns: np.ndarray, highest_ns: np.ndarray) -> np.ndarray:
    """Return the bounds, each as low as any other one allows that drifts there."""
    if not len(when_ns):
        return highest_ns
    drifted = DRIFT * (when_ns - when_ns[0])
    forward = np.minimum.accumulate(highest_ns - drifted) + drifted
    backward = np.minimum.accumulate((highest_ns + drifted)[::-1])[::-1] - drifted
    lowered: np.ndarray = np.minimum(forward, backward)
    return lowered
