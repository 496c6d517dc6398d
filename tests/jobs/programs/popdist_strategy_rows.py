"""Checks of `PopDistStrategy` with two instances of one replica each; instance 0 prints a line when all have held."""

import jax.numpy as jnp
import numpy as np
import optax

import popdist.tensorflow
import strategies

strategy = strategies.PopDistStrategy()
bare = strategies.PopDistStrategy(add_ipu_cross_replica_reductions=False)
index = popdist.getInstanceIndex()


def check(row, found, wanted):
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted), err_msg=row)


def all_reduced(op):
    def fn(x):
        return strategies.get_replica_context().all_reduce(op, x)

    return fn


def sync_on_read(first, change):
    """Average on reading a value that each replica keeps for itself."""
    own = strategy.run(lambda w, x: x + w, args=(strategy.broadcast(first), strategy.per_replica(change)))
    return strategy.reduce("mean", own)


# Instances, replicas, and the configuration of devices.
assert (popdist.getNumInstances(), popdist.getNumTotalReplicas()) == (2, 2)
check("instances", [strategy.num_instances, strategy.instance_index], [2, index])
config = popdist.tensorflow.set_ipu_config(strategies.config.IPUConfig())
distribution = strategy.update_ipu_config(config).experimental.multi_replica_distribution
check("distribution", [distribution.process_count, distribution.process_index], [2, index])
check("device", config.select_ipus, [index])
config.configure_ipu_system()
check("configured replicas", strategies.PopDistStrategy().num_replicas_in_sync, 2)
config.select_ipus, config.auto_select_ipus = [], 2  # of both instances
config.configure_ipu_system()
check("counted devices", strategies.PopDistStrategy().num_replicas_in_sync, 2)
config.auto_select_ipus = 3
config.configure_ipu_system()
try:
    strategies.PopDistStrategy()
except popdist.EnvironmentMismatchError as error:
    check("contradiction", "auto_select_ipus is 3, but this instance has 1 of 2 replicas" in str(error), True)
else:
    check("contradiction", "is refused", False)
strategies.config.reset_ipu_configuration()

# Initial values come from instance 0; a reduction on the device, and one on the host.
v = strategy.broadcast(jnp.float32(index + 1))
check("initial value", v, 1.0)
product = strategy.run(lambda v, x: v * x, args=(v, jnp.float32(2.0)))
check("reduction on the host", strategy.reduce("SUM", product), 4.0)
on_device = strategy.run(lambda v, x: all_reduced("sum")(v * x), args=(v, jnp.float32(2.0)))
check("reduction on the device", on_device[0], 4.0)
# The original refuses the mean of integers on its device; here it is the truncated one, as on the host.
check("mean of int32", strategy.run(all_reduced("MEAN"), args=(jnp.int32(3),))[0], 3)
check("dtype of the mean", strategy.run(all_reduced("mean"), args=(jnp.int32(3),))[0].dtype == np.int32, True)

# Without reductions on the device a value stays unchanged.
own = bare.run(all_reduced("sum"), args=(bare.per_replica(lambda r: float(r + 1)),))
check("value without reductions", own[0], index + 1.0)

# A per-replica value, averaged when it is read.
check("first per-replica value", strategy.reduce("mean", strategy.broadcast(jnp.float32(index + 1))), 1.0)
check("averaged value", sync_on_read(jnp.float32(index + 1), lambda r: float(r + 1)), 2.5)

# A mirrored value.
w = strategy.broadcast(jnp.float32(index + 1))
square = strategy.run(lambda w: w * w, args=(w,))
check("mirrored value of a replica", square[0], 1.0)
check("sum of mirrored values", strategy.reduce("sum", square), 2.0)

# Per-replica input.
x = strategy.per_replica(lambda r: float(r + 1))
check("sum of squares", strategy.reduce("sum", strategy.run(lambda x: x * x, args=(x,))), 5.0)

# A function of a per-replica value.
check("sum of doubled values", strategy.reduce("sum", strategy.run(lambda x: 2.0 * x, args=(x,))), 6.0)


# A training with two replicas: one step of gradient descent from 1 over linspace(0, 1, 16) gives 1 - mean(2 x^2).
def loss_fn(variables, batch, key):
    return jnp.mean((batch * variables["w"]) ** 2)


trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(1.0))
state = trainer.init({"w": jnp.float32(index + 1)})
dataset = strategy.distribute_dataset(np.linspace(0, 1, 16, dtype=np.float32), batch_size=8)
for batch in dataset.epoch(0):
    state, metrics = trainer.step(state, batch)
check("trained variable", np.round(np.asarray(state.variables["w"]), 6), np.float32(0.311111))
popdist.synchronize()
if index == 0:
    print("all rows held", flush=True)
