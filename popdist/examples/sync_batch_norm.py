"""A program that trains with synchronised batch normalisation: each group of replicas shares its statistics.

    python -m popdist.examples.sync_batch_norm --replicas 8
    poprun --num-instances 4 --num-replicas 8 python -m popdist.examples.sync_batch_norm

Both print the same fingerprint of the variables. The larger the group, the better the statistics of small
micro-batches; `--group-size 1` normalises each micro-batch by itself.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import popdist
import strategies
from popdist.examples.digits_data import load_digits
from strategies import cross_replica_ops

EPSILON = 1e-3
HIDDEN = 64


def batch_norm(
    x: jax.Array, scale: jax.Array, offset: jax.Array, replica_group_size: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise activations by the mean and the variance over all micro-batches of a group of replicas.

    Call it inside `strategy.run` or a loss function. The gradient of `x` includes the other replicas' share in the
    statistics; the gradients of `scale` and `offset` are those of this replica.

    Args:
        x: Activations [batch, ..., channels], with the same shape on all replicas.
        scale: Scale [channels].
        offset: Offset [channels].
        replica_group_size: Number of neighbouring replicas that share statistics; None for all.

    Returns:
        The normalised activations, in the dtype of `x`; and mean and variance, float32 [channels], equal in the group.
    """
    wide = x.astype(jnp.float32)  # squares of 16-bit floats overflow
    axes = tuple(range(x.ndim - 1))
    mean = cross_replica_ops.cross_replica_mean(wide.mean(axes), replica_group_size)
    variance = cross_replica_ops.cross_replica_mean(((wide - mean) ** 2).mean(axes), replica_group_size)
    normalised = (wide - mean) * jax.lax.rsqrt(variance + EPSILON) * scale + offset
    return normalised.astype(x.dtype), mean, variance


def main(words: Sequence[str] | None = None) -> str:
    """Train; print the fingerprint of the variables on instance 0, and return it."""
    options = read_options(words)
    popdist.init(options.replicas)
    strategy = strategies.PopDistStrategy()
    digits = load_digits("digits")

    def loss_fn(variables, batch, key):  # type: ignore[no-untyped-def]
        images = batch["image"].reshape(len(batch["image"]), -1)
        hidden, _, _ = batch_norm(
            images @ variables["hidden"], variables["scale"], variables["offset"], options.group_size
        )
        logits = jax.nn.relu(hidden) @ variables["logits"]
        is_right = logits.argmax(axis=1) == batch["label"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, {"accuracy": is_right.mean()}

    random = np.random.default_rng(0)
    pixels = int(np.prod(digits.image_shape))
    variables = {
        "hidden": (random.standard_normal((pixels, HIDDEN)) / pixels**0.5).astype(np.float32),
        "scale": np.ones(HIDDEN, np.float32),
        "offset": np.zeros(HIDDEN, np.float32),
        "logits": np.zeros((HIDDEN, 10), np.float32),
    }
    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(0.01))
    state = trainer.init(variables)
    data = {"image": digits.train_images, "label": digits.train_labels}
    dataset = strategy.distribute_dataset(data, batch_size=options.batch_size)
    for epoch in range(options.epochs):
        for batch in dataset.epoch(epoch):
            state, metrics = trainer.step(state, batch)
    fingerprint = strategies.fingerprint(state.variables)
    strategy.on_chief(lambda: print(f"accuracy {metrics['accuracy']:.3f} in the last step, {fingerprint}"))
    return fingerprint


def read_options(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--replicas", type=int, metavar="R", help="number of replicas, if no launcher gives it (1)")
    add("--group-size", type=int, default=2, metavar="K", help="replicas that share statistics (%(default)s)")
    add("--batch-size", type=int, default=4, metavar="N", help="rows per replica (%(default)s)")
    add("--epochs", type=int, default=3, metavar="N", help="number of epochs (%(default)s)")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
