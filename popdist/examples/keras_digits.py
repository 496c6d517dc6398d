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

import strategies
from popdist.examples.command_line import make_strategy, parser_of
from popdist.examples.digits_data import DataError, Digits, load_digits

SEED = 7


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
    parser = parser_of(__doc__.partition("\n")[0], strategy=True)
    parser.set_defaults(epochs=10)
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
