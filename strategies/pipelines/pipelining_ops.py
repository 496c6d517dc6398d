"""Pipelines: the stages of a program on several devices of a replica, and what they would do, or did, when.

Semantics: the original's `pipelining_ops`. `plan`, traces, and schedules beyond the first three are this project's own.
"""

from __future__ import annotations

from strategies.pipelines.plan import Plan, plan
from strategies.pipelines.schedules.registry import PipelineSchedule
from strategies.pipelines.times import StageTimes
from strategies.pipelines.trace import Trace

__all__ = ["PipelineSchedule", "Plan", "StageTimes", "Trace", "plan"]
