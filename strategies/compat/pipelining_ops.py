"""Pipelines of functions: the stages of a program on several devices of a replica, their plans and their traces.

Semantics: the original's `pipelining_ops`. `plan`, traces, and schedules beyond the first three are additions.
"""

from strategies.compat.functions.network import Pipeline
from strategies.compat.functions.optimizer_function import OptimizerFunctionOutput, PipelineStageOptions
from strategies.jax.programs.recomputation import recomputation_checkpoint
from strategies.pipelines.pipelining import RecomputationMode
from strategies.pipelines.plan import Plan, Trace, plan
from strategies.pipelines.running.arguments import (
    get_current_iteration_counter,
    get_model_state,
    get_random_key,
    update_model_state,
)
from strategies.pipelines.stages import _ALL_DEVICES as _ALL_DEVICES
from strategies.pipelines.timetable import PipelineSchedule

__all__ = [
    "OptimizerFunctionOutput",
    "Pipeline",
    "PipelineSchedule",
    "PipelineStageOptions",
    "Plan",
    "RecomputationMode",
    "Trace",
    "get_current_iteration_counter",
    "get_model_state",
    "get_random_key",
    "pipeline",
    "plan",
    "recomputation_checkpoint",
    "update_model_state",
]

pipeline = Pipeline  # the original's function
