"""What the extensions of a model set, and how it is trained then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strategies.errors import StrategyError
from strategies.numbers import positive
from strategies.step.accumulation import GradientAccumulationReductionMethod


@dataclass(frozen=True)
class ModelOptions:
    """How a model is trained, besides what Keras knows.

    Attributes:
        accumulated: micro-batches of each replica for one update; None where the model was not told.
        reduction_method: of their gradients.
        step: further options of the step; see `strategies.StepOptions`.
        prefetch: how many batches are prepared ahead.

    Raises:
        TypeError, ValueError: if an option is out of range.
    """

    accumulated: int | None = None
    reduction_method: GradientAccumulationReductionMethod = GradientAccumulationReductionMethod.SUM
    step: Mapping[str, Any] = field(default_factory=dict)
    prefetch: int = 2

    def __post_init__(self) -> None:
        if self.accumulated is not None:
            positive("gradient_accumulation_steps_per_replica", self.accumulated)

    @property
    def micro_batches(self) -> int:
        """Of each replica and step."""
        return self.accumulated or 1

    def steps_of(self, steps_per_execution: int) -> int:
        """How many updates an execution makes of so many micro-batches of each replica; one of them is none said.

        Raises:
            StrategyError: if they do not fill updates.
        """
        if self.accumulated is None or steps_per_execution == 1:
            return steps_per_execution
        if steps_per_execution % self.accumulated:
            raise StrategyError(
                f"steps_per_execution is {steps_per_execution}, and the model accumulates the gradients of "
                f"{self.accumulated} micro-batches; make it a multiple of that, or leave it 1 for one update"
            )
        return steps_per_execution // self.accumulated
