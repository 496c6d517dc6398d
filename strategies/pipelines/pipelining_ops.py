"""Pipelines: the stages of a program on several devices of a replica, and what they would do, or did, when.

Semantics: the original's `pipelining_ops`. `plan`, traces, and schedules beyond the first three are this project's own.
"""

from __future__ import annotations

from strategies.pipelines.functions.network import Pipeline
from strategies.pipelines.functions.optimizer_function import OptimizerFunctionOutput, PipelineStageOptions
from strategies.pipelines.functions.pipeline import pipeline
from strategies.pipelines.mapping import _ALL_DEVICES as _ALL_DEVICES
from strategies.pipelines.pipelining import RecomputationMode
from strategies.pipelines.plan import Plan, plan
from strategies.pipelines.running.micro_batch import (
    get_current_iteration_counter,
    get_model_state,
    get_random_key,
    update_model_state,
)
from strategies.pipelines.schedules.registry import PipelineSchedule
from strategies.pipelines.times import StageTimes
from strategies.pipelines.trace import Trace
from strategies.programs.recomputation import recomputation_checkpoint

__all__ = [
    "OptimizerFunctionOutput",
    "Pipeline",
    "PipelineSchedule",
    "PipelineStageOptions",
    "Plan",
    "RecomputationMode",
    "StageTimes",
    "Trace",
    "get_current_iteration_counter",
    "get_model_state",
    "get_random_key",
    "pipeline",
    "plan",
    "recomputation_checkpoint",
    "update_model_state",
]
