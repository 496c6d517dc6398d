"""The threads of local replicas: replicas with short programs take turns in one thread, with the same bits."""

import os
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import strategies
from collectives.instruments import Instruments
from strategies import get_replica_context
from strategies.jax.gradients import gradient_programs
from strategies.jax.gradients.gradient_programs import SHORT_S, TRIED, SerialDispatch, may_wait

LIMIT_S = 60.0
CALLS_OF_A_REPLICA = 65
needs_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="on one core replicas always take turns")


def loss_fn(variables, batch, key):
    noise = jax.random.normal(key, batch.shape)
    return jnp.mean((jnp.tanh(batch + 0.1 * noise) @ variables["kernel"] + variables["bias"]) ** 2)


def training(replicas, loss=loss_fn):
    """Return a function that makes a step."""
    trainer = strategies.Trainer(strategies.IPUStrategy(replicas), loss, optax.adam(0.1))
    state = trainer.init({"kernel": np.ones((3, 2), np.float32), "bias": np.zeros(2, np.float32)})
    batch = np.linspace(-1, 1, replicas * 4 * 3, dtype=np.float32).reshape(-1, 3)

    def step():
        nonlocal state
        state, metrics = trainer.step(state, batch)
        return metrics["loss"], strategies.fingerprint(state.variables)

    return step


class Seconds:
    """A clock that advances by a step's duration each time it is read."""

    def __init__(self, *durations):
        self._times = [time for duration in durations for time in (0.0, duration)]

    def __call__(self):
        return self._times.pop(0)


def choices(durations, *, waits=False, instruments=None):
    """Return for each step of a replica whether it is made in turn."""
    turns = SerialDispatch(lambda: waits, instruments or Instruments(), Seconds(*durations))
    found = []
    for _ in durations:
        found.append(turns.begin())
        if found[-1]:
            turns.end(1)
        else:
            turns._clock()
    return found


class TestChoice:
    def test_replicas_with_short_programs_take_turns(self):
        assert choices([SHORT_S / 2] * 8) == [True] * 8

    @needs_cores
    def test_replicas_with_long_programs_get_threads_after_a_few_steps(self):
        assert choices([SHORT_S * 2] * 8) == [True] * TRIED + [False] * (8 - TRIED)

    def test_a_delayed_step_does_not_make_a_program_long(self):
        assert choices([1.0, SHORT_S / 2, 1.0, 1.0, 1.0]) == [True] * 5

    def test_replicas_that_may_wait_for_each_other_get_threads_at_once(self):
        assert choices([0.0], waits=True) == [False]

    def test_an_instrument_that_sees_replicas_gets_their_threads(self):
        class Seen:
            def replica_begins(self, replica, stage):
                pass

            def replica_ends(self, replica, stage, part):
                pass

        assert choices([0.0], instruments=Instruments(Seen())) == [False]


class TestMayWait:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: jax.pure_callback(np.sin, x, x),
            lambda x: io_callback(np.sin, x, x),
            lambda x: jax.debug.print("{}", x),
            lambda x: jax.debug.callback(print, x),
            lambda x: jax.lax.scan(lambda c, _: (jax.pure_callback(np.sin, c, c), None), x, length=2),
        ],
    )
    def test_a_program_that_calls_python_may_wait(self, function):
        assert may_wait(jax.make_jaxpr(function)(jnp.float32(1)))

    def test_a_program_without_calls_never_waits(self):
        assert not may_wait(jax.make_jaxpr(jax.grad(lambda x: jnp.sin(x) * x))(1.0))


class TestSteps:
    @pytest.mark.parametrize("replicas", [2, 5])
    def test_replicas_have_the_same_bits_in_turn_and_in_threads(self, replicas, monkeypatch):
        found = []
        for short_s in (float("inf"), -1.0):
            monkeypatch.setattr(gradient_programs, "SHORT_S", short_s)
            step = training(replicas)
            found.append([step() for _ in range(TRIED + 2)])
        assert found[0] == found[1]

    def test_callbacks_of_replicas_may_wait_for_each_other(self):
        barrier = threading.Barrier(3)

        def meet(x):
            barrier.wait(LIMIT_S)
            return x

        def loss(variables, batch, key):
            factor = jax.pure_callback(meet, jax.ShapeDtypeStruct((), np.float32), batch[0, 0])
            return loss_fn(variables, batch, key) * jax.lax.stop_gradient(factor)

        step = training(3, loss)
        assert [np.isfinite(step()[0]) for _ in range(2)] == [True, True]

    def test_collectives_of_replicas_may_wait_for_each_other(self):
        def loss(variables, batch, key):
            return loss_fn(variables, get_replica_context().all_reduce("mean", batch), key)

        assert np.isfinite(training(3, loss)()[0])

    def test_one_more_replica_costs_few_calls_of_python(self, monkeypatch):
        monkeypatch.setattr(gradient_programs, "SHORT_S", float("inf"))
        four, eight = (calls_of(training(replicas)) for replicas in (4, 8))
        assert (eight - four) / 4 <= CALLS_OF_A_REPLICA


def calls_of(step):
    """Return the number of calls of Python and C functions in a step of this thread."""
    for _ in range(TRIED):
        step()
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count
