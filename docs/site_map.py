"""The order of the site's pages, which follows from the lists of links on its index pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_LISTED = re.compile(r"^\* \[(?P<title>[^\]]+)\]\((?P<path>[\w/.-]+\.md)\): (?P<purpose>.+)$", re.MULTILINE)

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def listed(index: str) -> list[str]:
    """Return the paths in the list of an index page, relative to it and in order."""
    return [item["path"] for item in _LISTED.finditer(index)]


def groups(index: str) -> list[tuple[str, int]]:
    """Return the headings of an index page, each with the number of pages that are listed above it."""
    return [(heading[1], len(listed(index[: heading.start()]))) for heading in _HEADING.finditer(index)]


def llms_txt(docs: Path) -> str:
    """Return the site's map for language models, in the form of https://llmstxt.org.

    Args:
        docs: Folder of the pages; its index page has the title, the summary and the groups.
    """
    home = (docs / "index.md").read_text(encoding="utf-8")
    title, summary, *_ = home.split("\n\n")
    groups = [
        "\n".join([f"## {group['title']}", "", *_items(docs / group["path"], docs)]) for group in _LISTED.finditer(home)
    ]
    return "\n\n".join([title, f"> {' '.join(summary.split())}", *groups]) + "\n"


def _items(index: Path, docs: Path) -> Iterator[str]:
    for item in _LISTED.finditer(index.read_text(encoding="utf-8")):
        page = index.parent / item["path"]
        if page.name == "index.md":
            yield from _items(page, docs)
        else:
            yield f"- [{item['title']}]({page.relative_to(docs)}): {item['purpose']}"
