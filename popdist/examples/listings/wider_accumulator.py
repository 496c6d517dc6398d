"""Gradients of bfloat16 variables, accumulated over micro-batches in float32 and in bfloat16."""

import jax.numpy as jnp
import numpy as np
import optax

import strategies

COUNT = 256

inputs = np.full((COUNT, 1), 1.0, np.float32)
inputs[0] = 256.0  # the first gradient is so large that a bfloat16 sum would lose the later ones


def loss_fn(variables, batch, key):
    """Return the loss of one micro-batch; its gradient is the mean of its inputs."""
    return jnp.mean(batch * variables["w"].astype(jnp.float32))


def train(dtype):
    """Make one update with learning rate 1, with the sum of the gradients of all micro-batches."""
    strategy = strategies.LocalStrategy(num_replicas=1)
    trainer = strategies.Trainer(
        strategy,
        loss_fn,
        optax.sgd(1.0),
        gradient_accumulation_count=COUNT,
        gradient_accumulation_dtype=dtype,
        reduction_method="sum",
    )
    dataset = strategy.distribute_dataset(inputs, batch_size=1, shuffle=False, gradient_accumulation_count=COUNT)
    state = trainer.init({"w": jnp.zeros((), jnp.bfloat16)})
    for batch in dataset.epoch(0):
        state, _ = trainer.step(state, batch)
    return -float(state.variables["w"])


wide, narrow = train(jnp.float32), train(None)
print(f"the sum of the gradients is {inputs.sum():.0f}: {wide:.0f} in float32, {narrow:.0f} in bfloat16")
