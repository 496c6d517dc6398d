"""A training loop on the device: batches come in through an infeed, losses go out through an outfeed."""

import jax
import jax.numpy as jnp
import numpy as np

from strategies import InfeedQueue, OutfeedQueue, loops

STEPS = 200

random = np.random.default_rng(0)
inputs = random.standard_normal((STEPS, 32, 8)).astype(np.float32)
targets = inputs @ random.standard_normal((8, 1)).astype(np.float32)


def loss_of(weights, x, y):
    """Return the mean squared error of one batch."""
    return jnp.mean((x @ weights - y) ** 2)


def training_step(weights, x, y):
    """Run the body of the loop, with the loop variable and an element of the infeed."""
    loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
    outfeed.enqueue(loss)
    return weights - 0.05 * gradient


infeed = InfeedQueue(zip(inputs, targets, strict=True))
outfeed = OutfeedQueue()
weights = loops.repeat(STEPS, training_step, [np.zeros((8, 1), np.float32)], infeed)
losses = outfeed.dequeue()  # float32 [200]
print(f"loss {losses[0]:.3f} at first, {losses[-1]:.6f} in the end")
