"""A thread that reads the losses of a training loop while the loop runs on the device."""

import threading

import jax
import jax.numpy as jnp
import numpy as np

from strategies import InfeedQueue, OutfeedQueue, loops

STEPS = 500

random = np.random.default_rng(0)
inputs = random.standard_normal((STEPS, 32, 8)).astype(np.float32)
targets = inputs @ random.standard_normal((8, 1)).astype(np.float32)

infeed = InfeedQueue(zip(inputs, targets, strict=True))
outfeed = OutfeedQueue()
has_ended = threading.Event()
losses = []
reads = []


def read_losses():
    """Take the available losses in order, until the loop has ended and nothing is left."""
    while not has_ended.wait(0.001):
        take()
    take()


def take():
    """Read the available losses once."""
    new = list(outfeed)
    losses.extend(new)
    reads.extend([len(new)] if new else [])


def training_step(weights, x, y):
    """Run the body of the loop."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(weights)
    outfeed.enqueue(loss)
    return weights - 0.01 * gradient


reader = threading.Thread(target=read_losses)
reader.start()
try:
    weights = loops.repeat(STEPS, training_step, [np.zeros((8, 1), np.float32)], infeed)
finally:
    has_ended.set()
    reader.join()
print(f"{len(losses)} losses in {len(reads)} reads, the last one {losses[-1]:.6f}")
