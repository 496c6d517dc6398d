"""Values of which every replica has its own."""

import pytest

from strategies.per_replica import PerReplica, dealt


def test_it_is_a_sequence_of_the_local_replicas_values():
    values = PerReplica((4, 5, 6))
    assert (list(values), len(values), values[1]) == ([4, 5, 6], 3, 5)


def test_what_has_none_is_dealt_as_it_is():
    tree = {"a": 1, "b": (2, 3)}
    assert dealt(tree, range(2)) is tree
    whole = PerReplica((1, 2))
    assert dealt(whole, range(2)) is whole


def test_every_replica_gets_a_whole_tree_with_its_own_value_in_it():
    tree = {"shared": 7, "own": (PerReplica((1, 2)), PerReplica(("x", "y")))}
    found = dealt(tree, range(2))
    assert list(found) == [{"shared": 7, "own": (1, "x")}, {"shared": 7, "own": (2, "y")}]


@pytest.mark.parametrize("value", [PerReplica((1, 2, 3)), [0, PerReplica((1,))]])
def test_another_number_of_values_is_refused(value):
    with pytest.raises(ValueError, match=r"has [13] values, and this instance has 2 replicas; make it with strategy"):
        dealt(value, range(2))


def test_values_of_other_replicas_are_refused():
    values = PerReplica((1, 2), range(2, 4))
    assert list(dealt([values], range(2, 4))) == [[1], [2]]
    with pytest.raises(ValueError, match=r"of the replicas \[2, 3\], and this instance has \[0, 1\]; make it with"):
        dealt([values], range(2))
