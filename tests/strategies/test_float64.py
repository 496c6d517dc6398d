"""What JAX would silently make float32 is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from strategies.programs.xla_pitfalls import refuse_float64


@pytest.mark.parametrize("value", [np.float64(1), {"x": [np.zeros(2)]}])
def test_float64_is_refused_wherever_it_is(value):
    with pytest.raises(TypeError, match="Unsupported data type for infeed: float64; convert it to float32"):
        refuse_float64(value, "infeed")


@pytest.mark.parametrize("value", [1.0, np.float32(1), {"x": (jnp.ones(2), np.int64(3))}, None])
def test_the_rest_comes_back_untouched(value):
    assert refuse_float64(value) is value
