"""The infeed: data that enters a compiled program while it runs, also from iterators among its arguments."""

from __future__ import annotations

import io
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import ArrayLike
from typing_extensions import override

from strategies.argument_checks import integer
from strategies.data.datasets import DistributedDataset
from strategies.data.iterators import DataIterator, Lockstep, Prefetcher, reading_ahead
from strategies.data.layout import Replication, is_in_program
from strategies.defaults import current_defaults
from strategies.errors import EndOfDataError, FeedError
from strategies.jax.programs.feed_program import FeedProgram, current_program
from strategies.jax.replicas.sharding import replication_of
from strategies.typing import Data, Element, Number, Numbers, Tree
from strategies.values import PerReplica

DTYPES = tuple(map(np.dtype, ("int8", "uint8", "bool", "int32", "float16", ml_dtypes.bfloat16, "float32")))


@dataclass(frozen=True)
class ElementSpec:
    """The structure, shapes and dtypes that all elements of a data set share.

    Attributes:
        structure: Structure of an element. The body of a loop gets a tuple or a dictionary as several arguments.
        leaves: Shape and dtype of each array.
    """

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, element: Element) -> ElementSpec:
        """Return the specification of an element.

        Raises:
            TypeError: "Unsupported datatype" for a dtype that cannot be fed, such as int64 or float64.
            ValueError: A dimension has size 0, or a tuple or list contains another one.
        """
        for part in element if isinstance(element, list | tuple) else ():
            if isinstance(part, list | tuple):
                raise ValueError("the elements of the data set have a tuple or list inside of another; make them flat")
        leaves, structure = jax.tree.flatten(_as_tuple(element))
        if not leaves:
            raise ValueError("the elements of the data set have no arrays; an infeed needs at least one")
        arrays = [np.asarray(leaf) for leaf in leaves]
        for index, array in enumerate(arrays):
            if array.dtype not in DTYPES:
                raise TypeError(
                    f"Unsupported datatype {array.dtype} on index {index} of feed operation; convert it to one of "
                    f"{', '.join(map(str, DTYPES))}"
                )
            if 0 in array.shape:
                raise ValueError(
                    f"Detected a tensor in the dataset with a dimension of size 0: {list(array.shape)} on index {index}"
                )
        return cls(structure, tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays))

    def flatten(self, number: int, element: Element) -> list[np.ndarray]:
        """Return copies of the arrays of an element.

        Raises:
            ValueError: The element is not like the first one; "Output shape" if only shapes differ.
        """
        leaves, structure = jax.tree.flatten(_as_tuple(element))
        arrays = [np.array(leaf) for leaf in leaves]
        if structure != self.structure or [(array.shape, array.dtype) for array in arrays] != [
            (leaf.shape, leaf.dtype) for leaf in self.leaves
        ]:
            raise ValueError(self._difference(number, structure, arrays))
        return arrays

    def _difference(self, number: int, structure: jax.tree_util.PyTreeDef, arrays: Sequence[np.ndarray]) -> str:
        is_of_shapes = structure == self.structure and [array.dtype for array in arrays] == [
            leaf.dtype for leaf in self.leaves
        ]
        return (
            f"{'Output shape is not fully defined: ' if is_of_shapes else ''}element {number} of the data set is "
            f"{_described(structure, arrays)}, and the first was {_described(self.structure, self.leaves)}; all must "
            "be alike: leave out an incomplete batch (drop_remainder=True)"
        )

    def unflatten(self, leaves: Iterable[Numbers]) -> Element:
        """Return the element with these arrays."""
        return jax.tree.unflatten(self.structure, leaves)

    def arguments(self, leaves: Iterable[Numbers]) -> tuple[Sequence[Tree], Mapping[str, Tree]]:
        """Return the positional and the keyword arguments of a loop's body."""
        element = self.unflatten(leaves)
        if isinstance(element, tuple) and len(element) == 1 and _has_names(element[0]):
            element = element[0]
        if _has_names(element):
            return (), element
        return (element if isinstance(element, tuple) else (element,)), {}


