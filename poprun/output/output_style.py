"""The appearance of output: tags in front of lines, clock and colours. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poprun.cli.log import clock_text
from poprun.cli.settings import LaunchSettings

STREAMS = {1: "stdout", 2: "stderr"}
_PALETTE = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)  # cyan, green, yellow, magenta, blue; the same, bright
_RED = 31


@dataclass(frozen=True)
class OutputStyle:
    """The appearance of output that the user wants.

    Attributes:
        tag_host: Whether tags name the host: `[1,0][node0]<stdout>:`, as mpirun's tag-detailed does.
        timestamps: Whether each line begins with the local time at which poprun received it.
        colours: Whether tags are coloured. None: only on a terminal.
        directory: The folder of files that also keep the output. None: no files.
        hosts: The host of each instance; `tag_host` and `directory` need it.
        untagged: The streams (1, 2) whose lines are shown without tags.
        is_plain: Whether standard output carries one instance's bytes unchanged.
    """

    tag_host: bool = False
    timestamps: bool = False
    colours: bool | None = None
    directory: Path | None = None
    hosts: tuple[str, ...] = ()
    untagged: frozenset[int] = frozenset()
    is_plain: bool = False

    def is_coloured(self, is_terminal: bool) -> bool:
        """Return whether tags are coloured on a stream, from whether it is a terminal."""
        return is_terminal if self.colours is None else self.colours

    def tag(self, instance: int, descriptor: int, coloured: bool = False) -> bytes:
        """Return the tag in front of a line, as mpirun's --tag-output prints it, with the job number 1."""
        source = f"[1,{instance}]" + (f"[{self.hosts[instance]}]" if self.tag_host else "")
        stream = f"<{STREAMS[descriptor]}>:"
        if coloured:
            colour = _PALETTE[instance % len(_PALETTE)]
            middle = f"\x1b[{_RED}m" if descriptor == 2 else ""
            return f"\x1b[0;{colour}m{source}{middle}{stream}\x1b[0m".encode()
        return f"{source}{stream}".encode()

    def clock(self, now_s: float) -> bytes:
        """Return the time in front of the tag; empty without timestamps. `now_s` is in seconds since 1970."""
        return f"{clock_text(now_s)} ".encode() if self.timestamps else b""

    @property
    def columns(self) -> int:
        """The largest width of tag and clock together."""
        tags = (self.tag(instance, 2) for instance in range(len(self.hosts)) if 2 not in self.untagged)
        return len(self.clock(0.0)) + max((len(tag.decode()) for tag in tags), default=0)


def style_from(
    settings: LaunchSettings, hosts: Sequence[str], environ: Mapping[str, str], is_piped: bool = False
) -> OutputStyle:
    """Return the style that options ask for; NO_COLOR (https://no-color.org) and a dumb terminal forbid colours.

    Args:
        settings: The settings of the launch.
        hosts: The host of each instance.
        environ: Environment variables of poprun.
        is_piped: Whether standard output is a pipe of its own; then a program may read one instance's bytes there.
    """
    is_plain = is_piped and settings.num_instances == 1 and not settings.tag_host and not settings.timestamps
    untagged = {1, 2} if settings.no_tags else {1} if is_plain else set()
    return OutputStyle(
        tag_host=settings.tag_host,
        timestamps=settings.timestamps,
        colours=False if environ.get("NO_COLOR") or environ.get("TERM") == "dumb" else None,
        directory=None if settings.output_dir is None else Path(settings.output_dir),
        hosts=tuple(hosts),
        untagged=frozenset(untagged),
        is_plain=is_plain,
    )


class Cursor:
    """The cursor of a terminal, or the end of a file; it knows the writer of an unfinished line."""

    def __init__(self) -> None:
        self._owner: object = None

    def tagged(self, tag: bytes, data: bytes, clock: bytes = b"", writer: object = None) -> bytes:
        """Return lines with the tag in front of each; consecutive pieces of one writer join to a line.

        A line redrawn with carriage returns keeps its tag; the carriage return of a DOS line end is left alone.

        Args:
            tag: The tag.
            data: Whole lines, perhaps followed by a piece of a line; not empty.
            clock: The text in front of the tag.
            writer: The writer of the lines. None: the tag identifies the writer.
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
        """Whether a writer has left the line unfinished."""
        return self._owner is not None

    def end_line(self) -> bytes:
        """Return the line end that an unfinished line lacks; empty if the line is finished."""
        line_end = b"" if self._owner is None else b"\n"
        self._owner = None
        return line_end
