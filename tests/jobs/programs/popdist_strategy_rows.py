"""The rows of `PopDistStrategy` for two instances of one replica; instance 0 prints when all of them held."""

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
    """A value of which each replica has its own; reading it gives the mean."""
    own = strategy.run(lambda w, x: x + w, args=(strategy.broadcast(first), strategy.per_replica(change)))
    return strategy.reduce("mean", own)


# P-01, P-10, P-19, P-21: who is there.
assert (popdist.getNumInstances(), popdist.getNumTotalReplicas()) == (2, 2)
check("P-01", [strategy.num_instances, strategy.instance_index], [2, index])
config = popdist.tensorflow.set_ipu_config(strategies.config.IPUConfig())
distribution = strategy.update_ipu_config(config).experimental.multi_replica_distribution
check("P-01 distribution", [distribution.process_count, distribution.process_index], [2, index])
check("P-01 device", config.select_ipus, [index])
config.configure_ipu_system()
check("P-01 configured", strategies.PopDistStrategy().num_replicas_in_sync, 2)
config.select_ipus, config.auto_select_ipus = [], 2  # of both instances
config.configure_ipu_system()
check("P-01 counted", strategies.PopDistStrategy().num_replicas_in_sync, 2)
config.auto_select_ipus = 3
config.configure_ipu_system()
try:
    strategies.PopDistStrategy()
except popdist.EnvironmentMismatchError as error:
    check("P-01 contradiction", "auto_select_ipus is 3, but this instance has 1 of 2 replicas" in str(error), True)
else:
    check("P-01 contradiction", "is refused", False)
strategies.config.reset_ipu_configuration()

# P-02, P-11: initial values come from instance 0; a reduction on the device, and one on the host.
v = strategy.broadcast(jnp.float32(index + 1))
check("P-02 initial value", v, 1.0)
product = strategy.run(lambda v, x: v * x, args=(v, jnp.float32(2.0)))
check("P-02 reduce", strategy.reduce("SUM", product), 4.0)
on_device = strategy.run(lambda v, x: all_reduced("sum")(v * x), args=(v, jnp.float32(2.0)))
check("P-02 on the device", on_device[0], 4.0)
# The original refuses the mean of integers on its device; here it is the truncated one, as on the host.
check("P-11 mean of int32", strategy.run(all_reduced("MEAN"), args=(jnp.int32(3),))[0], 3)
check("P-11 dtype", strategy.run(all_reduced("mean"), args=(jnp.int32(3),))[0].dtype == np.int32, True)

# P-03, P-12: without reductions on the device a value stays what it was.
own = bare.run(all_reduced("sum"), args=(bare.per_replica(lambda r: float(r + 1)),))
check("P-03", own[0], index + 1.0)

# P-04, P-13: a per-replica value that is averaged when it is read.
check("P-04 before", strategy.reduce("mean", strategy.broadcast(jnp.float32(index + 1))), 1.0)
check("P-04 after", sync_on_read(jnp.float32(index + 1), lambda r: float(r + 1)), 2.5)

# P-05, P-15: a mirrored value.
w = strategy.broadcast(jnp.float32(index + 1))
square = strategy.run(lambda w: w * w, args=(w,))
check("P-05 per replica", square[0], 1.0)
check("P-05 sum", strategy.reduce("sum", square), 2.0)

# P-07, P-14.
x = strategy.per_replica(lambda r: float(r + 1))
check("P-07", strategy.reduce("sum", strategy.run(lambda x: x * x, args=(x,))), 5.0)

# P-16.
check("P-16", strategy.reduce("sum", strategy.run(lambda x: 2.0 * x, args=(x,))), 6.0)


# P-34 with two replicas: one step of gradient descent from 1 over linspace(0, 1, 16) gives 1 - mean(2 x^2).
def loss_fn(variables, batch, key):
    return jnp.mean((batch * variables["w"]) ** 2)


trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(1.0))
state = trainer.init({"w": jnp.float32(index + 1)})
dataset = strategy.distribute_dataset(np.linspace(0, 1, 16, dtype=np.float32), batch_size=8)
for batch in dataset.epoch(0):
    state, metrics = trainer.step(state, batch)
check("P-34", np.round(np.asarray(state.variables["w"]), 6), np.float32(0.311111))
popdist.synchronize()
if index == 0:
    print("all rows held", flush=True)
