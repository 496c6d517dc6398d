"""Step in two stages; the backward pass of the first waits until the gradients of the last have been averaged."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax

import strategies
from collectives.instruments import EXCHANGE

LIMIT_S = 60.0
MICRO_BATCHES = 2
averaged = threading.Event()
seen = []


class Telling:
    """A phase that sets `averaged` when it has ended."""

    def __init__(self, phase):
        self._phase = phase

    def __enter__(self):
        self._phase.__enter__()

    def __exit__(self, *error):
        self._phase.__exit__(*error)
        averaged.set()


def wait(slope):
    """Wait until gradients have been averaged, and note whether they were in time."""
    seen.append(averaged.wait(LIMIT_S))
    return slope


@jax.custom_vjp
def held(value):
    """Return the value itself; its gradient comes late."""
    return value


held.defvjp(lambda value: (value, None), lambda _, slope: (jax.pure_callback(wait, slope, slope),))


def loss_fn(variables, batch, key):
    with strategies.pipeline_stage(0):
        hidden = held(jnp.tanh(batch @ variables["first"]))
    with strategies.pipeline_stage(1):
        return jnp.mean(hidden @ variables["last"])


def have_left(strategy):
    """Return for each local replica and micro-batch whether gradients left before the first stage's backward pass."""
    strategy.instruments.during[EXCHANGE] = Telling(strategy.instruments.during[EXCHANGE])
    trainer = strategies.Trainer(
        strategy,
        loss_fn,
        optax.sgd(0.1),
        gradient_accumulation_count=MICRO_BATCHES,
        pipeline=strategies.Pipelining([0, 1], "one_forward_one_backward"),
    )
    state = trainer.init({"first": np.ones((3, 5), np.float32), "last": np.ones(5, np.float32)})
    averaged.clear()
    rows = 2 * MICRO_BATCHES * len(strategy.local_replicas)
    trainer.step(state, np.ones((rows, 3), np.float32))
    return seen
