"""NumPy encodes gradients as int8 as JAX does, but for subnormal numbers, which XLA takes for zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from strategies.exchange.transfer import Int8Layout
from strategies.gradients.leaving import encode
from strategies.torch.contribution import quantise


def test_blocks_and_what_they_lose_have_the_bits_of_jax(seed):
    rng = np.random.default_rng(seed)
    leaves = [
        (rng.standard_normal(shape) * 10.0 ** rng.integers(-20, 30)).astype(np.float32) for shape in (200, (3, 70), 1)
    ]
    leaves[0][7], leaves[1][2, 69], leaves[2] = np.inf, np.nan, np.zeros(1, np.float32)
    residuals = [rng.standard_normal(leaf.shape).astype(np.float32) * np.abs(leaf).min() for leaf in leaves]
    layout = Int8Layout.of(leaves)
    into = np.empty(layout.payload_size, np.int8)
    kept = quantise(layout, leaves, residuals, into)
    expected = jax.jit(lambda *given: encode(layout, *given))(
        leaves, residuals, jnp.zeros(layout.payload_size, jnp.int8)
    )
    np.testing.assert_array_equal(into, expected[0])
    for one, other in zip(kept, expected[1], strict=True):
        np.testing.assert_array_equal(one, other)
