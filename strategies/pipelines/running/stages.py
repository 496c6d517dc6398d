"""The programs of a stage: its forward pass, its backward pass for the inputs, and that for the weights.

A stage and its gradient are traced as one function, which is cut in three. All schedules run these three, so that none
of them can change a bit: a whole backward pass is both parts, one after the other, and a stage that computes again what
it has not kept runs its forward pass once more. What is kept of a micro-batch is what the backward passes read of the
forward pass; weights are not, nor what depends on them alone, which is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from strategies.gradients.accumulation import GradientAccumulationReductionMethod, MapGradient, accumulated, mapped
from strategies.pipelines.running.executables import Executables
from strategies.programs.buckets import MOVEMENTS
from strategies.programs.jaxpr import Equation, EquationGroup, Graph, Variable, cut, variables
from strategies.programs.segments import Part, ProgramSegment


@dataclass(frozen=True)
class Staged:
    """What a replica computes of one micro-batch, cut into stages.

    Attributes:
        stages: for each stage its segments, one for each of its functions.
        arguments: the shapes and dtypes of the flat arguments.
        weights: the numbers of the arguments that are differentiated.
        varying: the numbers of the arguments that are others for each micro-batch.
        carried: for arguments among them the results that are the arguments of the next micro-batch.
        loss: the number of the result that is differentiated; None where nothing is learned.
    """

    stages: tuple[tuple[ProgramSegment, ...], ...]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    weights: tuple[int, ...] = ()
    varying: frozenset[int] = frozenset()
    carried: Mapping[int, int] = field(default_factory=dict)
    loss: int | None = None

    @cached_property
    def segments(self) -> tuple[ProgramSegment, ...]:
        """Those of all stages, in their order."""
        return tuple(segment for stage in self.stages for segment in stage)

    @cached_property
    def numbers(self) -> tuple[range, ...]:
        """For each stage the numbers of its segments."""
        ends = [sum(map(len, self.stages[: place + 1])) for place in range(len(self.stages))]
        return tuple(range(end - len(stage), end) for end, stage in zip(ends, self.stages, strict=True))

    @cached_property
    def shapes(self) -> dict[int, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of what stages hand on."""
        found: dict[int, jax.ShapeDtypeStruct] = {}
        for segment in self.segments:
            given = [self.arguments[place] for place in segment.inputs] + [found[number] for number in segment.takes]
            made = jax.eval_shape(lambda *values, one=segment: tuple(one.function(*values)), *given)
            found.update(zip(segment.gives, made[len(segment.parts) :], strict=True))
        return found

    @cached_property
    def learning(self) -> frozenset[int]:
        """The numbers of what stages hand on that have gradients: floating-point numbers that weights decide."""
        if self.loss is None:
            return frozenset()
        found: set[int] = set()
        for segment in self.segments:
            if set(segment.inputs) & set(self.weights) or found & set(segment.takes):
                found |= {number for number in segment.gives if is_learning(self.shapes[number])}
        return frozenset(found)

    def takers(self, value: int) -> list[int]:
        """The numbers of the segments that take what another one gives."""
        return [number for number, segment in enumerate(self.segments) if value in segment.takes]

    def readers(self, argument: int) -> list[int]:
        """The numbers of the segments that read an argument."""
        return [number for number, segment in enumerate(self.segments) if argument in segment.inputs]


def is_learning(shape: Any) -> bool:
    """Whether something can have a gradient."""
    return bool(jnp.issubdtype(shape.dtype, jnp.inexact))


@dataclass(frozen=True)
class Accumulators:
    """How the gradients of a stage's weights are added up over the micro-batches.

    Attributes:
        shapes: of the accumulators, by the numbers of the arguments.
        method: how.
        count: of micro-batches.
        map_gradient: of each micro-batch, before; None for none.
        keeps_bad: see `mapped`.
    """

    shapes: Mapping[int, jax.ShapeDtypeStruct] = field(default_factory=dict)
    method: GradientAccumulationReductionMethod = GradientAccumulationReductionMethod.SUM
    count: int = 1
    map_gradient: MapGradient | None = None
    keeps_bad: bool = False


