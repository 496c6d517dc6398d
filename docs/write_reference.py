"""Writer of the generated parts of reference pages: options of poprun, environment variables and errors.

python docs/write_reference.py     after an option, a variable or an error was added or changed

A generated part is the table or block below a mark such as `<!-- options: Output -->`. A test compares the pages with
the declarations.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

from collectives.simulation.__main__ import command_line_parser
from poprun.cli.help import options_table
from poprun.doctor import DOCTOR
from poprun.monitor.command import TOP
from poprun.monitor.resize_command import RESIZING
from poprun.trace.command import TIMELINE
from poprun.verify import options as verify

DOCS = Path(__file__).parent
REFERENCE = DOCS / "reference"
_MARK = re.compile(r"<!-- (?P<kind>[a-z]+): (?P<name>.+) -->\n(?:\|.*\n|```text\n(?s:.*?)^```\n)*", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((\w+\.md(?:#[\w-]+)?|#[\w-]+)\)")

_SUBCOMMANDS = {"timeline": TIMELINE, "top": TOP, "resize": RESIZING, "doctor": DOCTOR}
_OPTIONS_OF_SUBCOMMANDS = {
    verify.VERIFY: verify.OPTIONS_OF_VERIFY,
    **{command.options[0].section: command.options for command in _SUBCOMMANDS.values()},
}
_USAGES = {"verify": verify.USAGE, **{name: command.usage for name, command in _SUBCOMMANDS.items()}}


def pages() -> list[Path]:
    """Return the pages that have generated parts."""
    return [page for page in sorted(REFERENCE.glob("*.md")) if _MARK.search(page.read_text(encoding="utf-8"))]


def written(page: Path) -> str:
    """Return the text of a page with its generated parts as the code declares them."""
    return _MARK.sub(lambda mark: f"<!-- {mark['kind']}: {mark['name']} -->\n{_part(mark)}\n", page.read_text("utf-8"))


def _part(mark: re.Match[str]) -> str:
    return _linked(_WRITERS[mark["kind"]](mark["name"]))


def _options(section: str) -> str:
    if section in _OPTIONS_OF_SUBCOMMANDS:
        return options_table(section, _OPTIONS_OF_SUBCOMMANDS[section])
    return options_table(section)


def _usage(command: str) -> str:
    return f"```text\n{_USAGES[command]}\n```"


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
    """Replace places in declarations, such as `observability.md#metrics`, by titles and paths from the reference."""
    return _LINK.sub(lambda link: f"[{_text_of(link)}]({place_of(link[2])})", part)


def _text_of(link: re.Match[str]) -> str:
    """Return the text of a link, or the title of the page if the text is the name of a file."""
    if not link[1].endswith(".md"):
        return link[1]
    page = REFERENCE / place_of(link[2]).partition("#")[0]
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def place_of(place: str) -> str:
    """Return the path from the reference to a page, or to a heading on any page."""
    name, _, anchor = place.partition("#")
    named = [page for page in DOCS.rglob("*.md") if page.name == (name or "poprun.md")]
    candidates = [page for page in named if not anchor or anchor in anchors_of(page)]
    candidates = candidates or [page for page in DOCS.rglob("*.md") if anchor and anchor in anchors_of(page)]
    if len(candidates) != 1:
        raise ValueError(f"{place} is on {len(candidates)} pages; an option names one page, or a heading of one page")
    return os.path.relpath(candidates[0], REFERENCE) + (f"#{anchor}" if anchor else "")


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings on GitHub and on the site."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return frozenset(_anchors(re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)))


def _anchors(headings: list[str]) -> Iterator[str]:
    for heading in headings:
        yield re.sub(r"[^\w\- ]", "", heading.replace("`", "")).lower().replace(" ", "-")


_VARIABLES = {
    "time limits": ("POPDIST_STALL_WARNING_S", "POPDIST_TIMEOUT_S", "POPDIST_CONNECT_TIMEOUT_S"),
    "exchange": (
        *("POPDIST_EXCHANGE", "POPDIST_MECHANISM", "POPDIST_NETWORK", "POPDIST_NATIVE"),
        *("POPDIST_EXECUTABLE_CACHE_PATH", "POPDIST_ALLOW_WRONG_SUMS"),
    ),
    "workers": (
        *("TF_CONFIG", "POPDIST_JOB_TOKEN", "POPDIST_TLS_CERT", "POPDIST_TLS_KEY", "POPDIST_TLS_CA"),
        *("POPDIST_GRPC_INSECURE", "POPDIST_ALONE"),
    ),
    "recording": (
        *("POPDIST_METRICS", "POPDIST_METRICS_RUN", "POPDIST_NORMS_EVERY", "POPDIST_HISTOGRAMS_EVERY"),
        *("POPDIST_TIMELINE", "POPDIST_TIMELINE_LIMIT", "POPDIST_PROFILE"),
        "POPDIST_INJECT",
    ),
    "poprun": (
        *("POPRUN_LOG_LEVEL", "POPRUN_SSH_ARGS", "POPRUN_CHECK_TIMEOUT_S", "POPRUN_COPY_TIMEOUT_S"),
        "IPUOF_VIPU_API_PARTITION_ID",
    ),
    "instance": (
        *("POPDIST_NUM_TOTAL_REPLICAS", "POPDIST_NUM_LOCAL_REPLICAS", "POPDIST_REPLICA_INDEX_OFFSET"),
        *("POPDIST_NUM_IPUS_PER_REPLICA", "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE", "POPDIST_LOCAL_INSTANCE_INDEX"),
        *("POPDIST_DEVICE_ID", "POPDIST_RESTART_COUNT", "POPDIST_SHRINKS", "POPDIST_NUM_SPARES", "POPDIST_SPARE"),
        "POPDIST_RESERVE",
    ),
    "internal": (
        *(
            "POPDIST_REPLICAS_LEFT_OUT",
            "POPDIST_JOINED",
            "POPDIST_VERIFY_RECORD",
            "POPDIST_VERIFY_STEPS",
            "POPDIST_VERIFY_VALUES",
        ),
        *("POPDIST_VERIFY_LEAVE", "POPRUN_CONTROL", "POPRUN_HOST", "POPRUN_PROGRESS_FD", "POPRUN_STACK"),
        *("POPDIST_LAUNCH_ADDRESS", "POPDIST_LAUNCH_NETWORK", "POPDIST_LAUNCH_TOKEN"),
    ),
    "PopTorch": ("POPTORCH_IPU_HARDWARE_VERSION",),
}
"""The variables of each table on the page of environment variables, in order."""


def _variables(table: str) -> str:
    """Return a table of variables, each with the docstring below its declaration in the code."""
    texts = described_variables()
    rows = [f"| `{name}` | {texts[name]} |" for name in _VARIABLES[table]]
    return "\n".join(["| variable | meaning |", "|---|---|", *rows])


@cache
def described_variables() -> dict[str, str]:
    """Return the docstring of each constant that names a variable; the first package with a docstring counts."""
    found: dict[str, str] = {}
    for module in _modules():
        for statement, after in pairwise(module.body):
            match statement, after:
                case (
                    ast.Assign(value=ast.Constant(value=str(name))),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found.setdefault(name, " ".join(text.split()))
    return found


def names_of_variables() -> set[str]:
    """Return the environment variables that the code names: the project's own, and others that it reads or sets."""
    names = set()
    for module in _modules():
        constants = {
            target.id: statement.value.value
            for statement in module.body
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(module):
            names |= {each.value for each in _constants(node) if _OWN.fullmatch(each.value)}
            names |= {key for key in _keys_of_environ(node, constants) if re.fullmatch(r"[A-Z][A-Z0-9_]+", key)}
    return names


_OWN = re.compile(r"(?:POPDIST|POPRUN|POPTORCH|POPLAR|IPUOF|TF_CONFIG)(?:_[A-Z0-9]+)+|TF_CONFIG")


def _constants(node: ast.AST) -> list[ast.Constant]:
    return [node] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def _keys_of_environ(node: ast.AST, constants: Mapping[str, object]) -> list[str]:
    """Return the key of a lookup in a mapping called `environ`: a text, or a constant of the module."""
    match node:
        case ast.Subscript(value=mapping, slice=key):
            pass
        case ast.Call(func=ast.Attribute(value=mapping, attr="get" | "setdefault" | "pop"), args=[key, *_]):
            pass
        case ast.Compare(left=key, comparators=[mapping]):
            pass
        case _:
            return []
    named = mapping.attr if isinstance(mapping, ast.Attribute) else getattr(mapping, "id", "")
    text = key.value if isinstance(key, ast.Constant) else constants.get(getattr(key, "id", ""), "")
    return [str(text)] if named.strip("_") == "environ" else []


@cache
def _modules() -> tuple[ast.Module, ...]:
    packages = ("collectives", "popdist", "poprun", "strategies")
    paths = [path for package in packages for path in sorted((DOCS.parent / package).rglob("*.py"))]
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in paths)


