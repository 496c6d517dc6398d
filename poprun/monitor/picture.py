"""The page of `poprun top`: its texts and its table, cut to a size, and the screens for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from poprun.cli.log import show
from poprun.cli.wording import (
    count,
    draw_rows,
    duration_text,
    list_instances,
    list_ranges,
    memory_text,
    number_text,
    share_text,
    without_controls,
)
from poprun.monitor.snapshot import ENDED, LOST, RESERVE, SPARE, STOPPED, WAITING, Seen, Snapshot

AWAITED = "awaited"
"""The mark of an instance for which others wait; the mark of any other instance is its condition."""

HEADINGS = (
    *("instance", "host", "replicas", "step", "steps/s", "samples/s", "does", "for", "waited", "waits for"),
    *("memory", "loss"),
)
_LEFT_OUT_FIRST = ("samples/s", "steps/s", "loss", "memory", "host", "for", "replicas", "waited", "waits for")
"""The columns to leave out if space is short, in this order. The waits are the purpose of the table, so they go last;
rates are also in the line above the table.
"""
_DOES = HEADINGS.index("does")
_USUAL_DOES, _LEAST_DOES = 18, 10
_GAP = 2
_STALE_S = 3.0
_LEAST_ROWS = 3
_NO_TROUBLE = 2
"""The rank of an instance without trouble; instances in trouble have lower ranks."""


@dataclass(frozen=True)
class PictureRow:
    """A row of the table: one instance.

    Attributes:
        cells: A text for each heading.
        mark: The condition of the instance, or `AWAITED`.
    """

    cells: tuple[str, ...]
    mark: str


@dataclass(frozen=True)
class Picture:
    """The contents of a page.

    Attributes:
        head: The lines above the table.
        headings: The headings of the columns.
        rows: One row for each instance that fits.
        foot: The lines below the table.
    """

    head: tuple[str, ...]
    headings: tuple[str, ...]
    rows: tuple[PictureRow, ...]
    foot: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the whole page, without a final newline."""
        table = draw_rows([self.headings, *(row.cells for row in self.rows)]) if self.rows else ""
        return "\n".join(line for line in (*self.head, table, *self.foot) if line)


def picture_of(
    snapshot: Snapshot, columns: int | None = None, lines: int | None = None, silent_s: float = 0
) -> Picture:
    """Lay out the page of a job.

    Args:
        snapshot: The last snapshot from poprun.
        columns: The width of the page; None for no limit.
        lines: The height of the page; None for no limit.
        silent_s: The age of the snapshot.
    """
    awaited = {instance for each in snapshot.instances for instance in each.waiting_for}
    head = _head(snapshot, awaited, silent_s)
    shown = _chosen(snapshot.instances, awaited, None if lines is None else lines - len(head) - 2)
    rows = [PictureRow(_cells(each), AWAITED if each.instance in awaited else each.condition) for each in shown]
    hidden = () if any(each.replicas for each in snapshot.instances) else ("replicas",)
    headings, rows = _narrowed(rows, columns, len({each.host for each in snapshot.instances}) < 2, hidden)
    left_out = [each for each in snapshot.instances if each not in shown]
    trouble = "some" if any(_trouble(each, awaited) < _NO_TROUBLE for each in left_out) else "none"
    foot = [f"{count(len(left_out), 'more instance')}, {trouble} in trouble; a taller window, or --plain, shows all"]
    cut = [without_controls(line)[:columns] for line in (*head, *(foot if left_out else ()))]
    return Picture(tuple(cut[: len(head)]), headings, tuple(rows), tuple(cut[len(head) :]))


def _head(snapshot: Snapshot, awaited: set[int], silent_s: float) -> list[str]:
    lines = [f"poprun {snapshot.pid} on {snapshot.host}: {' '.join(snapshot.program)}"]
    spares = sum(each.condition == SPARE for each in snapshot.instances)
    carriers = sum(bool(each.replicas) for each in snapshot.instances)
    reserves = sum(each.condition == RESERVE for each in snapshot.instances)
    beside = [count(number, what) for number, what in ((spares, "spare"), (reserves, "reserve")) if number]
    training = carriers or len(snapshot.instances) - spares - reserves
    parts = [count(training, "instance"), *beside, f"runs for {duration_text(snapshot.age_s)}"]
    steps = [each.steps_per_s for each in snapshot.instances if each.steps_per_s is not None]
    if steps:
        parts.append(f"{number_text(max(steps))} steps/s")
    if snapshot.samples_per_s:
        parts.append(f"{number_text(snapshot.samples_per_s)} samples/s")
    if snapshot.attempt:
        parts.append(f"restart {snapshot.attempt}")
    if snapshot.losses:
        replaced = f", {snapshot.replaced} replaced" if snapshot.replaced else ""
        parts.append(f"{count(snapshot.losses, 'instance')} lost{replaced}")
    lines.append(", ".join(parts))
    if not snapshot.instances:
        lines.append("no instance runs: the job is about to be started again")
    if awaited:
        waiting = [each.instance for each in snapshot.instances if each.waiting_for]
        wait = "waits" if len(waiting) == 1 else "wait"
        lines.append(f"{list_instances(waiting, ',')} {wait} for {list_instances(awaited, ',')}")
    if silent_s >= _STALE_S:
        lines.append(f"poprun has said nothing for {duration_text(silent_s)}")
    return lines


