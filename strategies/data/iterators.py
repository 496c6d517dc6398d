"""Iterators over data sets: prefetching in a thread, and ends that all instances share."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import count
from typing import Any, Generic, TypeVar

import numpy as np

from collectives import Communicator, forks
from strategies.data.layout import is_in_program
from strategies.data.randomness import DrawWatch, of_program
from strategies.errors import FeedError, StrategyError
from strategies.typing import Data, Element

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ENDED: Any = object()

SLOW_WARNING_S = 30.0
JOIN_TIMEOUT_S = 5.0

_is_reading_ahead: ContextVar[bool] = ContextVar("is_reading_ahead", default=False)


class DataIterator(Iterator[Element]):
    """An iterator over a data set or infeed of this package.

    A function run by `strategy.run` takes elements from it with `next`. Semantics: the original's `IPUOwnedIterator`.

    Args:
        dataset: Data set or infeed.
        elements: Elements for Python code, outside of programs; None if Python code gets none.
        draw: Function that takes an element for the program being traced; None if a program must get the iterator among
            its arguments.
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
                    "next would take one element while the program is compiled, and none later; pass the iterator "
                    "among the arguments of strategy.run, and call next on the function's argument"
                )
            return self._draw()
        if self._elements is None:
            raise RuntimeError(
                "Accessing dataset elements with next is only possible in functions that strategy.run runs, with the "
                "iterator among their arguments; elsewhere use dataset.epoch(number), or infeed.dequeue()"
            )
        self._has_begun = True
        return next(self._elements)

    @property
    def dataset(self) -> Data:
        """The data set, for a program that reads it from the beginning.

        Raises:
            FeedError: If Python code has taken elements.
        """
        if self._has_begun:
            raise FeedError(
                "elements were taken from this iterator in Python, but a program would begin with the first one again; "
                "give the program an iterator of its own"
            )
        return self._dataset


def in_lockstep(
    batches: Iterator[T],
    communicator: Communicator,
    whole: str = "the data set",
    start: int = 0,
    has_rows: Callable[[T], bool] | None = None,
) -> Generator[T, None, None]:
    """Yield batches as long as every instance has one.

    Taking a batch is a collective call, made in the caller's thread. The instances tell each other whether they have
    another batch, and all wait for the slowest. If one instance has no batch, all end, and a warning names the
    instance. With `has_rows`, instances go on with batches of padding until no instance has rows.

    Args:
        batches: Batches of this instance.
        communicator: Connection of the instances; its ranks are their indices.
        whole: Description of the data for messages, the same on all instances.
        start: Number of steps that are over already, the same on all instances.
        has_rows: Function that returns whether a batch has more than padding; None without padding.

    Raises:
        ValueError: On all instances, with `has_rows`, if an instance has no batch where another one has rows.
        LayoutMismatchError: On all instances, if they are at different steps, or one makes another collective call.
        StrategyError: In a thread that reads ahead, whose calls would come in a different order on each instance.
    """
    for step in count(start):
        if _is_reading_ahead.get():
            raise StrategyError(
                f"batch {step} of {whole} is read ahead in a thread, but taking it is a collective call, which all "
                "instances must make in the same order; take batches in the program itself, or give an infeed the "
                "unchanged result of distribute_datasets_from_function"
            )
        batch = next(batches, _ENDED)
        is_there = batch is not _ENDED
        mine = np.array([is_there, is_there and (has_rows is None or has_rows(batch))])
        are_there, have_rows = communicator.all_gather(mine, name=f"whether there is a batch {step} of {whole}").T
        if not have_rows.any():
            return
        if has_rows is None and not are_there.all():
            _warn_of_what_is_left(are_there, whole, step)
            return
        if not are_there.all():
            raise ValueError(
                f"{_named(~are_there)} of {communicator.size} can read nothing at step {step} of {whole}, where others "
                "can, but padding repeats elements; give each replica at least one element, and all instances the same "
                "len()"
            )
        yield batch


class Lockstep(Generic[T]):
    """An iterable of batches that ends at the same step on all instances; see `in_lockstep`.

    Attributes:
        batches: Batches of this instance; iterating over these is not a collective call.
        is_collective: True: taking a batch is a collective call.
    """

    is_collective = True

    def __init__(self, batches: Iterable[T], communicator: Communicator) -> None:
        self.batches = batches
        self._communicator = communicator

    def __iter__(self) -> Iterator[T]:
        return DataIterator(self, in_lockstep(iter(self.batches), self._communicator))


