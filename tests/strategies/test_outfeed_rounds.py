"""Rounds of an outfeed: values of several replicas belong together if enqueued in the same iteration."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies import EndOfDataError, FeedError, InfeedQueue, OutfeedMode, OutfeedQueue, get_replica_context, loops
from strategies.jax.feeds.outfeed import AllRounds, LastRound

MODES = list(OutfeedMode)


def replica():
    return get_replica_context().replica_id_in_sync_group


def enqueue_if(condition, outfeed, value):
    jax.lax.cond(condition, lambda: outfeed.enqueue(value), lambda: None)


def skipping(outfeed, first, count=9):
    """Return a program in which replica r enqueues every third iteration, beginning with `first(r)`."""

    def body(v):
        enqueue_if((v >= first(replica())) & ((v - first(replica())) % 3 == 0), outfeed, v)
        return v + 1

    return lambda: loops.repeat(count, body, [jnp.int32(0)])


def run_other_programs(strategy, outfeed):
    """Run a program with the same values and one with others, and return the dequeued values."""
    found = []
    for value in (jnp.int32(7), jnp.ones(3)):
        strategy.run(lambda value=value: outfeed.enqueue(value))
        found.append(outfeed.dequeue())
    return [np.asarray(one).size for one in found] == [4, 12] and bool((found[0] == 7).all())


class TestIterations:
    """Iterations in which replicas enqueue differently."""

    @pytest.mark.parametrize("mode", MODES)
    def test_unmatched_iterations_are_named_and_the_next_program_runs(self, strategy, mode):
        outfeed = OutfeedQueue(mode)
        message = r"replica \d has enqueued in iteration [03], but replica \d in iteration [03], so their unmatched"
        if mode is OutfeedMode.LAST:
            message = "replica 0 has enqueued 3 values, the last one in iteration 6, but replica 2 2 values, the last "
        with pytest.raises(FeedError, match=message):
            strategy.run(skipping(outfeed, lambda r: jnp.where(r == 2, 3, 0)))
        assert run_other_programs(strategy, outfeed)

    @pytest.mark.parametrize("mode", MODES)
    def test_one_more_iteration_of_one_replica_leaves_no_value_behind(self, strategy, mode):
        outfeed = OutfeedQueue(mode)

        def program(late):
            return loops.repeat(5, lambda v: (v + 1, enqueue_if((v < 4) | (replica() == late), outfeed, v)), [0])

        message = "replica 1 has enqueued in iteration 4, but replica 0 has not, so their unmatched values are dropped"
        if mode is OutfeedMode.LAST:
            message = "replica 1 has enqueued 5 values, the last one in iteration 4, but replica 0 4 values, the last"
        with pytest.raises(FeedError, match=message):
            strategy.run(lambda: program(1))
        if mode is OutfeedMode.ALL:
            np.testing.assert_array_equal(outfeed.dequeue(), np.repeat(range(4), 4).reshape(4, 4))
        assert run_other_programs(strategy, outfeed)

    def test_nested_loops_have_one_iteration_number_each(self, strategy):
        outfeed = OutfeedQueue()

        def inner(outer, v):
            enqueue_if((outer < 2) | (v < 2) | (replica() != 3), outfeed, v)
            return outer, v + 1

        def program():
            return loops.repeat(4, lambda outer: loops.repeat(3, inner, [outer, jnp.int32(0)])[0] + 1, [jnp.int32(0)])

        with pytest.raises(FeedError, match=r"iteration \((2, 2|3, 0)\), but replica \d in iteration \((2, 2|3, 0)\)"):
            strategy.run(program)
        assert len(outfeed.dequeue()) == 8

    def test_a_loop_that_only_one_replica_skips_is_named(self, strategy):
        """The loop collects its values, and is itself in a branch."""
        outfeed = OutfeedQueue()

        def body(outer):
            repeat = lambda: loops.repeat(2, lambda v: (v + 1, outfeed.enqueue(v)), [0])  # noqa: E731
            jax.lax.cond((outer == 1) & (replica() == 0), lambda: 0, repeat)
            return outer + 1

        with pytest.raises(FeedError, match=r"iteration \([12], 0\), but replica \d in iteration \([12], 0\)"):
            strategy.run(lambda: loops.repeat(3, body, [0]))

    def test_iterations_of_a_loop_with_a_condition_are_counted(self, strategy):
        outfeed = OutfeedQueue()

        def program():
            return loops.while_loop(lambda v: v < 3 + replica() // 3, lambda v: (v + 1, outfeed.enqueue(v)), [0])

        with pytest.raises(FeedError, match="replica 3 has enqueued in iteration 3, but replica 0 has not"):
            strategy.run(program)
        assert outfeed.dequeue().shape == (3, 4)

    def test_iterations_of_a_loop_with_gradients_are_counted(self, strategy):
        outfeed = OutfeedQueue()

        def power(x):
            def body(v):
                outfeed.enqueue(v + replica())
                return v * x

            return loops.repeat(3, body, [x])

        assert [float(g) for g in strategy.run(jax.grad(power), args=(2.0,))] == [32.0] * 4
        np.testing.assert_array_equal(outfeed.dequeue(), [[v, v + 1, v + 2, v + 3] for v in (2, 4, 8)])

    def test_iterations_with_large_values_are_counted(self, strategy):
        outfeed = OutfeedQueue()
        with pytest.raises(FeedError, match="iteration"):
            strategy.run(
                lambda: loops.repeat(
                    4, lambda v: (v + 1, enqueue_if(v[0] != replica(), outfeed, v)), [jnp.zeros(5000, jnp.int32)]
                )
            )

    def test_iterations_of_plain_jax_are_paired_in_order(self, strategy):
        outfeed = OutfeedQueue()

        def step(v, _):
            outfeed.enqueue(v)
            return v + 1, None

        strategy.run(lambda: jax.lax.scan(step, 0, None, length=3 + 0 * replica().size)[0])
        np.testing.assert_array_equal(outfeed.dequeue(), np.repeat(range(3), 4).reshape(3, 4))

    def test_unmatched_values_outside_a_loop_are_named(self, strategy):
        outfeed = OutfeedQueue()
        for late in (1, 2):
            with pytest.raises(FeedError, match="replica 0 has enqueued in its program, but replica [23] has not"):
                strategy.run(lambda late=late: enqueue_if(replica() <= late, outfeed, late))
        assert outfeed.dequeue().shape == (0, 4)

    @pytest.mark.parametrize("instances", [2, pytest.param(4, marks=pytest.mark.complete)])
    def test_iterations_are_compared_on_each_instance(self, on_instances, instances):
        def on_one(strategy):
            outfeed = OutfeedQueue()
            try:
                strategy.run(skipping(outfeed, lambda r: 3 * (r % 2)))
            except FeedError as error:
                return f"replica {strategy.local_replicas[1]} " in str(error)
            return len(outfeed.dequeue())

        assert on_instances(instances, 4, on_one) == ([True, True] if instances == 2 else [3, 2, 3, 2])


class TestProgramsThatFail:
    def test_failing_programs_leave_no_value_for_the_next_one(self, strategy):
        outfeed = OutfeedQueue()

        def fail(v):
            if v == 2:
                raise OSError("disk")
            return v

        def program(fails):
            def body(v):
                v = jax.lax.cond(
                    (replica() == 1) & fails,
                    lambda: jax.experimental.io_callback(fail, jax.ShapeDtypeStruct((), np.int32), v),
                    lambda: v,
                )
                outfeed.enqueue(v)
                return v + 1

            return loops.repeat(4, body, [jnp.int32(0)])

        with pytest.raises(jax.errors.JaxRuntimeError, match="disk"):
            strategy.run(program, args=(True,))
        outfeed.dequeue()
        strategy.run(program, args=(False,))
        np.testing.assert_array_equal(outfeed.dequeue(), np.repeat(range(4), 4).reshape(4, 4))

    def test_failing_programs_keep_their_own_error(self, strategy):
        outfeed, infeed = OutfeedQueue(), InfeedQueue(np.arange(8, dtype=np.float32))

        def body(v, x):
            enqueue_if(replica() == 0, outfeed, v)
            return v + x

        with pytest.raises(EndOfDataError):
            strategy.run(lambda: loops.repeat(3, body, [0.0], infeed))
        assert outfeed.dequeue().shape == (0, 4)


class TestTrainer:
    def test_a_step_in_which_replicas_differ_is_not_applied(self, strategy):
        outfeed = OutfeedQueue()

        def loss_fn(variables, batch, key):
            loss = jnp.mean((variables["w"] - batch) ** 2)
            enqueue_if(batch[0] < 4, outfeed, loss)
            return loss, {}

        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        state = trainer.init({"w": jnp.ones(())})
        small, mixed = np.zeros(4, np.float32), np.arange(2, 6, dtype=np.float32)
        state, _ = trainer.step(state, small)
        before = strategies.fingerprint(state.variables)
        for _ in range(2):
            with pytest.raises(FeedError, match="replica 0 has enqueued in its program, but replica 2 has not"):
                trainer.step(state, mixed)
        assert (state.step, strategies.fingerprint(state.variables)) == (1, before)
        state, _ = trainer.step(state, small)
        assert (state.step, outfeed.dequeue().shape) == (2, (2, 4))


class TestRounds:
    """Rounds without a program."""

    def test_rounds_are_complete_when_all_replicas_have_come(self):
        rounds = AllRounds(range(4, 6))
        for place, number in ((0, 0), (0, 1), (1, 0)):
            assert len(rounds) == 0
            rounds.put(place, (number,), [number, place])
        assert len(rounds) == 1
        assert rounds.take() == [[0, 0], [0, 1]]
        assert rounds.is_waiting
        with pytest.raises(FeedError, match="replica 4 has enqueued in iteration 1, but replica 5 has not"):
            rounds.end()
        assert not rounds.is_waiting
        rounds.end()

    def test_rounds_take_no_more_values_until_the_program_ends(self):
        rounds = AllRounds(range(2))
        rounds.put(0, (1,), ["a"])
        with pytest.raises(FeedError, match="replica 1 has enqueued in iteration 2, but replica 0 in iteration 1"):
            rounds.put(1, (2,), ["b"])
        rounds.put(0, (2,), ["c"])
        rounds.end()
        assert not rounds.is_waiting
        rounds.put(0, (0,), ["d"])
        assert rounds.is_waiting

    def test_slower_replicas_complete_the_rounds_before_the_first_difference(self):
        rounds = AllRounds(range(3))
        for place in (0, 1):
            rounds.put(place, (0,), [place])
            rounds.put(place, (1,), [place])
        rounds.put(0, (2,), ["a"])
        with pytest.raises(FeedError, match="replica 1 has enqueued in iteration 3, but replica 0 in iteration 2"):
            rounds.put(1, (3,), ["b"])
        for number in range(3):
            rounds.put(2, (number,), [2])
        assert rounds.take() == rounds.take() == [[0], [1], [2]]
        rounds.put(2, (3,), [2])
        assert not rounds.is_waiting
        rounds.end()

    def test_the_last_round_is_complete(self):
        last = LastRound(range(2))
        assert last.whole is None
        for number in range(3):
            last.put(0, (number,), [f"a{number}"])
        assert last.whole is None
        for number in range(3):
            last.put(1, (number,), [f"b{number}"])
        assert last.whole == [["a2"], ["b2"]]
        last.put(0, (3,), ["a3"])
        last.put(0, (4,), ["a4"])
        last.put(1, (3,), ["b3"])
        assert last.whole == [["a3"], ["b3"]]
        last.put(1, (4,), ["b4"])
        last.end()
        last.put(1, (0,), ["b"])
        with pytest.raises(FeedError, match="replica 1 has enqueued 1 values, .* iteration 0, but replica 0 0 values"):
            last.end()
        assert last.whole == [["a4"], ["b4"]]

    def test_the_last_round_is_found_however_far_a_replica_is_ahead(self):
        last = LastRound(range(2))
        for place in (0, 1):
            for number in range(100):
                last.put(place, (number,), [number, place])
        assert last.whole == [[99, 0], [99, 1]]
        last.end()
