"""Compiling for fewer instances before one is lost, so that the first step after that finds its programs compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from strategies.background import Background
from strategies.devices import ReplicaDevices
from strategies.gradients import GradientPlan
from strategies.replica_program import ReplicaProgram
from strategies.strategy import Strategy
from strategies.survival import devices_with_one_lost

logger = logging.getLogger(__name__)

THREAD = "compile-ahead"


@dataclass(frozen=True)
class StepPlan:
    """What replicas compute in a step with batches of one shape; compiled, without memory for gradients.

    Attributes:
        program: what a replica computes.
        gradients: the programs that compute it on all local replicas.
    """

    program: ReplicaProgram
    gradients: GradientPlan


Compile = Callable[[ReplicaDevices, Any, Any], StepPlan]
"""Plans a step and compiles it, for the shapes of variables and batch on some devices; asks no other instance."""


class CompileAhead:
    """Compiles, in a background thread, the steps that this instance would make if one of the others were lost.

    That is all that is compiled after a loss: updates are the same, and programs for as many replicas are used again.

    Args:
        strategy: may lose instances.
        compile_step: see there.
        is_wanted: if False, nothing is compiled.
        obstacle: why nothing could be used after a loss, if something about the training says so.
    """

    def __init__(self, strategy: Strategy, compile_step: Compile, is_wanted: bool, obstacle: str | None) -> None:
        self._strategy = strategy
        self._compile_step = compile_step
        self._is_wanted = is_wanted
        self._obstacle = obstacle
        self._plans: Background[StepPlan] = Background(THREAD)

    def prepare(self, variables: Any, batch: Any, plan: StepPlan) -> None:
        """Begin to compile for one instance fewer; after the first step of a plan.

        Args:
            variables: as that step has returned them.
            batch: the shapes of this instance's batch.
            plan: of the step; it is used again where an instance gets as many replicas as before.
        """
        if not self._is_wanted:
            return
        obstacle = self._obstacle_to(plan)
        if obstacle is not None:
            logger.info("nothing is compiled ahead: %s", obstacle)
            self._is_wanted = False
            return
        for devices in devices_with_one_lost(self._strategy):
            shapes = jax.tree.map(partial(self._resized, devices=devices), batch)
            key = _key(devices, variables, shapes)
            if _place(devices) == _place(self._strategy.devices):
                self._plans.put(key, plan)
            else:
                shared = jax.tree.map(devices.shared_shape, variables)
                self._plans.prepare(key, partial(self._compile, devices, shared, shapes))

    def take(self, variables: Any, batch: Any) -> StepPlan | None:
        """The step for these variables and this batch, if it was compiled before the last loss; waits if it just is."""
        return self._plans.take(_key(self._strategy.devices, variables, batch))

    def drop_others(self) -> None:
        """Drop what is not for the replicas that this instance drives now."""
        place = _place(self._strategy.devices)
        self._plans.keep(lambda key: isinstance(key, tuple) and key[0] == place)

    def _obstacle_to(self, plan: StepPlan) -> str | None:
        if not self._strategy.can_carry_on:
            return "the job does not go on when an instance is lost; start it with poprun --on-failure shrink"
        if not plan.program.is_independent:
            return "the loss function has collectives or feeds, which belong to the instances that there are"
        return self._obstacle

    def _resized(self, leaf: Any, devices: ReplicaDevices) -> jax.ShapeDtypeStruct:
        rows = leaf.shape[0] // len(self._strategy.local_replicas) * len(devices.replicas)
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

    def _compile(self, devices: ReplicaDevices, variables: Any, batch: Any) -> StepPlan:
        began_s = time.monotonic()
        plan = self._compile_step(devices, variables, batch)
        took_s = time.monotonic() - began_s
        logger.info("compiled ahead, for %d local replicas, in %.2f s", len(devices.replicas), took_s)
        return plan


def _place(devices: ReplicaDevices) -> Hashable:
    """What programs depend on: not which replicas they are."""
    return devices.devices, len(devices.replicas), devices.calls_back


def _key(devices: ReplicaDevices, variables: Any, batch: Any) -> Hashable:
    leaves, structure = jax.tree.flatten((variables, batch))
    shapes = [(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves]
    return _place(devices), structure, tuple(shapes)
