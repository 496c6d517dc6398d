"""Trains the models of the main job, and one that draws random numbers, over every mechanism there is.

    digits_everywhere.py OUTPUT STEPS [REPLICAS]

Writes {"<model> <mechanism>": fingerprint} as JSON on instance 0; with REPLICAS all runs in this process.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "launch_scripts"))

import jax
import jax.numpy as jnp
import optax
import train_digits
from digits_data import load_digits

import collectives
import popdist
import strategies


def popdist_strategies():
    """The strategy that programs use, then the same over the ring."""
    popdist.init()
    auto = strategies.PopDistStrategy()
    yield "auto", auto
    if auto.num_instances > 1:
        ring = collectives.connect("mpi", collectives.Settings(mechanism="ring"))
        yield "ring", strategies.Strategy(popdist.instance(), ring, popdist.progress())
        ring.close()


def train_model(strategy, name, steps):
    options = train_digits.read_options(["--model", name, "--max-steps", str(steps), "--batch-size", "8"])
    data = load_digits("digits")
    result = train_digits.train(strategy, train_digits.distribute(strategy, data, options), data, options)
    assert result.steps == steps
    return result.variables_sha256


def train_dropout(strategy, steps):
    """Two dense layers of two dtypes with dropout; batches of 5, which no power of two divides."""

    def loss_fn(variables, batch, key):
        hidden = jax.nn.relu(batch["image"].reshape(5, -1) @ variables["first"])
        kept = jax.random.bernoulli(key, 0.7, hidden.shape)
        noise = jax.random.normal(jax.random.fold_in(key, 1), (10,))
        logits = (hidden * kept).astype(jnp.bfloat16) @ variables["last"]
        loss = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32) + noise, batch["label"]
        )
        return loss.mean(), {"kept": kept.mean()}

    data = load_digits("digits")
    pixels = data.train_images[0].size
    variables = {
        "first": jax.random.normal(jax.random.key(1), (pixels, 33)) / 8,
        "last": jax.random.normal(jax.random.key(2), (33, 10), jnp.bfloat16) / 8,
    }
    arrays = {"image": data.train_images, "label": data.train_labels}
    dataset = strategy.distribute_dataset(arrays, batch_size=5, seed=3)
    trainer = strategies.Trainer(strategy, loss_fn, optax.adamw(0.01), seed=4)
    state = trainer.init(variables)
    for batch in train_digits.batches(dataset, steps):
        state, _ = trainer.step(state, batch)
    return strategies.fingerprint(state.variables)


def main(output, steps, replicas=None):
    found = {}
    chosen = popdist_strategies() if replicas is None else [("ipu", strategies.IPUStrategy(int(replicas)))]
    for mechanism, strategy in chosen:
        for name in ("cnn", "mlp"):
            found[f"{name} {mechanism}"] = train_model(strategy, name, int(steps))
        found[f"dropout {mechanism}"] = train_dropout(strategy, int(steps))
        found[f"mechanism {mechanism}"] = strategy.communicator.mechanism
        if strategy.instance_index == 0:
            Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
