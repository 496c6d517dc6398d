"""The training loop in iterator form: the body dequeues its elements, and the program iterates over the results."""

import jax
import jax.numpy as jnp
import numpy as np

import strategies
from strategies import InfeedQueue, OutfeedQueue, loops

STEPS = 50

random = np.random.default_rng(0)
inputs = random.standard_normal((4 * STEPS, 32, 8)).astype(np.float32)
targets = inputs @ random.standard_normal((8, 1)).astype(np.float32)

strategy = strategies.LocalStrategy(num_replicas=1)
infeed = InfeedQueue({"x": x, "y": y} for x, y in zip(inputs, targets, strict=True))
outfeed = OutfeedQueue()


def loss_of(weights, batch):
    """Return the mean squared error of one batch."""
    return jnp.mean((batch["x"] @ weights - batch["y"]) ** 2)


def training_step(weights):
    """Run the body of the loop, which takes only the loop variable."""
    loss, gradient = jax.value_and_grad(loss_of)(weights, infeed.dequeue())
    outfeed.enqueue({"loss": loss, "gradient": jnp.abs(gradient).max()})
    return weights - 0.05 * gradient


def train(steps, weights):
    """Run the loop; it is compiled once, because the number of steps is an argument."""
    return loops.repeat(steps, training_step, [weights])


weights = np.zeros((8, 1), np.float32)
means = []
for epoch in range(4):
    [weights] = strategy.run(train, args=(np.int32(STEPS), weights))
    means.append(np.mean([result["loss"] for result in outfeed]))  # an outfeed can be iterated repeatedly
    print(f"epoch {epoch}: mean loss {means[-1]:.6f}")
