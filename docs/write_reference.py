"""Writer of the generated parts of reference pages: options of poprun.

python docs/write_reference.py     after an option was added or changed

A generated part is the table or block below a mark such as `<!-- options: Output -->`. A test compares the pages with
the declarations.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from collectives.simulation.__main__ import command_line_parser
from poprun import doctor
from poprun.cli.help import options_table
from poprun.monitor import command as top
from poprun.trace import command as timeline
from poprun.verify import options as verify

DOCS = Path(__file__).parent
REFERENCE = DOCS / "reference"
_MARK = re.compile(r"<!-- (?P<kind>[a-z]+): (?P<name>.+) -->\n(?:\|.*\n|```text\n(?s:.*?)^```\n)*", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((\w+\.md(?:#[\w-]+)?|#[\w-]+)\)")

_OPTIONS_OF_SUBCOMMANDS = {
    verify.VERIFY: verify.OPTIONS_OF_VERIFY,
    timeline.SECTION: (timeline.HELP, timeline.OUTPUT, timeline.HTML),
    top.SECTION: top.OPTIONS,
}
_USAGES = {
    "verify": verify.describe_verify,
    "timeline": timeline.describe,
    "top": top.describe,
    "doctor": lambda: doctor.USAGE,
}


def pages() -> list[Path]:
    """Return the pages that have generated parts."""
    return [page for page in sorted(REFERENCE.glob("*.md")) if _MARK.search(page.read_text(encoding="utf-8"))]


def written(page: Path) -> str:
    """Return the text of a page with its generated parts as the code declares them."""
    return _MARK.sub(lambda mark: f"<!-- {mark['kind']}: {mark['name']} -->\n{_part(mark)}\n", page.read_text("utf-8"))


def _part(mark: re.Match[str]) -> str:
    return _linked({"options": _options, "usage": _usage, "simulate": _simulate}[mark["kind"]](mark["name"]))


def _options(section: str) -> str:
    if section in _OPTIONS_OF_SUBCOMMANDS:
        return options_table(section, _OPTIONS_OF_SUBCOMMANDS[section])
    return options_table(section)


def _usage(command: str) -> str:
    usage, *_ = _USAGES[command]().split("\n\n")
    return f"```text\n{usage}\n```"


def _simulate(command: str) -> str:
    [commands] = (each for each in command_line_parser()._actions if isinstance(each, argparse._SubParsersAction))
    rows = [_row(action) for action in commands.choices[command]._actions if action.dest != "help"]
    return "\n".join(["| option | value | default | meaning |", "|---|---|---|---|", *rows])


def _row(action: argparse.Action) -> str:
    kinds = {int: "number", None: "" if action.nargs == 0 else "word", Path: "path"}
    value = ", ".join(f"`{word}`" for word in action.choices or ()) or kinds.get(action.type, "size")
    default = "" if action.default in (None, False) else str(action.default)
    meaning = action.help or ""
    meaning += ("; " * bool(meaning) + "required") if action.required else ""
    return f"| `{action.option_strings[-1]}` | {value} | {default} | {meaning} |".replace("|  |", "| |").replace(
        "|  |", "| |"
    )


def _linked(part: str) -> str:
    """Replace the places that declarations name, such as `observability.md#metrics`, by paths from the reference."""
    return _LINK.sub(lambda link: f"[{link[1]}]({place_of(link[2])})", part)


def place_of(place: str) -> str:
    """Return the path from the reference to a page, or to a heading wherever it is."""
    name, _, anchor = place.partition("#")
    named = [page for page in DOCS.rglob("*.md") if page.name == (name or "poprun.md")]
    candidates = [page for page in named if not anchor or anchor in anchors_of(page)]
    candidates = candidates or [page for page in DOCS.rglob("*.md") if anchor and anchor in anchors_of(page)]
    if len(candidates) != 1:
        raise ValueError(f"{place} is on {len(candidates)} pages; an option names one page, or a heading of one page")
    return os.path.relpath(candidates[0], REFERENCE) + (f"#{anchor}" if anchor else "")


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub and the site give to the headings of a page."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return frozenset(_anchors(re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)))


def _anchors(headings: list[str]) -> Iterator[str]:
    for heading in headings:
        yield re.sub(r"[^\w\- ]", "", heading.replace("`", "")).lower().replace(" ", "-")


if __name__ == "__main__":
    for each in pages():
        each.write_text(written(each), encoding="utf-8")
