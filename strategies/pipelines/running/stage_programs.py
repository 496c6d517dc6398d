"""The programs of a stage (its forward pass, and its backward passes for inputs and weights), and their run in a step.

A stage and its gradient are traced as one function, which is cut into three. All schedules run these three, so no
schedule can change a bit. A whole backward pass is both parts, one after the other. A stage that recomputes runs its
forward pass once more.

A stage keeps the values of the forward pass that backward passes read. It keeps neither weights nor values computed
from weights alone: backward passes compute the latter again.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from strategies.core.options import GradientAccumulationReductionMethod
from strategies.jax.comparing.agreement import lines_of
from strategies.jax.gradients.model_state import accumulated, mapped
from strategies.jax.programs.compilation import DeviceProgram, shapes_of
from strategies.jax.programs.jaxpr import (
    EquationGroup,
    Graph,
    ProgramSegment,
    Variable,
    cut,
    every_equation,
    variables,
)
from strategies.jax.updates.update import HOST_MEMORY
from strategies.pipelines.timetable import ActionKind, Places, StageAction
from strategies.typing import Function, MapGradient, Tree

StageArray: TypeAlias = jax.Array | np.ndarray | np.generic
"""A flat argument or result of a stage: on a device, or of NumPy."""

_MOVEMENTS = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "iota"})
"""The names of operations that move data. Repeating them is cheaper than handing on their results."""


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
            found.update(zip(segment.gives, made[len(segment.results) :], strict=True))
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
        return [number for number, segment in enumerate(self.segments) if result in segment.results]


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
        self.has_loss = staged.loss in segment.results
        if not self.has_backward:
            self.slopes, self.has_loss = (), False
        self._accumulators = accumulators
        self.closed = self._traced()
        *self._passes, outputs = self._cut()
        self._forward, self._inputs, self._weights = self._passes
        self._outputs = outputs
        self._handed = outputs.function(*map(_ValueNumber, range(len(outputs.inputs) + len(outputs.takes))))
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
        """Trace a stage's forward and backward pass as one function."""
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
        given = dict(zip(self.segment.gives, results[len(self.segment.results) :], strict=True))
        found = [given[value] for value, _ in self.slopes]
        if self.has_loss:
            found.append(results[self.segment.results.index(self._staged.loss or 0)])
        return found

    def _cut(self) -> list[ProgramSegment]:
        """Cut out the three passes, and a segment that hands over the results of the forward pass."""
        graph = Graph.of(self.closed)
        segment = self.segment
        results = len(segment.results) + len(segment.gives)
        behind = graph.arguments[len(segment.inputs) + len(segment.takes) :]
        backward = _reading(graph, behind)
        steep = graph.results[results : results + len(self.steep)]
        of_inputs = graph.ancestors(steep) & backward
        outputs = dict(enumerate(graph.results[:results]))
        handed = {graph.place(atom) for atom in outputs.values()}
        movements = {number for number, one in enumerate(graph.equations) if one.primitive.name in _MOVEMENTS}
        again = movements | self._lasting(graph)
        repeated = {id(graph.equations[number]) for number in again - handed}
        groups = [
            EquationGroup(set(range(len(graph.equations))) - backward),
            EquationGroup(of_inputs, dict(enumerate(steep))),
            EquationGroup(backward - of_inputs, dict(enumerate(graph.results[results + len(steep) :]))),
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
                kept.update(zip(one.gives, made[len(one.results) :], strict=True))
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
        """Run the forward pass; return its results, and the values for backward passes, by number.

        If the forward pass runs again, only the values that `needed` names must be present.
        """
        made = self._run(device, FORWARD, self._forward.read(values, {}))
        found = dict(zip(self._forward.gives, made, strict=True))
        given = self._outputs.read(values, found)
        handed = [given[one] if isinstance(one, _ValueNumber) else one for one in self._handed]
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
        kept.update(zip(inputs.gives, made[len(inputs.results) :], strict=True))
        for number in set(inputs.takes) - set(self._weights.takes):
            del kept[number]  # no later pass reads it
        return list(made[: len(inputs.results)])

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


class _ValueNumber(int):
    """The number of a value, which stands for the value when a segment without equations is evaluated."""


def _reading(graph: Graph, atoms: Sequence[Variable]) -> set[int]:
    """Return the numbers of the equations that read these arguments, or values computed from them."""
    known, found = set(atoms), set()
    for number, equation in enumerate(graph.equations):
        if known & set(variables(equation.invars)):
            known |= set(equation.outvars)
            found.add(number)
    return found


# ---- the run of one replica in a step: values between stages, the stash of micro-batches, and accumulators


@dataclass(frozen=True)
class StepArguments:
    """The arguments of a step.

    Attributes:
        lasting: The arguments that are the same for all micro-batches, by their numbers.
        of_each: The arguments that differ between micro-batches, by their numbers, with one value per micro-batch.
        first: The carried arguments, by their numbers, with their values for the first micro-batch. Each micro-batch
            computes their values for the next one.
    """

    lasting: Mapping[int, StageArray]
    of_each: Mapping[int, Sequence[StageArray]]
    first: Mapping[int, StageArray]


@dataclass
class _Stash:
    """The values that a segment keeps of a micro-batch for its backward passes.

    Attributes:
        values: The values of the segment; None for values that are no longer needed.
        residuals: The results of the forward pass for the backward passes; None if the forward pass runs again.
    """

    values: list[StageArray | None]
    residuals: dict[int, jax.Array] | None


@dataclass(frozen=True)
class StashPolicy:
    """The values that are kept of micro-batches for backward passes, and their memory.

    Attributes:
        recomputes: Whether forward passes run again for the backward passes.
        offloads: Whether kept values are in host memory.
        offloads_sums: Whether accumulators are in host memory between additions.
        in_blocks: The numbers of the segments that recompute by blocks themselves.
    """

    recomputes: bool = False
    offloads: bool = False
    offloads_sums: bool = False
    in_blocks: frozenset[int] = frozenset()

    def runs_again(self, number: int) -> bool:
        """Return whether the forward pass of a segment runs again."""
        return self.recomputes and number not in self.in_blocks


@dataclass(frozen=True)
class MicroBatchOutputs:
    """The outputs of each micro-batch.

    Attributes:
        structure: The tree structure of the outputs.
        results: The numbers of their leaves among the results.
    """

    structure: jax.tree_util.PyTreeDef
    results: range


_KEEPING = StashPolicy()


class ReplicaStages:
    """The actions of one replica. Actions of different devices run at once, in their threads.

    Attributes:
        carried: The values that the next micro-batch takes over, by the numbers of the arguments.
        outputs: For each result that is not carried, the values of the micro-batches, in their order.
        sums: For each segment, the accumulators of its weights; None before the first addition.
    """

    def __init__(
        self,
        staged: Staged,
        programs: Sequence[StagePrograms],
        mapping: Places,
        devices: Sequence[jax.Device],
        keeping: StashPolicy = _KEEPING,
    ) -> None:
        self._staged = staged
        self._programs = programs
        self._devices = devices
        self._keeping = keeping
        self._moves = len(set(devices)) > 1
        self._lock = threading.Lock()
        self._results = {result: argument for argument, result in staged.carried.items()}
        self._segments: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, (stage, place) in enumerate(staged.homes):
            self._segments[mapping[stage][place], stage].append(number)
        self._takers = {value: len(staged.takers(value)) for segment in staged.segments for value in segment.gives}
        self._needed = [one.needed(keeping.runs_again(number)) for number, one in enumerate(programs)]
        self.sums: list[list[jax.Array] | None] = [None] * len(programs)

    def prepare(self, given: StepArguments) -> None:
        """Take the arguments of a step."""
        self._given = given
        self.carried: dict[int, StageArray] = dict(given.first)
        self.outputs: dict[int, list[StageArray]] = {}
        self._handed: dict[tuple[int, int], StageArray] = {}
        self._left: Counter[tuple[int, int]] = Counter()
        self._kept: dict[tuple[int, int], _Stash] = {}
        self._cotangents: dict[tuple[int, int, int], StageArray] = {}

    def perform(self, device: int, action: StageAction) -> None:
        """Run a device's part of an action other than an update, and return when it is done."""
        assert action.micro_batch is not None
        for number in self.segments_of(device, action.stage):
            if action.kind is ActionKind.FORWARD:
                self._forward(number, action.micro_batch, self._devices[device])
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUTS):
                self._backward_inputs(number, action.micro_batch, self._devices[device])
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHTS):
                self._backward_weights(number, action.micro_batch, self._devices[device])

    def segments_of(self, device: int, stage: int) -> list[int]:
        """Return the segments of a stage that a device computes. The first device computes a stage of one function."""
        return self._segments.get((device, stage), [])

    # ---- actions

    def _forward(self, number: int, micro_batch: int, device: jax.Device) -> None:
        segment, programs = self._staged.segments[number], self._programs[number]
        values = [self._argument(place, micro_batch) for place in segment.inputs]
        values += [self._take(micro_batch, value) for value in segment.takes]
        values = self._here(values, device)
        made, residuals = programs.forward(device, values)
        for result, array in zip(segment.results, made, strict=False):
            self._finish(result, array)
        with self._lock:
            for value, array in zip(segment.gives, made[len(segment.results) :], strict=True):
                self._handed[micro_batch, value] = array
                self._left[micro_batch, value] = self._takers[value]
        if programs.has_backward:
            needed = self._needed[number]
            kept = [value if place in needed else None for place, value in enumerate(values)]
            if self._keeping.offloads:
                kept, residuals = self._offloaded(segment, kept, device), on_host(residuals, device)
            self._kept[number, micro_batch] = _Stash(kept, None if self._keeping.runs_again(number) else residuals)

    def _offloaded(
        self, segment: ProgramSegment, kept: Sequence[StageArray | None], device: jax.Device
    ) -> list[StageArray | None]:
        """Return the kept values in host memory; values that all micro-batches share, such as weights, stay."""
        stays = {place for place, number in enumerate(segment.inputs) if number in self._given.lasting}
        return [value if place in stays else on_host(value, device) for place, value in enumerate(kept)]

    def _backward_inputs(self, number: int, micro_batch: int, device: jax.Device) -> None:
        programs = self._programs[number]
        if not programs.has_backward:
            return
        kept = self._kept[number, micro_batch]
        if self._keeping.offloads:
            kept.values, kept.residuals = back_on((kept.values, kept.residuals), device)
        if kept.residuals is None:
            kept.residuals = programs.forward(device, kept.values)[1]
        cotangents = [
            self._cotangents.pop((micro_batch, value, taker)) for value, takers in programs.slopes for taker in takers
        ]
        if programs.has_loss:
            cotangents.append(programs.seed)
        kept.values += self._here(cotangents, device)
        gradients = programs.backward_inputs(device, kept.values, kept.residuals)
        for value, gradient in zip(programs.steep, gradients, strict=True):
            self._cotangents[micro_batch, value, number] = gradient

    def _backward_weights(self, number: int, micro_batch: int, device: jax.Device) -> None:
        programs = self._programs[number]
        kept = self._kept.pop((number, micro_batch), None)
        if kept is None or not programs.weights:
            return
        assert kept.residuals is not None
        sums = self.sums[number]
        if sums is None:
            sums = programs.zeros(device)
        elif self._keeping.offloads_sums:
            sums = back_on(sums, device)
        self.sums[number] = None  # the program consumes them, even if it fails
        place = np.int32(micro_batch)
        sums = programs.backward_weights(device, kept.values, kept.residuals, sums, place)
        self.sums[number] = on_host(sums, device) if self._keeping.offloads_sums else sums

    def release(self) -> None:
        """Drop the arguments of the step, which are no longer needed."""
        self._given = StepArguments({}, {}, {})

    def outputs_of(self, outputs: MicroBatchOutputs) -> list[Tree]:
        """Return the outputs of each micro-batch."""
        of_each = zip(*(self.outputs[result] for result in outputs.results), strict=True)
        return [jax.tree.unflatten(outputs.structure, leaves) for leaves in of_each]

    # ---- values

    def _argument(self, place: int, micro_batch: int) -> StageArray:
        given = self._given
        if place in self.carried:
            return self.carried[place]
        return given.of_each[place][micro_batch] if place in given.of_each else given.lasting[place]

    def _take(self, micro_batch: int, value: int) -> StageArray:
        key = (micro_batch, value)
        with self._lock:
            self._left[key] -= 1
            if self._left[key]:
                return self._handed[key]
            del self._left[key]
            return self._handed.pop(key)

    def _here(self, values: list[StageArray], device: jax.Device) -> list[StageArray]:
        if not self._moves:
            return values
        return [jax.device_put(value, device) if isinstance(value, jax.Array) else value for value in values]

    def _finish(self, result: int, value: StageArray) -> None:
        if result in self._results:
            self.carried[self._results[result]] = value
        elif result != self._staged.loss:
            self.outputs.setdefault(result, []).append(value)


def on_host(tree: Tree, device: jax.Device) -> Tree:
    """Move a tree's JAX arrays to host memory."""
    return _placed(tree, jax.sharding.SingleDeviceSharding(device, memory_kind=HOST_MEMORY))


def back_on(tree: Tree, device: jax.Device) -> Tree:
    """Move a tree's JAX arrays to the memory of a device."""
    return _placed(tree, jax.sharding.SingleDeviceSharding(device))


def _placed(tree: Tree, where: jax.sharding.Sharding) -> Tree:
    return jax.tree.map(lambda leaf: jax.device_put(leaf, where) if isinstance(leaf, jax.Array) else leaf, tree)
