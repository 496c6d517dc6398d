"""The compiled programs behind the gradients of the local replicas, and the buffers in which gradients leave them."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from collectives.memory import aligned_empty
from strategies.compilation import compile_now
from strategies.devices import ReplicaDevices
from strategies.flat import LARGE_BYTES, FlatLayout
from strategies.segments import Part, Segment, cut
from strategies.shards import Shards

logger = logging.getLogger(__name__)

TAIL = 0  # the first result of a gradient function, before the gradients
BUCKET_BYTES = LARGE_BYTES
"""Gradients travel as soon as so many bytes are finished. (Over 200 Mbit/s a message of 1 MiB takes 42 ms, what
precedes it 2 to 5 ms.)"""

GradientFunction = Callable[..., Sequence[jax.Array]]
Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]


@dataclass(frozen=True)
class Bucket:
    """Gradients that leave the programs together.

    Attributes:
        name: of their collectives.
        layout: how they lie in buffers.
        parts: what lies there, in the order of the layout.
        results: where the means of the buffers go.
        scattered: the numbers of the buffers of whose mean this instance gets its part only.
    """

    name: str
    layout: FlatLayout
    parts: tuple[Part, ...]
    results: tuple[np.ndarray, ...]
    scattered: frozenset[int]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a gradient function.

    Attributes:
        shapes: (variables, batch, replica index, control words, what replicas keep), the shapes as all replicas of a
            wave have them together.
        is_split: for each whether the replicas get their parts of it.
    """

    shapes: tuple[Any, ...]
    is_split: tuple[bool, ...]

    @property
    def structure(self) -> jax.tree_util.PyTreeDef:
        """How to put flat arguments together."""
        return jax.tree.structure(self.shapes)

    @property
    def split_leaves(self) -> list[bool]:
        """`is_split` for each flat argument."""
        pairs = zip(self.shapes, self.is_split, strict=True)
        return [split for shape, split in pairs for _ in jax.tree.leaves(shape)]


class GradientPlan:
    """The compiled programs behind the gradients, and how these will lie in buffers; has no such memory itself.

    With one segment all gradients come at the end. With several, XLA computes the later ones while the earlier ones
    are on their way.

    Args:
        devices: where the replicas run. Plans for as many replicas on the same devices are alike.
        function: `(variables, batch, replica index, control words, kept) -> (tail, *gradients, *kept)` of one replica;
            what it keeps is for its next step.
        arguments: for which it is compiled.
        gradients: the shapes and dtypes in which they leave the function.
        streams: whether to cut it into segments.
        tail: how many values the tail has.
        shards: how the means of gradients that have a buffer alone are cut, of which this instance gets its part only;
            None for whole means. A gradient that travels in pieces is not cut, nor are others of its bucket.

    Attributes:
        devices: see above.
        gradients: see above.
        shards: see above.
        segments: the parts of the function.
        layouts: for each segment how the gradients that it finishes lie in buffers.
        programs: compute the segments.
    """

    def __init__(
        self,
        devices: ReplicaDevices,
        function: GradientFunction,
        arguments: Arguments,
        gradients: Sequence[jax.ShapeDtypeStruct],
        streams: bool,
        tail: int,
        shards: Shards | None = None,
    ) -> None:
        self.devices = devices
        self.gradients = list(gradients)
        self.shards = shards
        count = len(self.gradients)
        self.segments = _cut(devices, function, arguments, count) if streams else [_uncut(function, arguments, count)]
        self.layouts = [
            self._layout(segment.parts, tail if segment is self.segments[-1] else 0) for segment in self.segments
        ]
        self.programs = [
            self._compile(segment, layout, arguments.split_leaves)
            for segment, layout in zip(self.segments, self.layouts, strict=True)
        ]

    def compile(self, shapes: Sequence[Any]) -> None:
        """Compile the program, which is one segment, before it is called; runs nothing.

        Args:
            shapes: of its arguments, which lie where those of `GradientPrograms.dispatch` will.
        """
        [segment], [layout], [program] = self.segments, self.layouts, self.programs
        flat = jax.tree.leaves(shapes)
        buffers = [self.devices.zeros_shape(buffer.size, buffer.dtype) for buffer in layout.buffers]
        compile_now(program, *[flat[place] for place in segment.inputs], *buffers)

    def shards_of(self, parts: Sequence[Part]) -> Shards | None:
        """How the means of gradients that travel together are cut."""
        return None if any(part.rows for part in parts) else self.shards

    def shape_of(self, part: Part) -> jax.ShapeDtypeStruct:
        """The shape of a gradient, or of the rows of it that are a part."""
        leaf = self.gradients[part.result - TAIL - 1]
        if part.rows is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        start, stop = part.rows
        return jax.ShapeDtypeStruct((stop - start, *leaf.shape[1:]), leaf.dtype)

    def _layout(self, parts: Sequence[Part], tail: int) -> FlatLayout:
        leaves = [self.shape_of(part) for part in _of_gradients(parts)]
        shards = self.shards_of(parts)
        return FlatLayout.of(leaves, tail, shards.multiple if shards else 1)

    def _compile(self, segment: Segment, layout: FlatLayout, is_split: Sequence[bool]) -> Callable[..., Any]:
        first_result = len(segment.inputs)
        first_buffer = first_result + len(segment.takes)

        def of_one_replica(*values: jax.Array) -> tuple[jax.Array, ...]:
            taken = [
                value[0] if number in segment.scalars else value
                for number, value in zip(segment.takes, values[first_result:first_buffer], strict=True)
            ]
            results = segment.function(*values[:first_result], *taken)
            finished = dict(zip(segment.parts, results, strict=False))
            tail = finished.pop(Part(TAIL), None)
            buffers = layout.flatten(list(finished.values()), tail, values[first_buffer:])
            given = [
                value[None] if number in segment.scalars else value
                for number, value in zip(segment.gives, results[len(segment.parts) :], strict=True)
            ]
            return (*buffers, *given)

        count = len(layout.buffers)
        split = [is_split[place] for place in segment.inputs] + [True] * (len(segment.takes) + count)
        return self.devices.compile(of_one_replica, split, range(first_buffer, first_buffer + count))


