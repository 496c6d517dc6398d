"""Steps for which nobody waits keep what they were given, and leave what the program has."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from collectives.arrays import aligned_empty
from strategies.defaults import Defaults
from strategies.errors import StrategyError
from strategies.jax.on_device.queue import MOST

SIZE, ROWS = 256, 2048


def trainer_on(exchange, replicas, loss_fn):
    strategy = strategies.IPUStrategy(num_replicas=replicas, defaults=Defaults(exchange=exchange))
    return strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))


def loss_fn(variables, batch, key):
    hidden = batch["x"]
    for _ in range(6):
        hidden = jnp.tanh(hidden @ variables["w"])
    return (hidden**2).mean()


def variables():
    return {"w": np.eye(SIZE, dtype=np.float32)}


def batch_of(step, replicas):
    """A batch in memory that XLA reads in place."""
    batch = aligned_empty(ROWS * replicas * SIZE * 4).view(np.float32).reshape(-1, SIZE)
    batch[...] = np.random.default_rng(step).standard_normal(SIZE)
    return {"x": batch}


@pytest.mark.parametrize(("exchange", "replicas", "steps"), [("compiled", 1, 6), ("compiled", 2, 6), ("auto", 1, 40)])
def test_the_program_may_write_to_a_batch_when_the_step_has_returned(exchange, replicas, steps):
    def trained(clears):
        trainer = trainer_on(exchange, replicas, loss_fn)
        state = trainer.init(variables())
        for step in range(steps):
            batch = batch_of(step, replicas)
            state, _ = trainer.step(state, batch)
            if clears:
                batch["x"][...] = 0
        return np.asarray(state.variables["w"]).tobytes()

    assert trained(clears=True) == trained(clears=False)


def test_the_next_step_waits_before_it_uses_the_state_up():
    """So an interrupt, or the failure of an earlier step, leaves the state to the program."""

    def fail(step):
        if step == 2:
            raise FloatingPointError("no such number")
        return np.float32(0)

    def loss(variables, batch, key):
        of_step = jax.pure_callback(fail, jax.ShapeDtypeStruct((), np.float32), batch["step"].max())
        return (batch["x"] @ variables["w"]).mean() + of_step

    trainer = trainer_on("compiled", 1, loss)
    state = trainer.init(variables())
    with pytest.raises(StrategyError, match="step 2 has failed"):
        for step in range(2 * MOST):
            given = {"x": np.ones((4, SIZE), np.float32), "step": np.full(4, step, np.int32)}
            state, _ = trainer.step(state, given)
    assert not state.variables["w"].is_deleted()


def test_what_a_trainer_has_on_devices_goes_with_it():
    trainer = trainer_on("compiled", 2, loss_fn)
    state, metrics = trainer.step(trainer.init(variables()), batch_of(0, 2))
    programs = weakref.ref(trainer._programs)
    gc.disable()
    try:
        del trainer
        assert programs() is None
    finally:
        gc.enable()
    assert metrics["loss"] > 0
    assert np.isfinite(np.asarray(state.variables["w"])).all()
