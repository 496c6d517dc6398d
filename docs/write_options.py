"""The tables of options in poprun.md, which follow from poprun/cli/launch_options.py.

python docs/write_options.py     after an option was added or changed
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from poprun.cli.help import options_table

DOCS = Path(__file__).parent
PAGE = DOCS / "how_to" / "launch" / "poprun.md"
_TABLE = re.compile(r"<!-- options: (.+) -->\n(?:\|.*\n)*")
_LINK = re.compile(r"\]\((\w+\.md)")


def with_tables(text: str) -> str:
    """Return the page with a table of its options under each mark."""
    return _TABLE.sub(lambda mark: f"<!-- options: {mark[1]} -->\n{_linked(options_table(mark[1]))}\n", text)


def _linked(table: str) -> str:
    """Return a table whose links, which name pages, lead to them from the page."""
    return _LINK.sub(lambda link: f"]({_path_of(link[1])}", table)


def _path_of(name: str) -> str:
    [page] = DOCS.rglob(name)
    return os.path.relpath(page, PAGE.parent)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
