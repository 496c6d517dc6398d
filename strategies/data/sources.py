"""The interface of data sets as one instance reads them, with random access or in order.

Arrays, and objects with `[i]`, have random access.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, zip_longest
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import strategies.trees as trees
from strategies.argument_checks import at_least, positive
from strategies.data.layout import Indices, Layout, epoch_order
from strategies.data.randomness import DrawWatch, seeded
from strategies.typing import Batch, Data, Element, Tree
from strategies.values import PerReplica

logger = logging.getLogger(__name__)


class Masked(NamedTuple):
    """A batch of a data set that pads.

    Attributes:
        values: Batch with leaves of shape `[local_replicas * gradient_accumulation_count * batch_size, ...]`.
        mask: Bool array with one entry per element, False for an element that was repeated to fill the batch.
    """

    values: Batch
    mask: NDArray[np.bool_]


class DataSource(ABC):
    """One instance's share of a data set.

    `DistributedDataset` calls `batches` for an epoch, usually in its prefetch thread, and closes the generator when it
    stops reading. Later calls may begin at any epoch and step, also after an error. Yielded arrays belong to the
    caller.

    Attributes:
        is_random_access: Whether the batch of any step can be read for any replicas, and every instance computes the
            number of steps without asking the others.
        length: Number of elements of the whole data set; None if unknown.
        steps: Steps per epoch, the same on every instance; None if unknown before the end of an epoch.
        runs_code: Whether reading runs code of the program. The first batch, taken while no other thread draws, shows
            whether that code draws random numbers from the global generators.
        draws: Whether it does, so that no batch may be read ahead.
        is_endless: Whether padding goes on after the last element if the number of steps is unknown, because other
            instances may have more elements; the reader sets it.
        passes_due: Number of passes that come before the next one, which resumes a later epoch; the reader sets it.
    """

    is_random_access: ClassVar[bool] = False
    length: int | None
    steps: int | None
    runs_code: bool = False
    draws: bool = False
    is_endless: bool = False
    passes_due: int = 0

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        """Yield the batches of steps `start`, `start + 1`, ... of an epoch; no array is ever reused."""


class SourceFactory(ABC):
    """A description of a data set that opens its source itself; `distribute_dataset` takes it as a source."""

    @abstractmethod
    def open(self, layout: Layout, *, seed: int, shuffle: bool) -> DataSource:
        """Return the local replicas' share; called again when an instance gets other replicas.

        Raises:
            ValueError: If the data set does not fill one step.
        """


def stacked(elements: Sequence[Element]) -> Batch:
    """Return elements as one batch; raise ValueError if structures or shapes differ, or an element is a PerReplica."""
    if any(isinstance(leaf, PerReplica) for leaf in trees.leaves(elements[0])):
        raise ValueError(
            "the elements are PerReplica, but each element must be for one replica; give distribute_dataset one "
            "PerReplica, with an iterable for each local replica"
        )
    try:
        return trees.map(lambda *leaves: np.stack(leaves), *elements)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"elements cannot be stacked into a batch ({error}); all need the same structure and shapes"
        ) from error


def common_length(arrays: Tree) -> int:
    """Return the leading length that all leaves share; raise ValueError, naming the leaves, if they do not."""
    lengths: dict[str, int] = {}
    for path, leaf in trees.leaves_with_path(arrays):
        name = f"data set{trees.keystr(path)}"
        if leaf.dtype == object:
            raise ValueError(f"{name} holds Python objects; use arrays of numbers")
        if leaf.ndim == 0:
            raise ValueError(f"{name} is a scalar; every leaf needs a leading axis that runs over the elements")
        lengths[name] = leaf.shape[0]
    if not lengths:
        raise ValueError("the data set has no arrays; give at least one")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"arrays differ in the number of elements: {listed}; all must have the same")
    return next(iter(lengths.values()))


class RandomAccess(Protocol):
    """An object with a length and `[i]`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Element: ...


