"""A program that trains a small network on handwritten digits with R replicas, on any number of instances.

    python -m popdist.examples.digits --strategy local --replicas 4
    poprun --num-instances 2 --num-replicas 4 python -m popdist.examples.digits
    TF_CONFIG=... python -m popdist.examples.digits --strategy multi-worker --replicas 4    (once per worker)
    mpirun -np 2 python -m popdist.examples.digits --strategy horovod --replicas 4

The first three print the same fingerprint of the variables. Horovod adds gradients in its own order.

With --checkpoint-dir the program continues where its last run with that folder ended. The bits do not depend on the
number of instances.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import optax

import collectives
import popdist
import strategies
from popdist.examples.command_line import make_strategy, parser_of
from popdist.examples.digits_data import DataError, Digits, load_digits
from popdist.examples.digits_models import MODELS, Model

TEST_BATCH_SIZE = 512


def main() -> int:
    """Run the program; the exit status is 2 if its arguments cannot be used."""
    options = read_options()
    try:
        data = load_digits(options.data)
        strategy = make_strategy(options.strategy, options.replicas)
        dataset = distribute(strategy, data, options)
    except (DataError, ValueError, popdist.PopDistError, collectives.CollectiveError) as error:
        print(f"digits.py: error: {error}", file=sys.stderr)
        return 2
    try:
        result = train(strategy, dataset, data, options)
    except (strategies.CheckpointError, strategies.FailedPreconditionError) as error:
        print(f"digits.py: error: {error}", file=sys.stderr)
        return 2
    strategy.on_chief(lambda: report(result, options.json))
    return 0


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with status 2 and a message if it cannot be used."""
    parser = parser_of("Train a small network on handwritten digits.", strategy=True)
    add = parser.add_argument
    add("--model", choices=MODELS, default="cnn", help="the network; it has its own default of epochs (%(default)s)")
    add("--max-steps", type=int, metavar="N", help="stop after N steps")
    add("--learning-rate", type=float, metavar="X", help="learning rate of Adam; each network has its own default")
    add("--seed", type=int, default=0, metavar="N", help="seed of variables and of the data's order (%(default)s)")
    add("--checkpoint-dir", type=Path, metavar="DIR", help="save here, and continue from the newest checkpoint here")
    add("--checkpoint-every", type=int, default=100, metavar="K", help="save every K steps (%(default)s)")
    add("--json", metavar="PATH", help="write the result to this file; '-' is standard output")
    options = parser.parse_args(arguments)
    model = MODELS[options.model]
    options.epochs = options.epochs or model.epochs
    options.learning_rate = options.learning_rate or model.learning_rate
    return options


def distribute(
    strategy: strategies.Strategy, data: Digits, options: argparse.Namespace
) -> strategies.DistributedDataset:
    """Distribute the training data over the replicas."""
    arrays = {"image": data.train_images, "label": data.train_labels}
    return strategy.distribute_dataset(arrays, batch_size=options.batch_size, seed=options.seed)


def train(
    strategy: strategies.Strategy,
    dataset: strategies.DistributedDataset,
    data: Digits,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Train, evaluate the variables on the test set, and return the result to report; a collective call."""
    model = MODELS[options.model]
    trainer = strategies.Trainer(strategy, loss_of(model), optax.adam(options.learning_rate), seed=options.seed)
    state = trainer.init(model.init(options.seed, data.image_shape))
    steps = int(min(options.epochs * len(dataset), options.max_steps or math.inf))
    metrics: strategies.Metrics | None = None
    folder, every = options.checkpoint_dir, options.checkpoint_every
    with strategies.Checkpoints(folder, trainer, dataset, every=every) if folder else nullcontext() as checkpoints:
        if checkpoints:
            state = checkpoints.restore(state)
            if state.step and strategy.is_chief:
                print(f"resuming at step {state.step} of {steps} from {folder}", file=sys.stderr, flush=True)
        for batch in batches(dataset, steps):
            state, metrics = trainer.step(state, batch)
            if strategy.is_chief and (state.step % len(dataset) == 0 or state.step == steps):
                text = f"loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.1%}"
                print(f"epoch {-(-state.step // len(dataset))}: {text}", file=sys.stderr, flush=True)
            if checkpoints:
                checkpoints.after_step(state)
        if checkpoints:
            checkpoints.save(state)
    tested = trainer.evaluate(state, test_set(strategy, data), metrics_fn=accuracy_of(model))
    return {
        "strategy": options.strategy,
        "model": options.model,
        "instances": strategy.num_instances,
        "replicas": strategy.num_replicas_in_sync,
        "steps": state.step,
        "final_loss": metrics and metrics["loss"],
        "final_accuracy": metrics and metrics["accuracy"],
        "test_accuracy": tested["accuracy"],
        "variables_sha256": strategies.fingerprint(state.variables),
    }


def batches(dataset: strategies.DistributedDataset, steps: int) -> Iterator[Any]:
    """Yield the batches up to the end of step `steps`, from the data set's position, over as many epochs as needed."""
    begin = dataset.position()
    for epoch in range(begin.epoch, -(-steps // len(dataset))):
        done = epoch * len(dataset) + (begin.step if epoch == begin.epoch else 0)
        for _, batch in zip(range(steps - done), dataset.epoch(epoch), strict=False):
            yield batch


def loss_of(model: Model) -> Callable[[Any, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]:
    """Return a loss function for one replica's micro-batch: mean cross-entropy, and the accuracy."""

    def loss_fn(variables: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = model.apply(variables, batch["image"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}

    return loss_fn


def test_set(strategy: strategies.Strategy, data: Digits) -> strategies.DistributedDataset:
    """Distribute the whole test set over the replicas."""
    arrays = {"image": data.test_images, "label": data.test_labels}
    size = max(1, TEST_BATCH_SIZE // strategy.num_replicas_in_sync)
    return strategy.distribute_dataset(arrays, size, shuffle=False, remainder="pad")


def accuracy_of(model: Model) -> Callable[[Any, Any, jax.Array, jax.Array], dict[str, strategies.Mean]]:
    """Return a function that computes the accuracy of all rows except padding."""

    def metrics_fn(variables: Any, batch: Any, mask: jax.Array, key: jax.Array) -> dict[str, strategies.Mean]:
        is_right = model.apply(variables, batch["image"]).argmax(-1) == batch["label"]
        return {"accuracy": strategies.Mean.of(is_right, mask)}

    return metrics_fn


def report(result: dict[str, Any], json_path: str | None) -> None:
    """Print the result, or write it as JSON if --json asks for it."""
    if json_path == "-":
        print(json.dumps(result))
        return
    if json_path is not None:
        Path(json_path).write_text(json.dumps(result) + "\n", encoding="utf-8")
    loss = "" if result["final_loss"] is None else f", loss {result['final_loss']:.4f}"
    print(
        f"{result['model']} with {result['replicas']} replicas in {result['instances']} instances "
        f"({result['strategy']}): {result['steps']} steps{loss}, test accuracy {result['test_accuracy']:.1%}\n"
        f"variables {result['variables_sha256']}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