_LINE_OF_TREE = re.compile(r"^(?P<branch>[├└│─ ]*)(?P<name>\w+) +(?P<text>\S.*(?:\n[│ ]{8,}\S.*)*)", re.MULTILINE)


def _errors(package: str) -> str:
    """Return a table of the errors of a package, with the texts of the tree in its `errors.py`."""
    module = ast.parse((DOCS.parent / package / "errors.py").read_text(encoding="utf-8"))
    tree = {line["name"]: " ".join(line["text"].split()) for line in _LINE_OF_TREE.finditer(ast.get_docstring(module))}
    classes = [each for each in module.body if isinstance(each, ast.ClassDef)]
    rows = [_error_row(each, tree.get(each.name, "")) for each in classes]
    return "\n".join(["| error | raised if | next step |", "|---|---|---|", *rows])


def _error_row(error: ast.ClassDef, text: str) -> str:
    bases = ", ".join(f"`{ast.unparse(base)}`" for base in error.bases)
    text = re.sub(r" \(also an? \w+\)", "", text)  # the bases say so
    when, _, then = text.partition(": " if ": " in text else "; ")
    first, *_ = ast.get_docstring(error).split("\n\n")
    when = when if then else " ".join((text or first).split())
    return f"| `{error.name}` ({bases}) | {when.rstrip('.')} | {then or '-'} |"


_WRITERS = {
    **{"options": _options, "usage": _usage, "simulate": _simulate},
    **{"variables": _variables, "errors": _errors},
}


if __name__ == "__main__":
    for each in pages():
        each.write_text(written(each), encoding="utf-8")
