"""Threads of a PyTorch training: values that each thread has for itself, and PyTorch's number of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
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

    def being(self, value: _T) -> Being[_T]:
        """Return a context, also a decorator, in which the calling thread has another value."""
        return Being(self, value)


class Being(ContextDecorator, Generic[_T]):
    """The context of `ThreadValue.being`. A generator would take twice as long, and a step has several contexts."""

    def __init__(self, holder: ThreadValue[_T], value: _T) -> None:
        self._holder, self._value = holder, value

    def _recreate_cm(self) -> Being[_T]:
        return Being(self._holder, self._value)

    def __enter__(self) -> None:
        holder = self._holder
        self._before, holder.now = holder.now, self._value

    def __exit__(self, *error: object) -> None:
        self._holder.now = self._before


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
