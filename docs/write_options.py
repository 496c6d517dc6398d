"""Writes the tables of options in poprun.md, which follow from poprun/cli/launch_options.py."""

from __future__ import annotations

import re
from pathlib import Path

from poprun.cli.help import options_table

PAGE = Path(__file__).parent / "how_to" / "launch" / "poprun.md"
_TABLE = re.compile(r"<!-- options: (.+) -->\n(?:\|.*\n)*")


def with_tables(text: str) -> str:
    """Return the page with a table of its options under each mark."""
    return _TABLE.sub(lambda mark: f"<!-- options: {mark[1]} -->\n{options_table(mark[1])}\n", text)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
