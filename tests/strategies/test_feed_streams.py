"""Streams of infeeds: the elements of each replica, and refusals of ambiguous streams."""

import jax.numpy as jnp
import numpy as np
import pytest

import strategies
from strategies import FeedError, InfeedMode, InfeedQueue, OutfeedQueue, StrategyError, get_replica_context, loops
from strategies.errors import EndOfDataError

R = 4


def fed(strategy, infeed, steps=2):
    """Return the elements that each local replica gets in each step; replicas and instances wait for each other."""
    outfeed = OutfeedQueue()

    def body(total, x):
        outfeed.enqueue(x)
        return get_replica_context().all_reduce("sum", total + x)

    with infeed:
        strategy.run(lambda: loops.repeat(steps, body, [jnp.int32(0)], infeed))
    return outfeed.dequeue().reshape(steps, len(strategy.local_replicas)).tolist()


def numbers(count):
    return list(np.arange(count, dtype=np.int32))


def shard(context, count=R * 2):
    """Return the elements of an instance: blocks with one element per local replica."""
    local = context.num_replicas_in_sync // context.num_input_pipelines
    blocks = np.arange(count, dtype=np.int32).reshape(-1, context.num_input_pipelines, local)
    return list(blocks[:, context.input_pipeline_id].reshape(-1))


def joined(found):
    """Return the elements of all replicas, step by step."""
    return np.concatenate(found, axis=1).tolist()


IN_ORDER = np.arange(R * 2).reshape(2, R).tolist()


class TestIterables:
    @pytest.mark.parametrize("instances", [1, 2, pytest.param(4, marks=pytest.mark.complete)])
    def test_each_replica_takes_its_elements_of_the_whole_stream(self, on_instances, instances):
        found = on_instances(
            instances, R, lambda s: fed(s, InfeedQueue(numbers(R * 2), mode=InfeedMode.WHOLE)), mechanism="window"
        )
        assert joined(found) == IN_ORDER

    @pytest.mark.parametrize("instances", [1, 2, pytest.param(4, marks=pytest.mark.complete)])
    def test_local_replicas_take_all_elements_of_the_stream_of_an_instance(self, on_instances, instances):
        def on_one(strategy):
            context = strategies.InputContext(instances, strategy.instance_index, R)
            return fed(strategy, InfeedQueue(shard(context), mode=InfeedMode.INSTANCE))

        assert joined(on_instances(instances, R, on_one)) == IN_ORDER

    @pytest.mark.parametrize("instances", [1, 2, pytest.param(4, marks=pytest.mark.complete)])
    def test_iterables_of_a_function_are_streams_of_an_instance(self, on_instances, instances):
        def on_one(strategy):
            before = strategy.communicator.calls_made
            infeed = InfeedQueue(strategy.distribute_datasets_from_function(shard))
            assert strategy.communicator.calls_made == before
            return fed(strategy, infeed)

        assert joined(on_instances(instances, R, on_one)) == IN_ORDER

    def test_iterables_of_a_function_can_be_whole_streams(self, on_instances):
        def on_one(strategy):
            made = strategy.distribute_datasets_from_function(lambda context: numbers(R * 2))
            return fed(strategy, InfeedQueue(made, mode=InfeedMode.WHOLE))

        assert joined(on_instances(2, R, on_one)) == IN_ORDER

    def test_streams_without_a_mode_are_refused_on_several_instances(self, on_instances):
        message = r"runs on replicas \d to \d of 4, .*mode=InfeedMode.WHOLE\) or InfeedMode.INSTANCE"

        def on_one(strategy):
            infeed = InfeedQueue(numbers(R * 2))
            with pytest.raises(FeedError, match=message):
                fed(strategy, infeed)
            return fed(strategies.IPUStrategy(2), infeed)

        assert on_instances(2, R, on_one) == [[[0, 1], [2, 3]]] * 2

    def test_iterables_of_a_function_are_read_without_collective_calls(self, on_instances):
        """The prefetching thread makes no collective calls, which other instances would make in another order."""

        def on_one(strategy):
            infeed = InfeedQueue(strategy.distribute_datasets_from_function(lambda context: shard(context, 50 * R)))
            for _ in range(5):
                strategy.reduce("sum", 1.0)
            return fed(strategy, infeed, 50)

        assert joined(on_instances(2, R, on_one)) == np.arange(50 * R).reshape(50, R).tolist()

    def test_iterables_of_a_function_are_checked_like_others(self, on_instances):
        class Shape(tuple):
            shape = (None, 4)

        class Declared:
            element_spec = Shape()

            def __iter__(self):
                return iter(numbers(8))

        def on_one(strategy):
            with pytest.raises(ValueError, match="Output shape"):
                InfeedQueue(strategy.distribute_datasets_from_function(lambda context: Declared()))
            infeed = InfeedQueue(strategy.distribute_datasets_from_function(lambda context: iter(numbers(8))))
            fed(strategy, infeed)
            with pytest.raises(ValueError, match="a list_iterator, which can be iterated only once"):
                infeed.start()

        on_instances(2, R, on_one)

    def test_iterables_end_with_the_first_incomplete_round(self, on_instances):
        def on_one(strategy):
            infeed = InfeedQueue(numbers(5), mode=InfeedMode.INSTANCE)
            with pytest.raises(EndOfDataError):
                fed(strategy, infeed, 3)

        on_instances(2, R, on_one)


