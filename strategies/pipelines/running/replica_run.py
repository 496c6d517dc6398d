"""The run of one replica in a step: values between stages, the stash of micro-batches, and accumulators."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from strategies.jax.programs.segments import ProgramSegment
from strategies.jax.updates.update import HOST_MEMORY
from strategies.pipelines.running.stage_programs import StagePrograms
from strategies.pipelines.running.staged import StageArray, Staged
from strategies.pipelines.timetable import ActionKind, Places, StageAction
from strategies.typing import Tree


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
class _Kept:
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
        self._mapping = mapping
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
        self._kept: dict[tuple[int, int], _Kept] = {}
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
        for part, array in zip(segment.parts, made, strict=False):
            self._finish(part.result, array)
        with self._lock:
            for value, array in zip(segment.gives, made[len(segment.parts) :], strict=True):
                self._handed[micro_batch, value] = array
                self._left[micro_batch, value] = self._takers[value]
        if programs.has_backward:
            needed = self._needed[number]
            kept = [value if place in needed else None for place, value in enumerate(values)]
            if self._keeping.offloads:
                kept, residuals = self._offloaded(segment, kept, device), on_host(residuals, device)
            self._kept[number, micro_batch] = _Kept(kept, None if self._keeping.runs_again(number) else residuals)

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

    def kept_bytes(self, number: int, micro_batch: int) -> int:
        """Return the bytes kept of a micro-batch for the backward passes of a segment, besides its arguments."""
        kept = self._kept.get((number, micro_batch))
        if kept is None:
            return 0
        taken = kept.values[len(self._staged.segments[number].inputs) :]
        arrays = [array for array in (*taken, *(kept.residuals or {}).values()) if array is not None]
        return sum({id(array): int(array.nbytes) for array in arrays}.values())

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
