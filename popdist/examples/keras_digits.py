"""A program that trains a small Keras network on handwritten digits with R replicas, on any number of instances.

    python -m popdist.examples.keras_digits --strategy local --replicas 4
    poprun --num-instances 2 --num-replicas 4 python -m popdist.examples.keras_digits
    mpirun -np 2 python -m popdist.examples.keras_digits --replicas 4
    TF_CONFIG=... python -m popdist.examples.keras_digits --strategy multi-worker --replicas 4    (once per worker)

All of them print the same fingerprint of the variables.
"""

import argparse
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")  # before keras is imported

import keras
import numpy as np
from keras import layers

import popdist
import strategies
from popdist.examples.digits_data import DataError, Digits, load_digits

SEED = 7


def make_strategy(name: str, replicas: int | None) -> strategies.Strategy:
    """Make the strategy with this name.

    Raises:
        ValueError: The replicas cannot be divided evenly among the workers.
    """
    if name in ("local", "ipu"):
        return strategies.LocalStrategy(num_replicas=replicas or 1)
    if name == "popdist":
        popdist.init(replicas)
        return strategies.PopDistStrategy()
    resolver = popdist.TFConfigClusterResolver()
    workers = len(resolver.cluster.addresses)
    local, rest = divmod(replicas or workers, workers)
    if rest or not local:
        raise ValueError(f"--replicas {replicas} on {workers} workers; each has equally many: use a multiple")
    return strategies.IPUMultiWorkerStrategy(resolver, num_local_replicas=local)


def make_model(digits: Digits) -> keras.Model:
    """Make a network with batch normalisation and dropout, and compile it."""
    model = keras.Sequential(
        [
            keras.Input(digits.image_shape),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(32),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.Dropout(0.2, seed=SEED),
            layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.Adam(0.005)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=8)
    return model


def train(strategy: strategies.Strategy, digits: Digits, arguments: argparse.Namespace) -> str:
    """Train and test; return the line that is the same for all ways to start the program."""
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = make_model(digits)
        model.fit(
            digits.train_images,
            digits.train_labels,
            batch_size=arguments.batch_size,
            epochs=arguments.epochs,
            validation_data=(digits.test_images, digits.test_labels),
            verbose=2,
        )
        _, accuracy = model.evaluate(digits.test_images, digits.test_labels, verbose=0)
        if arguments.save and strategy.is_chief:
            model.save(arguments.save)
    fingerprint = strategies.fingerprint([np.asarray(variable) for variable in model.variables])
    return f"{accuracy:.3f} of the test set right, variables {fingerprint}"


def main() -> int:
    """Train with the options of the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", choices=("local", "popdist", "multi-worker", "ipu"), default="popdist")
    parser.add_argument("--replicas", type=int, help="replicas of all instances; default: from poprun")
    parser.add_argument("--data", default="digits", help="'digits', an npz file or a directory of IDX files")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="rows per replica")
    parser.add_argument("--save", help="save a .keras file, which stock Keras can load")
    arguments = parser.parse_args()
    try:
        digits = load_digits(arguments.data)
        strategy = make_strategy(arguments.strategy, arguments.replicas)
    except (DataError, ValueError) as error:
        print(f"keras_digits.py: {error}", file=sys.stderr)
        return 2
    print(train(strategy, digits, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
