"""Train the models of the main job and one that draws random numbers, and write their fingerprints.

    digits_everywhere.py OUTPUT auto|ring MODEL...

Writes {model: fingerprint, "mechanism": ...} as JSON on instance 0.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from connected import ConnectedStrategy

import collectives
import popdist
import strategies
from popdist.examples import digits as train_digits
from popdist.examples.digits_data import load_digits

STEPS = 8


def make_strategy(how):
    """Return the strategy that programs use, or the same strategy over the ring."""
    popdist.init()
    if how == "auto":
        return strategies.PopDistStrategy()
    ring = collectives.connect("mpi", collectives.Settings(mechanism="ring"))
    return ConnectedStrategy(popdist.instance(), ring, popdist.progress())


def train_digits_model(strategy, name):
    options = train_digits.read_options(["--model", name, "--max-steps", str(STEPS), "--batch-size", "8"])
    data = load_digits("digits")
    result = train_digits.train(strategy, train_digits.distribute(strategy, data, options), data, options)
    assert result["steps"] == STEPS
    return result["variables_sha256"]


def train_dropout(strategy):
    """Train two dense layers of two dtypes with dropout; no power of two divides the batch size of 5."""

    def loss_fn(variables, batch, key):
        hidden = jax.nn.relu(batch["image"].reshape(5, -1) @ variables["first"])
        kept = jax.random.bernoulli(key, 0.7, hidden.shape)
        noise = jax.random.uniform(jax.random.fold_in(key, 1), (10,))
        logits = (hidden * kept).astype(jnp.bfloat16) @ variables["last"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32) + noise, batch["label"])
        return loss.mean(), {"kept": kept.mean()}

    data = load_digits("digits")
    rng = np.random.default_rng(1)  # NumPy's: with jax.random each instance would compile draws outside of the step
    variables = {
        "first": rng.standard_normal((data.train_images[0].size, 33)).astype(np.float32) / 8,
        "last": rng.standard_normal((33, 10)).astype(jnp.bfloat16) / 8,
    }
    arrays = {"image": data.train_images, "label": data.train_labels}
    dataset = strategy.distribute_dataset(arrays, batch_size=5, seed=3)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1, momentum=0.9), seed=4)
    state = trainer.init(variables)
    for batch in train_digits.batches(dataset, STEPS):
        state, _ = trainer.step(state, batch)
    return strategies.fingerprint(state.variables)


def train_model(strategy, name):
    return train_dropout(strategy) if name == "dropout" else train_digits_model(strategy, name)


def main(output, how, *models):
    strategy = make_strategy(how)
    found = {"mechanism": strategy.communicator.mechanism}
    for name in models:
        found[name] = train_model(strategy, name)
    if strategy.instance_index == 0:
        Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
