"""The documentation site: its order, its generated pages, and the length of its pages."""

from __future__ import annotations

import importlib
import re
from itertools import pairwise
from types import ModuleType

import pytest
import write_reference
from docstrings import restructured
from pages import DOCS, PAGES, ROOT, blocks_in, page_named, page_programs, page_text
from site_map import groups, llms_txt

from poprun.cli.launch_options import OPTIONS
from poprun.hosts.remote import FORWARDED_FAMILIES, FORWARDED_NAMES

INDEX = ROOT / "docs" / "index.md"
LISTED = re.compile(r"^\* \[[^\]]+\]\(([\w/.-]+\.md)\): .+\.$", re.MULTILINE)
INDEXES = [page for page in DOCS if page.name == "index.md"]


def listed_on(index):
    """Return the pages in the list of an index page, in order."""
    return [(index.parent / path).resolve() for path in LISTED.findall(index.read_text(encoding="utf-8"))]


def test_the_map_for_language_models_lists_every_page_with_its_purpose():
    title, summary, *lines = llms_txt(INDEX.parent).split("\n\n")
    assert title.startswith("# ")
    assert summary.startswith("> ")
    named = re.findall(r"^- \[.+\]\((.+)\): .+\.$", "\n".join(lines), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(INDEX.parent)) for page in DOCS if page not in INDEXES)


def test_every_page_is_listed_on_exactly_one_index_page():
    listed = [page for index in INDEXES for page in listed_on(index)]
    assert sorted(listed) == sorted(page for page in DOCS if page != INDEX)


@pytest.mark.parametrize("index", INDEXES, ids=lambda page: page.parent.name)
def test_every_list_item_of_an_index_page_names_a_page_and_its_purpose(index):
    items = re.findall(r"^[*-] .*$", index.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(items) == len(listed_on(index)) > 0


@pytest.mark.parametrize("index", INDEXES, ids=lambda page: page.parent.name)
def test_long_lists_of_an_index_page_have_headings(index):
    """Readers of the navigation guess a group before a page."""
    pages, found = len(listed_on(index)), groups(index.read_text(encoding="utf-8"))
    assert found or pages <= 10 or index.parent.name == "api"
    if index != INDEX and found:
        firsts = [first for _, first in found]
        assert firsts[0] == 0
        assert max(after - before for before, after in pairwise([*firsts, pages])) <= 10
        assert len(set(firsts) - {pages}) == len(firsts), "a heading has no pages"


def test_the_start_page_shows_a_program_of_readme():
    assert blocks_in(INDEX.read_text(encoding="utf-8"), "python") == page_programs("README.md")[1:]


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


API = {page: re.findall(r"^.. automodule:: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE) for page in DOCS}


@pytest.mark.parametrize("package", ["collectives", "popdist", "strategies"])
def test_every_public_module_has_a_page_of_the_python_api(package):
    """An exported module has one, too; the site build fails if a page names a missing module."""
    module = importlib.import_module(package)
    modules = {f"{package}.{name}" for name in module.__all__ if isinstance(getattr(module, name), ModuleType)}
    described = [name for names in API.values() for name in names]
    assert {package, *modules} <= set(described)
    assert len(described) == len(set(described))


@pytest.mark.parametrize(
    "lines",
    [
        ["Return `x`s of `a * b`, *args and name_ too.", "", ":py:obj:`x`\\ s of ``a * b``, \\*args and name\\_ too."],
        ["Use it so:", "", "    with it:", "        pass", "Then.", "", ".. code-block:: python", "   with it:"],
        ["Args:", "    first: one", "        or two.", "", "Args:", "    first: one"],
    ],
    ids=["spans", "example", "section"],
)
def test_docstrings_are_translated_for_the_site(lines):
    cut = len(lines) - lines[::-1].index("") if "" in lines else len(lines)
    text = "\n".join(restructured(lines[:cut]))
    assert all(line in text for line in lines[cut:])


def test_every_environment_variable_in_the_code_is_on_the_page():
    page = page_text("environment.md")
    assert [name for name in sorted(write_reference.names_of_variables()) if f"`{name}`" not in page] == []


def test_every_family_of_forwarded_variables_is_on_the_page():
    page = page_text("environment.md")
    assert [name for name in (*FORWARDED_FAMILIES, *FORWARDED_NAMES) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("package", ["collectives", "popdist", "strategies"])
def test_every_public_error_is_in_the_catalogue(package):
    page = page_text("errors.md")
    public = [name for name in importlib.import_module(package).__all__ if name.endswith("Error")]
    assert public
    assert [name for name in public if f"| `{name}` (" not in page] == []
    without_next_step = re.findall(
        r"^\| `(\w+)` .*\| - \|$", page.partition(f"\n## {package}\n")[2].split("\n## ")[0], re.M
    )
    assert len(without_next_step) == 1, "only the base class of a tree needs no next step"


def test_words_of_the_glossary_are_sorted_and_have_anchors():
    words = re.findall(r"^## (.*)$", page_text("glossary.md"), re.MULTILINE)
    assert words == sorted(words, key=str.lower)
    assert len(words) == len(write_reference.anchors_of(page_named("glossary.md"))) - 1


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "pictures").iterdir()), ids=lambda path: path.name)
def test_every_picture_has_a_dark_variant(picture):
    assert picture.suffix == ".svg"
    assert "prefers-color-scheme:dark" in picture.read_text(encoding="utf-8")


MOST_WORDS = 2500


def test_pages_have_at_most_the_allowed_length():
    """Generated tables, measurements and decisions may be longer."""
    generated = {page.name for page in write_reference.pages()}
    read = [page for page in DOCS if page.name not in generated and page.parent.name != "project"]
    longer = {page.name for page in read if len(page.read_text(encoding="utf-8").split()) > MOST_WORDS}
    assert longer == set()
