"""Iterators among the arguments of a program, which takes elements from them while it runs."""

from __future__ import annotations

import io
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from strategies.data.iterators import DataIterator
from strategies.data.replication import is_in_program
from strategies.errors import FeedError
from strategies.jax.feeds.feed_elements import ElementSpec
from strategies.jax.feeds.infeed import InfeedQueue
from strategies.jax.programs.feed_program import current_program
from strategies.typing import Data, Element, Number, Tree

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
            return queue.take_one(replication, replica)

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