def check_declared(dataset: Data) -> None:
    """Check the shapes that a data set declares in `element_spec`, as data sets of TensorFlow do.

    Raises:
        ValueError: "Output shape" if a shape is not fully defined.
    """
    for declared in jax.tree.leaves(
        getattr(dataset, "element_spec", None), is_leaf=lambda leaf: hasattr(leaf, "shape")
    ):
        shape = getattr(declared, "shape", ())
        if getattr(shape, "rank", 0) is None or any(size is None for size in shape):
            raise ValueError(
                f"Output shape {shape} is not fully defined; if the data set makes batches, have it drop the "
                "incomplete one with drop_remainder=True"
            )


def _as_tuple(element: Element) -> Element:
    return tuple(element) if isinstance(element, list | tuple) else element


def _has_names(element: Element) -> bool:
    return isinstance(element, dict) and all(isinstance(name, str) for name in element)


def _described(structure: jax.tree_util.PyTreeDef, leaves: Sequence[np.ndarray | jax.ShapeDtypeStruct]) -> str:
    return str(jax.tree.unflatten(structure, [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves])).replace("'", "")


Round = Sequence[tuple[int, Element]]
"""The next element of each local replica, with its number for messages."""


class InfeedMode(Enum):
    """The replicas whose elements an iterable has.

    WHOLE: all replicas. Every instance iterates over all elements and takes those of its own replicas. Element k * R +
    r is for replica r in its iteration k.

    INSTANCE: the local replicas. Each instance has a stream of its own, as in programs for the original that shard by
    hand. Element k * L + l is for the local replica number l of L in its iteration k.
    """

    WHOLE = "whole"
    INSTANCE = "instance"


class FeedStream(ABC):
    """The data set of an infeed. The queue calls `open` and `element`, then `check` and `rounds` for a program.

    Attributes:
        kind: Kind of the data set, for messages.
        is_once: Whether it can be iterated only once.
    """

    kind: str
    is_once: bool

    @abstractmethod
    def open(self) -> Iterator[Element]:
        """Return an iterator that begins with the first element."""

    @abstractmethod
    def check(self, replication: Replication) -> None:
        """Raise a `FeedError` if the stream cannot feed these replicas."""

    def element(self, first: Element) -> Element:
        """Return an element, given the first item of `open`: by default a sequence with one for each local replica."""
        return first[0]

    def rounds(self, opened: Iterator[Element], replication: Replication) -> Iterator[Round]:
        """Yield the rounds of the local replicas while there is an element for each of them."""
        for number, elements in enumerate(opened):
            yield [(number, element) for element in elements]


class ElementStream(FeedStream):
    """An iterable of elements, each for one replica."""

    def __init__(self, elements: Iterable[Element], mode: InfeedMode | None) -> None:
        self._elements = elements
        self._mode = mode
        self.kind = type(elements).__name__
        self.is_once = isinstance(elements, Iterator)

    @override
    def open(self) -> Iterator[Element]:
        return iter(self._elements)

    @override
    def element(self, first: Element) -> Element:
        """Return the first item, which is an element.

        Raises:
            TypeError: The item holds elements of several replicas.
        """
        for leaf in jax.tree.leaves(first):
            if isinstance(leaf, PerReplica):
                raise TypeError(
                    "the elements of the data set are PerReplica, but an element is for one replica; give the infeed "
                    "one PerReplica, with an iterable for each local replica"
                )
            if replication_of(leaf) is not None:
                raise TypeError(
                    "the elements of the data set are batches for all local replicas, but an element is for one; give "
                    "the infeed the result of distribute_dataset, and not its epochs"
                )
        return first

    @override
    def check(self, replication: Replication) -> None:
        if self._mode is None and len(replication.local) < replication.total:
            raise FeedError(
                f"the program runs on {replication}, and the infeed's iterable may have the elements of all replicas "
                "or of the local ones; choose with InfeedQueue(..., mode=InfeedMode.WHOLE) or InfeedMode.INSTANCE"
            )

    @override
    def rounds(self, opened: Iterator[Element], replication: Replication) -> Iterator[Round]:
        is_own = self._mode is InfeedMode.INSTANCE
        count = len(replication.local) if is_own else replication.total
        places = range(count) if is_own else replication.local
        for start in itertools.count(0, count):
            elements = list(itertools.islice(opened, count))
            if len(elements) < count:
                return
            yield [(start + place, elements[place]) for place in places]


