"""The programs of a pipeline; gradients leave it stage by stage, while other stages still run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from strategies.exchange.flat import FlatLayout
from strategies.exchange.means import Bucket
from strategies.exchange.shards import Shards
from strategies.jax.gradients.leaving import TAIL, Leaving, MeansMemory, flatten
from strategies.jax.gradients.replica_program import ReplicaProgram
from strategies.jax.programs.segments import Part
from strategies.pipelines.running.arguments import Arguments
from strategies.pipelines.running.driver import Course
from strategies.pipelines.running.replica_run import MicroBatchOutputs, StashPolicy
from strategies.pipelines.running.stage_programs import PASSES, Executables, Shape, StagePrograms
from strategies.pipelines.running.staged import Accumulators, Staged
from strategies.pipelines.timetable import Timetable


@dataclass(frozen=True)
class StageBucket:
    """The gradients that leave with a segment.

    Attributes:
        segment: The number of the segment.
        leaves: The numbers of the gradients.
        sums: For each gradient, the accumulators to be added, each as (segment, place among the segment's weights).
        layout: The layout of the gradients in buffers.
    """

    segment: int
    leaves: tuple[int, ...]
    sums: tuple[tuple[tuple[int, int], ...], ...]
    layout: FlatLayout

    @property
    def parts(self) -> list[Part]:
        """The gradients as parts of a replica's results."""
        return [Part(TAIL + 1 + leaf) for leaf in self.leaves]


class StagePlan:
    """The programs of the stages, and the programs that send gradients, loss, metrics and model state from a replica.

    A gradient leaves with the first segment that uses its variable, as the sum over all segments that use it; these are
    on one device. Buckets leave in the order of their completion: the last stage's first. The last bucket has all
    values that are no gradients.

    Attributes:
        buckets: The buckets, in the order in which they leave, without the last one.
        leaving: The layout of all values in buffers.
        state_layout: The layout of the values that are no gradients.
        course: The course of the timetable.
        stages: The programs of the segments.
    """

    def __init__(
        self,
        executables: Executables,
        program: ReplicaProgram,
        arguments: Arguments,
        staged: Staged,
        timetable: Timetable,
        shards: Shards | None,
        keeping: StashPolicy,
        outputs: MicroBatchOutputs,
    ) -> None:
        self.program = program
        self.arguments = arguments
        self.staged = staged
        self.timetable = timetable
        self.keeping = keeping
        self.outputs = outputs
        self._executables = executables
        shapes = {
            place: jax.ShapeDtypeStruct(staged.arguments[place].shape, dtype)
            for place, dtype in zip(staged.weights, program.gradient_dtypes, strict=True)
        }
        settings = program.accumulation
        sums = Accumulators(shapes, settings.method, settings.count, settings.map_gradient, program.needs_flags)
        if settings.map_gradient is not None:
            self._refuse_shared_weights()
        count = len(staged.segments)
        self.stages = [StagePrograms(staged, number, sums, self._executables) for number in range(count)]
        gradients = program.num_gradients
        self.leaving = Leaving(tuple(program.results), shards, len(program.results) - gradients)
        self.buckets = [bucket for number in reversed(range(count)) if (bucket := self._bucket(number)).leaves]
        self.state_parts = [Part(TAIL + 1 + leaf) for leaf in range(gradients, len(program.results))]
        self.state_layout = self.leaving.layout(self.state_parts, program.places.size)
        self.course = Course.of(timetable)
        self._found: dict[tuple[int, jax.Device], jax.stages.Compiled] = {}

    def _refuse_shared_weights(self) -> None:
        for leaf, place in enumerate(self.staged.weights):
            if len(self.staged.readers(place)) > 1:
                raise ValueError(
                    f"map_gradient needs the whole gradient of a micro-batch, but variable {leaf} is used by several "
                    "stages, each of which has a part of it; use it in one stage only, or leave map_gradient out"
                )

    # ---- gradients that leave with a segment

    def _bucket(self, number: int) -> StageBucket:
        """Return the gradients that leave with a segment. Gradients that no segment computes leave with the first."""
        weights = enumerate(self.staged.weights)
        leaves = [leaf for leaf, place in weights if (self.staged.readers(place) or [0])[0] == number]
        sums = tuple(
            tuple((reader, self.stages[reader].weights.index(place)) for reader in self.staged.readers(place))
            for place in (self.staged.weights[leaf] for leaf in leaves)
        )
        layout = self.leaving.layout([Part(TAIL + 1 + leaf) for leaf in leaves], 0)
        return StageBucket(number, tuple(leaves), sums, layout)

    def buckets_in(self, memory: MeansMemory) -> list[Bucket]:
        """Return the buckets, with memory for their means; the model state and the tail come last."""
        found = [memory.bucket(f"gradients/{n}", each.parts, each.layout) for n, each in enumerate(self.buckets)]
        return [*found, memory.bucket("gradients/tail", self.state_parts, self.state_layout)]

    # ---- programs

    def executables(self, devices: Sequence[jax.Device]) -> dict[str, jax.stages.Compiled]:
        """Return all programs for the devices of a replica, by description; compiled on the first call."""
        found: dict[str, jax.stages.Compiled] = {}
        for number, stage in enumerate(self.stages):
            of_passes = zip(PASSES, stage.compiled(devices[self.device_of(number)]), strict=True)
            found |= {f"{self._named(number)}, {name}": one for name, one in of_passes if one is not None}
        for bucket in self.buckets:
            found[f"{self._named(bucket.segment)}, sums"] = self.finish(bucket, devices[self.device_of(bucket.segment)])
        return {**found, "end of the step": self.end(devices[0])}

    def _named(self, number: int) -> str:
        stage, place = self.staged.homes[number]
        return f"stage {stage}" if len(self.staged.stages[stage]) == 1 else f"stage {stage}, segment {place}"

    def device_of(self, number: int) -> int:
        """Return the device of a segment."""
        stage, place = self.staged.homes[number]
        return self.timetable.mapping[stage][place]

    def finish(self, bucket: StageBucket, device: jax.Device) -> jax.stages.Compiled:
        """Return the program `(*accumulators, *buffers) -> (*buffers, which gradients are not finite)`."""
        key = (bucket.segment, device)
        if key not in self._found:
            shapes = [self.stages[segment].sum_shapes[place] for sums in bucket.sums for segment, place in sums]
            self._found[key] = self._compiled(device, self._finishing(bucket), shapes, bucket.layout)
        return self._found[key]

    def end(self, device: jax.Device) -> jax.stages.Compiled:
        """Return the program `(sum of values, index, control, *model state, *which are not finite, *buffers) -> ...`.

        It returns the buffers, and the leaves of the model state that the replica keeps.
        """
        key = (-1, device)
        if key not in self._found:
            like = self.arguments.like
            shapes = [like[6], like[3], like[4], *jax.tree.leaves(like[5])]
            if self.program.needs_flags:
                shapes += [jax.ShapeDtypeStruct((len(bucket.leaves),), np.bool_) for bucket in self.buckets]
            self._found[key] = self._compiled(device, self._ending, shapes, self.state_layout)
        return self._found[key]

    def _compiled(
        self,
        device: jax.Device,
        function: Callable[..., tuple[jax.Array, ...]],
        shapes: Sequence[Shape],
        layout: FlatLayout,
    ) -> jax.stages.Compiled:
        buffers = [jax.ShapeDtypeStruct((buffer.size,), buffer.dtype) for buffer in layout.buffers]
        donated = range(len(shapes), len(shapes) + len(buffers))
        return self._executables.compiled(device, function, [*shapes, *buffers], donated)

    def _finishing(self, bucket: StageBucket) -> Callable[..., tuple[jax.Array, ...]]:
        count = sum(map(len, bucket.sums))

        def finishing(*values: jax.Array) -> tuple[jax.Array, ...]:
            rest = list(values[:count])
            leaves = []
            for leaf, sums in zip(bucket.leaves, bucket.sums, strict=True):
                own, rest = rest[: len(sums)], rest[len(sums) :]
                result = self.program.results[leaf]
                total = sum(own[1:], start=own[0]) if own else jnp.zeros(result.shape, result.dtype)
                leaves.append(total.astype(result.dtype))
            buffers = flatten(bucket.layout, leaves, None, values[count:])
            return (*buffers, self.program.not_finite(leaves)) if self.program.needs_flags else buffers

        return finishing

    def _ending(self, *values: jax.Array) -> tuple[jax.Array, ...]:
        program = self.program
        total, index, control, *rest = values
        state, rest = rest[: len(program.rule.words)], rest[len(program.rule.words) :]
        is_bad = None
        if program.needs_flags:
            flags, rest = rest[: len(self.buckets)], rest[len(self.buckets) :]
            order = np.argsort([leaf for bucket in self.buckets for leaf in bucket.leaves])
            is_bad = jnp.concatenate(flags)[order]
        tail = program.tail(total / program.accumulation.count, index, control, is_bad)
        after = jax.tree.unflatten(program.rule.structure, state)
        means, kept = program.of_state(after)
        return (*flatten(self.state_layout, means, tail, rest), *kept)
