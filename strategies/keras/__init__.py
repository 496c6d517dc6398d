"""Keras models on the replicas of a strategy; loaded when a program that imported Keras enters a scope."""

from popdist.extras import describe_missing

try:
    import keras  # noqa: F401  first: a scope imports modules of this package as soon as Keras is loaded
except ModuleNotFoundError as error:
    if text := describe_missing(error, __name__):
        raise ModuleNotFoundError(text, name=error.name) from None
    raise

import strategies.keras.hook  # noqa: F401  `strategies.keras_in_scope` calls it
from strategies.keras.callbacks import OnChief
from strategies.keras.checkpointing import FitCheckpoints as Checkpoints
from strategies.keras.extensions import RecomputationCheckpoint
from strategies.keras.stages import (
    FunctionalLayerPipelineStageAssignment,
    FunctionalNestedModelPipelineStageAssignment,
    PipelineStage,
    SequentialLayerPipelineStageAssignment,
    SequentialNestedModelPipelineStageAssignment,
)

__all__ = [
    "Checkpoints",
    "FunctionalLayerPipelineStageAssignment",
    "FunctionalNestedModelPipelineStageAssignment",
    "OnChief",
    "PipelineStage",
    "RecomputationCheckpoint",
    "SequentialLayerPipelineStageAssignment",
    "SequentialNestedModelPipelineStageAssignment",
]
