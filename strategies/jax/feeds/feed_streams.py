"""The data sets of infeeds, and the assignment of their elements to replicas."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum

import jax
from typing_extensions import override

from strategies.data.datasets import DistributedDataset
from strategies.data.iterators import Lockstep
from strategies.data.replication import Replication
from strategies.errors import FeedError
from strategies.jax.feeds.feed_elements import check_declared
from strategies.jax.replicas.dealing import replication_of
from strategies.per_replica import PerReplica
from strategies.typing import Data, Element

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
    def element(self, first: Element) -> Element:
        """Return an element, given the first item of `open`."""

    @abstractmethod
    def check(self, replication: Replication) -> None:
        """Raise a `FeedError` if the stream cannot feed these replicas."""

    @abstractmethod
    def rounds(self, opened: Iterator[Element], replication: Replication) -> Iterator[Round]:
        """Yield the rounds of the local replicas while there is an element for each of them."""


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
    def element(self, first: Sequence[Element]) -> Element:
        return first[0]

    @override
    def check(self, replication: Replication) -> None:
        replicas = self._streams.replicas
        if len(self._streams) != len(replication.local) or replicas not in (None, replication.local):
            whose = f"{len(self._streams)} replicas" if replicas is None else f"the replicas {list(replicas)}"
            raise FeedError(
                f"the infeed has iterables for {whose}, but this program runs on {replication}; make them with "
                "per_replica of the strategy that runs it"
            )

    @override
    def rounds(self, opened: Iterator[Sequence[Element]], replication: Replication) -> Iterator[Round]:
        return _numbered(opened)


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
    def element(self, first: Sequence[Element]) -> Element:
        return first[0]

    @override
    def check(self, replication: Replication) -> None:
        if replication != self._dataset.replication:
            raise FeedError(
                f"the data set of the infeed was distributed to {self._dataset.replication}, but this program "
                f"runs on {replication}; run it with the strategy that distributed the data set"
            )

    @override
    def rounds(self, opened: Iterator[Sequence[Element]], replication: Replication) -> Iterator[Round]:
        return _numbered(opened)


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


def _numbered(rounds: Iterator[Sequence[Element]]) -> Iterator[Round]:
    for number, elements in enumerate(rounds):
        yield [(number, element) for element in elements]


def _iterable(dataset: Data) -> Iterable[Element]:
    if not isinstance(dataset, Iterable) or isinstance(dataset, str | bytes | Mapping):
        raise TypeError(f"the data set is a {type(dataset).__name__}; an infeed needs an iterable of elements")
    check_declared(dataset)
    return dataset
