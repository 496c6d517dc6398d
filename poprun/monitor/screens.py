"""Where `poprun top` shows what it sees: pages one after another, or one that is drawn again and again."""

from __future__ import annotations

from abc import ABC, abstractmethod

from poprun.cli.log import show
from poprun.monitor.picture import picture_of
from poprun.monitor.snapshot import Snapshot


class Screen(ABC):
    """Shows snapshots of a job as they come, between `open` and `close`."""

    @abstractmethod
    def open(self) -> None:
        """Begin."""

    @abstractmethod
    def show(self, snapshot: Snapshot, silent_s: float) -> None:
        """Show what poprun has said last, so long ago; called every second."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was; may be called at any time."""


class Pages(Screen):
    """Prints a page for each snapshot, as plain text, or as a line of JSON; nothing where there is no news.

    Args:
        is_json: whether it is JSON.
        is_one: whether there is only one page, and no line is needed between two.
        columns: of a page; None: as many as it takes.
    """

    def __init__(self, is_json: bool, is_one: bool, columns: int | None) -> None:
        self._is_json = is_json
        self._is_one = is_one
        self._columns = columns

    def open(self) -> None:
        """Do nothing."""

    def show(self, snapshot: Snapshot, silent_s: float) -> None:
        """Print it, unless it has been."""
        if silent_s:
            return
        if self._is_json:
            show(snapshot.pack().decode())
        else:
            show(picture_of(snapshot, self._columns).text() + ("" if self._is_one else "\n"))

    def close(self) -> None:
        """Do nothing."""