class TestPerReplica:
    @pytest.mark.parametrize("instances", [1, 2, pytest.param(4, marks=pytest.mark.complete)])
    def test_each_replica_gets_the_elements_of_its_own_iterable(self, on_instances, instances):
        def on_one(strategy):
            return fed(strategy, InfeedQueue(strategy.per_replica(lambda r: np.int32([r, R + r, -1]))))

        assert joined(on_instances(instances, R, on_one)) == IN_ORDER

    def test_an_infeed_restarts_unless_an_iterable_is_an_iterator(self, strategy):
        infeed = InfeedQueue(strategy.per_replica(lambda r: numbers(2)))
        for _ in range(2):
            assert fed(strategy, infeed) == [[0] * R, [1] * R]
            infeed.start()
        infeed = InfeedQueue(strategy.per_replica(lambda r: iter(numbers(2))))
        fed(strategy, infeed)
        with pytest.raises(ValueError, match="its data set is a PerReplica, which can be iterated only once"):
            infeed.start()

    def test_an_infeed_ends_with_the_shortest_iterable(self, strategy):
        infeed = InfeedQueue(strategy.per_replica(lambda r: numbers(4 - r // 3)))
        with pytest.raises(EndOfDataError):
            fed(strategy, infeed, 4)

    def test_iterables_of_other_replicas_are_refused(self, strategy, on_instances):
        with pytest.raises(FeedError, match=r"iterables for the replicas \[0, 1\], but this program runs on 4"):
            fed(strategy, InfeedQueue(strategies.IPUStrategy(2).per_replica(lambda r: numbers(2))))
        with pytest.raises(FeedError, match="iterables for 3 replicas, but this program runs on 4 replicas"):
            fed(strategy, InfeedQueue(strategies.PerReplica([numbers(2)] * 3)))

    def test_values_that_are_no_iterables_are_refused(self, strategy):
        with pytest.raises(TypeError, match="the data set is a int; an infeed needs an iterable"):
            InfeedQueue(strategy.per_replica(int))


class TestRefusals:
    """Sources whose elements do not belong to one replica each."""

    def test_elements_that_are_values_per_replica(self, strategy):
        with pytest.raises(TypeError, match="elements of the data set are PerReplica.*give the infeed one PerReplica"):
            InfeedQueue(strategy.per_replica(np.int32) for _ in range(3))

    def test_batches_of_a_distributed_data_set(self, strategy):
        dataset = strategy.distribute_dataset(np.arange(48, dtype=np.int32), batch_size=3)
        with pytest.raises(TypeError, match="are batches for all local replicas.* give the infeed the result of distr"):
            InfeedQueue(dataset.epoch(0))
        with pytest.raises(TypeError, match="are batches for all local replicas"):
            InfeedQueue({"x": batch} for batch in dataset.epoch(0))

    def test_batches_whose_reading_is_a_collective_call(self, on_instances):
        def on_one(strategy):
            made = strategy.distribute_datasets_from_function(shard)
            calls = strategy.communicator.calls_made
            with pytest.raises(StrategyError, match="batch 0 of the data set is read ahead in a thread, but taking"):
                InfeedQueue({"x": x} for x in made)
            again = strategy.distribute_dataset(made, batch_size=1)
            with pytest.raises(StrategyError, match="batch 0 of the data set is read ahead in a thread"):
                next(again.epoch(0))
            streams = strategy.distribute_dataset(numbers(8), batch_size=1)
            with pytest.raises(StrategyError, match="give the infeed the iterable itself, and its mode"):
                InfeedQueue(streams)
            return strategy.communicator.calls_made - calls

        on_instances(2, R, on_one)

    @pytest.mark.parametrize("mode", InfeedMode)
    def test_a_mode_for_elements_that_belong_to_each_replica(self, strategy, mode):
        dataset = strategy.distribute_dataset(np.arange(48, dtype=np.int32), batch_size=3)
        for own, name in ((dataset, "DistributedDataset"), (strategy.per_replica(lambda r: [r]), "PerReplica")):
            with pytest.raises(ValueError, match=f"a {name} has the elements of each local replica, but mode"):
                InfeedQueue(own, mode=mode)

    def test_unknown_modes(self):
        with pytest.raises(TypeError, match="mode is 'whole'; use InfeedMode.WHOLE"):
            InfeedQueue([np.int32(1)], mode="whole")

    def test_values_per_replica_in_a_distributed_data_set(self, strategy):
        values = [strategy.per_replica(np.int32) for _ in range(8)]
        with pytest.raises(ValueError, match="elements are PerReplica.*give distribute_dataset one PerReplica"):
            next(strategy.distribute_dataset(values, batch_size=1).epoch(0))
