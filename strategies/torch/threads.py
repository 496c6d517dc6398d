"""The threads of a training on PyTorch: values that each of them has for itself, and how many serve one operator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

_T = TypeVar("_T")


class ThreadValue(threading.local, Generic[_T]):
    """A value that each thread has for itself.

    Args:
        default: the value in threads that have set none.

    Attributes:
        now: the value of the calling thread.
    """

    def __init__(self, default: _T) -> None:
        self.now = default

    @contextmanager
    def being(self, value: _T) -> Iterator[None]:
        """Give the calling thread another value, and at the end the one before."""
        before, self.now = self.now, value
        try:
            yield
        finally:
            self.now = before


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Have PyTorch use `count` threads for one operator, in this thread; it decides how sums are split, and so bits."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)