class OwnElementStreams(FeedStream):
    """One iterable for each local replica."""

    kind = "PerReplica"

    def __init__(self, streams: PerReplica) -> None:
        self._streams = streams
        for stream in streams:
            _iterable(stream)
        self.is_once = any(isinstance(stream, Iterator) for stream in streams)

    @override
    def open(self) -> Iterator[Sequence[Element]]:
        return zip(*self._streams, strict=False)

    @override
    def check(self, replication: Replication) -> None:
        replicas = self._streams.replicas
        if len(self._streams) != len(replication.local) or replicas not in (None, replication.local):
            whose = f"{len(self._streams)} replicas" if replicas is None else f"the replicas {list(replicas)}"
            raise FeedError(
                f"the infeed has iterables for {whose}, but this program runs on {replication}; make them with "
                "per_replica of the strategy that runs it"
            )


class Batches(FeedStream):
    """A distributed data set; each replica gets its part of the batches."""

    kind = "DistributedDataset"
    is_once = False

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset

    @override
    def open(self) -> Iterator[Sequence[Element]]:
        return self._dataset.parts()

    @override
    def check(self, replication: Replication) -> None:
        if replication != self._dataset.replication:
            raise FeedError(
                f"the data set of the infeed was distributed to {self._dataset.replication}, but this program "
                f"runs on {replication}; run it with the strategy that distributed the data set"
            )


def feed_stream(dataset: Data, mode: InfeedMode | None) -> FeedStream:
    """Return the stream of a data set.

    Raises:
        TypeError: The data set is not iterable, or `mode` is not an `InfeedMode`.
        ValueError: The data set takes no mode, or shapes of elements are not fully defined.
    """
    if not isinstance(mode, InfeedMode | None):
        raise TypeError(f"mode is {mode!r}; use InfeedMode.WHOLE or InfeedMode.INSTANCE")
    if isinstance(dataset, DistributedDataset | PerReplica):
        if mode is not None:
            raise ValueError(
                f"a {type(dataset).__name__} has the elements of each local replica, but mode is {mode}; leave it out"
            )
        return Batches(dataset) if isinstance(dataset, DistributedDataset) else OwnElementStreams(dataset)
    if isinstance(dataset, Lockstep):  # its iteration is a collective call, which the infeed's thread must not make
        return ElementStream(_iterable(dataset.batches), mode or InfeedMode.INSTANCE)
    return ElementStream(_iterable(dataset), mode)


def _iterable(dataset: Data) -> Iterable[Element]:
    if not isinstance(dataset, Iterable) or isinstance(dataset, str | bytes | Mapping):
        raise TypeError(f"the data set is a {type(dataset).__name__}; an infeed needs an iterable of elements")
    check_declared(dataset)
    return dataset


# ---- the queue

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

    def take(self, replication: Replication, count: int) -> list[list[Arrays]]:
        """Return the next elements of each local replica, for a program that gets them as arguments.

        Args:
            replication: Replicas that run the program.
            count: Number of elements for each of them.

        Raises:
            EndOfDataError: Fewer elements are left.
            FeedError: The queue is deleted, or was used by a program on other replicas.
        """
        found: list[list[Arrays]] = [[] for _ in replication.local]
        for replica, elements in zip(replication.local, found, strict=True):
            while len(elements) < count:
                elements += self._take(replication, replica, count - len(elements))
        return found

    def _take(self, replication: Replication, replica: int, most: int) -> list[Arrays]:
        """Wait for the next element of a replica; return it, and further ones that are ready, `most` at most."""
        self._dequeued = True
        place = replication.local.index(replica)
        is_there = replication == self._replication and len(self._waiting[place]) > 0
        # A replica that waits for data holds the lock, and the data may depend on values that this replica enqueues.
        if self._lock.acquire(blocking=not is_there):
            try:
                self._expect(replication)
                mine = self._waiting[place]
                while len(mine) < most and (not mine or (self._rounds is not None and self._rounds.has_next)):
                    for waiting, arrays in zip(self._waiting, self._next_round(replication), strict=True):
                        waiting.append(arrays)
            finally:
                self._lock.release()
        mine = self._waiting[place]
        return [mine.popleft() for _ in range(min(most, len(mine)))]

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

    @property
    def initializer(self) -> None:
        """Call `start`, as an access to the original's attribute does."""
        self.start()

    @property
    def deleter(self) -> None:
        """Call `delete`, as an access to the original's attribute does."""
        self.delete()

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