def _chosen(instances: Sequence[Seen], awaited: set[int], most: int | None) -> list[Seen]:
    """Return the instances that fit, in their order; if not all fit, prefer awaited and failed ones."""
    if most is None or len(instances) <= most:
        return list(instances)
    most = max(most, _LEAST_ROWS)
    by_trouble = sorted(instances, key=lambda each: _trouble(each, awaited))
    return sorted(by_trouble[:most], key=lambda each: each.instance)


def _trouble(each: Seen, awaited: set[int]) -> int:
    if each.instance in awaited:
        return 0
    ranks = {LOST: 1, STOPPED: 1, WAITING: 3, ENDED: 4, SPARE: 5, RESERVE: 6}
    return ranks.get(each.condition, _NO_TROUBLE)


def _cells(each: Seen) -> tuple[str, ...]:
    texts = (
        str(each.instance),
        each.host or "-",
        list_ranges(range(each.replicas[0], each.replicas[-1] + 1)) if each.replicas else "-",
        "-" if each.step is None else str(each.step),
        "-" if each.steps_per_s is None else number_text(each.steps_per_s),
        "-" if each.samples_per_s is None else number_text(each.samples_per_s),
        each.doing or each.condition,
        "-" if each.for_s is None else duration_text(each.for_s),
        "-" if each.waiting_share is None else share_text(each.waiting_share),
        list_ranges(each.waiting_for) or "-",
        memory_text(each.memory_bytes) if each.memory_bytes else "-",
        "-" if each.loss is None else f"{each.loss:.4g}",
    )
    return tuple(map(without_controls, texts))


def _narrowed(
    rows: list[PictureRow], columns: int | None, same_host: bool, hidden: Sequence[str]
) -> tuple[tuple[str, ...], list[PictureRow]]:
    """Leave out hidden columns and those that do not fit, and cut the texts about activities.

    Returns:
        The headings and the rows.
    """
    kept = [number for number, name in enumerate(HEADINGS) if name not in hidden]
    if columns is None:
        return tuple(HEADINGS[number] for number in kept), [_with_cells(row, kept) for row in rows]
    widths = [max(map(len, cells)) for cells in zip(HEADINGS, *(row.cells for row in rows), strict=True)]
    order = [name for name in _LEFT_OUT_FIRST if name not in hidden]
    order.sort(key=lambda name: not (same_host and name == "host"))
    for name in order:
        if _total(widths, kept) - widths[_DOES] + min(widths[_DOES], _USUAL_DOES) <= columns:
            break
        kept.remove(HEADINGS.index(name))
    room = max(columns - (_total(widths, kept) - widths[_DOES]), _LEAST_DOES)
    return (
        tuple(HEADINGS[number] for number in kept),
        [_with_cells(row, kept, room) for row in rows],
    )


def _with_cells(row: PictureRow, kept: Sequence[int], room: int | None = None) -> PictureRow:
    return PictureRow(tuple(_cut(row.cells[n], room if n == _DOES else None) for n in kept), row.mark)


def _total(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[number] for number in kept) + _GAP * (len(kept) - 1)


def _cut(text: str, room: int | None) -> str:
    return text if room is None or len(text) <= room else f"{text[: room - 1]}…"


class Screen(ABC):
    """A display of the snapshots of a job."""

    @abstractmethod
    def show(self, snapshot: Snapshot, silent_s: float) -> None:
        """Show the last snapshot, which came `silent_s` ago; called for each snapshot, and again while none comes."""

    @abstractmethod
    def close(self) -> None:
        """Restore the terminal; may be called at any time."""


class Pages(Screen):
    """A printer of one page for each snapshot, as plain text or as a line of JSON.

    Args:
        is_json: Whether to print JSON.
        is_one: Whether only one page is printed, so that no empty line follows it.
        columns: The width of a page; None for no limit.
    """

    def __init__(self, is_json: bool, is_one: bool, columns: int | None) -> None:
        self._is_json = is_json
        self._is_one = is_one
        self._columns = columns

    def show(self, snapshot: Snapshot, silent_s: float) -> None:
        """Print the snapshot, unless it was printed before."""
        if silent_s:
            return
        if self._is_json:
            show(snapshot.pack().decode())
        else:
            show(picture_of(snapshot, self._columns).text() + ("" if self._is_one else "\n"))

    def close(self) -> None:
        """Do nothing: the terminal was not changed."""
