"""The infeed: data that enters a compiled program while it runs."""

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
    """A queue that brings the elements of a data set into a compiled program while it runs.

    Give it to a loop of `strategies.loops`, or call `dequeue` in a function that `strategy.run` compiles. Replica r
    gets element k * R + r of the data set in its iteration k. A thread prepares `prefetch_depth` rounds ahead; a round
    is one element for each replica.

    An element is an array, a tuple of arrays or dictionaries (the arguments of a loop's body), or a dictionary (its
    keyword arguments).

    With several instances, `mode` says whether the iterable of an instance has the elements of all replicas or only of
    the instance's own replicas. With the elements of all replicas, the spread of replicas does not matter.
    `distribute_datasets_from_function` returns elements of the own replicas; no instance asks the others whether they
    have more.

    A `DistributedDataset` feeds its batches, epoch after epoch; each replica gets its part of a step's batch. A
    `PerReplica` of iterables feeds each replica from its own iterable.

    The data are read once, on demand: each program continues where the previous one stopped. If no element is left, the
    program that asks for one raises `EndOfDataError`. If the data set raises an error, that program raises it. In both
    cases the replicas first finish their program without further data.

    The queue starts with `start`, or with the first program that dequeues it. `delete`, or the end of a `with`, deletes
    it. Then `start` begins again with the first element, unless the data set is an iterator, which can be read only
    once. The thread of the queue also ends when the queue is garbage-collected.

    Semantics: the original's `IPUInfeedQueue`; `start` and `delete` are its `initializer` and `deleter`.

    Example:
        >>> import numpy as np
        >>> from strategies import InfeedQueue, LocalStrategy, loops
        >>> infeed = InfeedQueue([np.float32(0), np.float32(1), np.float32(2)])
        >>> add = lambda total, element: total + element
        >>> LocalStrategy(1).run(lambda: loops.repeat(3, add, np.float32(0), infeed))
        PerReplica(values=(array(3., dtype=float32),))

    Args:
        dataset: Iterable of elements: NumPy arrays of int8, uint8, bool, int32, float16, bfloat16 or float32, all of
            the same structure, shapes and dtypes. Or a `DistributedDataset`, or a `PerReplica` of iterables.
        prefetch_depth: Number of rounds to prepare ahead, 1 to 255. None: the default of the strategy in whose scope
            the queue is made, or of the configuration in force (`strategies.config`), which is three or one.
        mode: Replicas whose elements an iterable has, see `InfeedMode`. Without effect if there is one instance.

    Attributes:
        spec: Structure, shapes and dtypes of an element.
        prefetch_depth: Number of rounds prepared ahead.
        number: Number of the queue in messages.

    Raises:
        TypeError: `dataset` is not iterable or its elements are not each for one replica; "Unsupported datatype"; or
            `mode` is not an `InfeedMode`.
        ValueError: The depth is out of range, "Output shape", a dimension has size 0, or the data set is empty. Also if
            `mode` is given although elements are each replica's own.
        StrategyError: Taking an element is a collective call, which the thread must not make.
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
        self._runs = False  # from `start`, or the first program that dequeues the queue, until `delete`
        self._is_deleted = False
        self._dequeued = False
        self._lock = threading.RLock()

    # ---- in compiled programs

    @property
    def dequeued(self) -> bool:
        """Whether the program being traced dequeues the queue; outside of programs, whether any program has."""
        if is_in_program():
            return id(self) in current_program().infeeds
        return self._dequeued

    @property
    def number_of_tuple_elements(self) -> int:
        """The number of arrays in an element."""
        return len(self.spec.leaves)

    def dequeue(self) -> Element:
        """Return the next element of the replica whose program is traced; called from Python, of a single replica.

        Raises:
            FeedError: The queue is deleted, or was used by a program on other replicas.
            EndOfDataError: Called from Python, and no element is left. Errors of the data set are raised too.
        """
        _, leaves = self.dequeue_some(1, np.int32(1))
        return self.spec.unflatten(leaf[0] for leaf in leaves)

    def register(self, program: FeedProgram) -> None:
        """Note that a program dequeues this queue. Called while the program is traced.

        Raises:
            FeedError: The queue is deleted, or was used by a program on other replicas.
        """
        with self._lock:
            self._expect(program.replication)
        self._dequeued = True
        program.infeeds[id(self)] += 1

    def dequeue_some(self, most: int, wanted: ArrayLike) -> tuple[jax.Array, list[jax.Array]]:
        """Return one element, and further ones that are ready, by one call into Python.

        Args:
            most: Largest number of elements; fixed when the program is compiled.
            wanted: Number of elements that the program will take, an int32 scalar, at least 1.

        Returns:
            The number of elements, 0 if the feed has failed; and the arrays of all elements, `[most, *shape]`.
        """
        program = current_program()
        self.register(program)
        count, *leaves = program.call(self.taker(program, most), self.shapes(most), [jnp.asarray(wanted, jnp.int32)])
        return count, leaves

    def shapes(self, most: int) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of a taker's results."""
        scalar = jax.ShapeDtypeStruct((), np.int32)
        return [scalar, *(jax.ShapeDtypeStruct((most, *leaf.shape), leaf.dtype) for leaf in self.spec.leaves)]

    def taker(self, program: FeedProgram, most: int) -> Callable[[int, int], list[ArrayLike]]:
        """Return the function that a program calls: `(replica, wanted) -> [count, *arrays]`, see `dequeue_some`.

        If `wanted` is 0, it does not wait.
        """
        # A program may outlive the queue, whose thread is to end with the queue.
        queue = weakref.ref(self)
        nothing: list[ArrayLike] = [np.zeros(shape.shape, shape.dtype) for shape in self.shapes(most)]
        replication = program.replication

        def take(replica: int, wanted: int) -> list[ArrayLike]:
            sender = queue()
            if sender is None:
                raise FeedError("the infeed of this program was deleted; keep a reference to it while programs run")
            elements = sender._take(replication, replica, min(most, int(wanted))) if wanted > 0 else []
            return [np.int32(len(elements)), *_stacked(elements, most)] if elements else nothing

        return take

    def __iter__(self) -> DataIterator:
        """Return an iterator for functions of `strategy.run`; it continues at the queue's position."""
        return DataIterator(self, draw=self.dequeue)

    # ---- on the host

    @property
    def has_ended(self) -> bool:
        """Whether no further element can come."""
        return self._failure is not None and not any(self._waiting)

    def take_one(self, replication: Replication, replica: int) -> Arrays:
        """Wait for the next element of a replica and return it.

        Raises:
            EndOfDataError: No element is left.
            FeedError: The queue is deleted, or was used by a program on other replicas.
        """
        self._dequeued = True
        return self._take(replication, replica, 1)[0]

    def take(self, replication: Replication, count: int) -> list[list[Arrays]]:
        """Return the next elements of each local replica, for a program that gets them as arguments.

        Args:
            replication: Replicas that run the program.
            count: Number of elements for each of them.

        Raises:
            EndOfDataError: Fewer elements are left.
            FeedError: The queue is deleted, or was used by a program on other replicas.
        """
        self._dequeued = True
        found: list[list[Arrays]] = [[] for _ in replication.local]
        for replica, elements in zip(replication.local, found, strict=True):
            while len(elements) < count:
                elements += self._take(replication, replica, count - len(elements))
        return found

    def _take(self, replication: Replication, replica: int, most: int) -> list[Arrays]:
        """Wait for the next element of a replica; return it, and further ones that are ready, `most` at most."""
        place = replication.local.index(replica)
        is_there = replication == self._replication and len(self._waiting[place]) > 0
        # A replica that waits for data holds the lock, and the data may depend on values that this replica enqueues.
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
                    f"dataset? No element was left for each of {replication.total} replicas; run fewer iterations, or "
                    "repeat the data"
                )
            except Exception as error:
                self._failure = error
        raise self._failure

    def _prepare(self, replication: Replication) -> Generator[Sequence[Arrays], None, None]:
        opened, self._opened = self._opened or self._stream.open(), None
        rounds, spec = self._stream.rounds(opened, replication), self.spec  # so the thread does not hold the queue
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
                f"Infeed with id={self.number} feeds {self._replication}, but this program runs on "
                f"{replication}; use one infeed for each number of replicas, or delete and start it"
            )

    def _peek(self) -> ElementSpec:
        """Return the specification of the first element, which stays in the queue."""
        assert self._opened is not None
        with reading_ahead():  # as in the thread that reads later elements
            first = next(self._opened, None)
        if first is None:
            raise ValueError("the data set has no elements; an infeed needs at least one, to know their shapes")
        self._opened = itertools.chain([first], self._opened)
        return ElementSpec.of(self._stream.element(first))

    # ---- life

    def start(self) -> None:
        """Begin with the first element. A new queue need not be started.

        Raises:
            ValueError: The queue has started already, or its data set is an iterator from which elements were taken.
        """
        with self._lock:
            if self._runs:
                raise ValueError(
                    f"Infeed with id={self.number} can only be started once; delete it before you start it again"
                )
            if self._opened is None and self._stream.is_once:
                raise ValueError(
                    f"Infeed with id={self.number} cannot begin with the first element again: its data set is a "
                    f"{self._stream.kind}, which can be iterated only once; use an object whose "
                    "__iter__ starts anew"
                )
            self._runs, self._is_deleted = True, False

    def delete(self) -> None:
        """End the thread, and drop the elements that it has prepared. No program that dequeues the queue may run.

        Raises:
            FeedError: The queue has not started, or a program waits for its data.
        """
        if not self._lock.acquire(timeout=DELETE_TIMEOUT_S):
            raise FeedError(
                f"Infeed with id={self.number} cannot be deleted: a program has waited for its data set for more than "
                f"{DELETE_TIMEOUT_S:g} s (DELETE_TIMEOUT_S); end the program first"
            )
        try:
            if not self._runs:
                raise FeedError(
                    f"Infeed with id={self.number} does not run; start it, or run a program that dequeues it, first"
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
    """Return the arrays of elements along a new first axis of length `most`; rows behind the last are arbitrary."""
    if most == 1:
        return [array[None] for array in elements[0]]
    stacked = [np.empty((most, *array.shape), array.dtype) for array in elements[0]]
    for place, element in enumerate(elements):
        for into, array in zip(stacked, element, strict=True):
            into[place] = array
    return stacked


def checked_depth(depth: object) -> int:
    """Return the number of rounds to prepare ahead if the original allows it.

    Raises:
        TypeError, ValueError: `depth` is not an integer from 1 to 255.
    """
    number = integer(depth)
    if number is None:
        raise TypeError(f"prefetch_depth is {depth!r}; it must be an integer from 1 to 255")
    if number <= 0:
        raise ValueError(f"prefetch_depth is {number}; it must be greater than zero")
    if number > 255:
        raise ValueError(f"prefetch_depth is {number}; it must be less than 256")
    return number
