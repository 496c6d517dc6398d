"""Fewer devices than replicas: the replicas run one wave after another, and the bits stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from popdist.environments.sums import WITHOUT_SUMS
from strategies import DeviceError, get_replica_context

pytestmark = pytest.mark.timeout(300)  # some start four processes, one after another

PROGRAM = """\
import sys
import jax, jax.numpy as jnp, numpy as np, optax
devices, replicas, is_early = (int(word) for word in sys.argv[1:])
if is_early:
    jax.config.update("jax_num_cpu_devices", devices)
    jax.numpy.zeros(1).block_until_ready()
import strategies
strategy = strategies.IPUStrategy(num_replicas=replicas)
assert jax.local_device_count() == devices
"""
TRAIN = """
def loss_fn(variables, batch, key):
    hidden = jnp.tanh(batch["x"] @ variables["first"])
    kept = jax.random.bernoulli(key, 0.8, hidden.shape)
    error = ((hidden * kept) @ variables["last"])[:, 0] - batch["y"]
    return jnp.mean(error ** 2), {"kept": kept.mean()}

rng = np.random.default_rng(0)
data = {"x": rng.standard_normal((120, 40)).astype(np.float32), "y": rng.standard_normal(120).astype(np.float32)}
trainer = strategies.Trainer(strategy, loss_fn, optax.adamw(0.01), check_numerics=True)
state = trainer.init({"first": jnp.ones((40, 300)) / 50, "last": jnp.linspace(-1, 1, 300)[:, None]})
for batch in strategy.distribute_dataset(data, batch_size=5).epoch(0):
    state, metrics = trainer.step(state, batch)
squares = strategy.run(lambda x: x * x, args=(strategy.per_replica(float),))
print(strategies.fingerprint(state.variables), dict(metrics), [float(x) for x in squares])
"""
COLLECTIVE = """
for replicas in (6, 2, 1):
    strategy = strategies.IPUStrategy(num_replicas=replicas)
    try:
        strategy.run(lambda x: strategies.get_replica_context().all_reduce("sum", x), args=(1.0,))
    except strategies.DeviceError as error:
        print(error)
    else:
        print("done")
"""


@pytest.mark.complete
def test_training_gives_the_bits_of_enough_devices(in_new_process):
    enough = in_new_process(PROGRAM + TRAIN, 6, 6, 0)
    for devices in (1, 2, 4):
        assert in_new_process(PROGRAM + TRAIN, devices, 6, 1, PJRT_NPROC="8", XLA_FLAGS=WITHOUT_SUMS) == enough


@pytest.mark.complete
def test_replicas_that_wait_need_a_device_each_however_few_there_are(in_new_process):
    of_six, *of_fewer = in_new_process(PROGRAM + COLLECTIVE, 2, 6, 1, XLA_FLAGS=WITHOUT_SUMS).splitlines()
    assert "6 replicas have to wait for each other on 2 devices" in of_six
    assert "make the strategy before JAX is used" in of_six
    assert of_fewer == ["done", "done"]


def trained(strategy):
    """The fingerprint after two steps, and what each replica sees in `run`."""

    def loss_fn(variables, batch, key):
        kept = jax.random.bernoulli(key, 0.8, (2, 5))
        return jnp.mean((jnp.tanh(batch @ variables) * kept) ** 2), {"kept": kept.mean()}

    data = np.random.default_rng(0).standard_normal((2 * 12 * 2, 3)).astype(np.float32)
    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(0.01))
    state = trainer.init(jnp.linspace(-1, 1, 15).reshape(3, 5))
    for batch in strategy.distribute_dataset(data, batch_size=2).epoch(0):
        state, metrics = trainer.step(state, batch)
    squares = strategy.run(lambda x: x * x, args=(strategy.per_replica(float),))
    return strategies.fingerprint(state.variables), dict(metrics), [float(square) for square in squares]


def test_twelve_replicas_on_eight_devices_have_the_bits_of_six_on_each_of_two_instances(on_instances):
    assert len(jax.local_devices()) == 8
    first, second = on_instances(2, 12, trained)
    fingerprint, metrics, squares = trained(strategies.IPUStrategy(12))
    assert (fingerprint, metrics) == first[:2] == second[:2]
    assert squares == first[2] + second[2] == [float(replica**2) for replica in range(12)]


def test_replicas_that_wait_for_each_other_need_a_device_each():
    def program(x):
        return get_replica_context().all_reduce("sum", x)

    with pytest.raises(DeviceError, match="9 replicas have to wait for each other on 3 devices.*before JAX is used"):
        strategies.IPUStrategy(9).run(program, args=(1.0,))
    assert list(strategies.IPUStrategy(8).run(program, args=(1.0,))) == [8.0] * 8
