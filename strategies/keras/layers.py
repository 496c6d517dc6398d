"""Layers of the original besides Keras's own."""

from __future__ import annotations

from typing import Any

import keras

from strategies.programs.recomputation import recomputation_checkpoint


@keras.saving.register_keras_serializable(package="strategies")
class RecomputationCheckpoint(keras.layers.Layer):  # type: ignore[misc]
    """Keep a value for the backward pass of a stage that recomputes, which so computes again from there.

    The original's `keras.ipu.layers.RecomputationCheckpoint`. Values stay as they are. The layer has an effect in
    stages with the `recomputation_mode` `RecomputeAndBackpropagateInterleaved` of `set_pipelining_options`.
    """

    def call(self, inputs: Any) -> Any:
        """Mark the inputs, one array or several."""
        return recomputation_checkpoint(inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shape of the inputs."""
        return input_shape
