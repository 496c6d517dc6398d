"""Train until instance 1 fails in the given way: `failing_training.py HOW STRATEGY`."""

import os
import sys

import jax.numpy as jnp
import numpy as np
import optax

import popdist
import strategies

how = sys.argv[1]
popdist.init()
strategy = getattr(strategies, sys.argv[2])()
is_it = strategy.instance_index == 1
FAILS_IN_STEP = 7


def loss_fn(variables, batch, key):
    return jnp.mean((batch[:, None] * variables["layer"]["w"]) ** 2) + variables["b"]


variables = {"layer": {"w": jnp.ones((100, 10))}, "b": jnp.float32(0)}
if is_it and how == "shape":
    variables["layer"]["w"] = jnp.ones((100, 11))

trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.01, momentum=0.9))
state = trainer.init(variables)
batch = np.ones(100 * len(strategy.local_replicas), np.float32)
while True:
    if is_it and state.step == FAILS_IN_STEP:
        print(f"step {FAILS_IN_STEP} of process {os.getpid()}.", flush=True)
        if how == "raise":
            raise ValueError("no such image")
        if how == "exit":
            sys.exit(5)
        if how == "leave":
            sys.exit(0)
    state, metrics = trainer.step(state, batch)
