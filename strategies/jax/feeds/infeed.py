"""Data that comes into a compiled program while it runs."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from strategies.argument_checks import integer
from strategies.data.iterators import DataIterator, Prefetcher, reading_ahead
from strategies.data.replication import Replication, is_in_program
from strategies.defaults import current_defaults
from strategies.errors import EndOfDataError, FeedError
from strategies.jax.feeds.feed_elements import ElementSpec
from strategies.jax.feeds.feed_streams import InfeedMode, feed_stream
from strategies.jax.programs.feed_program import FeedProgram, current_program
from strategies.typing import Data, Element

DELETE_TIMEOUT_S = 10.0

_numbers = itertools.count()

Arrays = list[np.ndarray]


class InfeedQueue:
    """Brings the elements of a data set into a compiled program while it runs.

    Give it to a loop of `strategies.loops`, or call `dequeue` in a function that `strategy.run` compiles. Element
    k * R + r of the data set is what replica r gets in its iteration k. A thread prepares `prefetch_depth` rounds of an
    element for each replica ahead.

    An element is an array, a tuple of arrays or of dictionaries (the arguments of a loop's body), or a dictionary
    (its keyword arguments).

    With several instances the iterable of each may have the elements of all replicas, so that it does not matter how
    these are spread, or those of its own replicas: `mode` says which. What `distribute_datasets_from_function` returns
    has those of its own replicas; no instance asks the others whether they have more.

    A `DistributedDataset` feeds its batches, epoch after epoch: each replica gets its own part of the batch of a step.
    Of a `PerReplica` each replica gets the elements of its own iterable.

    The data are gone through once, as far as programs ask for them: the next program goes on where the last one was.
    A program that asks for more gets `EndOfDataError`, and what the data set raises is raised by the program that asks
    for that element; both when the replicas have come to the end of their program, without any further data.

    The queue starts with `start`, or with the first program that dequeues it. It is deleted with `delete` or at the end
    of a `with`; after that `start` begins with the first element again, unless the data set is an iterator, which can
    be gone through only once. Its thread also ends when nobody has the queue any more.

    Semantics: the original's `IPUInfeedQueue`; `start` and `delete` are its `initializer` and `deleter`.

    Args:
        dataset: an iterable of elements, NumPy arrays of int8, uint8, bool, int32, float16, bfloat16 or float32, all of
            the same structure, shapes and dtypes; or a `DistributedDataset`, or a `PerReplica` of iterables.
        prefetch_depth: rounds to prepare ahead, 1 to 255; None: three, or one where the defaults of the strategy in
            whose scope this is, or the configuration in force (`strategies.config`), say so.
        mode: whose elements an iterable has; see `InfeedMode`. With one instance there is no difference.

    Attributes:
        spec: structure, shapes and dtypes of an element.
        prefetch_depth: how many rounds are prepared ahead.
        number: by which messages name the queue.

    Raises:
        TypeError: if `dataset` is not iterable or has no elements for one replica each, "Unsupported datatype", or if
            the mode is none.
        ValueError: for a depth out of range, "Output shape", a dimension of size 0, a data set without elements, or a
            mode where elements are each replica's own.
        StrategyError: if taking an element is a collective call, which the thread must not make.
    """

    def __init__(self, dataset: Data, prefetch_depth: int | None = None, mode: InfeedMode | None = None) -> None:
        usual_depth = 3 if current_defaults().prefetches else 1
        self.prefetch_depth = checked_depth(usual_depth if prefetch_depth is None else prefetch_depth)
        self.number = next(_numbers)
        self._stream = feed_stream(dataset, mode)
        self._opened: Iterator[Element] | None = self._stream.open()
        self.spec = self._peek()
        self._replication: Replication | None = None
        self._rounds: Prefetcher[Sequence[Arrays]] | None = None
        self._waiting: list[deque[Arrays]] = []
        self._failure: BaseException | None = None
        self._runs = False  # since start, or the first program that dequeues it, until delete
        self._is_deleted = False
        self._dequeued = False
        self._lock = threading.RLock()

    # ---- in compiled programs

    @property
    def dequeued(self) -> bool:
        """Whether the program that is being traced, or outside of programs any one, dequeues it."""
        if is_in_program():
            return id(self) in current_program().infeeds
        return self._dequeued

    @property
    def number_of_tuple_elements(self) -> int:
        """The number of arrays in an element."""
        return len(self.spec.leaves)

    def dequeue(self) -> Element:
        """The next element of the replica whose program is being traced; called from Python, that of a single replica.

        Raises:
            FeedError: if the queue is deleted, or used by a program on other replicas.
            EndOfDataError: called from Python, if there is none; and what the data set raises.
        """
        _, leaves = self.dequeue_some(1, np.int32(1))
        return self.spec.unflatten(leaf[0] for leaf in leaves)

    def register(self, program: FeedProgram) -> None:
        """Note that a program dequeues this queue; called while it is traced.

        Raises:
            FeedError: see `dequeue`.
        """
        with self._lock:
            self._expect(program.replication)
        self._dequeued = True
        program.infeeds[id(self)] += 1

    def dequeue_some(self, most: int, wanted: ArrayLike) -> tuple[jax.Array, list[jax.Array]]:
        """One element, and those behind it that are there already, in one call into Python.

        Args:
            most: how many may come; fixed when the program is compiled.
            wanted: how many the program will take, an int32 scalar, at least 1.

        Returns:
            How many have come, 0 if the feed has failed; and all arrays of the elements, `[most, *shape]`.
        """
        program = current_program()
        self.register(program)
        count, *leaves = program.call(self.taker(program, most), self.shapes(most), [jnp.asarray(wanted, jnp.int32)])
        return count, leaves

    def shapes(self, most: int) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of what a taker returns."""
        scalar = jax.ShapeDtypeStruct((), np.int32)
        return [scalar, *(jax.ShapeDtypeStruct((most, *leaf.shape), leaf.dtype) for leaf in self.spec.leaves)]

    def taker(self, program: FeedProgram, most: int) -> Callable[[int, int], list[ArrayLike]]:
        """Return the function that a program calls: `(replica, wanted) -> [count, *arrays]`, see `dequeue_some`.

        It does not wait where none is wanted.
        """
        # A program may be kept for longer than the queue, whose thread is not to run for so long.
        queue = weakref.ref(self)
        nothing: list[ArrayLike] = [np.zeros(shape.shape, shape.dtype) for shape in self.shapes(most)]
        replication = program.replication

        def take(replica: int, wanted: int) -> list[ArrayLike]:
            sender = queue()
            if sender is None:
                raise FeedError("the infeed of this program is gone; keep it as long as programs dequeue it")
            elements = sender._take(replication, replica, min(most, int(wanted))) if wanted > 0 else []
            return [np.int32(len(elements)), *_stacked(elements, most)] if elements else nothing

        return take

    def __iter__(self) -> DataIterator:
        """Return an iterator that goes on where the queue is, for functions that `strategy.run` runs."""
        return DataIterator(self, draw=self.dequeue)

    # ---- on the host

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing more to come."""
        return self._failure is not None and not any(self._waiting)

    def take_one(self, replication: Replication, replica: int) -> Arrays:
        """Wait for the next element of a replica, and return it.

        Raises:
            EndOfDataError: if there is none.
            FeedError: see `dequeue`.
        """
        self._dequeued = True
        return self._take(replication, replica, 1)[0]

    def take(self, replication: Replication, count: int) -> list[list[Arrays]]:
        """The next elements of each local replica, for a program that gets them as arguments.

        Args:
            replication: the replicas that run it.
            count: how many for each of them.

        Raises:
            EndOfDataError: if there are not so many.
            FeedError: see `dequeue`.
        """
        self._dequeued = True
        found: list[list[Arrays]] = [[] for _ in replication.local]
        for replica, elements in zip(replication.local, found, strict=True):
            while len(elements) < count:
                elements += self._take(replication, replica, count - len(elements))
        return found

    def _take(self, replication: Replication, replica: int, most: int) -> list[Arrays]:
        """The next element of a replica, for which it waits, and those behind it that are there already."""
        place = replication.local.index(replica)
        is_there = replication == self._replication and len(self._waiting[place]) > 0
        # Another replica that waits for data holds the lock, and they may depend on what this one puts out.
        if self._lock.acquire(blocking=not is_there):
            try:
                self._fill(replication, place, most)
            finally:
                self._lock.release()
        mine = self._waiting[place]
        return [mine.popleft() for _ in range(min(most, len(mine)))]

    def _fill(self, replication: Replication, place: int, most: int) -> None:
        self._expect(replication)
        mine = self._waiting[place]
        while len(mine) < most and (not mine or (self._rounds is not None and self._rounds.has_next)):
            for waiting, arrays in zip(self._waiting, self._next_round(replication), strict=True):
                waiting.append(arrays)

    def _next_round(self, replication: Replication) -> Sequence[Arrays]:
        if self._failure is None:
            try:
                if self._rounds is None:
                    self._rounds = Prefetcher(self._prepare(replication), self.prefetch_depth)
                return next(self._rounds)
            except StopIteration:
                self._failure = EndOfDataError(
                    "Infeed dataset iterator out of range. Are you trying to dequeue more elements than are in the "
                    f"dataset? There was none left for each of {replication.total} replicas; run fewer iterations, or "
                    "repeat the data"
                )
            except Exception as error:
                self._failure = error
        raise self._failure

    def _prepare(self, replication: Replication) -> Generator[Sequence[Arrays], None, None]:
        opened, self._opened = self._opened or self._stream.open(), None
        rounds, spec = self._stream.rounds(opened, replication), self.spec  # the thread does not keep the queue
        return ([spec.flatten(number, element) for number, element in elements] for elements in rounds)

    def _expect(self, replication: Replication) -> None:
        if self._is_deleted:
            raise FeedError(f"Infeed with id={self.number} is deleted; call start to begin with its first element")
        if self._replication is None:
            self._stream.check(replication)
            self._replication, self._runs = replication, True
            self._waiting = [deque() for _ in replication.local]
        elif replication != self._replication:
            raise FeedError(
                f"Infeed with id={self.number} feeds {self._replication}, and this program runs on "
                f"{replication}; use an infeed of its own for each number of replicas, or delete and start it"
            )

    def _peek(self) -> ElementSpec:
        """Return the specification of the first element, which stays the first one to be taken."""
        assert self._opened is not None
        with reading_ahead():  # as the thread does with those behind it
            first = next(self._opened, None)
        if first is None:
            raise ValueError("the data set has no elements; an infeed needs at least one, to know what they are")
        self._opened = itertools.chain([first], self._opened)
        return ElementSpec.of(self._stream.element(first))

    # ---- life

    def start(self) -> None:
        """Begin with the first element; a queue that is not deleted need not be started.

        Raises:
            ValueError: if it has started already, or its data set is an iterator from which elements were taken.
        """
        with self._lock:
            if self._runs:
                raise ValueError(
                    f"Infeed with id={self.number} can only be started once; delete it before it starts again"
                )
            if self._opened is None and self._stream.is_once:
                raise ValueError(
                    f"Infeed with id={self.number} cannot begin with the first element again: its data set is a "
                    f"{self._stream.kind}, which can be gone through only once; use an object whose "
                    "__iter__ starts anew"
                )
            self._runs, self._is_deleted = True, False

    def delete(self) -> None:
        """End the thread, and drop what it has prepared; no program may run that dequeues the queue.

        Raises:
            FeedError: if it has not started, or a program waits for its data.
        """
        if not self._lock.acquire(timeout=DELETE_TIMEOUT_S):
            raise FeedError(
                f"Infeed with id={self.number} cannot be deleted: a program has waited for its data set for more than "
                f"{DELETE_TIMEOUT_S:g} s (DELETE_TIMEOUT_S); end the program before"
            )
        try:
            if not self._runs:
                raise FeedError(
                    f"Infeed with id={self.number} does not run; start it, or run a program that dequeues it, before"
                )
            if self._rounds is not None:
                self._rounds.close()
            self._rounds = self._replication = self._failure = None
            self._waiting = []
            self._runs, self._is_deleted = False, True
        finally:
            self._lock.release()

    def __enter__(self) -> InfeedQueue:
        return self

    def __exit__(self, *error: object) -> None:
        if self._runs:
            self.delete()


def _stacked(elements: Sequence[Arrays], most: int) -> list[np.ndarray]:
    """Their arrays along a new first axis of that length; behind the last one there may be anything."""
    if most == 1:
        return [array[None] for array in elements[0]]
    stacked = [np.empty((most, *array.shape), array.dtype) for array in elements[0]]
    for place, element in enumerate(elements):
        for into, array in zip(stacked, element, strict=True):
            into[place] = array
    return stacked


def checked_depth(depth: object) -> int:
    """Return the number of rounds to prepare ahead, if the original allows it.

    Raises:
        TypeError, ValueError: unless it is an integer from 1 to 255.
    """
    number = integer(depth)
    if number is None:
        raise TypeError(f"prefetch_depth is {depth!r}; it must be an integer from 1 to 255")
    if number <= 0:
        raise ValueError(f"prefetch_depth is {number}; it must be greater than zero")
    if number > 255:
        raise ValueError(f"prefetch_depth is {number}; it must be less than 256")
    return number