class StagePrograms:
    """The compiled programs of one segment of a stage, and how values flow through them.

    Its values are its arguments and what it takes of earlier segments, in this order, and behind them the cotangents.

    Args:
        staged: all stages.
        number: of the segment.
        accumulators: of all weights.
        executables: of all segments.

    Attributes:
        segment: see there.
        weights: the numbers of the arguments whose gradients it computes.
        slopes: for each of the values that it gives, and that has gradients, the segments that take it.
        steep: which of the values that it takes have gradients.
        sum_shapes: of the accumulators of its weights.
        has_loss: whether the last cotangent is that of the loss.
    """

    def __init__(self, staged: Staged, number: int, accumulators: Accumulators, executables: Executables) -> None:
        self.segment = segment = staged.segments[number]
        self._staged = staged
        self.weights = tuple(place for place in segment.inputs if place in staged.weights and staged.loss is not None)
        learning = staged.learning
        self.steep = tuple(value for value in segment.takes if value in learning)
        self.slopes = tuple((value, tuple(staged.takers(value))) for value in segment.gives if value in learning)
        self.has_loss = any(part.result == staged.loss for part in segment.parts)
        if not self.has_backward:
            self.slopes, self.has_loss = (), False
        self._accumulators = accumulators
        self.closed = self._traced()
        self._forward, self._inputs, self._weights, outputs = self._cut()
        self._handed = _forwarded(outputs)
        self.sum_shapes = [accumulators.shapes[place] for place in self.weights]
        self._executables = executables
        self._compiled: dict[jax.Device, list[Callable[..., Any]]] = {}

    @cached_property
    def seed(self) -> np.ndarray:
        """The cotangent of the loss."""
        return np.ones((), self.closed.in_avals[-1].dtype)

    @property
    def has_backward(self) -> bool:
        """Whether there are gradients to compute."""
        return bool(self.weights or self.steep)

    @property
    def _first(self) -> int:
        """Where the accumulators begin among the arguments of the backward pass for the weights."""
        return len(self._weights.inputs) + len(self._weights.takes)

    # ---- tracing

    def _traced(self) -> core.ClosedJaxpr:
        """`(*values, *cotangents) -> (*parts, *gives, *gradients of what it takes, *gradients of the weights)`."""
        segment, staged = self.segment, self._staged
        given = [staged.arguments[place] for place in segment.inputs] + [staged.shapes[one] for one in segment.takes]
        cotangents = [staged.shapes[value] for value, takers in self.slopes for _ in takers]
        if self.has_loss:
            cotangents.append(self._loss_shape(given))
        count = len(given)
        steep = [count - len(segment.takes) + segment.takes.index(value) for value in self.steep]
        weights = [segment.inputs.index(place) for place in self.weights]
        places = [*steep, *weights]

        def whole(*values: jax.Array) -> Sequence[jax.Array]:
            every, behind = list(values[:count]), list(values[count:])

            def of_those(*some: jax.Array) -> tuple[list[jax.Array], Sequence[jax.Array]]:
                for place, value in zip(places, some, strict=True):
                    every[place] = value
                results = segment.function(*every)
                return self._differentiated(results), list(results)

            if not self.has_backward:
                return segment.function(*every)
            _, backward, results = jax.vjp(of_those, *(values[place] for place in places), has_aux=True)
            sums = []
            for _, takers in self.slopes:
                parts, behind = behind[: len(takers)], behind[len(takers) :]
                sums.append(sum(parts[1:], start=parts[0]))
            slopes = backward([*sums, *behind])
            of_weights = slopes[len(steep) :]
            rules, own = self._accumulators, [values[place] for place in weights]
            return (*results, *slopes[: len(steep)], *mapped(rules.map_gradient, of_weights, own, rules.keeps_bad))

        return jax.make_jaxpr(whole)(*given, *cotangents)

    def _loss_shape(self, given: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
        place = [part.result for part in self.segment.parts].index(self._staged.loss or 0)
        shape: jax.ShapeDtypeStruct = jax.eval_shape(lambda *values: tuple(self.segment.function(*values)), *given)[
            place
        ]
        return shape

    def _differentiated(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """Of what the segment makes, that which has cotangents."""
        parts = self.segment.parts
        given = dict(zip(self.segment.gives, results[len(parts) :], strict=True))
        found = [given[value] for value, _ in self.slopes]
        if self.has_loss:
            found.append(results[[part.result for part in parts].index(self._staged.loss or 0)])
        return found

    def _cut(self) -> list[ProgramSegment]:
        """The three passes; and what hands over the results of the forward pass."""
        graph = Graph.of(self.closed)
        segment = self.segment
        results = len(segment.parts) + len(segment.gives)
        behind = graph.arguments[len(segment.inputs) + len(segment.takes) :]
        backward = _reading(graph, behind)
        steep = graph.results[results : results + len(self.steep)]
        of_inputs = graph.ancestors(steep) & backward
        outputs = {Part(number): atom for number, atom in enumerate(graph.results[:results])}
        handed = {graph.place(atom) for atom in outputs.values()}
        again = _movements(graph) | self._lasting(graph)
        repeated = {id(graph.equations[number]) for number in again - handed}
        groups = [
            EquationGroup(set(range(len(graph.equations))) - backward),
            EquationGroup(of_inputs, {Part(number): atom for number, atom in enumerate(steep)}),
            EquationGroup(
                backward - of_inputs,
                {Part(number): atom for number, atom in enumerate(graph.results[results + len(self.steep) :])},
            ),
            EquationGroup((), outputs),
        ]
        return cut(graph, groups, lambda equation: id(equation) in repeated)

    def _lasting(self, graph: Graph) -> set[int]:
        """The numbers of the equations whose results are the same for all micro-batches."""
        varying = {
            graph.arguments[place] for place, number in enumerate(self.segment.inputs) if number in self._staged.varying
        }
        known = set(graph.arguments[: len(self.segment.inputs)]) - varying | set(graph.constants)
        found = set()
        for number, equation in enumerate(graph.equations):
            if not equation.effects and known.issuperset(variables(equation.invars)):
                known |= set(equation.outvars)
                found.add(number)
        return found

    def _accumulated(self, *values: jax.Array) -> Sequence[jax.Array]:
        first, own = self._first, len(self.weights)
        new = self._weights.function(*values[:first])
        number, rules = values[first + own], self._accumulators
        sums = []
        for sum_, gradient in zip(values[first : first + own], new, strict=True):
            before = jnp.where(number == 0, jnp.zeros_like(sum_), sum_)
            sums.append(accumulated(rules.method, before, gradient, number, rules.count))
        return sums

    # ---- compiling

    def compiled(self, device: jax.Device) -> list[Callable[..., Any]]:
        """The executables of the three passes on a device, None for those that have nothing to compute.

        They are compiled when they are asked for first.
        """
        if device not in self._compiled:
            self._compiled[device] = self._compile(device)
        return self._compiled[device]

    def _compile(self, device: jax.Device) -> list[Callable[..., Any]]:
        values = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self.closed.in_avals]
        kept: dict[int, Any] = {}
        found: list[Any] = []
        for one in self._passes[:2]:
            if one is self._inputs and not self.steep:
                found.append(None)
                continue
            given = [values[place] for place in one.inputs] + [kept[number] for number in one.takes]
            found.append(self._executables.compiled(device, one.function, given))
            made = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(found[-1].out_info)]
            kept.update(zip(one.gives, made[len(one.parts) :], strict=True))
        given = [values[place] for place in self._weights.inputs] + [kept[number] for number in self._weights.takes]
        if not self.weights:
            return [*found, None]
        given += [*self.sum_shapes, jax.ShapeDtypeStruct((), jnp.int32)]
        donated = range(self._first, self._first + len(self.weights))
        found.append(self._executables.compiled(device, self._accumulated, given, donated))
        return found

    @property
    def _passes(self) -> tuple[ProgramSegment, ProgramSegment, ProgramSegment]:
        return self._forward, self._inputs, self._weights

    # ---- running

    def needed(self, forward_again: bool) -> frozenset[int]:
        """The places of the values that backward passes read; of those of the forward pass too if that runs again."""
        count = len(self.segment.inputs) + len(self.segment.takes)
        passes = self._passes if forward_again else self._passes[1:]
        return frozenset(place for one in passes for place in one.inputs if place < count)

    def kept_bytes(self, device: jax.Device, forward_again: bool) -> int:
        """What is kept of a micro-batch for the backward passes at most, besides the arguments of the step.

        Args:
            device: where.
            forward_again: whether the forward pass runs again for the backward passes.
        """
        if not self.has_backward:
            return 0
        taken = range(len(self.segment.inputs), len(self.segment.inputs) + len(self.segment.takes))
        kept = [self.closed.in_avals[place] for place in taken if place in self.needed(forward_again)]
        if not forward_again:
            forward: Any = self.compiled(device)[0]
            made = dict(zip(self._forward.gives, jax.tree.leaves(forward.out_info), strict=True))
            kept += [made[number] for number in self._kept]
        return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in kept)

    def zeros(self, device: jax.Device) -> list[Any]:
        """New accumulators."""
        return [jax.device_put(np.zeros(one.shape, one.dtype), device, may_alias=False) for one in self.sum_shapes]

    def forward(self, device: jax.Device, values: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
        """The parts and what is given; and what the backward passes read of it, by numbers."""
        forward = self._forward
        made = _when_ready(self.compiled(device)[0](*[values[place] for place in forward.inputs]))
        found = dict(zip(forward.gives, made, strict=True))
        return [one.of(values, found) for one in self._handed], {number: found[number] for number in self._kept}

    @cached_property
    def _kept(self) -> list[int]:
        """The numbers of what the forward pass makes for the backward passes."""
        read = {*self._inputs.takes, *self._weights.takes}
        return [number for number in self._forward.gives if number in read]

    @cached_property
    def _last_read(self) -> frozenset[int]:
        """What the backward pass for the inputs reads last."""
        return frozenset(self._inputs.takes) - frozenset(self._weights.takes)

    def backward_inputs(self, device: jax.Device, values: Sequence[Any], kept: dict[int, Any]) -> list[Any]:
        """The gradients of `steep`.

        Args:
            device: where.
            values: of the segment, with the cotangents.
            kept: what `forward` has returned; what the other backward pass reads besides is added.
        """
        inputs = self._inputs
        if not self.steep:
            return []
        given = [values[place] for place in inputs.inputs] + [kept[number] for number in inputs.takes]
        made = _when_ready(self.compiled(device)[1](*given))
        kept.update(zip(inputs.gives, made[len(inputs.parts) :], strict=True))
        for number in self._last_read:
            del kept[number]
        return list(made[: len(inputs.parts)])

    def backward_weights(
        self, device: jax.Device, values: Sequence[Any], kept: Mapping[int, Any], sums: Sequence[Any], number: Any
    ) -> list[Any]:
        """The new accumulators; the old ones are used up.

        Args:
            device: where.
            values: of the segment, with the cotangents.
            kept: as `backward_inputs` has left it.
            sums: the accumulators, in the order of `weights`.
            number: of the micro-batch, an int32 scalar.
        """
        weights = self._weights
        if not self.weights:
            return []
        given = [values[place] for place in weights.inputs] + [kept[one] for one in weights.takes]
        return list(_when_ready(self.compiled(device)[2](*given, *sums, number)))


@dataclass(frozen=True)
class _Handed:
    """A result of a forward pass: a value of the segment, what the program has made, or a constant.

    Attributes:
        place: of the value; None if it is none.
        number: of what was made; None if it is none.
        constant: else.
    """

    place: int | None = None
    number: int | None = None
    constant: Any = None

    def of(self, values: Sequence[Any], found: Mapping[int, Any]) -> Any:
        """It, where the program has run."""
        if self.number is not None:
            return found[self.number]
        return self.constant if self.place is None else values[self.place]


def _forwarded(outputs: ProgramSegment) -> list[_Handed]:
    """What a segment without equations hands on."""
    every = [_Handed(place=place) for place in outputs.inputs] + [_Handed(number=number) for number in outputs.takes]
    return [one if isinstance(one, _Handed) else _Handed(constant=one) for one in outputs.function(*every)]


def _when_ready(results: Sequence[Any]) -> Sequence[Any]:
    """The results of a program, all of which are ready when one is."""
    if results:
        results[-1].block_until_ready()
    return results


def _reading(graph: Graph, atoms: Sequence[Variable]) -> set[int]:
    """The numbers of the equations that read some arguments, or what is made of them."""
    known, found = set(atoms), set()
    for number, equation in enumerate(graph.equations):
        if known & set(variables(equation.invars)):
            known |= set(equation.outvars)
            found.add(number)
    return found


def _movements(graph: Graph) -> set[int]:
    return {number for number, equation in enumerate(graph.equations) if _is_movement(equation)}


def _is_movement(equation: Equation) -> bool:
    return bool(equation.primitive.name in MOVEMENTS)
