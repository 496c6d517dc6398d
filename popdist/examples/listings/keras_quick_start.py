"""The quick start of the original's Keras: make, train, test and query a model in the scope of a strategy.

python -m popdist.examples.listings.keras_quick_start
poprun --num-instances 2 --num-replicas 4 python -m popdist.examples.listings.keras_quick_start
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import popdist
import strategies

REPLICAS = 4

popdist.init(REPLICAS)
strategy = strategies.PopDistStrategy()

keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
images = random.random((512, 28, 28), np.float32)
labels = (images.mean((1, 2)) * 10000).astype(np.int32) % 10

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=8)
    history = model.fit(images, labels, batch_size=16, epochs=2, verbose=0)
    loss, accuracy = model.evaluate(images, labels, batch_size=16, verbose=0)
    outputs = model.predict(images[:5], verbose=0)

fingerprint = strategies.fingerprint(model.get_weights())
print(f"loss {history.history['loss'][0]:.3f} at first, {loss:.3f} in the end, outputs {outputs.shape}, {fingerprint}")
