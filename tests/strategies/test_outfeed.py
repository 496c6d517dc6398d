"""Outfeeds: dequeued values, their shapes and their order."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feed_data import Increasing

import strategies
from strategies import FeedError, InfeedQueue, OutfeedMode, OutfeedQueue, get_replica_context, loops
from strategies.data.layout import Replication

LIMIT_S = 60


def counting(outfeed, start=1.0):
    """Return a function that enqueues v and adds 1 to it."""

    def body(v):
        outfeed.enqueue(v)
        return v + 1

    return lambda n=20: loops.repeat(n, body, [np.float32(start)])


def both(x):
    return x, (x + 10) / 2


class TestAll:
    """Mode ALL of outfeeds."""

    def test_all_values_are_dequeued(self):
        outfeed = OutfeedQueue()
        assert counting(outfeed)() == 21
        np.testing.assert_array_equal(outfeed.dequeue(), np.arange(1, 21))

    def test_nested_loops_enqueue_into_their_own_queues(self):
        inner, outer = OutfeedQueue(), OutfeedQueue()

        def count(v):
            inner.enqueue(v)
            return v + 1

        def body(v):
            outer.enqueue(v)
            return loops.repeat(10, count, [v])

        loops.repeat(10, body, [0])
        np.testing.assert_array_equal(outer.dequeue(), np.arange(0, 100, 10))
        np.testing.assert_array_equal(inner.dequeue(), np.arange(100))

    def test_values_keep_their_shape(self):
        outfeed = OutfeedQueue()

        def body(v, x):
            v = v + x
            outfeed.enqueue(v)
            return v

        ones = np.ones((4, 4), np.float32)
        result = loops.repeat(20, body, [ones], InfeedQueue(Increasing(10)))
        found = outfeed.dequeue()
        assert found.shape == (20, 4, 4)
        np.testing.assert_array_equal(found[-1], result)
        np.testing.assert_array_equal(found[5], 16 * ones)

    @pytest.mark.parametrize("kind", [tuple, list])
    def test_tuples_stay_tuples(self, kind):
        outfeed = OutfeedQueue()

        def body(v, x, y):
            v = v + x + y
            outfeed.enqueue(kind((v, x, y)))
            return v

        loops.repeat(5, body, [0.0], InfeedQueue(Increasing(3, (), change=both)))
        found = outfeed.dequeue()
        assert type(found) is kind
        assert [list(leaf) for leaf in found] == [[5, 11.5, 19.5, 24.5, 31], [0, 1, 2, 0, 1], [5, 5.5, 6, 5, 5.5]]

    def test_dictionaries_stay_dictionaries(self):
        outfeed = OutfeedQueue()

        def body(v, x, y):
            outfeed.enqueue({"v": v, "in": {"x": x, "y": y}})
            return v + x + y

        loops.repeat(3, body, [0.0], InfeedQueue(Increasing(3, (), change=both)))
        found = outfeed.dequeue()
        assert list(found["v"]) == [0, 5, 11.5]
        assert list(found["in"]["y"]) == [5, 5.5, 6]

    def test_losses_of_a_training_are_dequeued(self):
        outfeed = OutfeedQueue()
        loops.repeat(300, self.training(outfeed), [0.0, 0.0], InfeedQueue(Increasing(10, (3,))))
        losses = outfeed.dequeue()
        assert losses.shape == (300,)
        assert losses[-10:].sum() < losses[:10].sum() / 10

    @staticmethod
    def training(outfeed):
        def body(w, b, x):
            loss, (dw, db) = jax.value_and_grad(lambda w, b: jnp.mean((w * x + b - 2 * x - 1) ** 2), (0, 1))(w, b)
            outfeed.enqueue(loss)
            return w - 0.01 * dw, b - 0.01 * db

        return body

    def test_values_of_two_programs_can_be_dequeued_later(self):
        one, other = OutfeedQueue(), OutfeedQueue()
        counting(one)(5)
        counting(other, 4.0)(7)
        np.testing.assert_array_equal(one.dequeue(), np.arange(5) + 1)
        np.testing.assert_array_equal(other.dequeue(), np.arange(7) + 4)

    def test_python_numbers_and_variables_can_be_enqueued(self, strategy):
        outfeed = OutfeedQueue()
        variable = strategy.variable(np.float32([2]))
        loops.repeat(5, lambda: outfeed.enqueue({1: 1, 2: variable}), None)
        found = outfeed.dequeue()
        assert found[1].tolist() == [1] * 5
        assert found[2].tolist() == [[2.0]] * 5

    def test_two_programs_can_enqueue_different_shapes(self):
        found = []
        for size in (3, 4):
            outfeed = OutfeedQueue()
            loops.repeat(1, lambda x, queue=outfeed: queue.enqueue(x), infeed=InfeedQueue(Increasing(2, (1, size))))
            found.append(outfeed.dequeue().shape)
        assert found == [(1, 1, 3), (1, 1, 4)]

    def test_values_are_dequeued_only_once(self):
        outfeed = OutfeedQueue()
        counting(outfeed)(3)
        assert len(outfeed.dequeue()) == 3
        assert outfeed.dequeue().shape == (0,)

    @pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int32, np.float16, jnp.bfloat16, np.float32])
    def test_values_keep_their_bits(self, dtype, bits):
        outfeed = OutfeedQueue()
        value = np.random.default_rng(0).integers(0, 2, (3, 70_000)).astype(dtype)  # more than one piece
        loops.repeat(2, lambda: outfeed.enqueue(value))
        assert bits(outfeed.dequeue()) == bits(np.stack([value, value]))


class TestLast:
    """Mode LAST of outfeeds."""

    def test_the_last_values_have_no_axis_of_their_own(self):
        outfeed = OutfeedQueue(OutfeedMode.LAST)

        def body(v, x, y):
            v = v + x + y
            outfeed.enqueue((v, x, y))
            return v

        loops.repeat(5, body, [0.0], InfeedQueue(Increasing(3, (), change=both)))
        assert outfeed.dequeue() == (31, 1, 5.5)
        assert outfeed.dequeue() == (31, 1, 5.5)

    def test_the_last_values_keep_their_names(self):
        outfeed = OutfeedQueue(OutfeedMode.LAST)
        loops.repeat(
            4, lambda x, y: outfeed.enqueue({"x": x, "y": y}), infeed=InfeedQueue(Increasing(3, (), change=both))
        )
        assert outfeed.dequeue() == {"x": 0, "y": 5}

    def test_the_last_scalar_is_one_of_numpy(self):
        outfeed = OutfeedQueue(OutfeedMode.LAST)
        every = OutfeedQueue()
        infeed = InfeedQueue(Increasing(10, (3,)))
        loops.repeat(20, TestAll.training(outfeed), [0.0, 0.0], infeed)
        infeed.delete()
        infeed.start()
        loops.repeat(20, TestAll.training(every), [0.0, 0.0], infeed)
        assert type(outfeed.dequeue()) is np.float32
        assert outfeed.dequeue() == every.dequeue()[-1]

    def test_dequeuing_before_the_first_value_is_refused(self, strategy):
        outfeed = OutfeedQueue(OutfeedMode.LAST)
        with pytest.raises(FeedError, match="Trying to get the last value from an outfeed queue"):
            outfeed.dequeue()
        counting(outfeed)(0)
        with pytest.raises(FeedError, match="Trying to get the last value from an outfeed queue"):
            outfeed.dequeue()

    def test_the_last_values_of_several_replicas_have_an_axis_for_them(self, strategy):
        outfeed = OutfeedQueue(OutfeedMode.LAST)
        strategy.run(lambda: outfeed.enqueue(get_replica_context().replica_id_in_sync_group * jnp.ones(3)))
        np.testing.assert_array_equal(outfeed.dequeue(), np.repeat(np.arange(4.0), 3).reshape(4, 3))


class TestIteration:
    def test_iterating_in_mode_last_is_refused(self):
        assert iter(OutfeedQueue()) is not None
        with pytest.raises(FeedError, match="mode LAST cannot be iterated"):
            iter(OutfeedQueue(OutfeedMode.LAST))

    @pytest.mark.parametrize("replicas", [1, 2])
    def test_iteration_gives_available_values_and_continues_later(self, replicas):
        strategy = strategies.IPUStrategy(replicas)
        outfeed = OutfeedQueue()
        values = iter(outfeed)
        with pytest.raises(StopIteration):
            next(values)

        def body(x, y):
            outfeed.enqueue((x, y))
            return x + 1, y * 2

        def run(n, x, y):
            return strategy.run(lambda n, x, y: loops.repeat(n, body, [x, y]), args=(np.int32(n), x, y))[0]

        x, y = np.float32(1), np.float32([2, 2])
        found = []
        for n in (10, 0, 5):
            x, y = run(n, x, y)
            now = list(values)
            assert len(now) == n
            found += now
        lead = (2,) if replicas == 2 else ()
        for k, (x, y) in enumerate(found):
            np.testing.assert_array_equal(x, np.full(lead, 1 + k))
            np.testing.assert_array_equal(y, np.full((*lead, 2), 2 * 2.0**k))

    def test_another_thread_reads_values_in_order_while_the_program_runs(self, strategy):
        """The program does not end before its first values have been read."""
        outfeed = OutfeedQueue()
        found = []
        has_read = threading.Event()

        def read():
            while len(found) < 1000:
                for value in outfeed:
                    found.append(value["v"])
                    has_read.set()

        def elements():
            for k in range(4000):
                if k == 2000:
                    assert has_read.wait(LIMIT_S)
                yield np.float32(k // 4)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        infeed = InfeedQueue(elements())
        strategy.run(lambda: loops.repeat(1000, lambda x: outfeed.enqueue({"v": x}), infeed=infeed))
        reader.join(LIMIT_S)
        np.testing.assert_array_equal(np.stack(found), np.repeat(np.arange(1000), 4).reshape(1000, 4))

    def test_another_thread_reads_an_empty_list_before_the_program(self):
        outfeed = OutfeedQueue()
        with pytest.raises(ValueError, match="no program enqueues"):
            outfeed.dequeue()
        found = []
        thread = threading.Thread(target=lambda: found.append(outfeed.dequeue()))
        thread.start()
        thread.join(LIMIT_S)
        assert found == [[]]


class TestReplicas:
    def test_replicas_have_an_axis_of_their_own(self):
        outfeed = OutfeedQueue()
        infeed = InfeedQueue(np.arange(1, 5, dtype=np.float32))
        strategies.IPUStrategy(2).run(lambda: loops.repeat(2, lambda x: outfeed.enqueue(x), infeed=infeed))
        np.testing.assert_array_equal(outfeed.dequeue(), [[1, 2], [3, 4]])

    @pytest.mark.parametrize("instances", [1, 2, pytest.param(4, marks=pytest.mark.complete)])
    def test_an_instance_has_the_values_of_its_own_replicas(self, on_instances, instances):
        def on_one(strategy):
            outfeed = OutfeedQueue()

            def body(v):
                outfeed.enqueue(v)
                return v + 1

            strategy.run(lambda: loops.repeat(3, body, [10 * get_replica_context().replica_id_in_sync_group]))
            return outfeed.dequeue()

        found = on_instances(instances, 4, on_one)
        local = 4 // instances
        assert all(array.shape == ((3, local) if local > 1 else (3,)) for array in found)
        joined = np.concatenate([array.reshape(3, local) for array in found], axis=1)
        np.testing.assert_array_equal(joined, np.arange(3)[:, None] + 10 * np.arange(4))

    def test_replicas_that_take_turns_on_a_device_keep_their_places(self):
        outfeed = OutfeedQueue()
        strategies.IPUStrategy(12).run(
            lambda: loops.repeat(
                3, lambda v: (v + 100, outfeed.enqueue(v)), [get_replica_context().replica_id_in_sync_group]
            )
        )
        np.testing.assert_array_equal(outfeed.dequeue(), 100 * np.arange(3)[:, None] + np.arange(12))

    def test_the_next_program_can_have_other_replicas(self):
        outfeed = OutfeedQueue()
        for replicas in (2, 4):
            strategies.IPUStrategy(replicas).run(counting(outfeed))
            assert outfeed.dequeue().shape == (20, replicas)

    def test_values_of_programs_with_other_replicas_are_not_mixed(self):
        outfeed = OutfeedQueue()
        strategies.IPUStrategy(2).run(counting(outfeed))
        with pytest.raises(FeedError, match="dequeue them first"):
            strategies.IPUStrategy(4).run(counting(outfeed))
        assert outfeed.dequeue().shape == (20, 2)

    def test_replicas_enqueue_in_a_loss_function(self, strategy):
        import optax

        outfeed = OutfeedQueue()

        def loss_fn(variables, batch, key):
            loss = jnp.mean((variables["w"] - batch) ** 2)
            outfeed.enqueue({"loss": loss, "batch": batch})
            return loss

        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        state = trainer.init({"w": jnp.zeros(())})
        dataset = strategy.distribute_dataset(np.arange(32, dtype=np.float32), batch_size=2, shuffle=False)
        for batch in dataset.epoch(0):
            state, metrics = trainer.step(state, batch)
        found = outfeed.dequeue()
        np.testing.assert_array_equal(found["batch"].reshape(-1), np.arange(32))
        assert found["loss"][-1].mean() == pytest.approx(metrics["loss"])


class TestPrograms:
    @pytest.mark.parametrize("place", ["one body", "two loops", "loop and function"])
    def test_a_second_enqueue_in_a_program_is_refused(self, strategy, place):
        outfeed = OutfeedQueue()

        def body(v):
            outfeed.enqueue(v)
            if place == "one body":
                outfeed.enqueue(v)
            return v + 1

        def program():
            loops.repeat(2, body, [0])
            if place == "two loops":
                loops.repeat(2, lambda v: body(v), [0])
            outfeed.enqueue(1)

        with pytest.raises(ValueError, match="An outfeed can only be enqueued once"):
            strategy.run(program)

    def test_a_program_knows_whether_it_enqueues(self, strategy):
        outfeed = OutfeedQueue()
        seen = []

        def program():
            seen.append(outfeed.enqueued)
            counting(outfeed)()
            seen.append(outfeed.enqueued)

        assert not outfeed.enqueued
        strategy.run(program)
        strategy.run(lambda: program())
        assert seen == [False, True] * 2
        assert outfeed.enqueued
        assert outfeed.dequeue().shape == (40, 4)

    def test_programs_of_plain_jax_enqueue(self):
        outfeed = OutfeedQueue()

        def step(v, _):
            outfeed.enqueue(v)
            return v + 1, None

        jax.block_until_ready(jax.jit(lambda v: jax.lax.scan(step, v, None, length=4))(1.0))
        np.testing.assert_array_equal(outfeed.dequeue(), [1, 2, 3, 4])

    def test_branches_enqueue_only_if_they_are_taken(self, strategy):
        outfeed = OutfeedQueue()

        def body(v):
            jax.lax.cond(v % 3 == 0, lambda: outfeed.enqueue(v), lambda: None)
            return v + 1

        strategy.run(lambda: loops.repeat(10, body, [0]))
        np.testing.assert_array_equal(outfeed.dequeue(), np.repeat([0, 3, 6, 9], 4).reshape(4, 4))

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: np.zeros((3, 0), np.float32), ValueError, r"shape \[3, 0\], with a dimension of size 0"),
            (lambda: (), ValueError, "got no array to enqueue"),
            (lambda: jax.random.key(0), TypeError, "Unsupported data type for outfeed: a random key"),
            (lambda: np.zeros(3), TypeError, "Unsupported data type for outfeed: float64"),
        ],
    )
    def test_unsupported_values_are_not_enqueued(self, make, error, message):
        with pytest.raises(error, match=message):
            loops.repeat(1, lambda: OutfeedQueue().enqueue(make()))


class TestLife:
    def test_a_scope_ends_the_queue(self):
        with OutfeedQueue() as outfeed:
            counting(outfeed)(10)
            np.testing.assert_array_equal(outfeed.dequeue(), np.arange(10) + 1)
            counting(outfeed)(10)
        assert not outfeed.enqueued
        assert list(outfeed) == []

    def test_a_program_does_not_keep_the_queue(self):
        outfeed = OutfeedQueue()
        run = counting(outfeed)
        held = weakref.ref(outfeed)

        def body(v):
            held().enqueue(v)
            return v + 1

        run = lambda: loops.repeat(3, body, [0])  # noqa: E731
        assert run() == 3
        del outfeed
        gc.collect()
        assert held() is None
        assert run() == 3

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"mode": "all"}, "use OutfeedMode.ALL"),
            ({"buffer_depth": 0}, "buffer_depth is 0"),
            ({"buffer_depth": 1.5}, "buffer_depth is 1.5"),
        ],
    )
    def test_arguments_are_checked(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            OutfeedQueue(**arguments)

    def test_modes_have_the_values_of_the_original(self):
        assert (OutfeedMode.ALL.value, OutfeedMode.LAST.value) == ("all", "get_last")


def test_values_are_put_on_the_host_for_a_program_that_returns_them():
    local = Replication(range(2, 4), 4)
    outfeed, last = OutfeedQueue(), OutfeedQueue(OutfeedMode.LAST)
    for number in range(3):
        for queue in (outfeed, last):
            queue.put(local, number, [{"a": np.float32(10 * replica + number)} for replica in local.local])
    np.testing.assert_array_equal(last.dequeue()["a"], [22, 32])
    with pytest.raises(FeedError, match="dequeue them first"):
        outfeed.put(local, 3, [np.zeros(2)] * 2)
    np.testing.assert_array_equal(outfeed.dequeue()["a"], [[20, 30], [21, 31], [22, 32]])
