"""Values with which two programs are compared."""

import jax.numpy as jnp
import numpy as np

from strategies.comparing.exactness import batch_like, variables_like

VARIABLES = {"w": jnp.zeros((100, 50)), "h": jnp.zeros(400, jnp.bfloat16), "s": jnp.zeros(())}


def test_variables_are_drawn_as_they_were_shaped_and_none_is_zero(seed):
    found = variables_like(VARIABLES, seed)
    for name, leaf in found.items():
        assert (leaf.shape, leaf.dtype) == (VARIABLES[name].shape, VARIABLES[name].dtype)
        assert leaf.sharding == VARIABLES[name].sharding
        assert np.asarray(leaf).all()


def test_outputs_of_a_layer_have_about_unit_variance(seed):
    found = variables_like(VARIABLES, seed)["w"]
    assert 0.5 < 100 * float(jnp.var(found)) < 2


def test_the_same_seed_draws_the_same():
    one, again, other = (np.asarray(variables_like(VARIABLES, seed)["w"]) for seed in (3, 3, 4))
    assert (one == again).all()
    assert not (one == other).any()


def test_numbers_of_a_batch_are_others_and_labels_stay(seed):
    batch = {"x": np.zeros((6, 2), np.float32), "y": jnp.zeros(6, jnp.bfloat16), "label": np.arange(6)}
    found = batch_like(batch, seed)
    assert found["label"] is batch["label"]
    assert (found["x"].dtype, found["x"].shape, type(found["x"])) == (np.float32, (6, 2), np.ndarray)
    assert (found["y"].dtype, found["y"].sharding) == (jnp.bfloat16, batch["y"].sharding)
    assert found["x"].all()
