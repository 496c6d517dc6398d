"""Run programs of a strategy, and print the numbers of executables that JAX has compiled and loaded."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax

import strategies

counted = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counted.update([event.rpartition("/")[2]]))

strategy = strategies.PopDistStrategy()
matrix = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
for factor in (1.0, 2.0, 3.0):
    results = strategy.run(lambda x, f=factor: jnp.tanh(x @ x) * f, args=(matrix,))

trainer = strategies.Trainer(strategy, lambda v, batch, key: jnp.mean((batch @ v) ** 2), optax.sgd(0.1))
state = trainer.init(matrix)
for _ in range(2):
    state, _ = trainer.step(state, np.tile(matrix, (len(strategy.local_replicas), 1)))
names = ("cache_hits", "cache_misses")
print(strategies.fingerprint(state.variables), *(counted[name] for name in names), flush=True)
