"""Threads of a PyTorch training: values that each thread has for itself, and PyTorch's number of threads."""

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
        default: The value in threads that have set none.

    Attributes:
        now: The value of the calling thread.
    """

    def __init__(self, default: _T) -> None:
        self.now = default

    @contextmanager
    def being(self, value: _T) -> Iterator[None]:
        """Give the calling thread another value until the context ends."""
        before, self.now = self.now, value
        try:
            yield
        finally:
            self.now = before


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Use `count` threads within an operation, in this thread. The number decides how sums are split, and so bits."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)
