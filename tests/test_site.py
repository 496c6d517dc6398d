"""The documentation site: its order, its generated pages, and the length of its pages."""

from __future__ import annotations

import re

import pytest
import write_reference
from pages import DOCS, PAGES, ROOT, page_text

from poprun.cli.launch_options import OPTIONS

INDEX = ROOT / "docs" / "index.md"
LISTED = re.compile(r"^\* \[[^\]]+\]\(([\w/.-]+\.md)\): .+\.$", re.MULTILINE)
INDEXES = [page for page in DOCS if page.name == "index.md"]


def listed_on(index):
    """Return the pages in the list of an index page, in order."""
    return [(index.parent / path).resolve() for path in LISTED.findall(index.read_text(encoding="utf-8"))]


def test_every_page_is_listed_on_exactly_one_index_page():
    listed = [page for index in INDEXES for page in listed_on(index)]
    assert sorted(listed) == sorted(page for page in DOCS if page != INDEX)


@pytest.mark.parametrize("index", INDEXES, ids=lambda page: page.parent.name)
def test_every_list_item_of_an_index_page_names_a_page_and_its_purpose(index):
    items = re.findall(r"^[*-] .*$", index.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(items) == len(listed_on(index)) > 0


def test_every_page_begins_with_its_title():
    assert [page.name for page in DOCS if not page.read_text(encoding="utf-8").startswith("# ")] == []


def test_file_names_of_pages_are_unique():
    names = [page.name for page in PAGES if page.name not in ("index.md", "README.md")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("page", write_reference.pages(), ids=lambda page: page.name)
def test_generated_parts_of_a_page_match_the_code(page):
    assert write_reference.written(page) == page.read_text(encoding="utf-8"), "run python docs/write_reference.py"


def test_every_option_of_poprun_has_a_row():
    page = page_text("poprun_options.md")
    assert [option.name for option in OPTIONS if f"`--{option.name}` |" not in page] == []
