"""Iterators among the arguments of a program: three runs give the original's elements, not the first one thrice."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strategies
from strategies import EndOfDataError, FeedError, InfeedMode, InfeedQueue, loops

ELEMENTS = [np.float32(number) for number in range(24)]


def two_of(iterator):
    """Draw two elements, as the original writes it."""
    total = jnp.zeros(())
    for _ in range(2):
        total += next(iterator)
    return total


def in_a_loop(iterator):
    return loops.repeat(2, lambda total: total + next(iterator), [jnp.zeros(())])


def three_runs(strategy, function, iterator):
    return [[float(value) for value in strategy.run(function, (iterator,))] for _ in range(3)]


def elements_of(kind):
    return {
        "list": iter(ELEMENTS),
        "generator": (element for element in ELEMENTS),
        "infeed": iter(InfeedQueue(ELEMENTS)),
        "array": iter(np.float32(ELEMENTS)),
    }[kind]


@pytest.mark.parametrize("function", [two_of, in_a_loop])
@pytest.mark.parametrize("kind", ["list", "generator", "infeed", "array"])
def test_a_run_continues_after_the_last_one(kind, function):
    assert three_runs(strategies.IPUStrategy(1), function, elements_of(kind)) == [[1], [5], [9]]


def test_replica_r_draws_element_k_times_replicas_plus_r():
    runs = three_runs(strategies.IPUStrategy(2), two_of, iter(ELEMENTS))
    assert runs == [[0 + 2, 1 + 3], [4 + 6, 5 + 7], [8 + 10, 9 + 11]]


def test_the_elements_are_the_same_for_every_number_of_instances(on_instances):
    def run(strategy):
        return three_runs(strategy, two_of, iter(InfeedQueue(ELEMENTS, mode=InfeedMode.WHOLE)))

    alone = on_instances(1, 2, run)[0]
    halves = on_instances(2, 2, run)
    assert [first + second for first, second in zip(*halves, strict=True)] == alone


def test_a_distributed_data_set_gives_each_replica_its_part_epoch_after_epoch(on_instances):
    def run(strategy):
        dataset = strategy.distribute_dataset(np.float32(ELEMENTS[:8]), batch_size=2, shuffle=False)
        iterator = iter(dataset)
        return [np.asarray(list(strategy.run(lambda one: next(one), (iterator,)))).tolist() for _ in range(3)]

    assert on_instances(1, 2, run) == [[[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [2, 3]]]]
    assert on_instances(2, 2, run) == [[[[0, 1]], [[4, 5]], [[0, 1]]], [[[2, 3]], [[6, 7]], [[2, 3]]]]


def test_data_sets_from_a_function_can_be_drawn_from(on_instances):
    def run(strategy):
        own = ELEMENTS[strategy.instance_index :: strategy.num_instances]
        made = strategy.distribute_datasets_from_function(lambda context: own)
        return three_runs(strategy, two_of, iter(made))

    assert on_instances(2, 2, run) == [[[2], [10], [18]], [[4], [12], [20]]]


def test_an_iterator_can_stand_anywhere_in_the_arguments():
    def function(x, data):
        return x + next(data["train"])["a"]

    strategy = strategies.IPUStrategy(2)
    iterator = iter([{"a": element} for element in ELEMENTS])
    own = strategy.per_replica(lambda replica: np.float32(100 * replica))
    found = strategy.run(function, (own,), {"data": {"train": iterator}})
    assert [float(value) for value in found] == [0, 101]


def test_programs_are_compiled_once_for_all_iterators_of_such_elements():
    traces = []

    def function(iterator):
        traces.append(1)
        return next(iterator)

    strategy = strategies.IPUStrategy(1)
    found = [float(strategy.run(function, (iter(ELEMENTS[start:]),)).values[0]) for start in (3, 5)]
    assert found == [3, 5]
    assert len(traces) == 1


def test_the_end_of_an_iterator_is_an_error_of_the_program():
    strategy = strategies.IPUStrategy(1)
    iterator = iter(ELEMENTS[:3])
    strategy.run(two_of, (iterator,))
    with pytest.raises(EndOfDataError, match="out of range"):
        strategy.run(two_of, (iterator,))


def test_an_infeed_of_a_closure_can_be_drawn_from():
    iterator = iter(InfeedQueue(ELEMENTS))
    strategy = strategies.IPUStrategy(1)
    assert [float(strategy.run(lambda: two_of(iterator)).values[0]) for _ in range(3)] == [1, 5, 9]


def test_a_loop_without_an_end_is_refused():
    with pytest.raises(RuntimeError, match="never ends while a program is compiled"):
        strategies.IPUStrategy(1).run(lambda iterator: list(iterator), (iter(ELEMENTS),))


def test_dtypes_that_a_feed_does_not_take_are_refused():
    with pytest.raises(TypeError, match="Unsupported datatype int64"):
        strategies.IPUStrategy(1).run(two_of, (itertools.count(),))


def test_elements_are_not_for_python():
    strategy = strategies.IPUStrategy(1)
    for iterator in (iter(InfeedQueue(ELEMENTS)), iter(strategy.distribute_dataset(np.float32(ELEMENTS), 1))):
        with pytest.raises(RuntimeError, match="Accessing dataset elements"):
            next(iterator)


def test_a_data_set_in_a_closure_is_refused():
    strategy = strategies.IPUStrategy(1)
    iterator = iter(strategy.distribute_dataset(np.float32(ELEMENTS), 1))
    with pytest.raises(RuntimeError, match="pass the iterator among the arguments|pass it among"):
        strategy.run(lambda: next(iterator))


def test_several_instances_need_a_mode_for_their_elements(on_instances):
    def run(strategy):
        with pytest.raises(FeedError, match="choose with"):
            strategy.run(two_of, (iter(ELEMENTS),))

    on_instances(2, 2, run)


def test_six_equal_elements_are_drawn_six_times():
    """Equal elements cannot be distinguished by value from one element used six times."""
    strategy = strategies.IPUStrategy(1)
    found = strategy.run(lambda one: sum(next(one) for _ in range(6)), (iter([np.float32(1)] * 6),))
    assert jax.tree.map(float, found.values) == (6.0,)
