"""Translation of the docstrings of this project, Google style with Markdown's code spans, for Sphinx."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

_SECTION = re.compile(r"(Args|Arguments|Attributes|Raises|Returns|Yields|Examples?|Notes?|References|Warning):\s*$")
_EXAMPLE = re.compile(r"Examples?:\s*$")
_ITEM = re.compile(r"\s*(?:[*-]|\d+\.) ")
_CODE = re.compile(r"``.+?``|`[^`]+`", re.DOTALL)
_NAME = re.compile(r"`([A-Za-z_][\w.]*)`(?:\(\))?")
_MARKUP = re.compile(r"[*|]|(?<=\w)_(?!\w)|\\")


def restructured(lines: list[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText that napoleon can read."""
    marked: list[str] = []
    for block in _blocks([re.sub(r"(?<=\S)::$", ":", line) for line in lines]):
        marked += _as_code(block) if block.is_code else _with_escapes("\n".join(block.lines)).split("\n")
    return marked


@dataclass(frozen=True)
class _Block:
    """Consecutive lines of a docstring that are all code, or all prose.

    Attributes:
        lines: Lines of the docstring.
        is_code: Whether the lines are an indented example.
        indent: Columns before a block of code: 4 inside a section, otherwise 0.
    """

    lines: list[str]
    is_code: bool
    indent: int = 0


def _as_code(block: _Block) -> list[str]:
    """Return the lines as a block of code, with its language."""
    code = textwrap.dedent("\n".join(block.lines)).strip("\n")
    marked = f"\n.. code-block:: {_language(code)}\n\n{textwrap.indent(code, '   ')}\n"
    return textwrap.indent(marked, " " * block.indent).split("\n")


def _language(code: str) -> str:
    if code.startswith(">>>"):
        return "pycon"
    try:
        ast.parse(code)
    except SyntaxError:
        return "text"
    return "python"


def _blocks(lines: list[str]) -> Iterator[_Block]:
    position = 0
    while position < len(lines):
        end = _end_of_code(lines, position)
        if end > position:
            yield _Block(lines[position:end], True, 4 if _is_in_section(lines, position) else 0)
        else:
            end = position + 1
            while end < len(lines) and _end_of_code(lines, end) == end:
                end += 1
            yield _Block(lines[position:end], False)
        position = end


def _end_of_code(lines: list[str], start: int) -> int:
    """Return the end of the example that begins at a line, or the line itself if no example begins there."""
    if not _begins_example(lines, start):
        return start
    end = start
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith("    ")):
        end += 1
    return end


def _begins_example(lines: list[str], start: int) -> bool:
    if not lines[start].startswith("    "):
        return False
    before = [line for line in lines[:start] if line.strip()]
    head = _head(lines, start)
    if not head or before[-1].startswith(" ") or _ITEM.match(head):
        return False
    return not _SECTION.match(head) or _is_in_section(lines, start)


def _is_in_section(lines: list[str], start: int) -> bool:
    return bool(_EXAMPLE.match(_head(lines, start)))


def _head(lines: list[str], start: int) -> str:
    """Return the last line before `start` that is not indented."""
    return next((line for line in reversed(lines[:start]) if line.strip() and not line.startswith(" ")), "")


def _with_escapes(text: str) -> str:
    """Return prose as reStructuredText: code spans keep their meaning, and all other markup is escaped."""
    pieces = []
    end = 0
    for span in _CODE.finditer(text):
        pieces += [_escaped(text[end : span.start()]), _span(span[0], text[span.end() :])]
        end = span.end()
    return _separated("".join([*pieces, _escaped(text[end:])]))


def _escaped(text: str) -> str:
    """Escape markup, except the marks of lists and the stars before names of arguments in Args."""
    lines = text.split("\n")
    return "\n".join(
        re.sub(r"^(\s*[*-] )?(.*)$", lambda line: (line[1] or "") + _MARKUP.sub(r"\\\g<0>", line[2]), line)
        for line in lines
    )


def _span(code: str, rest: str) -> str:
    name = _NAME.fullmatch(code)
    marked = f":py:obj:`{name[1]}`" if name else f"``{code.strip('`')}``"
    return marked + ("\\ " if re.match(r"[\w`]", rest) else "")


def _separated(text: str) -> str:
    """Insert an empty line before each list, as reStructuredText requires."""
    lines: list[str] = []
    for line in text.split("\n"):
        if _ITEM.match(line) and lines and lines[-1].strip() and not _is_in_list(lines, line):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _is_in_list(lines: list[str], item: str) -> bool:
    indent = len(item) - len(item.lstrip())
    for line in reversed(lines):
        if not line.strip():
            return False
        if _ITEM.match(line) and len(line) - len(line.lstrip()) == indent:
            return True
    return False
