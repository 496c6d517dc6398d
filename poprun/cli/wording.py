"""How messages write numbers and names. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def count(number: int, noun: str) -> str:
    """A number and what is counted: `1 host`, `2 hosts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def list_ranges(numbers: Iterable[int], separator: str = ",") -> str:
    """Numbers in ascending order, as the kernel lists CPUs: `0-3,8`."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return separator.join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)


def cut_off(text: str, most: int = 300) -> str:
    """A text that somebody else has written, without its end where it is longer than a line of ours should be."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"


def name_nearest(written: str, known: Iterable[str]) -> str:
    """The known names that are nearest to an unknown one, as a question to append to a message; often empty."""
    import difflib  # costs some milliseconds, needed only on the way out

    nearest = difflib.get_close_matches(written.replace("_", "-"), list(known), n=3, cutoff=0.6)
    return f", did you mean {' or '.join(nearest)}?" if nearest else ""


def without_controls(text: str) -> str:
    """The text with all escaped that a terminal obeys; tabs, and bytes that are no UTF-8, stay."""
    if text.isprintable():
        return text
    return "".join(each if _is_harmless(each) else each.encode("unicode_escape").decode() for each in text)


def _is_harmless(character: str) -> bool:
    return character.isprintable() or character == "\t" or "\udc80" <= character <= "\udcff"


def share_text(share: float) -> str:
    """A share of something: `3 %`, `0.4 %`."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 0.95 or percent < 0.05 else f"{percent:.1f} %"


def number_text(number: float) -> str:
    """A number with three digits that count: `0.123`, `12.3`, `12345`."""
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}" if number >= 0.9995 else f"{number:.3g}"


def memory_text(nbytes: int) -> str:
    """An amount of memory: `812 MiB`, `1.5 GiB`."""
    mebibytes = nbytes / 2**20
    return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1023.5 else f"{mebibytes:.0f} MiB"


def duration_text(seconds: float) -> str:
    """A time: `0.3 s`, `59 s`, `2 min 5 s`, `3 h 20 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
