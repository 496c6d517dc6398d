"""A functional model in two stages, on two devices of each replica, with gradient accumulation.

python -m popdist.examples.listings.keras_pipelined
poprun --num-instances 2 --num-replicas 2 --ipus-per-replica 2 python -m popdist.examples.listings.keras_pipelined
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import popdist
import strategies
from strategies.keras import PipelineStage

popdist.init(2)
strategy = strategies.PopDistStrategy()

keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
inputs = random.standard_normal((512, 8)).astype(np.float32)
targets = inputs @ random.standard_normal((8, 1)).astype(np.float32)

with strategy.scope():
    given = keras.Input((8,))
    with PipelineStage(0):
        hidden = keras.layers.Dense(16, activation="relu")(given)
    with PipelineStage(1):
        output = keras.layers.Dense(1)(hidden)
    model = keras.Model(given, output)
    model.compile("adam", "mse")
    model.set_pipelining_options(8, gradient_accumulation_reduction_method="mean")
    history = model.fit(inputs, targets, batch_size=4, epochs=10, verbose=0)

fingerprint = strategies.fingerprint(model.get_weights())
print(f"loss {history.history['loss'][0]:.3f} at first, {history.history['loss'][-1]:.3f} in the end, {fingerprint}")
