"""Train with sharded optimizer state, accumulated micro-batches and bfloat16 gradients in transit.

    training_options.py OUTPUT

Writes the result as JSON on instance 0.
"""

import json
import sys
from pathlib import Path

import optax

import popdist
import strategies
from popdist.examples import digits as train_digits
from popdist.examples.digits_data import load_digits
from popdist.examples.digits_models import MODELS

STEPS = 3
MICRO_BATCHES = 2


def train(strategy):
    """Return the number of instances, the last loss and the fingerprint of the variables."""
    data, model = load_digits("digits"), MODELS["mlp"]
    arrays = {"image": data.train_images, "label": data.train_labels}
    dataset = strategy.distribute_dataset(arrays, batch_size=4, gradient_accumulation_count=MICRO_BATCHES)
    trainer = strategies.Trainer(
        strategy,
        train_digits.loss_of(model),
        optax.adam(model.learning_rate),
        gradient_accumulation_count=MICRO_BATCHES,
        gradient_transfer_dtype="bfloat16",
        replicated_optimizer_state_sharding=True,
    )
    state = trainer.init(model.init(0, data.image_shape))
    for batch in train_digits.batches(dataset, STEPS):
        state, metrics = trainer.step(state, batch)
    variables = strategies.fingerprint(state.variables)
    return {"instances": strategy.num_instances, "loss": metrics["loss"], "variables": variables}


def main(output):
    popdist.init()
    strategy = strategies.PopDistStrategy()
    result = train(strategy)
    strategy.on_chief(lambda: Path(output).write_text(json.dumps(result)))


if __name__ == "__main__":
    main(*sys.argv[1:])
