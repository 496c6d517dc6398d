"""Iterations of a loop: collection of enqueued values, and their delivery."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feed_data import Increasing

import strategies
from strategies import EndOfDataError, InfeedQueue, OutfeedMode, OutfeedQueue, get_replica_context, loops
from strategies.jax.programs import feed_program

LIMIT_S = 60
FOR_EVER_S = 1e9


@pytest.fixture
def calls(monkeypatch):
    """Provide the tokens of all later calls of feeds."""
    counted, next_token = [], feed_program.next_token
    monkeypatch.setattr(feed_program, "next_token", lambda token: counted.append(int(token)) or next_token(token))
    return counted


@pytest.fixture
def patient(monkeypatch):
    """Let loops hold values back for the maximum time, however slow this machine is."""
    monkeypatch.setattr("strategies.jax.feeds.iterations.HOLD_S", FOR_EVER_S)


def enqueuing(outfeed):
    return lambda v, *x: (v + 1, outfeed.enqueue(v))


class TestCalls:
    """Number of calls of Python from a loop."""

    def test_fast_iterations_make_few_calls(self, calls, patient):
        outfeed = OutfeedQueue()
        assert loops.repeat(64, enqueuing(outfeed), [0]) == 64
        assert len(calls) == 11  # after 1, 1, 2, 4, 8, 8, ... iterations
        np.testing.assert_array_equal(outfeed.dequeue(), np.arange(64))

    @pytest.mark.parametrize("queues", [1, 3])
    def test_calls_bring_elements_and_take_values_together(self, calls, patient, queues):
        outfeeds = [OutfeedQueue() for _ in range(queues)]

        def body(v, x):
            for number, outfeed in enumerate(outfeeds):
                outfeed.enqueue({"v": v, "x": x + number})
            return v + 1

        with InfeedQueue(Increasing(100, ()), prefetch_depth=1) as infeed:
            loops.repeat(24, body, [0], infeed)
        assert len(calls) == 24 + 1
        for number, outfeed in enumerate(outfeeds):
            found = outfeed.dequeue()
            np.testing.assert_array_equal(found["v"], np.arange(24))
            np.testing.assert_array_equal(found["x"], np.arange(24) + number)

    def test_large_values_make_one_call_per_iteration(self, calls, patient):
        outfeed = OutfeedQueue()
        loops.repeat(5, lambda v: (v + 1, outfeed.enqueue(v)), [np.zeros(2049, np.float32)])
        assert len(calls) == 5
        np.testing.assert_array_equal(outfeed.dequeue()[:, 7], np.arange(5))

    @pytest.mark.parametrize("mode", OutfeedMode)
    def test_calls_leave_no_value_behind_when_a_condition_ends_the_loop(self, calls, patient, mode):
        outfeed = OutfeedQueue(mode)
        assert loops.while_loop(lambda v: v < 13, enqueuing(outfeed), [0], maximum_iterations=50) == 13
        assert len(calls) == 5  # after 1, 1, 2, 4 and 5
        assert outfeed.dequeue().tolist() == (list(range(13)) if mode is OutfeedMode.ALL else 12)

    def test_calls_take_no_elements_beyond_the_condition(self, calls, patient):
        outfeed = OutfeedQueue()
        with InfeedQueue(Increasing(100, ())) as infeed:
            for start in (0, 5):
                loops.while_loop(lambda i: i < 5, lambda i, x: (i + 1, outfeed.enqueue(x)), [0], infeed)
                assert outfeed.dequeue().tolist() == list(range(start, start + 5))
        assert len(calls) == 2 * (5 + 1)


class TestVisibility:
    """Visibility of values in another thread."""

    def test_slow_iterations_deliver_values_one_by_one(self, monkeypatch):
        monkeypatch.setattr("strategies.jax.feeds.iterations.HOLD_S", 0.0)  # every iteration takes longer
        outfeed, seen = OutfeedQueue(), []

        def look(v):
            seen.extend(outfeed.dequeue())
            assert seen == list(range(int(v)))
            return v

        def body(v):
            v = jax.pure_callback(look, jax.ShapeDtypeStruct((), np.int32), v)
            outfeed.enqueue(v)
            return v + 1

        assert loops.repeat(20, body, [0]) == 20
        assert [*seen, *outfeed.dequeue()] == list(range(20))

    def test_data_can_depend_on_values_dequeued_before(self, monkeypatch, patient):
        """The data set waits for the values of all replicas of all earlier rounds, and one replica is late."""
        outfeed, seen, has_come = OutfeedQueue(), [], threading.Condition()
        put = outfeed._put

        def tell(*arguments):
            put(*arguments)
            with has_come:
                has_come.notify_all()

        def are_there(rounds):
            if len(seen) < rounds:
                seen.extend(outfeed.dequeue())
            return len(seen) >= rounds

        def elements():
            for k in range(12):
                with has_come:
                    assert has_come.wait_for(lambda k=k: are_there(k), LIMIT_S), f"{len(seen)} rounds came, not {k}"
                yield from [np.float32(k)] * 2

        with InfeedQueue(elements()) as infeed:
            take, late = infeed._take, itertools.count()
            first_has = [threading.Event() for _ in range(12)]

            def take_in_turn(of, replica, n):
                if replica == 1:
                    assert first_has[next(late)].wait(LIMIT_S)
                taken = take(of, replica, n)
                for [number] in taken if replica == 0 else ():
                    first_has[int(number)].set()
                return taken

            monkeypatch.setattr(outfeed, "_put", tell)
            monkeypatch.setattr(infeed, "_take", take_in_turn)
            strategies.IPUStrategy(2).run(lambda: loops.repeat(12, lambda x: outfeed.enqueue(x), infeed=infeed))
        np.testing.assert_array_equal([*seen, *outfeed.dequeue()], np.repeat(np.arange(12), 2).reshape(12, 2))

    def test_all_values_are_visible_when_data_end(self, strategy, patient):
        outfeed = OutfeedQueue()
        with InfeedQueue(Increasing(44, (), repeats=False)) as infeed, pytest.raises(EndOfDataError):
            strategy.run(lambda: loops.repeat(20, lambda x: outfeed.enqueue(x), infeed=infeed))
        np.testing.assert_array_equal(outfeed.dequeue(), np.arange(44).reshape(11, 4))


class TestBodies:
    """Bodies that a loop does not collect, so values leave at once."""

    @pytest.mark.parametrize("other", ["in a branch", "large", "in a loop"])
    def test_bodies_that_also_enqueue_other_values_keep_the_order(self, calls, patient, other):
        first, second = OutfeedQueue(), OutfeedQueue()
        rounds, take = [], second._put

        def put(*arguments):
            rounds.append((len(first.dequeue()), int(arguments[-1][0].flat[0])))
            take(*arguments)

        second._put = put

        def body(v):
            first.enqueue(v)
            if other == "in a branch":
                jax.lax.cond(v % 2 == 0, lambda: second.enqueue(v), lambda: None)
            elif other == "large":
                second.enqueue(jnp.full(5000, v))
            else:
                loops.repeat(1, enqueuing(second), [v])
            return v + 1

        loops.repeat(6, body, [0])
        step = 2 if other == "in a branch" else 1
        assert rounds == [(1 if v == 0 else step, v) for v in range(0, 6, step)]

    def test_bodies_without_other_calls_are_traced_once(self):
        outfeed, traced = OutfeedQueue(), []

        def body(v):
            traced.append(v)
            outfeed.enqueue(v)
            return v + 1

        assert [int(loops.repeat(n, body, [0])) for n in (2, 3)] == [2, 3]
        assert len(traced) == 1
        assert outfeed.dequeue().tolist() == [0, 1, 0, 1, 2]

    def test_loops_in_programs_of_jax_collect_values(self, calls, patient):
        outfeed = OutfeedQueue()
        assert jax.jit(lambda n: loops.repeat(n, enqueuing(outfeed), [0]))(10) == 10
        assert outfeed.dequeue().tolist() == list(range(10))
        assert len(calls) == 5

    def test_replicas_can_wait_for_each_other_in_the_condition(self, strategy):
        outfeed = OutfeedQueue()

        def program():
            replica = get_replica_context()

            def goes_on(v):
                return replica.all_reduce("max", v) < 30

            return loops.while_loop(goes_on, enqueuing(outfeed), [replica.replica_id_in_sync_group])

        assert list(strategy.run(program)) == [27, 28, 29, 30]
        np.testing.assert_array_equal(outfeed.dequeue(), np.arange(27)[:, None] + np.arange(4))


@pytest.mark.parametrize("other", ["another call", "gradients"])
def test_bits_do_not_depend_on_whether_values_are_collected(strategy, bits, other):
    """Bodies with other calls and loops with gradients do not collect values."""
    data = list(np.random.default_rng(0).standard_normal((24, 7, 5)).astype(np.float32))
    weights = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)

    def trained(collects):
        outfeed = OutfeedQueue()

        def body(w, x):
            loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2 + 0.3 * jnp.sin(w[0, 0])))(w)
            outfeed.enqueue({"loss": loss, "w": w * 3 + gradient, "norm": jnp.sqrt(jnp.sum(gradient**2))})
            if other == "another call" and not collects:
                jax.debug.callback(lambda: None)
            return w - 0.1 * get_replica_context().all_reduce("mean", gradient)

        def program(w):
            def run(w):
                return loops.repeat(6, body, [w], infeed)

            return jax.vjp(run, w)[0] if other == "gradients" and not collects else run(w)

        with InfeedQueue(data) as infeed:
            results = strategy.run(program, args=(weights,))
        return [bits(leaf) for leaf in (*results, *jax.tree.leaves(outfeed.dequeue()))]

    assert trained(collects=True) == trained(collects=False)


def test_many_small_values_keep_their_bits(bits):
    """Together they are larger than one transfer of JAX."""
    outfeed = OutfeedQueue()
    values = [np.random.default_rng(k).standard_normal(250).astype(np.float32) for k in range(130)]
    loops.repeat(2, lambda: outfeed.enqueue(values))
    assert [bits(leaf) for leaf in outfeed.dequeue()] == [bits(np.stack([value, value])) for value in values]
