"""All collectives between replicas in one program, with groups within instances and across them; and trainings.

    every_collective.py FOLDER

The first training is that of `popdist/examples/sync_batch_norm.py`, which reports its own result.

Each instance writes the results of its replicas to FOLDER/INSTANCE.npz, under "replica/path".
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import strategies
from strategies import cross_replica_ops as ops
from strategies.jax.programs.recomputation import recomputation_checkpoint, recomputing

GROUPS = {
    "all": {},
    "pairs": {"replica_group_size": 2},
    "orthogonal": {"replica_group_size": 2, "orthogonal": True},
}
DTYPES = ("float32", "bfloat16")


def inputs(replica):
    random = np.random.default_rng(replica)
    wide = (random.standard_normal((8, 3)) * 300).astype(np.float32)
    return {dtype: np.asarray(jnp.asarray(wide).astype(dtype)) for dtype in DTYPES}


def everything(x):
    return {name: of_groups(x, options) for name, options in GROUPS.items()} | {"index": ops.replication_index()}


def of_groups(x, groups):
    weight = ops.replication_index() + 1.0
    flat = {dtype: value.reshape(-1)[:13] for dtype, value in x.items()}

    def loss(value):
        results = [
            ops.cross_replica_sum(value, **groups),
            ops.cross_replica_mean(value, **groups),
            ops.all_gather(value, **groups),
            ops.all_to_all(value, 0, 1, **groups),
            ops.reduce_scatter(value.reshape(-1), **groups),
        ]
        return sum(jnp.sum(jnp.sin(result)) for result in results) * weight

    return {
        "sum": ops.cross_replica_sum(x, **groups),
        "mean": ops.cross_replica_mean(x, **groups),
        "gathered": ops.all_gather(x, **groups),
        "exchanged": ops.all_to_all(x["float32"], 0, 1, **groups),
        "products": ops.reduce_scatter(flat["float32"], op="MUL", **groups),
        "squares": ops.reduce_scatter(flat["bfloat16"], op="SQUARE_ADD", **groups),
        "gradient": jax.grad(loss)(x["float32"] / 300),
    }


def loss_fn(variables, batch, key):
    """Compute two layers with statistics over groups of replicas between them."""
    hidden = jnp.tanh(batch @ variables["first"])
    centre = ops.cross_replica_mean(hidden.mean(0), 2, orthogonal=True)
    spread = ops.cross_replica_mean(((hidden - centre) ** 2).mean(0))
    hidden = recomputation_checkpoint((hidden - centre) * jax.lax.rsqrt(spread + 1e-3))
    return jnp.mean((jnp.tanh(hidden) @ variables["last"]) ** 2)


def trained(strategy):
    trainer = strategies.Trainer(strategy, recomputing(loss_fn, "blocks"), optax.sgd(0.01, momentum=0.9))
    state = trainer.init(
        {"first": jnp.linspace(-1, 1, 96).reshape(6, 16), "last": jnp.linspace(1, -1, 48).reshape(16, 3)}
    )
    data = np.random.default_rng(0).standard_normal((80, 6)).astype(np.float32)
    for batch in strategy.distribute_dataset(data, batch_size=5).epoch(0):
        state, _ = trainer.step(state, batch)
    return {name: np.asarray(value) for name, value in state.variables.items()}


def found(strategy):
    """Return the results of each local replica under "replica/path", and variables under "trained/name"."""
    results = strategy.run(everything, args=(strategy.per_replica(inputs),))
    arrays = {
        f"{replica}/{jax.tree_util.keystr(path)}": np.asarray(leaf)
        for replica, result in zip(strategy.local_replicas, results, strict=True)
        for path, leaf in jax.tree_util.tree_leaves_with_path(result)
    }
    arrays |= {f"trained/{name}": value for name, value in trained(strategy).items()}
    return {name: array.view(np.uint16) if array.dtype.itemsize == 2 else array for name, array in arrays.items()}


if __name__ == "__main__":
    from popdist.examples import sync_batch_norm

    sync_batch_norm.main(["--epochs=1"])
    this = strategies.PopDistStrategy()
    np.savez(Path(sys.argv[1]) / f"{this.instance_index}.npz", **found(this))
