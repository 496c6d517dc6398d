"""Putting tags in front of the lines of many writers that share one page. Pure."""

from __future__ import annotations


class Cursor:
    """The cursor of a terminal, or the end of a file: it knows who left the line unfinished on which it stands."""

    def __init__(self) -> None:
        self._owner: object = None

    def tagged(self, tag: bytes, data: bytes, clock: bytes = b"", writer: object = None) -> bytes:
        """What has to be written so that lines appear with the tag, and pieces of one writer join to a line.

        A line redrawn with carriage returns keeps its tag; the carriage return of a DOS line end is left alone.

        Args:
            tag: stands in front of each line.
            data: whole lines, or lines and at last a piece of one; not empty.
            clock: what stands before the tag.
            writer: whose lines they are; None: the tag says so.
        """
        writer = tag if writer is None else writer
        head = clock + tag
        start = head
        if self._owner is not None:
            start = b"" if self._owner == writer else b"\n" + head
        is_whole = data.endswith(b"\n")
        if b"\r" in data:
            data = data.replace(b"\r", b"\r" + head).replace(b"\r" + head + b"\n", b"\r\n")
        if is_whole:
            data = data[:-1]
        self._owner = None if is_whole else writer
        return b"".join((start, data.replace(b"\n", b"\n" + head), b"\n" if is_whole else b""))

    @property
    def is_inside_line(self) -> bool:
        """Whether somebody has left the line unfinished."""
        return self._owner is not None

    def end_line(self) -> bytes:
        """What has to be written to finish a line that somebody has left unfinished."""
        line_end = b"" if self._owner is None else b"\n"
        self._owner = None
        return line_end
