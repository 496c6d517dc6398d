"""Data sets that are split among the replicas of all instances, in the same way on any number of instances."""

import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

import strategies.trees as trees
from collectives import Communicator
from collectives.instruments import DATA, Instruments
from popdist.switches import require_switches
from strategies.argument_checks import at_least
from strategies.data.casts import DTypes, converted
from strategies.data.grain_source import as_grain_source
from strategies.data.iterators import DataIterator, in_lockstep, prefetched
from strategies.data.layout import Layout, Position, Remainder, Replication
from strategies.data.sources import (
    DataSource,
    Masked,
    RandomAccessSource,
    SourceFactory,
    Steps,
    common_length,
    from_iterable,
    from_shards,
    from_values,
    read_elements,
    take_rows,
)
from strategies.errors import SpareError, StrategyError
from strategies.placeholders import placeholders_like
from strategies.typing import Batch, Data, Leaf

log = logging.getLogger(__name__)


class DistributedDataset:
    """The local replicas' share of a data set, as one batch per step.

    The elements of a replica depend on the source, the seed and the number of replicas, never on the number of
    instances. A source is one of:

    * A pytree of arrays with a common leading length (tuples and mappings; NumPy's memory maps are read as
      needed). Each epoch is a permutation of the whole set, drawn from (seed, epoch). With
      B = `gradient_accumulation_count * batch_size`, replica r takes rows `[r * B, (r + 1) * B)` of each global batch.
    * A `grain.MapDataset`, a `strategies.GrainSource`, or any object with a length and `[i]` that is not iterable.
      Replicas take its elements as they take rows of arrays. Elements are read one by one, and only for the local
      replicas. If they draw random numbers from the global generators of Python, NumPy or PyTorch, these depend on
      the seed, the epoch and the element alone. Such batches are not read ahead, but when they are taken.
    * An object with `shard(n, i)`: replica r iterates over `source.shard(total_replicas, r)` again in every epoch.
      The lengths of the shards give the steps per epoch; without them, `len(source)` split evenly does.
    * An iterable of elements, such as a list: replica r takes elements r, r + R, r + 2R, ... Every instance
      iterates over all elements.
    * An object whose `values` holds one iterable per local replica (`strategies.PerReplica`).

    Arrays and objects with `[i]` are shuffled here; other sources keep their own order. Elements are pytrees of
    arrays or scalars, and are stacked. Without lengths, an epoch ends when one of the local replicas cannot fill a
    batch. With padding it ends when all local replicas have ended.

    For arrays and objects with `[i]`, every instance computes the same number of steps per epoch. For any other source,
    **taking a batch is a collective call**: the instances ask each other whether all of them have one. Without padding,
    an epoch ends on all instances, with a warning, as soon as one of them has no batch. With padding, it ends when none
    of them has an element left.

    If reading fails, the error is raised at the batch it belongs to, and the position stays after the last batch
    yielded.

    Args:
        source: Data, of one of the kinds above.
        batch_size: Elements per replica and micro-batch.
        total_replicas: Number of replicas of all instances.
        local_replicas: Global indices of the replicas of this instance.
        seed: Seed of the shuffle, the same on all instances.
        shuffle: Whether to shuffle arrays and objects with `[i]`.
        remainder: `"drop"` the elements that do not fill the last global batch, or `"pad"` that batch by repeating
            elements; every batch is then a `Masked`. `"short"`, for arrays and random access, gives a last batch with
            fewer elements, the same number for each replica.
        gradient_accumulation_count: Micro-batches that a replica takes in one step. A position does not contain it:
            the elements of a step depend only on its product with `batch_size`.
        transfer_dtype: Smaller dtype in which arrays travel to the devices, or one for each entry of a batch:
            `{"image": np.float16}`. `strategies.casting` casts them back in the compiled step.
        prefetch: Number of batches that a background thread prepares ahead; 0 prepares each batch when it is taken.
        place: Function that puts a batch of host arrays on the devices; it runs in the prefetch thread.
        communicator: Connection of the instances; None for a single instance.
        instruments: Instruments that observe the wait for each batch.
        is_spare: Function that returns whether this instance is a spare. Then batches have no values, but the first.
        is_read_again: Whether the last batch may have to be read again, for other replicas.

    Attributes:
        num_read_ahead: Number of batches that are prepared before they are taken.
        is_last_outdated: Whether the batch yielded last belongs to other replicas than the present ones.
        consumed: The epoch and the step after the batch that was yielded last.
        place: The argument.

    Raises:
        TypeError: If the source is of no known kind, or an argument has the wrong type.
        ValueError: If the source is empty or inconsistent, or smaller than one global batch.
    """

    def __init__(
        self,
        source: Data,
        *,
        batch_size: int,
        total_replicas: int,
        local_replicas: Sequence[int],
        seed: int = 0,
        shuffle: bool = True,
        remainder: Remainder = "drop",
        gradient_accumulation_count: int = 1,
        transfer_dtype: DTypes = None,
        prefetch: int = 2,
        place: Callable[[Batch], Batch] = lambda batch: batch,
        communicator: Communicator | None = None,
        instruments: Instruments | None = None,
        is_spare: Callable[[], bool] = lambda: False,
        is_read_again: bool = False,
    ) -> None:
        self._layout = Layout(batch_size, total_replicas, local_replicas, remainder, gradient_accumulation_count)
        require_switches(shuffle=shuffle)
        self._seed = at_least(0, "seed", seed)
        self._shuffle = shuffle
        self.num_read_ahead = at_least(0, "prefetch", prefetch)
        self._transfer_dtype = transfer_dtype
        self.place = place
        self._instruments = instruments or Instruments()
        self._communicator = communicator if communicator is not None and communicator.size > 1 else None
        self._is_spare = is_spare
        self._example: Batch = None  # a batch without values, on a spare
        self._given = source
        self._source = open_source(source, self._layout, seed=seed, shuffle=shuffle)
        self._source.is_endless = self.is_collective
        self._last: Batch = None
        self._earlier: list[Batch] = []  # the batches of the same step for earlier replicas
        self._is_read_again = is_read_again
        self._contents: list[tuple[Leaf, object]] = []  # of the batches above, to see whether the program changes them
        self.is_last_outdated = False
        self.consumed = (0, 0)
        self._resume: tuple[int, int] | None = None
        if self.dropped:
            text = "%d of %s elements are dropped in every epoch: they do not fill a global batch of %d"
            log.info(text, self.dropped, self._source.length, self.global_batch_size)

    def __len__(self) -> int:
        """Return the steps per epoch; raise TypeError if the source does not give its length."""
        if self._source.steps is None:
            raise TypeError("the data set has no length: its source does not give its number of elements")
        return self._source.steps

    @property
    def gradient_accumulation_count(self) -> int:
        """The number of micro-batches that a replica takes in one step."""
        return self._layout.gradient_accumulation_count

    @property
    def global_batch_size(self) -> int:
        """The number of elements that all replicas take in one step: micro-batch x accumulation x R."""
        return self._layout.global_batch_size

    @property
    def dropped(self) -> int | None:
        """The number of elements that no replica sees in an epoch; None if the source does not give its length."""
        if self._source.length is None or self._source.steps is None:
            return None
        if self._layout.remainder == "short":
            return self._layout.dropped(self._source.length)
        return max(0, self._source.length - self._source.steps * self._layout.global_batch_size)

    def __iter__(self) -> DataIterator:
        """Return an iterator over each replica's parts, epoch after epoch, for functions run by `strategy.run`."""
        return DataIterator(self)

    def epoch(self, epoch: int) -> Generator[Batch, None, None]:
        """Yield this instance's batch for every global step of an epoch.

        Leaves have shape `[len(local_replicas) * gradient_accumulation_count * batch_size, ...]`, with the local
        replicas' elements in replica order. A replica's micro-batches follow one another. If the source is a stream and
        several instances run, taking a batch is a collective call.
        """
        at_least(0, "epoch", epoch)
        start = 0
        if self._resume is not None and self._resume[0] == epoch:
            start, self._resume, self._source.passes_due = self._resume[1], None, epoch
        return self._read(epoch, start)

    @property
    def pads(self) -> bool:
        """Whether its batches are `Masked`, so that no element is dropped."""
        return self._layout.pads

    @property
    def is_random_access(self) -> bool:
        """Whether the batch of any step can be read for any replicas, as for arrays and objects with `[i]`."""
        return self._source.is_random_access

    @property
    def is_shuffled(self) -> bool:
        """Whether each epoch reads the elements in a shuffled order."""
        return self._shuffle and self.is_random_access

    @property
    def is_collective(self) -> bool:
        """Whether taking a batch is a collective call: several instances read a source without random access."""
        return self._communicator is not None and not self._source.is_random_access

    @property
    def replication(self) -> Replication:
        """The replicas among which the data set is split."""
        local = self._layout.local_replicas
        return Replication(range(local[0], local[-1] + 1), self._layout.total_replicas)

    def parts(self) -> Generator[list[Batch], None, None]:
        """Yield the host arrays of each local replica, step after step and epoch after epoch, without end.

        The call neither uses nor changes the position.

        Raises:
            StrategyError: If several instances read a source without random access, which needs collective calls; or
                if the first batch draws from the global generators, which belong to the program while a thread reads.
        """
        if self.is_collective:
            raise StrategyError(
                "with several instances an infeed takes only data sets of arrays and of random access, because a batch "
                "of other data sets is a collective call; give the infeed the iterable itself, and its mode"
            )
        local = len(self._layout.local_replicas)
        source = open_source(self._given, self._layout, seed=self._seed, shuffle=self._shuffle)
        for epoch in itertools.count():
            is_empty = True
            for batch in source.batches(epoch, 0):
                is_empty = source.runs_code = False  # a thread may read the others, which cannot see who draws
                if source.draws:
                    raise StrategyError(
                        "elements draw random numbers from the generators of Python, NumPy or PyTorch, but an infeed "
                        "reads them in a thread, and the program may draw meanwhile; draw from generators of their "
                        "own, such as np.random.default_rng((seed, index))"
                    )
                leaves, structure = trees.flatten(converted(self._transfer_dtype, batch))
                split = zip(*(np.split(leaf, local) for leaf in leaves), strict=True)
                yield [trees.unflatten(structure, part) for part in split]
            if is_empty:
                return

    def position(self) -> Position:
        """Return the position after the batch that was yielded last.

        After the last batch of an epoch it is the beginning of the next epoch.
        """
        return Position(*self.consumed, **self._identity())

    def restore(self, position: Position) -> None:
        """Make the next `epoch(position.epoch)` begin at the position's step; other epochs begin at step 0.

        Arrays and objects with `[i]` are read from that step on. Other sources are read from their beginning, and
        earlier elements are skipped. If they have a length, the passes of earlier epochs are read too, because a loader
        that shuffles has another order in each pass.

        Raises:
            ValueError: If the position belongs to a data set with another seed, size or order; nothing has changed.
        """
        own, saved = self._identity(), position.to_dict()
        different = [name for name in own if own[name] != saved[name]]
        if different:
            theirs, ours = (", ".join(f"{name} {of[name]!r}" for name in different) for of in (saved, own))
            raise ValueError(
                f"the position was saved with {theirs}, but this data set has {ours}; restore it with the same"
            )
        at_least(0, "epoch", position.epoch)
        if at_least(0, "step", position.step) > (self._source.steps or position.step):
            raise ValueError(f"the position is at step {position.step} of an epoch of {self._source.steps} steps")
        self.consumed = self._resume = (position.epoch, position.step)

    def redistribute(self, local_replicas: Sequence[int]) -> None:
        """Give the batches of other replicas from the next batch on.

        Raises:
            StrategyError: If the source has no random access.
        """
        if not self._source.is_random_access:
            raise StrategyError(
                "an instance is lost, and the others can take over its part only of data sets of arrays, "
                "grain.MapDataset and other random access"
            )
        self.is_last_outdated = True
        self._layout = replace(self._layout, local_replicas=local_replicas)
        self._source = open_source(self._given, self._layout, seed=self._seed, shuffle=self._shuffle)

    def has_given(self, batch: Batch) -> bool:
        """Return whether this is a batch of the last step, with or without its mask, as it was given.

        A batch whose arrays the program has changed or replaced is another one: reading it again would undo this.
        """
        if isinstance(batch, Masked) and not isinstance(self._last, Masked):
            batch = batch.values  # an evaluation has added a mask
        if self._last is None or not any(
            batch is one or (isinstance(one, Masked) and batch is one.values) for one in (self._last, *self._earlier)
        ):
            return False
        given = iter(self._contents)  # in the order of the leaves
        return not self._is_read_again or all(
            any(leaf is one and version == _version(one) for one, version in given) for leaf in trees.leaves(batch)
        )

    def read_again(self, batch: Batch = None) -> Batch:
        """Return the batch of the last step for the present local replicas.

        Args:
            batch: A batch for which `has_given` is true; without its mask, the result has none either.
        """
        is_bare = batch is not None and all(batch is not given for given in (self._last, *self._earlier))
        if self.is_last_outdated:
            self._earlier.append(self._last)
            self._last, self.is_last_outdated = self.with_values(), False
            self._note_contents()
        return self._last.values if is_bare else self._last

    def _note_contents(self) -> None:
        self._contents += [(leaf, _version(leaf)) for leaf in trees.leaves(self._last)]

    def with_values(self) -> Batch:
        """Return the batch of the last step, read again; `has_given` does not know it."""
        return self._batch_at(self.consumed[0], self.consumed[1] - 1)

    def _batch_at(self, epoch: int, step: int) -> Batch:
        with closing(self._source.batches(epoch, step)) as batches:
            return self._moved(next(batches))

    def end_epoch(self) -> None:
        """Take the rest of the epoch for read, as the active instances have read it."""
        self.consumed, self._resume, self._last = (self.consumed[0] + 1, 0), None, None

    def _identity(self) -> dict[str, Any]:
        """Return the fields of a position that must be equal for it to mean the same elements."""
        return {
            "seed": self._seed,
            "batch_size": self._layout.elements_per_replica,
            "total_replicas": self._layout.total_replicas,
            "length": self._source.length,
            "shuffle": self._shuffle,
            "remainder": self._layout.remainder,
        }

    def _read(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        self.consumed = (epoch, start)
        source = None
        while source is not self._source:  # redistribute has replaced the source
            source = self._source
            batches = self._placeholders(epoch, start) if self._is_spare() else self._placed(epoch, start)
            try:
                for step, batch in enumerate(self._waited_for(self._agreed(batches, epoch, start)), start + 1):
                    self.consumed, self._last, self.is_last_outdated = (epoch, step), batch, False
                    self._earlier.clear()
                    self._contents.clear()
                    if self._is_read_again:
                        self._note_contents()
                    start = step  # not that of another iterator, which `consumed` may be
                    yield batch
                    if source is not self._source:
                        break
                else:
                    self.consumed, self._last = (epoch + 1, 0), None
            finally:
                batches.close()

    def _placed(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        placed = (self._moved(batch) for batch in self._source.batches(epoch, start))
        # If the program's code reads, the calling thread takes the first batch, which shows whether the code draws.
        first = list(itertools.islice(placed, 1)) if self._source.runs_code else []
        yield from prefetched(placed, 0 if self._source.draws else self.num_read_ahead, first)

    def _placeholders(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        """Return batches without values, for a spare, which computes nothing. Its first batch has values.

        Raises:
            SpareError: The data set has no random access, so that no instance can take another one's place.
        """
        if not self._source.is_random_access or self._source.steps is None:
            raise SpareError(
                "the data set can only be read in order, so no spare can take the place of an instance that reads it; "
                "use arrays, grain.MapDataset or other random access"
            )
        for step in range(start, self._source.steps):
            is_other = self._layout.remainder == "short" and step == self._source.steps - 1
            if self._example is None or is_other:
                batch = self._batch_at(epoch, step)
                self._example = self._example if is_other else placeholders_like(batch, _raise_no_values)
                yield batch
            else:
                yield placeholders_like(self._example, _raise_no_values)

    def _waited_for(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            try:
                with self._instruments.during[DATA]:
                    batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _agreed(self, batches: Generator[Batch, None, None], epoch: int, start: int) -> Generator[Batch, None, None]:
        """Return the batches of the steps that all instances make."""
        if not self.is_collective or self._communicator is None:
            return batches

        def has_rows(batch: Masked) -> bool:
            return self._source.steps is not None or bool(np.asarray(batch.mask).any())

        return in_lockstep(batches, self._communicator, f"epoch {epoch}", start, has_rows if self.pads else None)

    def _moved(self, batch: Batch) -> Batch:
        """Return the batch on the devices."""
        return self.place(converted(self._transfer_dtype, batch))


def _version(leaf: Leaf) -> object:
    """Return the number of changes of a tensor of PyTorch in place; the other arrays of batches do not change."""
    return getattr(leaf, "_version", None)


def _raise_no_values() -> None:
    raise SpareError(
        "the program reads a batch, but a spare reads no data before it becomes active; compute with batches in the "
        "loss function, or in the data set itself"
    )


def open_source(source: Data, layout: Layout, *, seed: int, shuffle: bool) -> DataSource:
    """Return the local replicas' share of `source`, of any kind that `DistributedDataset` takes.

    Raises:
        TypeError: If the source is of no known kind, or can be iterated over only once.
        ValueError: If the source cannot be split as `layout` says.
    """
    source = as_grain_source(source) or source
    if isinstance(source, SourceFactory):
        return source.open(layout, seed=seed, shuffle=shuffle)
    if layout.remainder == "short" and not _is_random_access(source):
        raise ValueError("remainder is 'short', which needs arrays or random access; use 'drop' or 'pad'")
    if callable(getattr(source, "shard", None)):
        return from_shards(source, layout)
    if isinstance(getattr(source, "values", None), list | tuple):
        return from_values(source.values, layout)
    if isinstance(source, Mapping) and trees.is_leaf(source):
        source = dict(source)  # a mapping that is not registered with JAX
    if is_pytree_of_arrays(source):
        arrays = trees.map(np.asarray, source)
        steps = Steps(arrays, common_length(arrays), layout, seed=seed, shuffle=shuffle, read=take_rows)
        return RandomAccessSource(steps)
    if _is_random_access(source):
        return RandomAccessSource(Steps(source, len(source), layout, seed=seed, shuffle=shuffle, read=read_elements))
    return from_iterable(source, layout)


def _is_random_access(source: Data) -> bool:
    has_elements = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    return is_pytree_of_arrays(source) or (has_elements and not isinstance(source, Iterable))


def is_pytree_of_arrays(source: Data) -> bool:
    """Return whether a data set is an array or a pytree of arrays. A list is a data set of its elements."""
    return not isinstance(source, list) and (not trees.is_leaf(source) or hasattr(source, "shape"))
