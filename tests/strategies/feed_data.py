"""Data sets of the original's tests of feeds, and iterables without a length."""

import itertools
import threading

import numpy as np


class Increasing:
    """A data set whose element k is k mod n in all places of an array."""

    def __init__(self, n, shape=(4, 4), repeats=True, change=lambda x: x):
        self._elements = [change(np.full(shape, k, np.float32)) for k in range(n)]
        self._repeats = repeats

    def __iter__(self):
        return itertools.cycle(self._elements) if self._repeats else iter(self._elements)


class Unsized:
    """An iterable without a length."""

    def __init__(self, elements):
        self.elements = elements

    def __iter__(self):
        return iter(self.elements)


def feed_threads():
    """Return the running threads of infeeds."""
    return [thread for thread in threading.enumerate() if thread.name == "dataset-prefetch"]
