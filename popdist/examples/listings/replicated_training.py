"""A training loop of every replica, with gradients added over all replicas; on any number of instances.

python -m popdist.examples.listings.replicated_training
poprun --num-instances 2 --num-replicas 4 python -m popdist.examples.listings.replicated_training
"""

import jax
import jax.numpy as jnp
import numpy as np

import popdist
import strategies
from strategies import InfeedMode, InfeedQueue, OutfeedQueue, cross_replica_ops, loops

STEPS = 100
REPLICAS = 4

popdist.init(REPLICAS)
strategy = strategies.PopDistStrategy()

random = np.random.default_rng(0)
inputs = random.standard_normal((STEPS * REPLICAS, 16, 8)).astype(np.float32)
targets = inputs @ random.standard_normal((8, 1)).astype(np.float32)

# Every instance has all elements. Element k * 4 + r is for step k of replica r.
infeed = InfeedQueue(zip(inputs, targets, strict=True), mode=InfeedMode.WHOLE)
outfeed = OutfeedQueue()


def training_step(weights, x, y):
    """Run the body of the loop for one replica."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(weights)
    outfeed.enqueue(loss)
    total = cross_replica_ops.cross_replica_sum(gradient)
    return weights - 0.05 / REPLICAS * total


def train():
    """Run the program of every replica."""
    return loops.repeat(STEPS, training_step, [jnp.zeros((8, 1))], infeed)


weights = strategy.run(train)[0]  # the same on all replicas
losses = outfeed.dequeue()  # float32 [100, local replicas]; with one local replica [100]
infeed.delete()
fingerprint = strategies.fingerprint(weights)
print(f"loss {losses[0].mean():.3f} at first, {losses[-1].mean():.6f} in the end, {fingerprint}")