def _warn_of_what_is_left(has_batch: np.ndarray, whole: str, steps: int) -> None:
    logger.warning(
        "%s ran out of data after %d steps of %s: all instances end it there, and the rest on %s is not used; "
        "give all instances the same number of batches",
        *(_named(~has_batch), steps, whole, _named(has_batch)),
    )


def _named(are_meant: np.ndarray) -> str:
    instances = np.flatnonzero(are_meant).tolist()
    return f"{'instance' if len(instances) == 1 else 'instances'} {', '.join(map(str, instances))}"


@contextmanager
def reading_ahead() -> Iterator[None]:
    """Mark this thread, inside the block, as one that reads ahead."""
    token = _is_reading_ahead.set(True)
    try:
        yield
    finally:
        _is_reading_ahead.reset(token)


def prefetched(items: Generator[T, None, None], depth: int, first: Sequence[T] = ()) -> Generator[T, None, None]:
    """Yield the items in `first`, then those of `items`, computing up to `depth` of them in advance.

    `items` runs in a daemon thread that starts with the first item taken. An exception of `items` is raised here,
    after the items before it. The thread ends, and `items` is closed, when `items` is exhausted, or this generator is
    closed or garbage-collected (as when a `for` loop is left). Both also happen before the interpreter exits. With
    `depth` 0 there is no thread.
    """
    if depth == 0:
        yield from first
        yield from items
        return
    yield from _Worker(items, depth).items(first)


class Prefetcher(Generic[T]):
    """An iterator like `prefetched` that also tells whether the next item is ready.

    Args:
        items: Items to read ahead.
        depth: Number of items to hold ready, at least 1.
    """

    def __init__(self, items: Generator[T, None, None], depth: int) -> None:
        self._worker = _Worker(items, depth)
        self._items = self._worker.items()

    @property
    def has_next(self) -> bool:
        """Whether the next item can be taken without waiting."""
        return self._worker.has_item

    def __next__(self) -> T:
        return next(self._items)

    def close(self) -> None:
        """End the thread."""
        self._items.close()


class _Worker(Generic[T]):
    """A thread that produces items, and the bounded queue between it and the consumer."""

    def __init__(self, items: Generator[T, None, None], depth: int) -> None:
        self._items = items
        self._depth = depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._is_finished = False
        self._is_stopped = False
        self._draws: bool | None = None  # until the first item has shown it
        self._changed = threading.Condition()
        self._made_in = forks.generation
        self._thread = threading.Thread(target=self._produce, name="dataset-prefetch", daemon=True)

    @property
    def has_item(self) -> bool:
        with self._changed:
            return bool(self._ready)

    def items(self, first: Sequence[T] = ()) -> Generator[T, None, None]:
        try:
            # Exit handlers run in reverse order: the thread ends before JAX, imported earlier, clears its backends.
            forks.at_exit(self.stop)
            self._thread.start()
            yield from first
            while self._wait_for_item():
                yield self._take()
            if self._error is not None:
                raise self._error
        finally:
            self.stop()

    def stop(self) -> None:
        # At exit the generator is collected after modules have been emptied, and this method has been called before.
        if self._is_stopped or self._made_in != forks.generation:
            return  # in a child process the thread is the parent's, and may have held the lock
        with self._changed:
            if self._is_stopped:
                return
            self._is_stopped = True
            self._ready.clear()
            self._changed.notify_all()
        forks.not_at_exit(self.stop)
        # The garbage collector may close an abandoned generator from any thread, this one included.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _produce(self) -> None:
        watch = DrawWatch()
        try:
            with reading_ahead(), closing(self._items):
                while self._wait_for_room():
                    self._put(self._next(watch))
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_finished = True
                self._changed.notify_all()

    def _next(self, watch: DrawWatch) -> T:
        """Return the next item. If the first one has drawn random numbers, no other is made while a replica draws.

        The consumer waits for the first one, and makes no step meanwhile.
        """
        if self._draws is None:
            watch.begin()
            item = next(self._items)
            self._draws = of_program.has_others and watch.look()
            return item
        with of_program.drawing() if self._draws else nullcontext():
            return next(self._items)

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or len(self._ready) < self._depth)
            return not self._is_stopped

    def _put(self, item: T) -> None:
        with self._changed:
            if not self._is_stopped:
                self._ready.append(item)
                self._changed.notify_all()

    def _wait_for_item(self) -> bool:
        with self._changed:
            while not self._changed.wait_for(lambda: self._ready or self._is_finished, SLOW_WARNING_S):
                logger.warning("no batch for %.0f s: the data source is slow or stuck", SLOW_WARNING_S)
            return bool(self._ready)

    def _take(self) -> T:
        with self._changed:
            self._changed.notify_all()
            return self._ready.popleft()
