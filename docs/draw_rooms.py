"""Drawing of docs/pictures/rooms.svg: the rooms of the packages, each above the rooms from which it imports.

    python docs/draw_rooms.py     after a room was added, or its imports or first sentence changed

A room is a folder. Files outside folders form two rooms: shared files that import from no room, and the others.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from xml.sax.saxutils import escape

from dark import with_dark

ROOT = Path(__file__).resolve().parents[1]
PICTURE = Path(__file__).with_name("pictures") / "rooms.svg"
COLUMNS = (("strategies",), ("poprun",), ("popdist", "collectives"))
COMMANDS = {"strategies/dataset_benchmark.py", "poprun/__main__.py"}
"""Commands for `python -m`, which no module imports."""

EXAMPLES = "popdist/examples"
"""Programs that use all packages; they belong to no room."""

DOORS = {"strategies/config.py", "strategies/torch/poptorch/__init__.py"}
"""Modules that import names from `strategies/compat` for programs."""

GRADIENT = {
    "strategies/trainer.py": "step",
    "strategies/core/step.py": "make_step",
    "strategies/jax/engine.py": "begin",
    "strategies/jax/gradients/gradient_programs.py": "dispatch",
    "strategies/exchange/means.py": "reduce",
    "collectives/communicator.py": "grouped_ordered_all_reduce",
    "collectives/shared_memory/transport.py": "reduce",
    "strategies/jax/updates/update.py": "apply",
}
"""The files on the path of a JAX gradient, from `Trainer.step` to the new variables, over a shared window.

