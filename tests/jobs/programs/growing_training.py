"""A training in which instance 1 is killed, and a new instance joins; also run in one process by the test.

Usage: python growing_training.py
"""

import json
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import strategies
from popdist.context import progress

REPLICAS, EPOCHS, LOSS_AT, WAIT_AT = 6, 3, 3, 7
LIMIT_S = 60.0


def loss_fn(variables, batch, key):
    hidden = jnp.tanh(batch["x"] @ variables["first"]) * jax.random.bernoulli(key, 0.9, (8,))
    loss = jnp.mean((hidden @ variables["last"] - batch["y"]) ** 2)
    return loss, {"hidden": jnp.mean(hidden)}


def await_new_instance(strategy, count):
    """Wait until poprun wants the new instance to join, which is then at the same step."""
    give_up_s = time.monotonic() + LIMIT_S
    while strategy.num_instances < count and not progress().is_resize_due:
        assert time.monotonic() < give_up_s, "no new instance has come"
        time.sleep(0.01)


def train(strategy, before_step):
    """Train, and return the bits of the variables and the losses of all steps."""
    random = np.random.default_rng(3)
    draw = random.standard_normal
    data = {"x": draw((96, 5), np.float32), "y": draw((96, 3), np.float32)}
    dataset = strategy.distribute_dataset(data, batch_size=4, seed=1)
    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(1e-2))
    state = trainer.init({"first": draw((5, 8), np.float32), "last": draw((8, 3), np.float32)})
    losses = []
    for epoch in range(EPOCHS):
        for batch in dataset.epoch(epoch):
            before_step(len(losses))
            state, metrics = trainer.step(state, batch)
            losses.append(float(metrics["loss"]).hex())
    return {"bits": strategies.fingerprint(state.variables), "step": state.step, "losses": losses}


def main():
    strategy = strategies.PopDistStrategy()
    count, rank = strategy.num_instances, int(os.environ["OMPI_COMM_WORLD_RANK"])

    def before_step(made):
        if made == LOSS_AT and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if made == WAIT_AT and rank < count:
            await_new_instance(strategy, count)

    found = train(strategy, before_step)
    print(json.dumps(found | {"replicas": list(strategy.local_replicas)}), flush=True)


if __name__ == "__main__":
    main()
