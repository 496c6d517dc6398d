"""Drawing of docs/pictures/tree.svg: the tree that adds seven replicas, and the parts of instances with 3, 2 and 2.

python docs/draw_tree.py     to change the picture
"""

from __future__ import annotations

from pathlib import Path

from dark import with_dark

from collectives.tree import TreeNode, halves, root_of, subtrees

PICTURE = Path(__file__).with_name("pictures") / "tree.svg"
REPLICAS, COUNTS = 7, (3, 2, 2)
STEP, LEFT, TOP, LEVEL, HEIGHT = 90, 60, 40, 62, 300
COLOURS = ("#dce9f9", "#e3f0d8", "#fbe5d0")
EDGES = ("#4a7ebb", "#7a9a3c", "#c77b30")


def draw() -> str:
    """Return the picture as SVG."""
    width = 2 * LEFT + STEP * (REPLICAS - 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14">',
        f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    owners = [owner for owner, count in enumerate(COUNTS) for _ in range(count)]
    added_by: dict[TreeNode, int] = {}
    first = 0
    for owner, count in enumerate(COUNTS):
        added_by |= dict.fromkeys(subtrees(first, first + count, REPLICAS), owner)
        lines.append(
            f'<text x="{LEFT + STEP * (first + (count - 1) / 2):g}" y="{HEIGHT - 14}" text-anchor="middle" '
            f'fill="{EDGES[owner]}">instance {owner}</text>'
        )
        first += count
    _draw_node(lines, root_of(REPLICAS), owners, added_by)
    return "\n".join([*lines, "</svg>", ""])


def place(node: TreeNode) -> tuple[float, float]:
    """Return the position of a node."""
    across = LEFT + STEP * (node.first + node.stop - 1) / 2
    return across, TOP + LEVEL * (3 - (node.stop - node.first - 1).bit_length())


def _draw_node(
    lines: list[str], node: TreeNode, owners: list[int], added_by: dict[TreeNode, int], owner: int = -1
) -> None:
    across, below = place(node)
    owner = added_by.get(node, owner)
    if node.is_leaf:
        owner = owners[node.first]
    else:
        for half in halves(node):
            to_across, to_below = place(half)
            lines.append(
                f'<line x1="{across:g}" y1="{below:g}" x2="{to_across:g}" y2="{to_below:g}" stroke="#8a98a8"/>'
            )
            _draw_node(lines, half, owners, added_by, owner)
    fill, edge = (COLOURS[owner], EDGES[owner]) if owner >= 0 else ("#eeeeee", "#666666")
    text = f"g{node.first}" if node.is_leaf else "+"
    lines.append(f'<circle cx="{across:g}" cy="{below:g}" r="17" fill="{fill}" stroke="{edge}" stroke-width="1.5"/>')
    lines.append(f'<text x="{across:g}" y="{below + 5:g}" text-anchor="middle" fill="#1f2d3d">{text}</text>')


if __name__ == "__main__":
    PICTURE.write_text(with_dark(draw()), encoding="utf-8")
