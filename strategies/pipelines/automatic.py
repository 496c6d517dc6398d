"""Measures stages before the first step, and chooses the schedule for them, the same one on all instances."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strategies.pipelines.choice import Choice, StashBytes, choose
from strategies.pipelines.running.replica_run import Given, Keeping, ReplicaRun
from strategies.pipelines.running.stage_plan import StagePlan
from strategies.pipelines.times import StageTimes, measured_times
from strategies.pipelines.timetable import Action, Kind, Timed
from strategies.replicas.replicas import Replicas

ROUNDS = 4
"""How often a micro-batch goes through all stages; the first time, when programs are compiled, does not count."""


def choose_for(replicas: Replicas, plan: StagePlan, memory_limit_bytes: int | None) -> Choice:
    """The schedule for the stages of a plan, by what instance 0 measures; a collective call.

    Raises:
        ValueError: if nothing fits into the limit.
    """
    times, stash = measured(plan, [column.device_of(0) for column in replicas.grid.columns])
    numbers = np.array([times.forward, times.backward, times.weights, stash.stashed, stash.inputs], np.float64)
    numbers = replicas.communicator.broadcast(numbers, name="times of the stages of a pipeline")
    forward, backward, weights, stashed, inputs = (tuple(of.tolist()) for of in numbers)
    return choose(
        StageTimes(forward, backward, weights),
        StashBytes(tuple(map(int, stashed)), tuple(map(int, inputs))),
        plan.timetable.mapping,
        plan.timetable.num_micro_batches,
        memory_limit_bytes,
    )


def measured(plan: StagePlan, devices: Sequence[jax.Device]) -> tuple[StageTimes, StashBytes]:
    """How long the stages take for one micro-batch of zeros, and what they keep of it."""
    rounds = [_round(plan, devices, Keeping()) for _ in range(ROUNDS)][1:]
    _, inputs = _round(plan, devices, Keeping(recomputes=True))
    return measured_times(spans for spans, _ in rounds), StashBytes(rounds[0][1], inputs)


def _round(plan: StagePlan, devices: Sequence[jax.Device], keeping: Keeping) -> tuple[list[Timed], tuple[int, ...]]:
    """Send one micro-batch there and back; who did what when, and how many bytes each stage kept."""
    mapping = plan.timetable.mapping
    run = ReplicaRun(plan.staged, plan.stages, mapping, devices, keeping)
    run.prepare(Given({place: _zeros(shape) for place, shape in enumerate(plan.staged.arguments)}, {}, {}))
    spans: list[Timed] = []

    def perform(kind: Kind, stage: int) -> None:
        for device in sorted(set(mapping[stage])):
            action = Action(kind, stage, 0)
            begin_s = time.perf_counter()
            run.perform(device, action)
            spans.append(Timed(device, action, begin_s, time.perf_counter()))

    stages = range(len(mapping))
    for stage in stages:
        perform(Kind.FORWARD, stage)
    kept = tuple(
        max(sum(run.kept_bytes(one, 0) for one in run.segments_of(device, stage)) for device in mapping[stage])
        for stage in stages
    )
    for stage in reversed(stages):
        perform(Kind.BACKWARD_INPUTS, stage)
        perform(Kind.BACKWARD_WEIGHTS, stage)
    return spans, kept


def _zeros(shape: jax.ShapeDtypeStruct) -> Any:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape.shape, shape.dtype)
    return np.zeros(shape.shape, shape.dtype)