class GradientPrograms:
    """Computes the gradients of all local replicas, bucket by bucket.

    Args:
        plan: the programs that do it.
        allocate: makes memory for results.
    """

    def __init__(self, plan: GradientPlan, allocate: Allocate) -> None:
        self.plan = plan
        self._devices = plan.devices
        self._means: dict[int, np.ndarray] = {}
        pairs = zip(plan.segments, plan.layouts, strict=True)
        self.buckets = [
            self._bucket(segment.parts, layout, number, allocate) for number, (segment, layout) in enumerate(pairs)
        ]
        self._buffers = [
            [
                tuple(self._devices.zeros(buffer.size, buffer.dtype) for buffer in bucket.layout.buffers)
                for bucket in self.buckets
            ]
            for _ in range(self._devices.waves)
        ]

    @property
    def means(self) -> list[np.ndarray]:
        """Where the mean gradients of the variables are, once all buckets have been reduced.

        Of those that are cut this instance's part, in its shape.
        """
        return [self._means[number] for number in range(TAIL + 1, TAIL + 1 + len(self.plan.gradients))]

    @property
    def tail(self) -> np.ndarray:
        """Where the mean tail is, once the last bucket has been reduced."""
        return self.buckets[-1].layout.tail_view(self.buckets[-1].results)

    def dispatch(self, arguments: Sequence[Any], wave: int) -> list[jax.Array]:
        """Begin to compute the gradients of one wave of replicas; does not wait for them. Returns what they keep."""
        flat = jax.tree.leaves(arguments)
        residuals: dict[int, jax.Array] = {}
        buffers = self._buffers[wave]
        for number, (segment, program) in enumerate(zip(self.plan.segments, self.plan.programs, strict=True)):
            inputs = [flat[place] for place in segment.inputs]
            results = program(*inputs, *[residuals[taken] for taken in segment.takes], *buffers[number])
            count = len(buffers[number])
            buffers[number], given = results[:count], results[count:]
            residuals.update(zip(segment.gives, given, strict=True))
        return list(given)

    def collect(self) -> Iterator[tuple[Bucket, list[list[np.ndarray]]]]:
        """Each bucket when it is ready, with the local replicas' arrays for each of its buffers."""
        for number, bucket in enumerate(self.buckets):
            contributions: list[list[np.ndarray]] = [[] for _ in bucket.results]
            for of_wave in self._buffers:
                for of_buffer, array in zip(contributions, of_wave[number], strict=True):
                    of_buffer += self._devices.views(array)
            yield bucket, contributions

    def leaves(self) -> list[list[np.ndarray]]:
        """The gradients that were begun last, for each local replica."""
        found: list[dict[Part, np.ndarray]] = [{} for _ in self._devices.replicas]
        for bucket, contributions in self.collect():
            for parts, buffers in zip(found, zip(*contributions, strict=True), strict=True):
                parts.update(zip(bucket.parts, bucket.layout.views(buffers), strict=True))
        return [self._put_together(parts) for parts in found]

    def _put_together(self, parts: Mapping[Part, np.ndarray]) -> list[np.ndarray]:
        ordered = sorted(parts, key=lambda part: (part.result, part.rows or (0, 0)))
        grouped = itertools.groupby(ordered, key=lambda part: part.result)
        return [np.concatenate([parts[part].reshape(-1) for part in group]) for _, group in grouped]

    # ---- memory

    def _bucket(self, parts: Sequence[Part], layout: FlatLayout, number: int, allocate: Allocate) -> Bucket:
        of_gradients = _of_gradients(parts)
        shards = self.plan.shards_of(parts)
        name = "gradients" if len(self.plan.segments) == 1 else f"gradients/{number}"
        results: list[np.ndarray] = []
        scattered: set[int] = set()
        for place, buffer in enumerate(layout.buffers):
            part = of_gradients[buffer.leaves[0]] if buffer.is_of_one else None
            if part is not None and part.rows is not None:
                results.append(self._piece(part, allocate))
            elif part is not None and shards is not None and shards.divides(self.plan.shape_of(part)):
                results.append(self._share(part, shards))
                scattered.add(place)
            else:
                results.append(allocate((buffer.size,), buffer.dtype))
        for leaf, part in enumerate(of_gradients):
            if part.result not in self._means:
                self._means[part.result] = layout.view(leaf, results)
        return Bucket(name, layout, of_gradients, tuple(results), frozenset(scattered))

    def _piece(self, part: Part, allocate: Allocate) -> np.ndarray:
        """The place of some rows in the mean of the whole gradient."""
        assert part.rows is not None
        leaf = self.plan.gradients[part.result - TAIL - 1]
        if part.result not in self._means:
            self._means[part.result] = allocate(leaf.shape, np.dtype(leaf.dtype))
        rows: np.ndarray = self._means[part.result][slice(*part.rows)].reshape(-1)
        return rows

    def _share(self, part: Part, shards: Shards) -> np.ndarray:
        """Memory for this instance's part of the mean of a gradient."""
        leaf = self.plan.gradients[part.result - TAIL - 1]
        shape, dtype = shards.shape(leaf), np.dtype(leaf.dtype)
        room: np.ndarray = aligned_empty(math.prod(shape) * dtype.itemsize).view(dtype)
        self._means[part.result] = room.reshape(shape)
        return room


