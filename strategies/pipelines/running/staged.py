"""The computation of one micro-batch on a replica, cut into stages that are not yet compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from strategies.core.options import GradientAccumulationReductionMethod
from strategies.jax.programs.segments import Part, ProgramSegment
from strategies.typing import MapGradient

StageArray: TypeAlias = jax.Array | np.ndarray | np.generic
"""A flat argument or result of a stage: on a device, or of NumPy."""


@dataclass(frozen=True)
class Staged:
    """The computation of one micro-batch on a replica, cut into stages.

    Attributes:
        stages: For each stage its segments, one for each of its functions.
        arguments: The shapes and dtypes of the flat arguments.
        weights: The numbers of the arguments that are differentiated.
        varying: The numbers of the arguments that differ between micro-batches.
        carried: For arguments among `varying`, the results that become the arguments of the next micro-batch.
        loss: The number of the result that is differentiated; None without training.
    """

    stages: tuple[tuple[ProgramSegment, ...], ...]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    weights: tuple[int, ...] = ()
    varying: frozenset[int] = frozenset()
    carried: Mapping[int, int] = field(default_factory=dict)
    loss: int | None = None

    @cached_property
    def segments(self) -> tuple[ProgramSegment, ...]:
        """The segments of all stages, in their order."""
        return tuple(segment for stage in self.stages for segment in stage)

    @cached_property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """The stage of each segment, and the segment's place in the stage."""
        return tuple((number, place) for number, stage in enumerate(self.stages) for place in range(len(stage)))

    @cached_property
    def shapes(self) -> dict[int, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the values that stages hand on."""
        found: dict[int, jax.ShapeDtypeStruct] = {}
        for segment in self.segments:
            given = segment.read(self.arguments, found)
            made = jax.eval_shape(lambda *values, one=segment: tuple(one.function(*values)), *given)
            found.update(zip(segment.gives, made[len(segment.parts) :], strict=True))
        return found

    @cached_property
    def learning(self) -> frozenset[int]:
        """The numbers of the handed-on values with gradients: floating-point values that depend on weights."""
        if self.loss is None:
            return frozenset()
        found: set[int] = set()
        for segment in self.segments:
            if set(segment.inputs) & set(self.weights) or found & set(segment.takes):
                found |= {number for number in segment.gives if jnp.issubdtype(self.shapes[number].dtype, jnp.inexact)}
        return frozenset(found)

    def takers(self, value: int) -> list[int]:
        """Return the numbers of the segments that take a value of another segment."""
        return [number for number, segment in enumerate(self.segments) if value in segment.takes]

    def readers(self, argument: int) -> list[int]:
        """Return the numbers of the segments that read an argument."""
        return [number for number, segment in enumerate(self.segments) if argument in segment.inputs]

    def makers(self, result: int) -> list[int]:
        """Return the numbers of the segments that make a result: one, unless the result is an argument."""
        return [number for number, segment in enumerate(self.segments) if Part(result) in segment.parts]


@dataclass(frozen=True)
class Accumulators:
    """The way to add the gradients of a stage's weights over the micro-batches.

    Attributes:
        shapes: The shapes of the accumulators, by the numbers of the arguments.
        method: The way to combine micro-batches.
        count: The number of micro-batches.
        map_gradient: A function applied to each micro-batch's gradients before they are added; None for none.
        keeps_bad: Whether the map leaves elements that are not finite as they are; see `mapped`.
    """

    shapes: Mapping[int, jax.ShapeDtypeStruct] = field(default_factory=dict)
    method: GradientAccumulationReductionMethod = GradientAccumulationReductionMethod.SUM
    count: int = 1
    map_gradient: MapGradient | None = None
    keeps_bad: bool = False
