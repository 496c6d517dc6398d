"""Instances with different amounts of data: they end at the same step, with a message and no deadlock."""

import logging
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from feed_data import Unsized

import strategies
from collectives import LayoutMismatchError
from strategies import InputContext, PerReplica

WARNING = (
    "instance 1 ran out of data after {} steps of {}: all instances end it there, and the rest on {} is not used; "
    "give all instances the same number of batches"
)


class UnsizedShards:
    """A source whose shard r has 4 + 3 r elements and no length."""

    def shard(self, n, i):
        return Unsized([i] * (4 + 3 * i))


class CountedShards(UnsizedShards):
    """The same with elements that differ."""

    def shard(self, n, i):
        return Unsized([100 * i + number for number in range(4 + 3 * i)])


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def steps_of(dataset, epochs=1):
    return [len(list(dataset.epoch(epoch))) for epoch in range(epochs)]


class TestFromAFunction:
    @pytest.mark.parametrize("lengths", [(5, 3), (9, 3, 4), (7, 3, 3, 7)])
    def test_all_instances_end_with_the_first_one(self, on_instances, caplog, lengths):
        def program(strategy):
            return list(strategy.distribute_datasets_from_function(lambda context: make(context, lengths)))

        instances = len(lengths)
        assert on_instances(instances, instances, program) == [[0, 1, 2]] * instances
        assert len(warnings_of(caplog)) == instances
        assert all(" ran out of data after 3 steps of the data set: " in line for line in warnings_of(caplog))

    def test_the_warning_names_the_instance_that_ended_and_the_remaining_data(self, on_instances, caplog):
        def program(strategy):
            return len(list(strategy.distribute_datasets_from_function(lambda context: make(context, (9, 3, 4)))))

        on_instances(3, 3, program)
        assert set(warnings_of(caplog)) == {WARNING.format(3, "the data set", "instances 0, 2")}

    @pytest.mark.parametrize("length", [0, 4])
    def test_equal_amounts_of_data_give_no_warning(self, on_instances, caplog, length):
        def program(strategy):
            return list(strategy.distribute_datasets_from_function(lambda context: range(length)))

        assert on_instances(2, 2, program) == [list(range(length))] * 2
        assert warnings_of(caplog) == []

    def test_one_instance_gets_the_data_set_unchanged(self):
        made = [1, 2, 3]
        assert strategies.IPUStrategy(2).distribute_datasets_from_function(lambda context: made) is made

    def test_the_data_set_can_be_iterated_again(self, on_instances):
        def program(strategy):
            dataset = strategy.distribute_datasets_from_function(lambda context: make(context, (2, 3)))
            return [list(dataset), list(dataset)]

        assert on_instances(2, 2, program) == [[[0, 1], [0, 1]]] * 2

    def test_training_on_the_data_set_gives_the_same_state_everywhere(self, on_instances):
        def program(strategy):
            trainer = strategies.Trainer(strategy, lambda v, batch, key: v["w"] * batch.mean(), optax.sgd(1.0))
            state = trainer.init({"w": jnp.float32(0)})
            for batch in strategy.distribute_datasets_from_function(batches_of_ones):
                state, _ = trainer.step(state, batch)
            return state.step, float(state.variables["w"])

        assert on_instances(2, 4, program) == [(3, -3.0)] * 2

    def test_a_function_that_fails_on_one_instance_is_the_error(self, on_instances):
        def make_or_fail(context):
            yield 0
            if context.input_pipeline_id == 1:
                raise OSError("no such file")
            yield 1

        with pytest.raises(OSError, match="no such file"):
            on_instances(2, 2, lambda strategy: list(strategy.distribute_datasets_from_function(make_or_fail)))


def make(context, lengths):
    return range(lengths[context.input_pipeline_id])


def batches_of_ones(context):
    assert context == InputContext(2, context.input_pipeline_id, 4)
    return [np.ones(2, np.float32)] * (3 + 2 * context.input_pipeline_id)


