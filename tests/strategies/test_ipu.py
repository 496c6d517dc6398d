"""The strategy of one process that drives all replicas."""

import numpy as np
import pytest

import strategies


def test_it_is_the_only_instance_with_all_replicas():
    strategy = strategies.IPUStrategy(num_replicas=3)
    assert (strategy.num_instances, strategy.instance_index, strategy.num_replicas_in_sync) == (1, 0, 3)
    assert strategy.local_replicas == range(3)
    assert not strategy.can_carry_on
    assert not strategy.replicas.streams_gradients


def test_it_writes_checkpoints_and_summaries_and_makes_variables():
    extended = strategies.IPUStrategy().extended
    assert (extended.should_checkpoint, extended.should_save_summary) == (True, True)
    assert (extended.experimental_between_graph, extended.experimental_should_init) == (True, True)


def test_reductions_are_those_of_its_replicas():
    strategy = strategies.IPUStrategy(3)
    values = strategy.per_replica(lambda replica: np.float32(replica + 1))
    assert (float(strategy.reduce("sum", values)), float(strategy.reduce("mean", values))) == (6, 2)


@pytest.mark.parametrize(("number", "error"), [(0, ValueError), (-2, ValueError), (1.5, TypeError)])
def test_there_is_at_least_one_replica(number, error):
    with pytest.raises(error, match="num_replicas"):
        strategies.IPUStrategy(number)
