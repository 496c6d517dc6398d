"""The page of `poprun top` drawn in place on a terminal, by Rich (the extra `top`)."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from poprun.monitor.picture import AWAITED, Picture, Screen, picture_of
from poprun.monitor.snapshot import ENDED, JOINING, LEAVING, LOST, STARTING, STOPPED, WAITING, Snapshot

_STYLES = {
    AWAITED: "bold magenta",
    LOST: "bold red",
    STOPPED: "bold red",
    WAITING: "yellow",
    STARTING: "cyan",
    JOINING: "cyan",
    LEAVING: "dim",
    ENDED: "dim",
}
_RIGHT = ("instance", "step", "steps/s", "samples/s", "for", "waited", "memory", "loss")


class RichScreen(Screen):
    """The terminal's alternate screen, at its current size; Rich obeys NO_COLOR."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    def show(self, snapshot: Snapshot, silent_s: float) -> None:
        """Draw the page anew, even without a new snapshot: the window may have another size."""
        self._live.start()
        width, height = self._console.size
        self._live.update(drawn(picture_of(snapshot, width, height, silent_s)), refresh=True)

    def close(self) -> None:
        """Return to the terminal's normal screen."""
        self._live.stop()


def drawn(picture: Picture) -> Group:
    """Return the page with colours; its texts are never parsed as Rich markup."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in picture.headings:
        table.add_column(heading, justify="right" if heading in _RIGHT else "left", no_wrap=True)
    for row in picture.rows:
        style = _STYLES.get(row.mark, "")
        table.add_row(*(Text(cell, style=style) for cell in row.cells))
    first, *others = picture.head
    foot = (Text(line, style="dim") for line in picture.foot)
    return Group(Text(first, style="bold"), *map(Text, others), table, *foot)
