"""The tree of sums over replicas."""

from __future__ import annotations

from itertools import pairwise

import pytest

from collectives.tree import TreeNode, add_last, halves, merged, registers, root_of, steps, subtrees

MOST = 64


def nodes_below(node: TreeNode) -> set[TreeNode]:
    return {node} if node.is_leaf else {node}.union(*map(nodes_below, halves(node)))


def leaves(first: int, stop: int) -> tuple[TreeNode, ...]:
    return tuple(TreeNode(replica, replica + 1) for replica in range(first, stop))


def text(nodes: tuple[TreeNode, ...]) -> str:
    """Return the sum of some steps with brackets."""
    values = [str(node.first) for node in nodes]
    for left, right, _ in steps(nodes):
        values.append(f"({values[left]}+{values[right]})")
    return values[-1]


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
        (12, "((((0+1)+(2+3))+((4+5)+(6+7)))+((8+9)+(10+11)))"),
    ],
)
def test_sums_are_split_at_the_largest_power_of_two_below_the_whole(replicas: int, expected: str) -> None:
    assert text(leaves(0, replicas)) == expected


def test_a_block_of_replicas_adds_the_largest_nodes_inside_of_it() -> None:
    for replicas in range(1, 33):
        nodes = nodes_below(root_of(replicas))
        for first in range(replicas):
            for stop in range(first + 1, replicas + 1):
                inside = [node for node in nodes if TreeNode(first, stop).covers(node)]
                largest = [node for node in inside if not any(one != node and one.covers(node) for one in inside)]
                assert list(subtrees(first, stop, replicas)) == sorted(largest)


def test_a_block_has_few_nodes_and_an_aligned_block_has_one() -> None:
    for size in (1, 2, 4, 8, 16):
        assert all(len(subtrees(first, first + size, MOST)) == 1 for first in range(0, MOST, size))
    for first in range(MOST):
        for stop in range(first + 1, MOST + 1):
            assert len(subtrees(first, stop, MOST)) <= max(1, 2 * (stop - first).bit_length() - 1)


def test_two_nodes_are_added_exactly_if_they_are_the_halves_of_a_covered_node() -> None:
    for replicas in range(1, 18):
        root = root_of(replicas)
        nodes = list(nodes_below(root))
        parents = {halves(node): node for node in nodes if not node.is_leaf}
        for left in nodes:
            for right in nodes:
                parent = parents.get((left, right))
                sums, apart = [(left, "a"), (right, "b")], [(left, "a"), (right, "b")]
                add_last(sums, [root], replicas, lambda _, one, other: one + other)
                assert sums == ([(left, "a"), (right, "b")] if parent is None else [(parent, "ab")])
                add_last(apart, [left, right], replicas, lambda _, one, other: one + other)
                assert apart == [(left, "a"), (right, "b")] or parent in (left, right)


def test_adjacent_nodes_of_several_blocks_are_merged() -> None:
    assert merged([TreeNode(6, 7), TreeNode(2, 4), TreeNode(0, 2)], 8) == (TreeNode(0, 4), TreeNode(6, 7))
    assert merged([TreeNode(4, 6), TreeNode(6, 7)], 7) == (TreeNode(4, 7),)
    assert merged([TreeNode(1, 2), TreeNode(2, 4)], 8) == (TreeNode(1, 2), TreeNode(2, 4))


def test_steps_use_earlier_sums() -> None:
    nodes = (TreeNode(0, 4), TreeNode(4, 5), TreeNode(5, 6), TreeNode(6, 7))
    assert text(nodes) == "(0+((4+5)+6))"


def test_the_number_of_accumulators_is_the_number_of_levels() -> None:
    for replicas in range(2, MOST + 1):
        assert registers(steps(leaves(0, replicas))) <= (replicas - 1).bit_length()


def test_an_accumulator_is_not_overwritten_while_it_is_needed() -> None:
    for replicas in range(2, MOST + 1):
        nodes = leaves(0, replicas)
        holds: dict[int, int] = {}
        for number, (left, right, register) in enumerate(steps(nodes), len(nodes)):
            needed = [each for each in (left, right) if each >= replicas]
            assert all(each in holds.values() for each in needed), replicas
            holds = {place: value for place, value in holds.items() if value not in needed}
            assert register not in holds, replicas
            holds[register] = number


@pytest.mark.parametrize("nodes", [(TreeNode(0, 2), TreeNode(3, 4)), (TreeNode(0, 1), TreeNode(1, 3), TreeNode(3, 4))])
def test_missing_and_invalid_nodes_are_refused(nodes: tuple[TreeNode, ...]) -> None:
    assert any(one.stop != other.first for one, other in pairwise(nodes)) or nodes[1] == TreeNode(1, 3)
    with pytest.raises(ValueError, match="missing|not the parts"):
        steps(nodes)
