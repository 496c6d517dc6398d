"""The training of two functions in a pipeline, on any number of instances.

python -m popdist.examples.listings.pipelined_training
poprun --num-instances 2 --num-replicas 4 --ipus-per-replica 2 python -m popdist.examples.listings.pipelined_training
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import popdist
import strategies
from strategies import InfeedMode, InfeedQueue, OutfeedQueue, pipelining_ops

REPLICAS = 4
MICRO_BATCHES = 8  # per replica and update
UPDATES = 20

popdist.init(REPLICAS)
strategy = strategies.PopDistStrategy()

random = np.random.default_rng(0)
inputs = random.standard_normal((UPDATES * MICRO_BATCHES * REPLICAS, 16, 8)).astype(np.float32)
targets = np.tanh(inputs @ random.standard_normal((8, 1)).astype(np.float32))

# Every instance has all elements. Element k * 4 + r is micro-batch k of replica r.
infeed = InfeedQueue(zip(inputs, targets, strict=True), mode=InfeedMode.WHOLE)
outfeed = OutfeedQueue()


def stage0(variables, x, y):
    """Run the first layer on its device, and pass the targets to the next stage."""
    return jnp.tanh(x @ variables["first"]), y


def stage1(variables, hidden, y):
    """Run the second layer, and return the loss."""
    return jnp.mean((hidden @ variables["second"] - y) ** 2)


def optimizer_function(loss):
    """Choose the optimizer for the loss that the last stage returns."""
    return pipelining_ops.OptimizerFunctionOutput(optax.adam(0.02), loss)


devices = popdist.getNumIpusPerReplica()
with strategy.scope():
    net = pipelining_ops.pipeline(
        [stage0, stage1],
        gradient_accumulation_count=MICRO_BATCHES,
        repeat_count=UPDATES,
        infeed_queue=infeed,
        outfeed_queue=outfeed,
        optimizer_function=optimizer_function,
        device_mapping=[0, 1 % devices],
        pipeline_schedule=pipelining_ops.PipelineSchedule.Grouped,
        outfeed_loss=True,
        reduction_method="mean",
    )
keys = jax.random.split(jax.random.key(0))
state = net.init({"first": jax.random.normal(keys[0], (8, 32)) / 3, "second": jax.random.normal(keys[1], (32, 1)) / 6})
state = net(state)
losses = outfeed.dequeue()  # float32 [160, local replicas]; with one local replica [160]
infeed.delete()
fingerprint = strategies.fingerprint(state.variables)
print(f"loss {losses[0].mean():.3f} at first, {losses[-1].mean():.4f} in the end, {fingerprint}")
