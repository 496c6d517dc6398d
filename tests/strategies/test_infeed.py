"""Infeeds: order of elements, refusals, and the end of data."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from feed_data import Increasing, feed_threads

import strategies
from strategies import EndOfDataError, FeedError, InfeedMode, InfeedQueue, OutfeedQueue, get_replica_context, loops
from strategies.data.layout import Replication
from strategies.errors import StrategyError

ONES = np.ones((4, 4), np.float32)
LIMIT_S = 60


def add(v, x):
    return v + x


def both(x):
    return x, (x + 10) / 2


def equal(array, value):
    return bool((np.asarray(array) == value).all())


class TestElements:
    """Elements that the body of a loop gets."""

    def test_elements_of_an_endless_data_set_are_fed(self):
        assert equal(loops.repeat(20, add, [ONES], InfeedQueue(Increasing(10))), 91)

    def test_elements_of_a_finite_data_set_are_fed(self):
        assert equal(loops.repeat(10, add, [ONES], InfeedQueue(Increasing(10, repeats=False))), 46)

    def test_tuples_are_several_arguments(self):
        infeed = InfeedQueue(Increasing(3, change=both))
        assert equal(loops.repeat(5, lambda v, x, y: v + x + y, [np.zeros((4, 4), np.float32)], infeed), 31)
        assert infeed.number_of_tuple_elements == 2

    def test_dictionaries_are_keyword_arguments(self):
        infeed = InfeedQueue(Increasing(3, (), change=lambda x: {"a": x, "b": (x + 10) / 2}))
        assert loops.repeat(5, lambda v, w, b, a: (v + a, w + b), [0.0, 0.0], infeed) == [4, 27]

    def test_elements_are_fed_while_a_condition_holds(self):
        def body(i, v, x):
            return i + 1, v + x

        infeed = InfeedQueue(Increasing(10))
        assert equal(loops.while_loop(lambda i, v: i < 20, body, [0, ONES], infeed)[1], 91)

    def test_tuples_are_fed_while_a_condition_holds(self):
        def body(i, v, x, y):
            return i + 1, v + x + y

        infeed = InfeedQueue(Increasing(3, change=both))
        assert equal(loops.while_loop(lambda i, v: i < 20, body, [0, ONES], infeed)[1], 129.5)

    def test_a_dictionary_in_a_tuple_is_one_argument(self):
        infeed = InfeedQueue([({"x0": np.float32(1), "x1": np.float32(1)}, np.float32(1))] * 2)
        assert loops.repeat(2, lambda v, x, y: v + x["x0"] + x["x1"] + y, [0.0], infeed) == 6

    def test_a_dictionary_alone_in_a_tuple_is_keyword_arguments(self):
        infeed = InfeedQueue([({"x0": np.float32(1), "x1": np.float32(1)},)] * 2)
        assert loops.repeat(2, lambda v, x0, x1: v + x0 + x1, [0.0], infeed) == 4

    def test_booleans_are_fed(self):
        left, right = np.random.default_rng(0).random((2, 10)) < 0.5
        outfeed = OutfeedQueue()
        infeed = InfeedQueue(list(zip(left, right, strict=True)))
        loops.repeat(10, lambda x, y: outfeed.enqueue(x & y), infeed=infeed)
        np.testing.assert_array_equal(outfeed.dequeue(), left & right)

    def test_numbers_looked_up_for_words_are_fed(self):
        numbers = {"hund": 0, "katze": 1}
        words = ["hund", "hund", "vogel", "katze"]
        infeed = InfeedQueue(np.int32(numbers.get(word, -1)) for word in words)
        outfeed = OutfeedQueue()
        loops.repeat(4, lambda x: outfeed.enqueue(x), infeed=infeed)
        assert list(outfeed.dequeue()) == [0, 0, -1, 1]

    @pytest.mark.parametrize(("dtype", "wanted"), [(np.int8, range(-4, 6)), (np.uint8, [*range(252, 256), *range(6)])])
    def test_signed_and_unsigned_bytes_are_fed(self, dtype, wanted):
        data = [np.array(k, np.int8).astype(dtype) for k in range(-5, 5)]
        outfeed = OutfeedQueue()
        loops.repeat(10, lambda x: outfeed.enqueue(x + dtype(1)), infeed=InfeedQueue(data))
        assert list(outfeed.dequeue()) == list(wanted)

    def test_bytes_can_be_reshaped(self):
        outfeed = OutfeedQueue()
        infeed = InfeedQueue([(np.zeros(4, np.int8), np.zeros(4, np.uint8))])

        def body(x, y):
            outfeed.enqueue([op(z) for z in (x, y) for op in (lambda z: z.reshape(2, 2), lambda z: z[None])])

        loops.repeat(1, body, infeed=infeed)
        found = outfeed.dequeue()
        assert [array.shape for array in found] == [(1, 2, 2), (1, 1, 4)] * 2
        assert not any(array.any() for array in found)

    @pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int32, np.float16, np.float32, ml_dtypes.bfloat16])
    def test_elements_keep_their_dtype_and_bits(self, dtype, bits):
        data = np.arange(6).reshape(2, 3).astype(dtype)
        outfeed = OutfeedQueue()
        loops.repeat(2, lambda x: outfeed.enqueue(x), infeed=InfeedQueue(list(data)))
        assert bits(outfeed.dequeue()) == bits(data)

    def test_elements_can_be_dequeued_without_a_loop(self, strategy):
        infeed = InfeedQueue(Increasing(8, (), change=lambda x: {"x": x}))
        results = strategy.run(lambda: infeed.dequeue()["x"] * 10 + infeed.dequeue()["x"])
        assert list(results) == [4, 15, 26, 37]
        assert infeed.dequeued

    def test_elements_can_lie_in_reused_memory(self):
        def reused():
            array = np.zeros(1000, np.int32)
            for k in range(20):
                array[:] = k
                yield array

        assert equal(loops.repeat(20, add, [np.zeros(1000, np.int32)], InfeedQueue(reused())), 190)


class TestOrder:
    """Order of elements: element k * R + r goes to replica r in its iteration k."""

    @staticmethod
    def program(infeed):
        def run():
            index = get_replica_context().replica_id_in_sync_group
            return loops.repeat(5, lambda v, x: 2 * v + x * (index + 1), [0.0], infeed)

        return run

    @pytest.mark.parametrize("instances", [1, 2, pytest.param(4, marks=pytest.mark.complete)])
    def test_the_order_does_not_depend_on_the_instances(self, on_instances, instances):
        def on_one(strategy):
            with InfeedQueue(Increasing(20, (), repeats=False), mode=InfeedMode.WHOLE) as infeed:
                return [float(x) for x in strategy.run(self.program(infeed))]

        found = [x for results in on_instances(instances, 4, on_one) for x in results]
        assert found == [sum((4 * k + r) * (r + 1) * 2 ** (4 - k) for k in range(5)) for r in range(4)]

    def test_the_order_is_the_same_if_replicas_share_a_device(self):
        """Replicas outnumber devices: the first ones take all of their elements before the others begin."""
        infeed = InfeedQueue(Increasing(60, (), repeats=False))
        found = strategies.IPUStrategy(12).run(self.program(infeed))
        assert list(found) == [sum((12 * k + r) * (r + 1) * 2 ** (4 - k) for k in range(5)) for r in range(12)]

    def test_the_order_continues_in_the_next_loop(self):
        infeed = InfeedQueue(Increasing(2, ()))
        v = loops.repeat(5, add, [0.0], infeed)
        assert loops.repeat(5, add, [v], infeed) == 5

    def test_the_order_continues_in_the_next_run(self, strategy):
        infeed = InfeedQueue(Increasing(10, ()))
        one = strategies.IPUStrategy(1)
        found = [one.run(lambda n, v: loops.repeat(n, add, [v], infeed), args=(np.int32(n), 0.0))[0] for n in (0, 2, 2)]
        assert found == [0, 1, 5]
        assert one.run(lambda v: loops.repeat(2, add, [v], infeed), args=(0.0,))[0] == 9

    def test_independent_loops_dequeue_in_the_order_of_the_program(self, strategy):
        infeed = InfeedQueue(Increasing(1000, ()))

        def two_loops():
            return loops.repeat(3, add, [0.0], infeed), loops.repeat(3, add, [0.0], infeed)

        assert [tuple(map(float, pair)) for pair in strategy.run(two_loops)] == [
            (12 + 3 * r, 48 + 3 * r) for r in range(4)
        ]

    def test_infeeds_are_independent_of_each_other(self):
        one, other = InfeedQueue(Increasing(20, ())), InfeedQueue(Increasing(3, ()))
        assert [loops.repeat(5, add, [0.0], infeed) for infeed in (one, other, one, other)] == [10, 4, 35, 5]

    def test_the_order_is_the_same_for_every_strategy(self):
        for _ in range(2):
            strategy = strategies.IPUStrategy(2)
            infeed = InfeedQueue(Increasing(6, ()))
            assert list(strategy.run(lambda queue=infeed: loops.repeat(3, add, [0.0], queue))) == [6, 9]

    def test_a_distributed_data_set_keeps_its_own_order(self, on_instances):
        rows = np.arange(48, dtype=np.int32)

        def on_one(strategy):
            dataset = strategy.distribute_dataset(rows, batch_size=3, seed=5)
            batches = [np.asarray(batch) for epoch in range(2) for batch in dataset.epoch(epoch)]
            wanted = np.stack(batches).reshape(len(batches), len(strategy.local_replicas), 3)
            outfeed = OutfeedQueue()
            with InfeedQueue(dataset) as infeed:
                strategy.run(lambda: loops.repeat(len(batches), lambda x: outfeed.enqueue(x), infeed=infeed))
            np.testing.assert_array_equal(outfeed.dequeue().reshape(wanted.shape), wanted)
            return True

        for instances in (1, 2, 4):
            assert on_instances(instances, 4, on_one) == [True] * instances


class TestRefusals:
    @pytest.mark.parametrize(
        ("depth", "error", "message"),
        [
            (0, ValueError, "must be greater than zero"),
            (-1, ValueError, "greater than zero"),
            (256, ValueError, "less than 256"),
            (1.5, TypeError, "must be an integer"),
        ],
    )
    def test_a_depth_out_of_range(self, depth, error, message):
        with pytest.raises(error, match=message):
            InfeedQueue(Increasing(3), prefetch_depth=depth)

    @pytest.mark.parametrize("depth", [1, 2, 255])
    def test_depths_from_1_to_255_are_accepted(self, depth):
        assert equal(loops.repeat(20, add, [ONES], InfeedQueue(Increasing(10), depth)), 91)

    def test_undefined_shapes(self):
        class Declared:
            element_spec = {"x": jax.ShapeDtypeStruct((2,), np.float32)}

            def __iter__(self):
                return iter([{"x": np.zeros(2, np.float32)}])

        assert InfeedQueue(Declared()).spec.leaves[0].shape == (2,)

        class Shape(tuple):
            shape = (None, 4)

        Declared.element_spec = Shape()
        with pytest.raises(ValueError, match=r"Output shape .*drop_remainder=True"):
            InfeedQueue(Declared())

    def test_elements_that_differ_from_the_first(self):
        infeed = InfeedQueue([np.zeros(4, np.float32)] * 2 + [np.zeros(3, np.float32)])
        assert equal(loops.repeat(2, add, [np.zeros(4, np.float32)], infeed), 0)
        message = r"Output shape .*element 2 .* is float32\[3\], and the first was float32\[4\].*drop_remainder=True"
        with pytest.raises(ValueError, match=message):
            loops.repeat(1, add, [np.zeros(4, np.float32)], infeed)
        infeed = InfeedQueue([np.float32(0), np.int32(0)])
        with pytest.raises(ValueError, match=r"^element 1 .* is int32\[\], and the first was float32\[\]"):
            loops.repeat(2, add, [0.0], infeed)

    @pytest.mark.parametrize("dtype", ["int64", "float64", "uint32", "complex64"])
    def test_dtypes_that_are_not_fed(self, dtype):
        with pytest.raises(TypeError, match=f"Unsupported datatype {dtype} on index 1 of feed operation"):
            InfeedQueue([(np.float32(0), np.zeros(2, dtype))])

    @pytest.mark.parametrize(
        ("dataset", "error", "message"),
        [
            ([np.zeros((4, 0), np.float32)], ValueError, "dimension of size 0"),
            ([(np.float32(0), (np.float32(0), np.float32(0)))], ValueError, "inside of another"),
            *((each, TypeError, "needs an iterable of elements") for each in (3, "words", {"a": [1]})),
            *((each, ValueError, "needs at least one") for each in ([], [()])),
        ],
        ids=str,
    )
    def test_data_sets_without_elements_that_can_be_fed(self, dataset, error, message):
        with pytest.raises(error, match=message):
            InfeedQueue(dataset)

    def test_programs_with_other_numbers_of_replicas(self):
        """A queue belongs to the number of replicas that dequeued it first."""
        infeed = InfeedQueue(Increasing(10, ()))
        program = self.summing(infeed)
        assert list(strategies.IPUStrategy(2).run(program)) == [2, 4]
        with pytest.raises(FeedError, match="feeds 2 replicas, but this program runs on 4 replicas"):
            strategies.IPUStrategy(4).run(program)
        with pytest.raises(FeedError, match="runs on 1 replicas"):
            loops.repeat(2, add, [0.0], infeed)

    def test_a_data_set_distributed_to_other_replicas(self, strategy):
        dataset = strategy.distribute_dataset(np.arange(48, dtype=np.int32), batch_size=3)
        with pytest.raises(FeedError, match="distributed to 4 replicas, but this program runs on 2 replicas"):
            strategies.IPUStrategy(2).run(self.summing(InfeedQueue(dataset)))

    def test_a_data_set_that_draws_where_the_program_draws(self, strategy):
        """A thread would exchange the states of generators from which the program draws."""

        class Cropped:
            def __len__(self):
                return 48

            def __getitem__(self, index):
                return np.float32(index + np.random.rand())  # noqa: NPY002

        dataset = strategy.distribute_dataset(Cropped(), batch_size=3)
        with pytest.raises(StrategyError, match="elements draw random numbers .* an infeed reads them in a thread"):
            InfeedQueue(dataset)
        assert next(dataset.epoch(0)).shape == (12,)

    @staticmethod
    def summing(infeed):
        return lambda: loops.repeat(2, lambda v, x: v + jnp.sum(x), [0.0], infeed)


class TestEnd:
    def test_the_end_is_an_error_for_a_program_that_asks_for_more(self):
        infeed = InfeedQueue(Increasing(10, (), repeats=False))
        with pytest.raises(EndOfDataError, match="Infeed dataset iterator out of range"):
            loops.repeat(11, add, [0.0], infeed)
        with pytest.raises(EndOfDataError):
            loops.repeat(1, add, [0.0], infeed)

    @pytest.mark.parametrize("kind", [EndOfDataError, FileNotFoundError])
    def test_the_end_is_the_same_error_if_python_asks_for_more(self, kind):
        """An error of the data set is raised unchanged; later calls work after both."""

        def elements():
            yield from np.arange(2, dtype=np.float32)
            if kind is FileNotFoundError:
                raise FileNotFoundError("no such file: part-3")

        infeed = InfeedQueue(elements())
        assert [float(infeed.dequeue()) for _ in range(2)] == [0, 1]
        for _ in range(2):
            with pytest.raises(kind, match="part-3" if kind is FileNotFoundError else "out of range"):
                infeed.dequeue()
        assert float(InfeedQueue(Increasing(2, ())).dequeue()) == 0

    def test_the_end_is_no_error_for_a_program_that_does_not_reach_it(self):
        assert loops.repeat(10, add, [0.0], InfeedQueue(Increasing(10, (), repeats=False), prefetch_depth=20)) == 45

    def test_the_end_comes_for_all_replicas_before_the_first_incomplete_round(self, strategy):
        infeed, outfeed = InfeedQueue(Increasing(11, (), repeats=False)), OutfeedQueue()

        def body(v, x):
            outfeed.enqueue(x)
            return get_replica_context().all_reduce("sum", v) + x

        with pytest.raises(EndOfDataError, match="No element was left for each of 4 replicas"):
            strategy.run(lambda: loops.repeat(1_000_000, body, [0.0], infeed))
        np.testing.assert_array_equal(outfeed.dequeue(), np.arange(8).reshape(2, 4))

    @pytest.mark.parametrize("kind", [EndOfDataError, FileNotFoundError])
    def test_the_end_stops_endless_loops_of_replicas_that_wait_for_each_other(self, strategy, kind):
        def elements():
            yield from np.arange(12, dtype=np.float32)
            if kind is FileNotFoundError:
                raise FileNotFoundError("no such file: part-3")

        def body(v, s, x):
            return v + x, get_replica_context().all_reduce("mean", s)

        infeed = InfeedQueue(elements())
        with pytest.raises(kind, match="part-3" if kind is FileNotFoundError else "out of range"):
            strategy.run(lambda: loops.while_loop(lambda v, s: s > 0, body, [0.0, 1.0], infeed))

    def test_the_strategy_runs_other_programs_after_the_end(self, strategy):
        infeed = InfeedQueue(Increasing(4, (), repeats=False))
        for _ in range(2):
            with pytest.raises(EndOfDataError):
                strategy.run(lambda: loops.repeat(2, add, [0.0], infeed))
        fresh, outfeed = InfeedQueue(Increasing(8, ())), OutfeedQueue()
        found = strategy.run(lambda: loops.repeat(2, lambda v, x: (v + x, outfeed.enqueue(v)), [0.0], fresh))
        assert list(found) == [4, 6, 8, 10]
        assert outfeed.dequeue().shape == (2, 4)
        assert loops.repeat(2, add, [0.0], InfeedQueue(Increasing(8, ()))) == 1


def test_a_body_that_dequeues_takes_turns_with_its_loop():
    infeed = InfeedQueue(np.arange(20, dtype=np.float32))

    def body(value, x):
        inner = loops.repeat(2, lambda total, y: total * 10 + y, [0.0], infeed)
        return jnp.stack([value[1], value[2], x * 10000 + inner * 10 + infeed.dequeue()])

    found = loops.repeat(3, body, [jnp.zeros(3)], infeed)
    assert list(found) == [123, 40567, 80000 + 9 * 100 + 10 * 10 + 11]


def test_an_infeed_of_another_type_is_refused():
    with pytest.raises(TypeError, match="the infeed is a list; make an InfeedQueue"):
        loops.repeat(2, add, [0.0], [1, 2])


class TestLife:
    def test_an_infeed_starts_only_once(self):
        infeed = InfeedQueue(Increasing(10, ()))
        infeed.start()
        assert loops.repeat(5, add, [0.0], infeed) == 10
        with pytest.raises(ValueError, match="can only be started once"):
            infeed.start()

    def test_an_infeed_can_start_before_a_program(self):
        infeed = InfeedQueue(Increasing(10, ()))
        infeed.start()
        with pytest.raises(ValueError, match="can only be started once"):
            infeed.start()
        infeed.delete()
        with pytest.raises(FeedError, match="does not run"):
            infeed.delete()
        infeed.start()
        assert loops.repeat(5, add, [0.0], infeed) == 10

    def test_deleting_before_the_start_is_refused(self):
        with pytest.raises(FeedError, match=r"Infeed with id=\d+ does not run"):
            InfeedQueue(Increasing(10)).delete()

    @pytest.mark.parametrize("dataset", [Increasing(10, ()), list(np.arange(10, dtype=np.float32))])
    def test_a_deleted_infeed_restarts_from_the_beginning(self, dataset):
        infeed = InfeedQueue(dataset)
        for _ in range(2):
            infeed.start()
            assert loops.repeat(5, add, [0.0], infeed) == 10
            infeed.delete()
        with pytest.raises(FeedError, match="is deleted; call start"):
            loops.repeat(5, add, [0.0], infeed)

    def test_an_infeed_of_an_iterator_cannot_restart(self):
        infeed = InfeedQueue(element for element in Increasing(10, ()))
        infeed.start()
        infeed.delete()
        infeed.start()
        assert loops.repeat(5, add, [0.0], infeed) == 10
        infeed.delete()
        with pytest.raises(ValueError, match="a generator, which can be iterated only once"):
            infeed.start()

    def test_an_infeed_restarts_on_other_replicas_after_an_error(self):
        infeed = InfeedQueue(Increasing(6, (), repeats=False))
        with pytest.raises(EndOfDataError):
            loops.repeat(7, add, [0.0], infeed)
        infeed.delete()
        infeed.start()
        assert list(strategies.IPUStrategy(2).run(lambda: loops.repeat(3, add, [0.0], infeed))) == [6, 9]

    def test_the_spec_describes_the_elements(self):
        infeed = InfeedQueue([{"a": np.zeros((2, 3), np.int8), "b": np.float32(0)}])
        assert infeed.spec.unflatten(infeed.spec.leaves) == {
            "a": jax.ShapeDtypeStruct((2, 3), np.int8),
            "b": jax.ShapeDtypeStruct((), np.float32),
        }

    def test_an_infeed_knows_whether_the_program_dequeues_it(self, strategy):
        infeed = InfeedQueue(Increasing(100, ()))
        seen = []

        def program():
            seen.append(infeed.dequeued)
            loops.repeat(2, add, [0.0], infeed)
            seen.append(infeed.dequeued)

        assert not infeed.dequeued
        strategy.run(program)
        strategy.run(lambda: program())
        assert seen == [False, True] * 2

    def test_an_infeed_leaves_no_thread(self):
        before = set(feed_threads())
        with InfeedQueue(Increasing(10, ())) as infeed:
            loops.repeat(5, add, [0.0], infeed)
            assert len(set(feed_threads()) - before) == 1
        join_others_than(before)
        with InfeedQueue(Increasing(10, ())):
            pass
        infeed = InfeedQueue(Increasing(10, ()))
        loops.repeat(5, add, [0.0], infeed)
        del infeed
        gc.collect()
        join_others_than(before)

    def test_a_program_of_a_deleted_infeed_raises(self):
        infeed = InfeedQueue(Increasing(10, ()))
        held = weakref.ref(infeed)
        strategy = strategies.IPUStrategy(2)

        def program():
            return loops.repeat(2, add, [0.0], held())

        strategy.run(program)
        del infeed
        gc.collect()
        with pytest.raises(FeedError, match="infeed of this program was deleted"):
            strategy.run(program)

    def test_an_infeed_cannot_be_deleted_while_a_program_waits_for_data(self, monkeypatch):
        monkeypatch.setattr("strategies.jax.feeds.infeed.DELETE_TIMEOUT_S", 0.05)
        asked, given = threading.Event(), threading.Event()

        def slow():
            yield np.float32(1)
            asked.set()
            assert given.wait(LIMIT_S)
            yield np.float32(2)

        infeed = InfeedQueue(slow())
        strategy = strategies.IPUStrategy(
            2
        )  # the first round needs both elements, so a program waits when one is asked
        results = []
        thread = threading.Thread(
            target=lambda: results.append(list(strategy.run(lambda: loops.repeat(1, add, [0.0], infeed))))
        )
        thread.start()
        assert asked.wait(LIMIT_S)
        with pytest.raises(FeedError, match="waited for its data set"):
            infeed.delete()
        given.set()
        thread.join(LIMIT_S)
        assert results == [[1, 2]]


PROGRAM = """
import sys, numpy, strategies
from strategies import InfeedQueue, OutfeedQueue, loops
strategy = strategies.IPUStrategy(8)
def endless():
    while True:
        yield numpy.ones((300, 300), numpy.float32)  # too large for JAX to hand over at once
