"""Instances that have different numbers of batches end together, at the same step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Generic, TypeVar

import numpy as np

from collectives import Communicator
from strategies.data.iterators import DataIterator
from strategies.data.prefetch import is_reading_ahead
from strategies.errors import StrategyError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ENDED: Any = object()


def in_lockstep(
    batches: Iterator[T],
    communicator: Communicator,
    whole: str = "the data set",
    start: int = 0,
    fill: Callable[[T], T] | None = None,
) -> Generator[T, None, None]:
    """Yield batches for as long as every instance has one.

    Asking for a batch is a collective call, made in the asking thread: the instances tell each other whether they
    have another one, and all wait for the slowest. Where one has none, all end, and a warning says who it was; or,
    with `fill`, it goes on with padding until all have none.

    Args:
        batches: those of this instance.
        communicator: connects the instances; its ranks are theirs.
        whole: what the batches are, for messages; the same on all instances.
        start: how many steps of it are over already; the same on all instances.
        fill: makes a batch of nothing but padding from the last one; None where nothing is padded.

    Raises:
        ValueError: on all instances with `fill`, if one of them has no batch at all that could be repeated.
        LayoutMismatchError: on all instances if they are at different steps, or one of them does something else.
        StrategyError: in a thread that reads ahead, whose calls would come in another order on each instance.
    """
    last: Any = _ENDED
    for step in count(start):
        if is_reading_ahead():
            raise StrategyError(
                f"batch {step} of {whole} is read ahead in a thread, and taking it is a collective call, which all "
                "instances make in one order; take batches in the program itself, or give an infeed what "
                "distribute_datasets_from_function returned as it is"
            )
        batch = next(batches, _ENDED)
        mine = np.array(batch is not _ENDED)
        all_of_them = communicator.all_gather(mine, name=f"whether there is a batch {step} of {whole}")
        if fill is None and not all_of_them.all():
            _warn_of_what_is_left(all_of_them, whole, step)
            return
        if not all_of_them.any():
            return
        if fill is not None and step == start and not all_of_them.all():
            raise ValueError(
                f"{_named(np.flatnonzero(~all_of_them).tolist())} of {communicator.size} can read nothing from step "
                f"{step} of {whole} on, and padding repeats what was read; give each of them one element at least"
            )
        last = fill(last) if fill is not None and batch is _ENDED else batch
        yield last


class Lockstep(Generic[T]):
    """An iterable of batches that ends for all instances at the same step; see `in_lockstep`.

    Attributes:
        batches: those of this instance; to go through them is no collective call.
        is_collective: that taking one of these is.
    """

    is_collective = True

    def __init__(self, batches: Iterable[T], communicator: Communicator) -> None:
        self.batches = batches
        self._communicator = communicator

    def __iter__(self) -> Iterator[T]:
        return DataIterator(self, in_lockstep(iter(self.batches), self._communicator))


def _warn_of_what_is_left(has_batch: np.ndarray, whole: str, steps: int) -> None:
    if not has_batch.any():
        return
    logger.warning(
        "%s ran out of data after %d steps of %s: all instances end it there, and what is left on %s is not used; "
        "give all of them equally many batches",
        _named(np.flatnonzero(~has_batch).tolist()),
        steps,
        whole,
        _named(np.flatnonzero(has_batch).tolist()),
    )


def _named(instances: Sequence[int]) -> str:
    return f"{'instance' if len(instances) == 1 else 'instances'} {', '.join(map(str, instances))}"
