"""How a model is trained, besides what Keras knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from strategies.feeds.infeed import checked_depth
from strategies.gradients.accumulation import GradientAccumulationReductionMethod
from strategies.numbers import positive
from strategies.pipelines.pipelining import Pipelining
from strategies.step.options import StepOptions

Option: TypeAlias = Any
"""The value of an option."""


@dataclass(frozen=True)
class ModelOptions:
    """What the extensions of a model have set.

    Attributes:
        accumulated: micro-batches of each replica for one update; None where the model was not told.
        reduction_method: of their gradients.
        step: further options of the step; see `strategies.StepOptions`.
        pipelining: how a replica is cut into stages; None for one that is not.
        stages: the stage of each call of a layer; see `strategies.keras.stages`.
        prefetch: how many batches are prepared ahead.
        each_step: whether callbacks are told of each step, and not of each execution.

    Raises:
        TypeError, ValueError: if an option is out of range.
    """

    accumulated: int | None = None
    reduction_method: GradientAccumulationReductionMethod = GradientAccumulationReductionMethod.SUM
    step: Mapping[str, Option] = field(default_factory=dict)
    pipelining: Mapping[str, Option] | None = None
    stages: tuple[int, ...] | None = None
    prefetch: int = 2
    each_step: bool = False

    def __post_init__(self) -> None:
        if self.accumulated is not None:
            positive("gradient_accumulation_steps_per_replica", self.accumulated)
        checked_depth(self.prefetch)
        _ = StepOptions(**self.step)  # refuses what is out of range, and so does a pipeline
        if self.pipelining is not None:
            self.pipeline(0, 1)

    @property
    def micro_batches(self) -> int:
        """Of each replica and step."""
        return self.accumulated or 1

    @property
    def is_pipelined(self) -> bool:
        """Whether it was told that a replica is cut into stages."""
        return self.pipelining is not None or self.stages is not None

    def executed(self, steps_per_execution: int) -> int:
        """How many updates an execution makes of so many micro-batches of each replica. 1 stands for one update.

        Raises:
            RuntimeError: if the micro-batches do not fill updates.
        """
        if self.accumulated is None or steps_per_execution == 1:
            return 1 if self.each_step else steps_per_execution
        if steps_per_execution % self.accumulated:
            kind = "pipelined model" if self.is_pipelined else "model"
            raise RuntimeError(
                f"The {kind} has been configured to use gradient accumulation for {self.accumulated} steps per "
                f"replica, and steps_per_execution is {steps_per_execution}, which is no multiple of it; use one, or "
                "leave steps_per_execution out for one update"
            )
        return 1 if self.each_step else steps_per_execution // self.accumulated

    def pipeline(self, stages: int, devices: int) -> Pipelining:
        """The option of the step.

        Args:
            stages: how many there are.
            devices: that a replica spans.
        """
        given = dict(self.pipelining or {})
        mapping = given.pop("device_mapping", None)
        if mapping is None:
            mapping = list(range(stages)) if devices > 1 else [0] * stages
        return Pipelining(device_mapping=mapping, **given)
