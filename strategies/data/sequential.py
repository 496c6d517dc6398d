"""Data sets that are read in order, from shards or from one iterable."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, zip_longest
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from strategies.data.layout import Layout
from strategies.data.sources import DataSource, Masked, stacked
from strategies.typing import Batch, Data, Element

_ENDED = object()


class ElementRound(NamedTuple):
    """One element for every local replica; if `valid` is False, the element is padding."""

    elements: Sequence[Element]
    valid: Sequence[bool]

    def as_padding(self) -> "ElementRound":
        """Return the same elements as padding."""
        return ElementRound(self.elements, [False] * len(self.valid))


@dataclass(eq=False)
class SequentialSource(DataSource):
    """Elements that come in their source's order; `elements_per_replica` rounds are stacked into a batch."""

    rounds: Callable[[], Iterator[ElementRound]]
    layout: Layout
    length: int | None = None
    steps: int | None = None

    @override
    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        for step, rounds in enumerate(self._batches_of_rounds()):
            if step >= start:
                yield self._stack(rounds)

    def _batches_of_rounds(self) -> Iterator[list[ElementRound]]:
        rounds = self.rounds()
        latest: ElementRound | None = None
        for step in count():
            if step == self.steps:
                return
            taken = list(islice(rounds, self.layout.elements_per_replica))
            latest = taken[-1] if taken else latest
            if len(taken) < self.layout.elements_per_replica:
                if not self._can_fill(taken, latest, step):
                    return
                assert latest is not None
                taken += [latest.as_padding()] * (self.layout.elements_per_replica - len(taken))
            yield taken

    def _can_fill(self, taken: list[ElementRound], latest: ElementRound | None, step: int) -> bool:
        """Return True to pad an incomplete batch, and False if the epoch is over."""
        if self.layout.pads and latest is not None and (taken or self.steps is not None):
            return True
        if self.steps is None:
            return False
        replicas = ", ".join(map(str, self.layout.local_replicas))
        raise ValueError(
            f"the data of replicas {replicas} ended after {step} of {self.steps} steps, before their len(); "
            "make len() exact, or leave it out"
        )

    def _stack(self, rounds: list[ElementRound]) -> Batch:
        per_replica = range(len(self.layout.local_replicas))
        values = stacked([taken.elements[j] for j in per_replica for taken in rounds])
        if not self.layout.pads:
            return values
        return Masked(values, np.array([taken.valid[j] for j in per_replica for taken in rounds], bool))


def from_iterable(source: Data, layout: Layout) -> DataSource:
    """Return a source that gives replica r the elements r, r + R, r + 2R, ... of an iterable."""
    _require_iterable("the data set", source)
    length = _length(source)
    if length is not None:
        layout.check_length(length)
    return SequentialSource(
        lambda: _interleaved(source, layout),
        layout,
        length=length,
        steps=None if length is None else layout.steps(length),
    )


def from_shards(source: Data, layout: Layout) -> DataSource:
    """Return a source that gives replica r the elements of `source.shard(R, r)`."""
    replicas = layout.total_replicas
    shards = [source.shard(replicas, r) for r in layout.local_replicas]
    for replica, shard in zip(layout.local_replicas, shards, strict=True):
        _require_iterable(f"shard {replica} of {replicas}", shard)
    lengths = _shard_lengths(source, shards[0], replicas)
    return SequentialSource(
        lambda: _side_by_side(shards, layout),
        layout,
        length=None if lengths is None else sum(lengths),
        steps=None if lengths is None else _steps_of_shards(lengths, layout),
    )


def from_values(values: Sequence[Element], layout: Layout) -> DataSource:
    """Return a source that gives each local replica the elements of its own iterable."""
    if len(values) != len(layout.local_replicas):
        raise ValueError(f"got {len(values)} iterables for {len(layout.local_replicas)} local replicas; give each one")
    for replica, value in zip(layout.local_replicas, values, strict=True):
        _require_iterable(f"the data set of replica {replica}", value)
    return SequentialSource(lambda: _side_by_side(values, layout), layout)


def _interleaved(source: Iterable[Element], layout: Layout) -> Iterator[ElementRound]:
    """Yield rounds of elements for replica 0, 1, ..., in one pass over the source for all local replicas."""
    elements = iter(source)
    while dealt := list(islice(elements, layout.total_replicas)):
        if len(dealt) < layout.total_replicas and not layout.pads:
            return
        valid = [replica < len(dealt) for replica in layout.local_replicas]
        own = zip(layout.local_replicas, valid, strict=True)
        yield ElementRound([dealt[replica] if is_dealt else dealt[0] for replica, is_dealt in own], valid)


def _side_by_side(shards: Sequence[Iterable[Element]], layout: Layout) -> Iterator[ElementRound]:
    """Yield one element of each local shard at a time until one shard ends; with padding, until all have ended."""
    if not layout.pads:
        for elements in zip(*shards, strict=False):
            yield ElementRound(elements, [True] * len(shards))
        return
    previous: list[Element] = [_ENDED] * len(shards)
    for elements in zip_longest(*shards, fillvalue=_ENDED):
        valid = [element is not _ENDED for element in elements]
        previous = [new if ok else old for new, old, ok in zip(elements, previous, valid, strict=True)]
        for replica, element in zip(layout.local_replicas, previous, strict=True):
            if element is _ENDED:
                raise ValueError(f"the data of replica {replica} is empty; padding repeats at least one element")
        yield ElementRound(previous, valid)


def _shard_lengths(source: Data, own_shard: Data, replicas: int) -> list[int] | None:
    """Return the lengths of all replicas' shards: their own if they have one, else an even split of the source's."""
    if _length(own_shard) is not None:
        return [len(source.shard(replicas, r)) for r in range(replicas)]
    length = _length(source)
    if length is None:
        return None
    return [length // replicas + (r < length % replicas) for r in range(replicas)]


def _steps_of_shards(lengths: Sequence[int], layout: Layout) -> int:
    """Return the steps until the shortest shard cannot fill a batch; with padding, until the longest has ended."""
    if layout.pads and min(lengths) > 0:
        return -(-max(lengths) // layout.elements_per_replica)
    if min(lengths) < layout.elements_per_replica:
        replica = lengths.index(min(lengths))
        raise ValueError(
            f"batch_size is {layout.described} per replica, but shard {replica} of {layout.total_replicas} "
            f"has {min(lengths)} elements; use a smaller batch_size or fewer replicas"
        )
    return min(lengths) // layout.elements_per_replica


def _length(source: Data) -> int | None:
    try:
        return len(source)
    except TypeError:  # no __len__, or one that fails for an unknown or infinite length, as TensorFlow's data sets do
        return None


def _require_iterable(name: str, source: Data) -> None:
    kind = type(source).__name__
    if isinstance(source, str | bytes) or not isinstance(source, Iterable):
        raise TypeError(f"{name} is a {kind}; use a pytree of arrays, an object with shard(n, i), or an iterable")
    if isinstance(source, Iterator):
        raise TypeError(
            f"{name} is a {kind}, which can be iterated over only once; use an object whose __iter__ starts "
            "again in every epoch"
        )
