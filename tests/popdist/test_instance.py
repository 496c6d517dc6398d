from __future__ import annotations

import dataclasses

import pytest

from popdist.errors import InstanceError, PopDistError
from popdist.instance import Instance, this_host

SECOND_OF_THREE = Instance(
    index=1, count=3, local_replicas=2, replica_offset=2, total_replicas=6, local_index=1, launcher="poprun"
)


def test_an_instance_owns_a_block_of_global_replicas():
    assert SECOND_OF_THREE.local_replica_range == range(2, 4)


def test_only_instance_0_leads():
    first = dataclasses.replace(SECOND_OF_THREE, index=0, local_index=0, replica_offset=0)
    assert first.is_leader
    assert not SECOND_OF_THREE.is_leader


def test_the_default_host_is_the_local_machine():
    assert SECOND_OF_THREE.host == this_host()
    assert dataclasses.replace(SECOND_OF_THREE, host="node3").host == "node3"


def test_an_instance_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SECOND_OF_THREE.index = 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": 3}, r"index is 3; it must lie in 0\.\.2"),
        ({"index": -1}, r"index is -1"),
        ({"local_index": 3}, r"local_index is 3"),
        ({"count": 0}, r"count is 0; it must be at least 1"),
        ({"local_replicas": 0}, r"local_replicas is 0"),
        ({"ipus_per_replica": 0}, r"ipus_per_replica is 0"),
        ({"replica_offset": 5}, r"replicas 5\.\.6 do not lie in 0\.\.5"),
        ({"replica_offset": 4}, r"starts at replica 2, not 4"),
        ({"local_replicas": 1}, r"do not make 6"),
        ({"launcher": "torchrun"}, r"known launchers: poprun, mpirun, slurm, single"),
    ],
)
def test_impossible_numbers_are_refused(change, message):
    with pytest.raises(InstanceError, match=message):
        dataclasses.replace(SECOND_OF_THREE, **change)


def test_an_instance_error_is_a_popdist_error_and_a_value_error():
    assert issubclass(InstanceError, PopDistError)
    assert issubclass(InstanceError, ValueError)


def test_uneven_instances_may_drive_different_numbers_of_replicas():
    uneven = dataclasses.replace(SECOND_OF_THREE, local_replicas=3, replica_offset=1, uniform=False)
    assert uneven.local_replica_range == range(1, 4)
