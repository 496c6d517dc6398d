"""The data sets of infeeds: which element is for which replica."""

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
"""The next element of each local replica, with the number by which messages call it."""


class InfeedMode(Enum):
    """Whose elements an iterable has.

    WHOLE: those of all replicas. Every instance goes through all of it and takes those of its own replicas: element
    k * R + r is for replica r in its iteration k.

    INSTANCE: those of the local replicas; each instance has a stream of its own, as in the original's programs, which
    shard by hand. Element k * L + l is for the local replica number l of L in its iteration k.
    """

    WHOLE = "whole"
    INSTANCE = "instance"


class FeedStream(ABC):
    """The data set of an infeed.

    Attributes:
        kind: what it is, for messages.
        is_once: whether it can be gone through only once.
    """

    kind: str
    is_once: bool

    @abstractmethod
    def open(self) -> Iterator[Element]:
        """Return an iterator that begins with the first element."""

    @abstractmethod
    def element(self, first: Element) -> Element:
        """Return an element, from the first item of `open`."""

    @abstractmethod
    def check(self, replication: Replication) -> None:
        """Refuse replicas that it cannot feed, with `FeedError`."""

    @abstractmethod
    def rounds(self, opened: Iterator[Element], replication: Replication) -> Iterator[Round]:
        """Yield the rounds of the local replicas, for as long as there is an element for each."""


class ElementStream(FeedStream):
    """An iterable of elements, each of which is for one replica."""

    def __init__(self, elements: Iterable[Element], mode: InfeedMode | None) -> None:
        self._elements = elements
        self._mode = mode
        self.kind = type(elements).__name__
        self.is_once = isinstance(elements, Iterator)

    @override
    def open(self) -> Iterator[Element]:
        return iter(self._elements)

    def element(self, first: Element) -> Element:
        """See `FeedStream`.

        Raises:
            TypeError: if the elements are not each for one replica.
        """
        for leaf in jax.tree.leaves(first):
            if isinstance(leaf, PerReplica):
                raise TypeError(
                    "the elements of the data set are PerReplica, and an element is for one replica; give the infeed "
                    "one PerReplica, with an iterable for each local replica"
                )
            if replication_of(leaf) is not None:
                raise TypeError(
                    "the elements of the data set are batches for all local replicas, and an element is for one; give "
                    "the infeed what distribute_dataset returned, and not its epochs"
                )
        return first

    @override
    def check(self, replication: Replication) -> None:
        if self._mode is None and len(replication.local) < replication.total:
            raise FeedError(
                f"the program runs on {replication}, and an infeed's iterable may have the elements of all replicas or "
                "of the local ones; say which, with InfeedQueue(..., mode=InfeedMode.WHOLE) or InfeedMode.INSTANCE"
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
    """An iterable for each local replica."""

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
                f"the infeed has iterables for {whose}, and this program runs on {replication}; make them with "
                "per_replica of the strategy that runs it"
            )

    @override
    def rounds(self, opened: Iterator[Sequence[Element]], replication: Replication) -> Iterator[Round]:
        return _numbered(opened)


class Batches(FeedStream):
    """A distributed data set, of whose batches each replica gets its part."""

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
                f"the data set of the infeed was distributed to {self._dataset.replication}, and this program "
                f"runs on {replication}; run it with the strategy that has distributed the data set"
            )

    @override
    def rounds(self, opened: Iterator[Sequence[Element]], replication: Replication) -> Iterator[Round]:
        return _numbered(opened)


def feed_stream(dataset: Data, mode: InfeedMode | None) -> FeedStream:
    """Return the stream of a data set.

    Raises:
        TypeError: if it is none, or the mode is none.
        ValueError: for a mode of what has none, or shapes of elements that are not fully defined.
    """
    if not isinstance(mode, InfeedMode | None):
        raise TypeError(f"mode is {mode!r}; use InfeedMode.WHOLE or InfeedMode.INSTANCE")
    if isinstance(dataset, DistributedDataset | PerReplica):
        if mode is not None:
            raise ValueError(
                f"a {type(dataset).__name__} has the elements of each local replica, and mode is {mode}; leave it out"
            )
        return Batches(dataset) if isinstance(dataset, DistributedDataset) else OwnElementStreams(dataset)
    if isinstance(dataset, Lockstep):  # whose iteration is a collective call, which a thread must not make
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
