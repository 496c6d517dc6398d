"""Iterators that know their data set, so that a program may draw from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from strategies.errors import FeedError
from strategies.programs.feed_program import is_in_program
from strategies.typing import Data, Element


class DataIterator(Iterator[Element]):
    """The iterator of a data set or infeed of this package.

    Semantics: the original's `IPUOwnedIterator`. A function that `strategy.run` runs draws from it with `next`.

    Args:
        dataset: the data set.
        elements: what Python gets, outside of programs; None where it gets nothing.
        draw: draws an element for the program that is being traced; None where only one does that has the iterator
            among its arguments.
    """

    def __init__(
        self, dataset: Data, elements: Iterator[Element] | None = None, draw: Callable[[], Element] | None = None
    ) -> None:
        self._dataset = dataset
        self._elements = elements
        self._draw = draw
        self._has_begun = False

    def __next__(self) -> Element:
        if is_in_program():
            if self._draw is None:
                raise RuntimeError(
                    "next would take an element once, while the program is compiled; hand the iterator over among the "
                    "arguments of strategy.run, and take elements from what the function gets for it"
                )
            return self._draw()
        if self._elements is None:
            raise RuntimeError(
                "Accessing dataset elements with next is for functions that strategy.run runs, with the iterator among "
                "their arguments; elsewhere use dataset.epoch(number), or infeed.dequeue()"
            )
        self._has_begun = True
        return next(self._elements)

    @property
    def dataset(self) -> Data:
        """The data set, for a program that draws from its beginning on.

        Raises:
            FeedError: elements were taken in Python.
        """
        if self._has_begun:
            raise FeedError(
                "elements were taken from this iterator in Python, and a program would begin with the first one again; "
                "give it an iterator of its own"
            )
        return self._dataset
