"""Putting tags in front of the lines of many writers that share one page. Pure."""

from __future__ import annotations


class Cursor:
    """The cursor of a terminal, or the end of a file: it knows who left the line unfinished on which it stands."""

    def __init__(self) -> None:
        self._owner = b""

    def tagged(self, tag: bytes, data: bytes, clock: bytes = b"") -> bytes:
        """What has to be written so that lines appear with the tag, and pieces of one writer join to a line.

        A line redrawn with carriage returns keeps its tag; the carriage return of a DOS line end is left alone.

        Args:
            tag: names the writer.
            data: whole lines, or lines and at last a piece of one; not empty.
            clock: what stands before the tag.
        """
        head = clock + tag
        start = head
        if self._owner:
            start = b"" if self._owner == tag else b"\n" + head
        is_whole = data.endswith(b"\n")
        if b"\r" in data:
            data = data.replace(b"\r", b"\r" + head).replace(b"\r" + head + b"\n", b"\r\n")
        if is_whole:
            data = data[:-1]
        self._owner = b"" if is_whole else tag
        return b"".join((start, data.replace(b"\n", b"\n" + head), b"\n" if is_whole else b""))

    def end_line(self) -> bytes:
        """What has to be written to finish a line that somebody has left unfinished."""
        line_end = b"\n" if self._owner else b""
        self._owner = b""
        return line_end
