"""Pytrees without JAX, compared with JAX's own functions in the same process."""

from __future__ import annotations

import json

SAME = """
import collections, json, sys
import strategies.trees as trees
from strategies.loss_scaling import LossScale
from strategies.values import TrainState

Pair = collections.namedtuple("Pair", "first second")
state = TrainState({"w": 1}, (2, None), step=3, loss_scale=LossScale(4, 5, 6), model_state=[7])
cases = [
    0, None, (), [], {}, (1,), [1, [2, (3, None)]], {"b": 1, "a": {"d": 2, "c": 3}}, {2: "x", 1: "y"},
    Pair(1, {"a": 2}), collections.OrderedDict(b=1, a=2), collections.defaultdict(list, b=1, a=2), state,
    {"s": state, "o": object()},
]
PUBLIC = ("leaves", "structure", "flatten", "leaves_with_path", "flatten_with_path", "is_leaf")
found = [{name: getattr(trees, name)(case) for name in PUBLIC} for case in cases]
texts = [[trees.keystr(path) for path, _ in each["leaves_with_path"]] for each in found]
doubled = [trees.map(lambda leaf: (leaf, 0), case) for case in cases]
prefixes = [trees.map(lambda leaf, other: other, case, whole) for case, whole in zip(cases, doubled)]
named = [trees.map_with_path(lambda path, leaf: trees.keystr(path), case) for case in cases]
again = [trees.unflatten(each["structure"], each["leaves"]) for each in found]
try:
    trees.leaves({1: 0, "a": 0})
    refused = False
except ValueError:
    refused = True
assert "jax" not in sys.modules

import jax

of_jax = [[jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(case)] for case in cases]
structures = [jax.tree.structure(case) for case in cases]
print(json.dumps({
    "leaves": [each["leaves"] == jax.tree.leaves(case) for each, case in zip(found, cases)],
    "paths": [one == other for one, other in zip(texts, of_jax)],
    "leaf or node": [each["is_leaf"] == jax.tree_util.all_leaves([case]) for each, case in zip(found, cases)],
    "maps": [one == jax.tree.map(lambda leaf: (leaf, 0), case) for one, case in zip(doubled, cases)],
    "maps of several": [one == other for one, other in zip(prefixes, doubled)],
    "maps with paths": [jax.tree.leaves(one) == text for one, text in zip(named, texts)],
    "made again": [one == case for one, case in zip(again, cases)],
    "made later": [trees.unflatten(each["structure"], each["leaves"]) == case for each, case in zip(found, cases)],
    "texts of plain ones": [str(each["structure"]) == str(one) for each, one in zip(found[:9], structures)],
    "refused": [refused],
    "JAX's own": [trees.flatten is jax.tree_util.tree_flatten, trees.leaves is jax.tree_util.tree_leaves],
}))
"""

MISMATCHES = """
import strategies.trees as trees
for one, other in [([1, 2], [1]), ((1,), [1]), ({"a": 1}, {"b": 1}), ([1], 2)]:
    try:
        trees.map(lambda *leaves: leaves, one, other)
    except ValueError as error:
        print("refused")
for count in (1, 3):
    try:
        trees.unflatten(trees.structure([1, 2]), list(range(count)))
    except ValueError as error:
        print("refused")
"""

DURING_THE_IMPORT = """
import sys
import strategies.trees as trees
from strategies.values import TrainState

state = TrainState({"w": 1}, (2, 3), step=3)

class Look:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("jax."):
            found.add(len(trees.leaves(state)))

found = set()
sys.meta_path.insert(0, Look())
import jax
print(found, len(jax.tree.leaves(state)))
"""


def test_trees_are_the_same_without_jax(in_new_process):
    """The classes of this project are nodes for JAX too, although JAX was imported after them."""
    compared = json.loads(in_new_process(SAME))
    assert {what: [number for number, same in enumerate(each) if not same] for what, each in compared.items()} == {
        what: [] for what in compared
    }


def test_trees_of_other_structures_are_refused_without_jax(in_new_process):
    assert in_new_process(MISMATCHES).split() == ["refused"] * 6


def test_trees_are_the_same_while_another_thread_imports_jax(in_new_process):
    assert in_new_process(DURING_THE_IMPORT) == "{3} 3\n"