class TestDistributeDataset:
    def test_shards_of_unknown_lengths(self, on_instances, caplog):
        """Instance 0 has 4 and 7 elements, instance 1 has 10 and 13, in batches of 2."""

        def program(strategy):
            return steps_of(strategy.distribute_dataset(UnsizedShards(), batch_size=2), epochs=2)

        assert on_instances(2, 4, program) == [[2, 2]] * 2
        assert len(warnings_of(caplog)) == 4
        assert " ran out of data after 2 steps of epoch 1: " in warnings_of(caplog)[-1]

    @pytest.mark.parametrize("instances", [1, 2, 4])
    def test_the_number_of_steps_does_not_depend_on_the_instances(self, on_instances, instances):
        def program(strategy):
            return steps_of(strategy.distribute_dataset(UnsizedShards(), batch_size=2))

        assert on_instances(instances, 4, program) == [[2]] * instances

    @pytest.mark.parametrize("prefetch", [0, 3])
    def test_iterables_of_each_replica(self, on_instances, caplog, prefetch):
        def program(strategy):
            source = PerReplica([Unsized(range(8 - 4 * strategy.instance_index))])
            return steps_of(strategy.distribute_dataset(source, batch_size=2, prefetch=prefetch))

        assert on_instances(2, 2, program) == [[2]] * 2
        assert set(warnings_of(caplog)) == {WARNING.format(2, "epoch 0", "instance 0")}

    def test_lists_of_different_lengths(self, on_instances, caplog):
        def program(strategy):
            return steps_of(strategy.distribute_dataset(list(range(12 - 5 * strategy.instance_index)), batch_size=2))

        assert on_instances(2, 2, program) == [[1]] * 2
        assert set(warnings_of(caplog)) == {WARNING.format(1, "epoch 0", "instance 0")}

    def test_the_position_is_at_the_next_epoch_everywhere(self, on_instances):
        def program(strategy):
            dataset = strategy.distribute_dataset(UnsizedShards(), batch_size=1)
            steps_of(dataset)
            return dataset.position().epoch, dataset.position().step

        assert on_instances(2, 2, program) == [(1, 0)] * 2

    def test_a_restored_position_is_counted(self, on_instances, caplog):
        def program(strategy):
            dataset = strategy.distribute_dataset(UnsizedShards(), batch_size=1)
            stream = dataset.epoch(0)
            next(stream)
            stream.close()
            dataset.restore(dataset.position())
            return steps_of(dataset)

        assert on_instances(2, 2, program) == [[3]] * 2
        assert "instance 0 ran out of data after 4 steps of epoch 0" in warnings_of(caplog)[0]

    def test_instances_at_different_steps_are_an_error_on_all(self, on_instances):
        def program(strategy):
            dataset = strategy.distribute_dataset(UnsizedShards(), batch_size=1)
            stream = dataset.epoch(strategy.instance_index)
            with pytest.raises(LayoutMismatchError, match="batch 0 of epoch 0.* batch 0 of epoch 1"):
                next(stream)

        on_instances(2, 2, program)

    def test_arrays_need_no_communication(self, on_instances):
        def program(strategy):
            before = strategy.communicator.calls_made
            steps = steps_of(strategy.distribute_dataset(np.arange(20), batch_size=2))
            return steps, strategy.communicator.calls_made - before

        assert on_instances(2, 2, program) == [([5], 0)] * 2


class TestPadding:
    """Padding: it continues until the last instance ends, and drops nothing."""

    @pytest.mark.parametrize("instances", [1, 2, 4])
    def test_every_element_of_shards_of_unknown_lengths_counts_once(self, on_instances, caplog, instances):
        def program(strategy):
            dataset = strategy.distribute_dataset(UnsizedShards(), batch_size=2, remainder="pad")
            batches = [(np.asarray(batch.values), np.asarray(batch.mask)) for batch in dataset.epoch(0)]
            assert (dataset.position().epoch, dataset.position().step) == (1, 0)
            return np.concatenate([values[mask] for values, mask in batches]).tolist(), len(batches)

        found = on_instances(instances, 4, program)
        assert sorted(sum((elements for elements, _ in found), [])) == [0] * 4 + [1] * 7 + [2] * 10 + [3] * 13
        assert {steps for _, steps in found} == {7}
        assert warnings_of(caplog) == []

    @pytest.mark.parametrize("start", [0, 3, 7])
    def test_padding_does_not_depend_on_the_instances(self, on_instances, start):
        """The rows of each replica are the same, also from a step on at which some instances have only padding."""

        def program(strategy):
            dataset = strategy.distribute_dataset(CountedShards(), batch_size=2, remainder="pad")
            dataset.restore(replace(dataset.position(), step=start))
            batches = [(np.asarray(batch.values), np.asarray(batch.mask)) for batch in dataset.epoch(0)]
            split = [[np.split(each, len(strategy.local_replicas)) for each in batch] for batch in batches]
            return [[(v.tolist(), m.tolist()) for v, m in zip(values, masks, strict=True)] for values, masks in split]

        (whole,) = on_instances(1, 4, program)
        assert len(whole) == 7 - start
        for instances in (2, 4):
            by_instance = on_instances(instances, 4, program)
            assert [sum(of_step, []) for of_step in zip(*by_instance, strict=True)] == whole

    def test_an_instance_with_nothing_to_repeat_is_an_error_on_all(self, on_instances):
        def program(strategy):
            source = PerReplica([Unsized([1, 2] if strategy.is_chief else [])])
            dataset = strategy.distribute_dataset(source, batch_size=2, remainder="pad")
            with pytest.raises(ValueError, match="instance 1 of 2 can read nothing at step 0 of epoch 0, where others"):
                next(dataset.epoch(0))

        on_instances(2, 2, program)