infeed, outfeed = InfeedQueue(endless()), OutfeedQueue()
def body(v, x):
    outfeed.enqueue(v)
    return strategies.get_replica_context().all_reduce("mean", v) + x
strategy.run(lambda: loops.repeat(10, body, [numpy.zeros((300, 300), numpy.float32)], infeed))
print(outfeed.dequeue()[:, 7, 0, 0].tolist())
raise SystemExit(3)
"""


@pytest.mark.complete
def test_a_pool_of_one_thread_is_enough_and_nothing_is_left_at_exit():
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PJRT_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=clean | {"PJRT_NPROC": "1"},
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (3, f"{[float(k) for k in range(10)]}\n"), done.stderr


def test_available_elements_come_in_one_call(monkeypatch):
    """A loop leaves surplus elements for the next one, which continues there."""
    with InfeedQueue(Increasing(100, ()), prefetch_depth=4) as infeed:
        take, taken = infeed._take, []
        monkeypatch.setattr(infeed, "_take", lambda *arguments: taken.append(take(*arguments)) or taken[-1])
        assert loops.repeat(1, add, [0.0], infeed) == 0
        worker = infeed._rounds._worker
        with worker._changed:
            assert worker._changed.wait_for(lambda: len(worker._ready) == 4, LIMIT_S)
        assert loops.repeat(3, add, [0.0], infeed) == 1 + 2 + 3
        assert list(map(len, taken)) == [1, 3]
        assert loops.repeat(20, add, [0.0], infeed) == sum(range(4, 24))
        assert sum(map(len, taken)) == 24


def join_others_than(before):
    for thread in set(feed_threads()) - before:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_elements_are_taken_on_the_host_for_a_program_that_gets_them_as_arguments():
    with InfeedQueue([np.float32(number) for number in range(20)], mode=InfeedMode.WHOLE) as infeed:
        local = Replication(range(2, 4), 4)
        for first in (0, 8):
            taken = [[float(array) for [array] in elements] for elements in infeed.take(local, 2)]
            assert taken == [[first + 2, first + 6], [first + 3, first + 7]]
        assert infeed.dequeued
        with pytest.raises(EndOfDataError):
            infeed.take(local, 2)
        with pytest.raises(FeedError, match="one infeed for each number of replicas"):
            infeed.take(Replication(range(4), 4), 2)