Read: TypeAlias = Callable[[Data, int, Indices], Batch]
"""(source, epoch, indices) -> a batch of these elements as they are in that epoch; picklable."""


def take_rows(arrays: Tree, epoch: int, indices: Indices) -> Batch:
    """Read rows of a pytree of arrays, which are the same in every epoch."""
    return trees.map(lambda array: array.take(indices, axis=0), arrays)


def read_elements(source: RandomAccess, epoch: int, indices: Indices) -> Batch:
    """Read elements of an object with `[i]`, which are the same in every epoch."""
    return stacked([source[int(index)] for index in indices])


class Steps:
    """The batches of the local replicas at every step of all epochs, counted from step 0 of epoch 0.

    The object can be pickled, so that worker processes read steps of one data set without other information. Several
    threads may read at once.

    Args:
        source: Elements.
        length: Number of elements.
        layout: Rule that assigns elements to replicas.
        seed: Seed of the shuffle.
        shuffle: Whether to shuffle.
        read: Function that reads elements by their indices.

    Raises:
        ValueError: If the elements do not fill one step.
    """

    def __init__(self, source: Data, length: int, layout: Layout, *, seed: int, shuffle: bool, read: Read) -> None:
        self.length = length
        layout.check_length(self.length)
        self.per_epoch = layout.steps(self.length)
        self._source = source
        self._read = read
        self._layout = layout
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, Indices] | None = None

    @property
    def runs_code(self) -> bool:
        """Whether reading runs code of the program, which may draw random numbers."""
        return self._read is not take_rows

    def read(self, number: int) -> Batch:
        """Return the batch of step `number % per_epoch` of epoch `number // per_epoch`."""
        return self._read_from(self._source, number)

    def read_seeded(self, number: int, watch: DrawWatch | None = None) -> Batch:
        """Return the same batch, with random numbers that depend on the elements and the epoch alone.

        No other thread may draw meanwhile from the global generators, which are restored afterwards.

        Args:
            number: The number of the step.
            watch: A watch that sees whether random numbers are drawn; None if nobody asks. With a watch, and several
                replicas, elements are read twice.

        Raises:
            StrategyError: If an element is different when it is read again.
        """
        reads_twice = watch is not None and self._layout.total_replicas > 1
        with seeded(self._source, self._seed, number // self.per_epoch, watch, reads_twice) as elements:
            return self._read_from(elements, number)

    def _read_from(self, source: Data, number: int) -> Batch:
        epoch, step = divmod(number, self.per_epoch)
        positions = self._layout.positions(step, self.length)
        known = self._order  # read only once, because another thread may replace it
        if known is None or known[0] != epoch:
            known = self._order = (epoch, epoch_order(self.length, self._seed, epoch, shuffle=self._shuffle))
        values = self._read(source, epoch, known[1][positions % self.length])
        return Masked(values, positions < self.length) if self._layout.pads else values

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_order": None}


class RandomAccessSource(DataSource):
    """Elements that this process reads when their batch is taken."""

    is_random_access = True

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.length: int = steps.length
        self.steps: int = steps.per_epoch
        self.runs_code = steps.runs_code

    @override
    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        for step in range(start, self.steps):
            number = epoch * self.steps + step
            watch = DrawWatch() if self.runs_code and step == start else None
            batch = self._steps.read_seeded(number, watch) if watch or self.draws else self._steps.read(number)
            self.draws = self.draws or (watch is not None and watch.has_seen)
            yield batch


@dataclass(frozen=True)
class InputContext:
    """The reader of a data set, described for the function that makes it (like `tf.distribute.InputContext`).

    Attributes:
        num_input_pipelines: Number of calls of the function in the whole job, one per instance.
        input_pipeline_id: Number of this call, from 0.
        num_replicas_in_sync: Number of replicas of all instances.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        positive("num_input_pipelines", self.num_input_pipelines)
        positive("num_replicas_in_sync", self.num_replicas_in_sync)
        if at_least(0, "input_pipeline_id", self.input_pipeline_id) >= self.num_input_pipelines:
            raise ValueError(
                f"input_pipeline_id is {self.input_pipeline_id} of {self.num_input_pipelines} pipelines; "
                f"they are numbered 0 to {self.num_input_pipelines - 1}"
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of one replica; raise ValueError if the replicas do not divide `global_batch_size`."""
        size, rest = divmod(positive("global_batch_size", global_batch_size), self.num_replicas_in_sync)
        if rest:
            near = " or ".join(str(number * self.num_replicas_in_sync) for number in (size, size + 1) if number)
            raise ValueError(
                f"the global batch of {global_batch_size} is not divisible by {self.num_replicas_in_sync} "
                f"replicas; use {near}"
            )
        return size


# ---- in order

_ENDED = object()


class ElementRound(NamedTuple):
    """One element for every local replica; if `valid` is False, the element is padding."""

    elements: Sequence[Element]
    valid: Sequence[bool]


@dataclass(eq=False)
class SequentialSource(DataSource):
    """Elements that come in their source's order; `elements_per_replica` rounds are stacked into a batch.

    A source may have another order in each pass, as a loader that shuffles. Where a later epoch is resumed, the passes
    before it are read first. Passes without a known end are not.
    """

    rounds: Callable[[], Iterator[ElementRound]]
    layout: Layout
    length: int | None = None
    steps: int | None = None
    passes: int = 0

    @override
    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        due = range(self.passes, self.passes_due)
        if due and self.steps is None:
            logger.warning(
                "an epoch after the first is resumed in the order of the first pass over the data set, which has no "
                "len(), so that earlier passes may have no end; give it a len() if each pass has its own order"
            )
        for _ in due if self.steps is not None else ():
            deque(self._batches_of_rounds(), maxlen=0)
        self.passes = max(self.passes, self.passes_due) + 1
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
                padding = ElementRound(latest.elements, [False] * len(latest.valid))
                taken += [padding] * (self.layout.elements_per_replica - len(taken))
            yield taken

    def _can_fill(self, taken: list[ElementRound], latest: ElementRound | None, step: int) -> bool:
        """Return True to pad an incomplete batch, and False if the epoch is over."""
        if self.layout.pads and latest is not None and (taken or self.steps is not None or self.is_endless):
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
    length = length_of(source)
    if length is not None:
        layout.check_length(length)
    steps = None if length is None else layout.steps(length)
    return SequentialSource(lambda: _interleaved(source, layout), layout, length, steps)


def from_shards(source: Data, layout: Layout) -> DataSource:
    """Return a source that gives replica r the elements of `source.shard(R, r)`."""
    replicas = layout.total_replicas
    shards = [source.shard(replicas, r) for r in layout.local_replicas]
    for replica, shard in zip(layout.local_replicas, shards, strict=True):
        _require_iterable(f"shard {replica} of {replicas}", shard)
    lengths = _shard_lengths(source, shards[0], replicas)
    length, steps = (None, None) if lengths is None else (sum(lengths), _steps_of_shards(lengths, layout))
    return SequentialSource(lambda: _side_by_side(shards, layout), layout, length, steps)


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
    while taken := list(islice(elements, layout.total_replicas)):
        if len(taken) < layout.total_replicas and not layout.pads:
            return
        valid = [replica < len(taken) for replica in layout.local_replicas]
        own = zip(layout.local_replicas, valid, strict=True)
        yield ElementRound([taken[replica] if is_real else taken[0] for replica, is_real in own], valid)


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
    if length_of(own_shard) is not None:
        return [len(source.shard(replicas, r)) for r in range(replicas)]
    length = length_of(source)
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


def length_of(source: Data) -> int | None:
    """Return the length of a data set; None if it does not know its length."""
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
