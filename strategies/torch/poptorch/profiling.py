"""PopTorch's channels of PopVision: spans of a program that PyTorch's profiler sees (`poprun --profile torch`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar

from torch.profiler import record_function

Instrumented = TypeVar("Instrumented")


class Channel:
    """Spans under a name.

    Args:
        name: stands before that of each span.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def instrument(self, obj: Instrumented, *methods: str) -> Instrumented:
        """Make a span of every call of these methods of an object, or a class; return that.

        Raises:
            AttributeError: if it has none of that name.
        """
        for method in methods:
            setattr(obj, method, self._spanning(method, getattr(obj, method)))
        return obj

    def tracepoint(self, name: str) -> AbstractContextManager[Any]:
        """Return what makes a span of a `with` statement."""
        span: AbstractContextManager[Any] = record_function(f"{self._name}.{name}")
        return span

    def _spanning(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def in_span(*arguments: Any, **named: Any) -> Any:
            with self.tracepoint(name):
                return function(*arguments, **named)

        return in_span
