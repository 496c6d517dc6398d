"""Configuration of the documentation site: Sphinx with MyST and furo (https://www.sphinx-doc.org)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]  # autodoc imports the packages of this checkout

from popdist.version import __version__  # noqa: E402

project = "PopDist for everyone"
author = "the authors of popdist-everywhere"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_static"]
nitpicky = True

# The anchors that GitHub gives to headings of all levels, so that the links of pages work there and here.
myst_heading_anchors = 6
suppress_warnings = ["myst.header"]  # a heading that skips a level

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = "$ "

_LISTED = re.compile(r"^\* \[[^\]]+\]\(([\w/.-]+\.md)\)", re.MULTILINE)


def add_table_of_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make the list of links on an index page its table of contents, in the order of the list."""
    if docname.rpartition("/")[2] == "index":
        pages = "\n".join(_LISTED.findall(source[0]))
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    """Connect the functions above with Sphinx."""
    app.connect("source-read", add_table_of_contents)
