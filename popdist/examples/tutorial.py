"""The program of tutorial.md: it trains on handwritten digits, validates, stops early, and keeps the best variables.

python -m popdist.examples.tutorial
poprun --num-instances 2 --num-replicas 4 python -m popdist.examples.tutorial
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import popdist
import strategies
from popdist.examples.digits_data import load_digits

popdist.init(4)  # replicas of all instances; poprun --num-replicas must be equal
strategy = strategies.PopDistStrategy()

digits = load_digits("digits")
images, labels = digits.train_images, digits.train_labels
dataset = strategy.distribute_dataset({"image": images[:1200], "label": labels[:1200]}, batch_size=16, seed=0)


def init(key):
    """Draw the variables of a network with one hidden layer."""
    keys = jax.random.split(key)
    return {
        "hidden": {"kernel": jax.random.normal(keys[0], (64, 64)) / 8, "bias": jnp.zeros(64)},
        "logits": {"kernel": jax.random.normal(keys[1], (64, 10)) / 8, "bias": jnp.zeros(10)},
    }


def apply(variables, images):
    """Return the logits of images."""
    hidden, logits = variables["hidden"], variables["logits"]
    features = jax.nn.relu(images.reshape(len(images), 64) @ hidden["kernel"] + hidden["bias"])
    return features @ logits["kernel"] + logits["bias"]


def losses_of(variables, batch):
    """Return the loss of each image."""
    return optax.softmax_cross_entropy_with_integer_labels(apply(variables, batch["image"]), batch["label"])


def loss_fn(variables, batch, key):
    """Return the loss of one replica's micro-batch, with different noise for each replica and step."""
    noise = 0.1 * jax.random.normal(key, batch["image"].shape)
    return losses_of(variables, batch | {"image": batch["image"] + noise}).mean()


trainer = strategies.Trainer(strategy, loss_fn, optax.adam(0.01), seed=0)
state = trainer.init(init(jax.random.key(0)))

validation = strategy.distribute_dataset(
    {"image": images[1200:], "label": labels[1200:]}, batch_size=16, shuffle=False, remainder="pad"
)


def found_in(variables, batch, key):
    """Return the validated values, without noise: the loss and the accuracy."""
    is_right = apply(variables, batch["image"]).argmax(-1) == batch["label"]
    return losses_of(variables, batch).mean(), {"accuracy": is_right.mean()}


patience = 3
best, best_loss, best_epoch = None, np.inf, 0
for epoch in range(100):
    steps = []
    for batch in dataset.epoch(epoch):
        state, metrics = trainer.step(state, batch)
        steps.append(metrics)
    validated = trainer.evaluate(state, validation, found_in)
    if strategy.is_chief:
        loss = np.mean([metrics["loss"] for metrics in steps])
        print(f"epoch {epoch}: loss {loss:.4f}, validated {validated['loss']:.4f}, {validated['accuracy']:.1%} right")
    if validated["loss"] < best_loss:
        best, best_loss, best_epoch = jax.tree.map(np.array, state.variables), validated["loss"], epoch
    elif epoch - best_epoch >= patience:
        break


def report():
    """Predict other digits with the best variables, and save these."""
    np.savez("best.npz", **{f"{layer}/{name}": best[layer][name] for layer in best for name in best[layer]})
    predicted = jax.jit(apply)(best, digits.test_images).argmax(-1)
    accuracy = np.mean(predicted == digits.test_labels)
    print(f"epoch {best_epoch} was best: {accuracy:.1%} of other digits right, {strategies.fingerprint(best)}")


strategy.on_chief(report)
