"""What a sink of metrics is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from strategies.sinks.row import Row


class Sink(ABC):
    """A file or a service that takes rows.

    `open`, then `write` any number of times, then `close`; all in one thread, but the first `open`. What one of them
    raises never reaches the training: the sink is closed, and later opened again for the rows that it has not got.

    Attributes:
        name: of it, for messages.
        way_out: what its user can do where it fails, in words.
    """

    name: str
    way_out = "correct what keeps it from that"

    @abstractmethod
    def open(self, goes_on: bool) -> None:
        """Prepare to write; may be called again after `close`.

        Args:
            goes_on: whether it has got rows of this job before, from this instance or from one that is lost.
        """

    @abstractmethod
    def write(self, rows: Sequence[Row]) -> None:
        """Write all of them, in this order; nothing of it may be left in this process when it returns."""

    @abstractmethod
    def close(self) -> None:
        """End; after an error, too."""
