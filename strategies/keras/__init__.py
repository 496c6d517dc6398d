"""Models of Keras on the replicas of a strategy; loaded when a scope is entered and Keras is there."""

import keras  # noqa: F401  before this package's own modules: once it is there, some of them are imported by a scope

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
