"""Counts of `Any` in each room of the product, by the syntax tree. `python tests/test_types.py` prints the table."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("collectives", "popdist", "poprun", "strategies")

ANY = {
    "collectives": 5,
    "collectives/cuda": 3,
    "collectives/network": 11,
    "popdist": 6,
    "popdist/environments": 1,
    "poprun/cli": 1,
    "poprun/hosts": 1,
    "poprun/verify": 1,
    "strategies": 12,
    "strategies/checkpoints": 20,
    "strategies/compat": 26,
    "strategies/data": 4,
    "strategies/exchange": 2,
    "strategies/jax": 71,
    "strategies/keras": 14,
    "strategies/sinks": 11,
    "strategies/torch": 6,
}
"""Occurrences of `Any` in each room; rooms without any are left out."""


def says_any(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "Any") or (isinstance(node, ast.Attribute) and node.attr == "Any")


def room_of(path: Path) -> str:
    """Return the folder of a package that contains a file, even in a subfolder; for its own files the package."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:2])


def counted(root: Path = ROOT) -> dict[str, int]:
    found: Counter[str] = Counter()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if root / "popdist" / "examples" in path.parents:
                continue
            found[room_of(path)] += sum(map(says_any, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    return {room: count for room, count in sorted(found.items()) if count}


def test_no_room_contains_more_any_than_before() -> None:
    """The table must follow a room that contains less, so that the number only falls."""
    found = counted()
    rooms = {*found, *ANY}
    more = {room: found[room] for room in rooms if found.get(room, 0) > ANY.get(room, 0)}
    fewer = {room: found.get(room, 0) for room in rooms if found.get(room, 0) < ANY.get(room, 0)}
    assert more == {}, "say what is meant: an alias of strategies/typing.py, a Protocol, or object"
    assert fewer == {}, "well done: lower the table, see python tests/test_types.py"


def test_any_is_counted_in_every_spelling() -> None:
    source = "import typing\nfrom typing import Any\nx: Any\ndef f(a: typing.Any) -> dict[str, Any]: ...\n# Any\n"
    assert sum(map(says_any, ast.walk(ast.parse(source)))) == 3


if __name__ == "__main__":
    print("ANY = {", *(f'    "{room}": {count},' for room, count in counted().items()), "}", sep="\n")
