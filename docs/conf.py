"""Configuration of the documentation site: Sphinx with MyST and furo (https://www.sphinx-doc.org)."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]  # autodoc imports the packages of this checkout

from docstrings import restructured  # noqa: E402
from site_map import groups, listed, llms_txt  # noqa: E402

from popdist.version import __version__  # noqa: E402

project = "PopDist for everyone"
author = "the authors of popdist-everywhere"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_static"]
nitpicky = True

os.environ.setdefault("KERAS_BACKEND", "jax")
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_preprocess_types = False
napoleon_use_ivar = True
# Types in signatures are mostly of other libraries; the same name may be public in several packages.
nitpick_ignore_regex = [("py:.*", ".*")]

# The anchors that GitHub gives to headings of all levels, so that the links of pages work there and here.
myst_heading_anchors = 6
suppress_warnings = ["ref.python"]  # several packages may have the same public name

highlight_language = "text"  # blocks without a language are output of programs

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = "$ "


def add_table_of_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make the list of links on an index page its table of contents, in the list's order."""
    if docname.rpartition("/")[2] == "index":
        pages = "\n".join(listed(source[0]))
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def name_groups(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object) -> None:
    """Write the headings of index pages into the navigation, above the pages that they group."""
    navigation = BeautifulSoup(context["furo_navigation_tree"], "html.parser")
    for entry in navigation.select("li.has-children"):
        pages = entry.find("ul").find_all("li", recursive=False)
        for heading, first in reversed(_GROUPS.get(entry.find("a").text, [])):
            name = navigation.new_tag("li", attrs={"class": "group"})
            name.string = heading
            pages[first].insert_before(name)
    context["furo_navigation_tree"] = str(navigation)


_INDEXES = [page.read_text(encoding="utf-8") for page in DOCS.glob("*/**/index.md")]
_GROUPS = {text.partition("\n")[0].removeprefix("# "): groups(text) for text in _INDEXES}
_OF_LIBRARY = re.compile(
    r"^```\{eval-rst\}\n\.\. automodule:: strategies\.(keras|torch)\b.*?^```\n", re.MULTILINE | re.DOTALL
)


def leave_out_missing_library(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the docstrings of a package by a sentence if its library is not installed."""
    library = _OF_LIBRARY.search(source[0])
    if library and find_spec(library[1]) is None:
        source[0] = _OF_LIBRARY.sub(
            f"(This site was built without {library[1]}, which this package needs.)\n", source[0]
        )


def translate_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Write a docstring in reStructuredText before napoleon reads it, with links for the pages that it names."""
    lines[:] = [_PAGE_NAME.sub(_link_to_page, line) for line in restructured(lines)]


_PAGES = {page.name: page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md") if page.name != "index.md"}
_PAGE_NAME = re.compile(r"(?<![\w/.`])\w+\.md\b(?!`)")


def _link_to_page(name: re.Match[str]) -> str:
    return f":doc:`/{_PAGES[name[0]]}`" if name[0] in _PAGES else name[0]


def write_for_language_models(app: Sphinx, error: Exception | None) -> None:
    """Write llms.txt, and the Markdown source of each page beside its HTML."""
    if error is None and app.builder.name == "html":
        (app.outdir / "llms.txt").write_text(llms_txt(DOCS), encoding="utf-8")
        for docname in app.project.docnames:
            shutil.copyfile(app.srcdir / f"{docname}.md", app.outdir / f"{docname}.md")


def setup(app: Sphinx) -> None:
    """Connect this module's functions with Sphinx."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":  # "Variables" has another meaning in this project
            field.label = "Attributes"
    app.connect("source-read", add_table_of_contents)
    app.connect("source-read", leave_out_missing_library)
    app.connect("html-page-context", name_groups, priority=600)  # after furo, which makes the tree
    app.connect("build-finished", write_for_language_models)
    app.connect("autodoc-process-docstring", translate_docstring, priority=400)
