"""How replicas are divided into groups."""

import pytest

from strategies.replicas.replica_groups import ReplicaGroups


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        (ReplicaGroups(), ((0, 1, 2, 3, 4, 5),)),
        (ReplicaGroups(2), ((0, 1), (2, 3), (4, 5))),
        (ReplicaGroups(3), ((0, 1, 2), (3, 4, 5))),
        (ReplicaGroups(2, is_orthogonal=True), ((0, 3), (1, 4), (2, 5))),
        (ReplicaGroups(3, is_orthogonal=True), ((0, 2, 4), (1, 3, 5))),
        (ReplicaGroups(1), ((0,), (1,), (2,), (3,), (4,), (5,))),
        (ReplicaGroups(0, is_orthogonal=True), ((0, 1, 2, 3, 4, 5),)),
    ],
)
def test_every_replica_is_in_one_group(groups, members):
    assert groups.members(6) == members
    assert sorted(replica for group in members for replica in group) == list(range(6))
    for group in members:
        assert [groups.rank(replica, 6) for replica in group] == list(range(len(group)))


@pytest.mark.parametrize("groups", [ReplicaGroups(2), ReplicaGroups(3, is_orthogonal=True), ReplicaGroups(6)])
def test_lists_of_replicas_describe_their_division(groups):
    assert ReplicaGroups.of(groups.members(6)).members(6) == groups.members(6)


@pytest.mark.parametrize("lists", [[], [[]], [[0, 1], [2]], [[1, 0], [2, 3]], [[0, 3], [1, 2]], [[2, 3], [0, 1]]])
def test_other_lists_are_refused(lists):
    with pytest.raises(ValueError, match="are irregular or empty; use groups of equal size"):
        ReplicaGroups.of(lists)


def test_a_size_that_does_not_divide_the_replicas_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"\(got 4\) does not evenly divide .* \(got 6\); use one of 1, 2, 3, 6"):
        ReplicaGroups(4).members(6)


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), (2.0, TypeError)])
def test_a_size_is_a_number_of_replicas(size, error):
    with pytest.raises(error, match="replica_group_size"):
        ReplicaGroups(size)
