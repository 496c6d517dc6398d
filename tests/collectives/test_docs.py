"""The programs in the documentation run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_of_the_page_runs(snippet: str) -> None:
    exec(compile(snippet, str(PAGE), "exec"), {"__name__": "snippet"})


def test_the_page_has_a_snippet() -> None:
    assert SNIPPETS
