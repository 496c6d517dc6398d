"""One thread for each communicator, in which collective calls follow each other while autograd or a module runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

from collectives import Communicator


class ExchangeQueue:
    """A queue of collective calls, made in the order of submission, which all instances have to share."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gradients")

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a call made behind those that were submitted before; does not wait for it."""
        return self._thread.submit(call, *arguments)


_queues: WeakKeyDictionary[Communicator, ExchangeQueue] = WeakKeyDictionary()


def queue_of(communicator: Communicator) -> ExchangeQueue:
    """Return the queue of a communicator, the same one for everybody who asks."""
    return _queues.setdefault(communicator, ExchangeQueue())
