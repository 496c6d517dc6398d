"""Batch normalisation over groups of replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strategies
from popdist.examples.sync_batch_norm import EPSILON, batch_norm

REPLICAS, GROUP, BATCH, CHANNELS = 8, 2, 4, 3


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_statistics_are_those_of_the_group_and_gradients_of_variables_stay_local(dtype):
    random = np.random.default_rng(0)
    x = (random.standard_normal((REPLICAS, BATCH, 5, CHANNELS)) * 3 + 1).astype(dtype)
    scale, offset = np.float32([1, 2, 3]), np.float32([0, 1, -1])
    weight = np.cos(np.arange(5 * CHANNELS, dtype=np.float32)).reshape(5, CHANNELS)

    def program(own):
        def loss(x, scale, offset):
            normalised, mean, variance = batch_norm(x, scale, offset, GROUP)
            return jnp.sum(normalised.astype(jnp.float32) ** 2 * weight), (normalised, mean, variance)

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(own, scale, offset)

    def of_group(group, scale, offset):  # all its micro-batches as one
        mean = group.mean((0, 1, 2))
        variance = ((group - mean) ** 2).mean((0, 1, 2))
        normalised = (group - mean) / jnp.sqrt(variance + EPSILON) * scale + offset
        return jnp.sum(normalised**2 * weight, axis=(1, 2, 3)), (normalised, mean, variance)

    strategy = strategies.IPUStrategy(REPLICAS)
    results = list(strategy.run(program, args=(strategy.per_replica(lambda r: x[r]),)))
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == np.float32 else {"rtol": 0.02, "atol": 0.05}
    for first in range(0, REPLICAS, GROUP):
        group = x[first : first + GROUP].astype(np.float32)
        (_, (normalised, mean, variance)) = of_group(group, scale, offset)
        of_x = jax.grad(lambda g: of_group(g, scale, offset)[0].sum())(group)
        of_scale, of_offset = jax.jacrev(lambda *given, g=group: of_group(g, *given)[0], argnums=(0, 1))(scale, offset)
        for member in range(GROUP):
            gradients, found = results[first + member]
            assert found[0].dtype == dtype
            for one, wanted in zip(found, (normalised[member], mean, variance), strict=True):
                np.testing.assert_allclose(one, wanted, **tolerance)
            for one, wanted in zip(gradients, (of_x[member], of_scale[member], of_offset[member]), strict=True):
                np.testing.assert_allclose(one, wanted, **{"rtol": 0.02, "atol": 20 * tolerance["atol"]})
    assert np.ptp([result[1][1] for result in results], axis=0).max() > 0.1  # the groups' means do differ
