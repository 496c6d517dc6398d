"""First lines of docstrings and names of tests; ruff's D401 checks the first lines of functions."""

import ast
import re
from pathlib import Path

import pytest
from pages import ROOT

FOLDERS = ("benchmarks", "collectives", "docs", "popdist", "poprun", "strategies", "tests")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
NO_NOUN = re.compile(
    r"(What|Which|Who|Whom|Whose|How|Those|Of|Where|When|That|This|These|It|There|Whether|As|For|If)\b"
)
NO_SUBJECT = re.compile(
    r"test_(what|which|who|whose|how|of|is|are|was|has|have|had|does|do|that|this|those|these|it|its|they|where|there|may|"
    r"can|q\d*|pl\d*|cf\d*)_"
)
KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings_of(path: Path) -> dict[str, str]:
    """Return the first paragraph of each docstring in a file by the kind, name and line of its owner."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, KINDS) and (text := ast.get_docstring(node)):
            name = f"{type(node).__name__} {getattr(node, 'name', '')}:{getattr(node, 'lineno', 1)}"
            found[name] = " ".join(text.partition("\n\n")[0].split())
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_noun_or_a_verb_and_have_at_most_25_words(folder):
    wrong = [
        f"{path.relative_to(ROOT)} {name}: {first}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == folder
        for name, first in docstrings_of(path).items()
        if len(first.split()) > 25 or (NO_NOUN.match(first) and not ("Def" in name and first.startswith("Whether ")))
    ]
    assert wrong == []


def test_names_of_tests_begin_with_a_subject():
    names = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in FILES
        if path.name.startswith("test_") or "tests" in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and NO_SUBJECT.match(node.name)
    ]
    assert names == []