The value is the function that is called in the file."""

TORCH_GRADIENT = {
    "strategies/torch/trainer.py": "step",
    "strategies/core/step.py": "make_step",
    "strategies/torch/engine.py": "begin",
    "strategies/torch/replicas/steps.py": "fits",
    "strategies/torch/exchange/gradients.py": "reduce",
    "strategies/exchange/means.py": "reduce_whole",
    "collectives/communicator.py": "grouped_ordered_all_reduce",
    "collectives/shared_memory/transport.py": "reduce",
    "strategies/torch/updates.py": "apply",
}
"""The files on the path of a PyTorch gradient, with the functions called in them."""

WIDTH, GAP, LINE, PADDING = 330, 14, 15, 10
USED_BY_ALL = "used by all of these"


def modules_of(package: str) -> list[Path]:
    """Return the modules of a package, and those of the examples only for the examples."""
    modules = sorted((ROOT / package).rglob("*.py"))
    return [path for path in modules if package == EXAMPLES or ROOT / EXAMPLES not in path.parents]


def room_of(path: Path, package: str) -> str:
    """Return the room of a file of a package, or "" for a file outside rooms."""
    parts = path.relative_to(ROOT / package).parts
    return parts[0] if len(parts) > 1 else ""


def imported_by_name(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file passes to `import_module`, if they are literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func).endswith(("import_module", "__import__")):
            parts = getattr(node.args[0], "values", [node.args[0]])  # the literal beginning of an f-string
            yield str(parts[0].value) if isinstance(parts[0], ast.Constant) else ""


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def imports_of(path: Path) -> Iterator[str]:
    """Yield the full names of the modules, or of their members, that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from imported_by_name(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(path: Path) -> str:
    """Return the module name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if path.name == "__init__.py" else parts)


@cache
def imported_by(package: str) -> dict[Path, set[Path]]:
    """Return for each file of a package, except its public modules, the package's files from which it imports."""
    besides = {f"{package}/__init__.py", *COMMANDS, *DOORS}
    files = [path for path in modules_of(package) if str(path.relative_to(ROOT)) not in besides]
    names = {name_of(path): path for path in files}
    return {path: {names[name] for name in imports_of(path) if name in names} for path in files}


@cache
def home_of(path: Path, package: str) -> str:
    """Return the room of a file; a file outside folders belongs to one of two rooms named above."""
    return room_of(path, package) or (package if uses_a_room(path, package) else USED_BY_ALL)


@cache
def uses_a_room(path: Path, package: str) -> bool:
    """Return whether a file imports from a room, directly or through other files."""
    return any(room_of(other, package) or uses_a_room(other, package) for other in imported_by(package)[path])


def rooms_of(package: str) -> dict[str, set[str]]:
    """Return for each room of a package the rooms from which it imports."""
    rooms: dict[str, set[str]] = {}
    for path, others in imported_by(package).items():
        home = home_of(path, package)
        rooms.setdefault(home, set()).update(home_of(other, package) for other in others)
    return {room: others - {room} for room, others in rooms.items()}


def levels_of(rooms: dict[str, set[str]]) -> list[list[str]]:
    """Return the rooms by level, from the top to the rooms that import from none."""
    height: dict[str, int] = {}
    for room in TopologicalSorter(rooms).static_order():
        height[room] = 1 + max((height[other] for other in rooms[room]), default=-1)
    return [
        sorted(room for room in rooms if height[room] == level) for level in sorted(set(height.values()), reverse=True)
    ]


def said_of(package: str, room: str) -> str:
    """Return the description of a room: the first sentence of its docstring, or the names of its files."""
    if room not in (package, USED_BY_ALL):
        source = (ROOT / package / room / "__init__.py").read_text(encoding="utf-8")
        return str(ast.get_docstring(ast.parse(source))).partition("\n\n")[0]
    return ", ".join(path.stem for path in imported_by(package) if home_of(path, package) == room)


def steps_in(package: str, room: str) -> str:
    """Return the numbers of the files on the gradient's path that are in a room."""
    numbers = [
        str(number)
        for number, file in enumerate(GRADIENT, 1)
        if file.startswith(f"{package}/") and home_of(ROOT / file, package) == room
    ]
    return " ".join(numbers)


def draw() -> str:
    """Return the picture as SVG."""
    parts: list[str] = []
    bottom = 0
    for column, packages in enumerate(COLUMNS):
        left, top = GAP + column * (WIDTH + 2 * GAP), GAP
        for package in packages:
            parts.append(f'<text class="package" x="{left}" y="{top + LINE}">{package}</text>')
            top += 2 * LINE
            for level in levels_of(rooms_of(package)):
                for room in level:
                    top += _box(parts, left, top, package, room) + GAP / 2
                top += GAP / 2
            top += GAP
        bottom = max(bottom, int(top))
    width = GAP + len(COLUMNS) * (WIDTH + 2 * GAP)
    style = (
        "text{font:12px sans-serif;fill:#222}.package{font-weight:bold;font-size:16px}.name{font-weight:bold}"
        "rect{fill:#f4f6f8;stroke:#8a97a5}.on{fill:#fff3d6;stroke:#c98a00}.number{font-weight:bold;fill:#a86f00}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom}" width="{width}" height="{bottom}">'
    background = f'<rect width="{width}" height="{bottom}" style="fill:#fff;stroke:none"/>'
    return with_dark("\n".join([head, f"<style>{style}</style>", background, *parts, "</svg>\n"]))


def _box(parts: list[str], left: float, top: float, package: str, room: str) -> float:
    """Draw a room, and return its height."""
    lines = textwrap.wrap(said_of(package, room).replace("`", ""), 46)
    height = 2 * PADDING + LINE * (1 + len(lines)) - 4
    numbers = steps_in(package, room)
    kind = ' class="on"' if numbers else ""
    parts.append(f'<rect{kind} x="{left}" y="{top:g}" width="{WIDTH}" height="{height}" rx="4"/>')
    first = top + PADDING + LINE - 4
    parts.append(f'<text class="name" x="{left + PADDING}" y="{first:g}">{escape(room)}</text>')
    if numbers:
        place = left + WIDTH - PADDING
        parts.append(f'<text class="number" text-anchor="end" x="{place}" y="{first:g}">{numbers}</text>')
    for number, line in enumerate(lines, 1):
        parts.append(f'<text x="{left + PADDING}" y="{first + number * LINE:g}">{escape(line)}</text>')
    return height


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