def _of_gradients(parts: Sequence[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.result != TAIL)


def _uncut(function: GradientFunction, arguments: Arguments, gradients: int) -> Segment:
    """All of it as one segment."""
    leaves, structure = jax.tree.flatten(arguments.shapes)

    def flat(*values: jax.Array) -> Sequence[jax.Array]:
        return function(*jax.tree.unflatten(structure, values))

    kept = range(len(jax.tree.leaves(arguments.shapes[-1])))
    parts = tuple(map(Part, range(TAIL + 1 + gradients)))
    return Segment(flat, tuple(range(len(leaves))), (), tuple(kept), parts, frozenset())


def _cut(devices: ReplicaDevices, function: GradientFunction, arguments: Arguments, gradients: int) -> list[Segment]:
    """Segments, each of which finishes some gradients; only one where the function calls back into Python.

    JAX hands the arguments of a callback over on the device, behind the segments that wait there for the callback.
    """
    closed = devices.trace(function, arguments.shapes, arguments.is_split)
    if closed.effects:
        logger.info("gradients are not streamed: the loss function calls back, as an all_reduce of its own does")
        return [_uncut(function, arguments, gradients)]
    return cut(closed, range(TAIL + 1, TAIL + 1 + gradients), BUCKET_BYTES, LARGE_BYTES)
