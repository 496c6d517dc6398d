"""Texts and tables that fit the page on which they are read. Pure but for `columns_of`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

USUAL_COLUMNS = 80
_LEAST_COLUMNS = 20
_GAP = 2


def columns_of(environ: Mapping[str, str], descriptor: int = 1) -> int | None:
    """How wide the page is: what COLUMNS says, else the terminal; None where it is a pipe or a file."""
    text = environ.get("COLUMNS", "")
    if text.isascii() and text.isdecimal() and len(text) < 6 and int(text):
        return max(int(text), _LEAST_COLUMNS)
    try:
        columns = os.get_terminal_size(descriptor).columns
    except OSError:
        return None
    return max(columns, _LEAST_COLUMNS) if columns else USUAL_COLUMNS


def wrap(text: str, columns: int, indent: int = 0) -> str:
    """The text in lines of at most so many columns; a longer word has a line of its own."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= columns:
            lines[-1] += f" {word}"
        else:
            lines.append(" " * indent + word)
    return "\n".join(lines)


def draw_rows(rows: Sequence[Sequence[str]], columns: int | None = None) -> str:
    """Rows with aligned columns, without a final newline.

    Where they do not fit, the texts in the widest columns are broken.

    Args:
        rows: of equally many cells each.
        columns: of the page; None: as many as it takes.
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
    """Narrower columns, the widest first, for a page of so many."""
    too_many = 0 if columns is None else sum(widths) + _GAP * (len(widths) - 1) - columns
    while too_many > 0 and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
        too_many -= 1
    return widths


def _break(text: str, width: int) -> list[str]:
    """The text in pieces of this width: between words, behind a comma, or anywhere."""
    pieces: list[str] = []
    while len(text) > width:
        end = text.rfind(" ", 0, width + 1)
        if end <= 0:
            end = text.rfind(",", 0, width) + 1 or width
        pieces.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*pieces, text]
