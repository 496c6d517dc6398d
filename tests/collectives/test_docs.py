"""The programs of the page about collectives."""

from __future__ import annotations

import pytest
from pages import page_programs

PAGE = "collectives.md"
SNIPPETS = page_programs(PAGE)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_of_the_page_runs(snippet: str) -> None:
    exec(compile(snippet, PAGE, "exec"), {"__name__": "snippet"})


def test_the_page_has_a_snippet() -> None:
    assert SNIPPETS
