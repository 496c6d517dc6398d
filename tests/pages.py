"""The pages of the documentation, found by their names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]


def page_named(name: str) -> Path:
    """Return the page with a file name such as "torch.md", which must be unique."""
    [page] = [page for page in PAGES if page.name == name]
    return page


def page_text(name: str) -> str:
    """Return the text of the page with a file name."""
    return page_named(name).read_text(encoding="utf-8")


def page_programs(name: str) -> list[str]:
    """Return the blocks of Python code on the page with a file name."""
    return blocks_in(page_text(name), "python")


def blocks_in(text: str, language: str) -> list[str]:
    """Return the blocks of a language in a text in Markdown."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
