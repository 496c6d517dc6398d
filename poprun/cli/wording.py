"""The text forms of numbers, names and tables, and the width of the page. Pure but for `columns_of`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence

USUAL_COLUMNS = 80
_LEAST_COLUMNS = 20
_GAP = 2


def count(number: int, noun: str) -> str:
    """Write a number with its noun: `1 host`, `2 hosts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size_text(instances: int, spares: int) -> str:
    """Write the size of a job: `1 instance`, `4 instances and 2 spares`."""
    return count(instances, "instance") + (f" and {count(spares, 'spare')}" if spares else "")


def list_ranges(numbers: Iterable[int], separator: str = ",") -> str:
    """Write numbers in ascending order, as the kernel lists CPUs: `0-3,8`."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return separator.join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)


def list_instances(indices: Collection[int], separator: str = ", ") -> str:
    """Write the instances as text: `instance 3` or `instances 0-2, 5`."""
    return f"{'instance' if len(indices) == 1 else 'instances'} {list_ranges(indices, separator)}"


def cut_off(text: str, most: int = 300) -> str:
    """Shorten a text of unknown origin to about one line."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"


def name_nearest(written: str, known: Iterable[str]) -> str:
    """Return the known name nearest to an unknown one, as a question to append to a message; often empty."""
    import difflib  # takes some milliseconds to load, and only errors need it

    nearest = difflib.get_close_matches(written.replace("_", "-"), list(known), n=1, cutoff=0.6)
    return f", did you mean {nearest[0]}?" if nearest else ""


def without_controls(text: str) -> str:
    """Escape the control characters in a text; tabs, and bytes that are not UTF-8, stay unchanged."""
    if text.isprintable():
        return text
    return "".join(each if _is_harmless(each) else each.encode("unicode_escape").decode() for each in text)


def _is_harmless(character: str) -> bool:
    return character.isprintable() or character == "\t" or "\udc80" <= character <= "\udcff"


def share_text(share: float) -> str:
    """Write a share as a percentage: `3 %`, `0.4 %`."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 0.95 or percent < 0.05 else f"{percent:.1f} %"


def number_text(number: float) -> str:
    """Write a number with three significant digits: `0.123`, `12.3`, `12345`."""
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}" if number >= 0.9995 else f"{number:.3g}"


def memory_text(nbytes: int) -> str:
    """Write an amount of memory: `812 MiB`, `1.5 GiB`."""
    mebibytes = nbytes / 2**20
    return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1023.5 else f"{mebibytes:.0f} MiB"


def duration_text(seconds: float) -> str:
    """Write a duration: `0.3 s`, `59 s`, `2 min 5 s`, `3 h 20 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def time_text(seconds: float) -> str:
    """Write a time of a step or an event with a fitting unit: `1.5 ms`, `20 us`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.0f} us"


def columns_of(environ: Mapping[str, str], descriptor: int = 1) -> int | None:
    """Return the width of the page: the variable COLUMNS, else the terminal's; None for a pipe or a file."""
    text = environ.get("COLUMNS", "")
    if text.isascii() and text.isdecimal() and len(text) < 6 and int(text):
        return max(int(text), _LEAST_COLUMNS)
    try:
        columns = os.get_terminal_size(descriptor).columns
    except OSError:
        return None
    return max(columns, _LEAST_COLUMNS) if columns else USUAL_COLUMNS


def wrap(text: str, columns: int, indent: int = 0) -> str:
    """Break a text into lines of at most `columns` characters; a longer word gets a line of its own."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= columns:
            lines[-1] += f" {word}"
        else:
            lines.append(" " * indent + word)
    return "\n".join(lines)


def draw_rows(rows: Sequence[Sequence[str]], columns: int | None = None) -> str:
    """Return rows with aligned columns, without a final newline.

    If the rows do not fit the page, the texts in the widest columns are broken.

    Args:
        rows: The cells of each row; all rows have the same number.
        columns: The width of the page. None: no limit.
    """
    widths = _fit([max(map(len, cells)) for cells in zip(*rows, strict=True)], columns)
    lines: list[str] = []
    for row in rows:
        cells = [_break(cell, width) for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            pieces = [cell[number] if number < len(cell) else "" for cell in cells]
            lines.append((" " * _GAP).join(map(str.ljust, pieces, widths)).rstrip())
    return "\n".join(lines)


def _fit(widths: list[int], columns: int | None) -> list[int]:
    """Narrow the columns, the widest first, until they fit the page."""
    too_many = 0 if columns is None else sum(widths) + _GAP * (len(widths) - 1) - columns
    while too_many > 0 and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
        too_many -= 1
    return widths


def _break(text: str, width: int) -> list[str]:
    """Split a text into pieces of at most `width` characters: between words, after a comma, or anywhere."""
    pieces: list[str] = []
    while len(text) > width:
        end = text.rfind(" ", 0, width + 1)
        if end <= 0:
            end = text.rfind(",", 0, width) + 1 or width
        pieces.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*pieces, text]