# ---- iterators among the arguments

_queues: weakref.WeakValueDictionary[int, InfeedQueue] = weakref.WeakValueDictionary()


@partial(jax.tree_util.register_dataclass, data_fields=["number"], meta_fields=["spec"])
@dataclass(frozen=True)
class _Draw:
    """An iterator in the arguments of a program, which is compiled once for all iterators with equal elements.

    Attributes:
        number: Number of the queue behind it, int32.
        spec: Structure, shapes and dtypes of an element.
    """

    number: Number
    spec: ElementSpec


class _Argument(Iterator[Element]):
    """The stand-in for an iterator that a function gets while it is traced."""

    def __init__(self, draw: _Draw) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[Element]:
        raise RuntimeError(
            "a loop over an iterator of a data set never ends while a program is compiled; give it a number of steps: "
            "for _ in range(steps): element = next(iterator)"
        )

    def __next__(self) -> Element:
        if not is_in_program():
            raise RuntimeError(
                "this iterator belongs to a program that is compiled already; use the iterator that the function got"
            )
        program, spec = current_program(), self._draw.spec
        program.infeeds[id(self)] += 1
        replication = program.replication

        def take(replica: int, number: np.ndarray) -> list[np.ndarray]:
            queue = _queues.get(int(number))
            if queue is None:
                raise FeedError("the iterator of this program was deleted; keep a reference to it while programs run")
            return queue._take(replication, replica, 1)[0]

        return spec.unflatten(program.call(take, spec.leaves, [self._draw.number]))


class Iterators:
    """The queues behind iterators that programs were given; each program goes on where the previous one stopped."""

    def __init__(self) -> None:
        self._of_identity: dict[int, tuple[Data, InfeedQueue]] = {}

    def placed(self, tree: Tree) -> Tree:
        """Return the tree with each iterator replaced by a `_Draw`, which a program can take as an argument.

        Raises:
            TypeError, ValueError, FeedError: As in `InfeedQueue`.
        """
        return jax.tree.map(self._placed, tree, is_leaf=is_iterator)

    def _placed(self, leaf: Data) -> Tree:
        if not is_iterator(leaf):
            return leaf
        queue = self._queue_of(leaf)
        _queues[queue.number] = queue
        return _Draw(np.int32(queue.number), queue.spec)

    def _queue_of(self, iterator: Data) -> InfeedQueue:
        if isinstance(iterator, DataIterator) and isinstance(iterator.dataset, InfeedQueue):
            return iterator.dataset
        found = self._of_identity.get(id(iterator))
        if found is None:
            self._of_identity = {key: kept for key, kept in self._of_identity.items() if not kept[1].has_ended}
            is_ours = isinstance(iterator, DataIterator)
            found = iterator, InfeedQueue(iterator.dataset if is_ours else iterator)
            self._of_identity[id(iterator)] = found
        return found[1]


def is_iterator(value: object) -> bool:
    """Return whether a value is an iterator other than a file."""
    return hasattr(value, "__next__") and not isinstance(value, io.IOBase | _Argument)


def drawn(tree: Tree) -> Tree:
    """Return the arguments of a traced function, with an iterator in the place of each `_Draw`."""
    return jax.tree.map(
        lambda leaf: _Argument(leaf) if isinstance(leaf, _Draw) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, _Draw),
    )
