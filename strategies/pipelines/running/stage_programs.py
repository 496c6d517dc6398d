"""The programs of a stage: its forward pass, and its backward passes for the inputs and for the weights.

A stage and its gradient are traced as one function, which is cut into three. All schedules run these three, so no
schedule can change a bit. A whole backward pass is both parts, one after the other. A stage that recomputes runs its
forward pass once more.

A stage keeps the values of the forward pass that backward passes read. It keeps neither weights nor values computed
from weights alone: backward passes compute the latter again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from strategies.jax.comparing.agreement import lines_of
from strategies.jax.gradients.accumulation import accumulated, mapped
from strategies.jax.programs.buckets import MOVEMENTS
from strategies.jax.programs.jaxpr import Atom, EquationGroup, Graph, Variable, cut, every_equation, variables
from strategies.jax.programs.program import DeviceProgram, shapes_of
from strategies.jax.programs.segments import Part, ProgramSegment
from strategies.pipelines.running.staged import Accumulators, StageArray, Staged
from strategies.typing import Function

PASSES = ("forward", "backward for inputs", "backward for weights")
"""The names of the passes of a stage, in the order of their programs."""

FORWARD, INPUTS, WEIGHTS = range(len(PASSES))

Shape: TypeAlias = jax.ShapeDtypeStruct | jax.core.ShapedArray

Compile = Callable[[Function, Sequence[int]], DeviceProgram]
"""(function, numbers of the donated arguments) -> its program."""


class Executables:
    """The compiled functions of a pipeline, each compiled once."""

    def __init__(self, compile_program: Compile) -> None:
        self._compile = compile_program
        self._programs: dict[Hashable, DeviceProgram] = {}

    def __len__(self) -> int:
        """Return the number of programs."""
        return len(self._programs)

    def compiled(
        self, device: jax.Device, function: Function, shapes: Sequence[Shape], donated: Sequence[int] = ()
    ) -> jax.stages.Compiled:
        """Return the executable of a function for arguments of these shapes on a device."""
        closed = jax.make_jaxpr(function)(*shapes)
        key = (tuple(lines_of(closed)), tuple(donated)) if _is_known_by_its_text(closed) else function
        if key not in self._programs:
            self._programs[key] = self._compile(function, donated)
        return self._programs[key].compiled(device, *shapes)


def _is_known_by_its_text(closed: core.ClosedJaxpr) -> bool:
    """Return whether the text of a program determines its results: it calls no Python and has no effects."""
    return not closed.effects and not any("callback" in one.primitive.name for one in every_equation(closed.jaxpr))


class StagePrograms:
    """The compiled programs of one segment of a stage, and the flow of values through them.

    The segment's values are its arguments, then the values that it takes from earlier segments, then the cotangents.

    Attributes:
        segment: The segment.
        weights: The numbers of the arguments whose gradients the segment computes.
        slopes: For each value with gradients that the segment gives to others, the segments that take the value.
        steep: The values with gradients that the segment takes from others.
        sum_shapes: The shapes of its weights' accumulators.
        has_loss: Whether the last cotangent is that of the loss.
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
        *self._passes, outputs = self._cut()
        self._forward, self._inputs, self._weights = self._passes
        self._outputs = outputs
        self._handed = outputs.function(*map(_Handed, range(len(outputs.inputs) + len(outputs.takes))))
        self.sum_shapes = [accumulators.shapes[place] for place in self.weights]
        self._executables = executables
        self._compiled: dict[jax.Device, list[jax.stages.Compiled | None]] = {}

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
        """The place of the first accumulator among the arguments of the backward pass for the weights."""
        return len(self._weights.inputs) + len(self._weights.takes)

    # ---- tracing

    def _traced(self) -> core.ClosedJaxpr:
        """Trace `(*values, *cotangents) -> (*parts, *gives, *gradients of takes, *gradients of the weights)`."""
        segment, staged = self.segment, self._staged
        given = segment.read(staged.arguments, staged.shapes)
        cotangents = [staged.shapes[value] for value, takers in self.slopes for _ in takers]
        if self.has_loss:
            cotangents.append(
                jax.eval_shape(lambda *values: self._differentiated(segment.function(*values))[-1], *given)
            )
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

    def _differentiated(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the results of the segment that have cotangents."""
        parts = self.segment.parts
        given = dict(zip(self.segment.gives, results[len(parts) :], strict=True))
        found = [given[value] for value, _ in self.slopes]
        if self.has_loss:
            found.append(results[[part.result for part in parts].index(self._staged.loss or 0)])
        return found

    def _cut(self) -> list[ProgramSegment]:
        """Cut out the three passes, and a segment that hands over the results of the forward pass."""
        graph = Graph.of(self.closed)
        segment = self.segment
        results = len(segment.parts) + len(segment.gives)
        behind = graph.arguments[len(segment.inputs) + len(segment.takes) :]
        backward = _reading(graph, behind)
        steep = graph.results[results : results + len(self.steep)]
        of_inputs = graph.ancestors(steep) & backward
        outputs = _parts(graph.results[:results])
        handed = {graph.place(atom) for atom in outputs.values()}
        again = _movements(graph) | self._lasting(graph)
        repeated = {id(graph.equations[number]) for number in again - handed}
        groups = [
            EquationGroup(set(range(len(graph.equations))) - backward),
            EquationGroup(of_inputs, _parts(steep)),
            EquationGroup(backward - of_inputs, _parts(graph.results[results + len(steep) :])),
            EquationGroup((), outputs),
        ]
        return cut(graph, groups, lambda equation: id(equation) in repeated)

    def _lasting(self, graph: Graph) -> set[int]:
        """Return the numbers of the equations whose results are the same for all micro-batches."""
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

    def compiled(self, device: jax.Device) -> list[jax.stages.Compiled | None]:
        """Return the executables of the three passes on a device, None for passes with nothing to compute.

        They are compiled on the first call.
        """
        if device not in self._compiled:
            self._compiled[device] = self._compile(device)
        return self._compiled[device]

    def _compile(self, device: jax.Device) -> list[jax.stages.Compiled | None]:
        values = shapes_of(self.closed.in_avals)
        kept: dict[int, jax.ShapeDtypeStruct] = {}
        found: list[jax.stages.Compiled | None] = [None] * len(PASSES)
        for number, one in enumerate(self._passes[:WEIGHTS]):
            if number == FORWARD or self.steep:
                program = self._executables.compiled(device, one.function, one.read(values, kept))
                made = shapes_of(jax.tree.leaves(program.out_info))
                kept.update(zip(one.gives, made[len(one.parts) :], strict=True))
                found[number] = program
        if self.weights:
            given = [*self._weights.read(values, kept), *self.sum_shapes, jax.ShapeDtypeStruct((), jnp.int32)]
            donated = range(self._first, self._first + len(self.weights))
            found[WEIGHTS] = self._executables.compiled(device, self._accumulated, given, donated)
        return found

    # ---- running

    def needed(self, forward_again: bool) -> frozenset[int]:
        """Return the places of the values that backward passes (and the forward pass, if it runs again) read."""
        count = len(self.segment.inputs) + len(self.segment.takes)
        passes = self._passes if forward_again else self._passes[1:]
        return frozenset(place for one in passes for place in one.inputs if place < count)

    def kept_bytes(self, device: jax.Device, forward_again: bool) -> int:
        """Return the bytes kept of a micro-batch for the backward passes, besides the arguments of the step."""
        if not self.has_backward:
            return 0
        taken = range(len(self.segment.inputs), len(self.segment.inputs) + len(self.segment.takes))
        kept = [self.closed.in_avals[place] for place in taken if place in self.needed(forward_again)]
        if not forward_again:
            forward = self.compiled(device)[0]
            assert forward is not None
            made = dict(zip(self._forward.gives, jax.tree.leaves(forward.out_info), strict=True))
            kept += [made[number] for number in self._kept]
        return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in kept)

    def zeros(self, device: jax.Device) -> list[jax.Array]:
        """Return new accumulators."""
        return [jax.device_put(np.zeros(one.shape, one.dtype), device, may_alias=False) for one in self.sum_shapes]

    def forward(
        self, device: jax.Device, values: Sequence[StageArray | None]
    ) -> tuple[list[StageArray], dict[int, jax.Array]]:
        """Run the forward pass; return its parts and given values, and the values for backward passes, by number.

        If the forward pass runs again, only the values that `needed` names must be present.
        """
        made = self._run(device, FORWARD, self._forward.read(values, {}))
        found = dict(zip(self._forward.gives, made, strict=True))
        given = self._outputs.read(values, found)
        handed = [given[one] if isinstance(one, _Handed) else one for one in self._handed]
        return handed, {number: found[number] for number in self._kept}

    def _run(self, device: jax.Device, number: int, given: Sequence[StageArray | None]) -> Sequence[jax.Array]:
        """Run one of the three passes, and wait for one result; then all are ready."""
        program = self.compiled(device)[number]
        assert program is not None
        results: Sequence[jax.Array] = program(*given)
        if results:
            results[-1].block_until_ready()
        return results

    @cached_property
    def _kept(self) -> list[int]:
        """The numbers of the values that the forward pass makes for the backward passes."""
        read = {*self._inputs.takes, *self._weights.takes}
        return [number for number in self._forward.gives if number in read]

    def backward_inputs(
        self, device: jax.Device, values: Sequence[StageArray | None], kept: dict[int, jax.Array]
    ) -> list[jax.Array]:
        """Return the gradients of `steep`.

        Args:
            device: The device.
            values: The values of the segment, with the cotangents.
            kept: The values that `forward` has returned for backward passes. Values that only this pass reads are
                removed, and values that it makes for the other backward pass are added.
        """
        inputs = self._inputs
        if not self.steep:
            return []
        made = self._run(device, INPUTS, inputs.read(values, kept))
        kept.update(zip(inputs.gives, made[len(inputs.parts) :], strict=True))
        for number in set(inputs.takes) - set(self._weights.takes):
            del kept[number]  # no later pass reads it
        return list(made[: len(inputs.parts)])

    def backward_weights(
        self,
        device: jax.Device,
        values: Sequence[StageArray | None],
        kept: Mapping[int, jax.Array],
        sums: Sequence[jax.Array],
        number: np.int32,
    ) -> list[jax.Array]:
        """Return the new accumulators; the old ones are consumed.

        Args:
            device: The device.
            values: The values of the segment, with the cotangents.
            kept: The kept values, as `backward_inputs` has left them.
            sums: The accumulators, in the order of `weights`.
            number: The number of the micro-batch, an int32 scalar.
        """
        if not self.weights:
            return []
        return list(self._run(device, WEIGHTS, [*self._weights.read(values, kept), *sums, number]))


class _Handed(int):
    """The number of a value, which stands for the value when a segment without equations is evaluated."""


def _parts(atoms: Sequence[Atom]) -> dict[Part, Atom]:
    return {Part(number): atom for number, atom in enumerate(atoms)}


def _reading(graph: Graph, atoms: Sequence[Variable]) -> set[int]:
    """Return the numbers of the equations that read these arguments, or values computed from them."""
    known, found = set(atoms), set()
    for number, equation in enumerate(graph.equations):
        if known & set(variables(equation.invars)):
            known |= set(equation.outvars)
            found.add(number)
    return found


def _movements(graph: Graph) -> set[int]:
    return {number for number, equation in enumerate(graph.equations) if equation.primitive.name in MOVEMENTS}
