"""Variables that a function reads and assigns besides its arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class HeldState(Protocol):
    """Variables that a function reads, as of models of Keras; they are arguments and results of its program."""

    @property
    def values(self) -> Sequence[Any]:
        """The values of all variables, for a program."""

    @property
    def is_current(self) -> bool:
        """Whether these are still all variables."""

    @contextmanager
    def inside(self, values: Sequence[Any]) -> Iterator[Callable[[], Mapping[int, Any]]]:
        """Give the variables these values while the function is traced; yield a function that returns the changes."""

    def put(self, of_replicas: Sequence[Mapping[int, Any]]) -> None:
        """Assign what the local replicas have changed."""


class _Nothing:
    values: Sequence[Any] = ()
    is_current = True

    @contextmanager
    def inside(self, values: Sequence[Any]) -> Iterator[Callable[[], Mapping[int, Any]]]:
        yield dict

    def put(self, of_replicas: Sequence[Mapping[int, Any]]) -> None:
        pass


NOTHING_HELD: HeldState = _Nothing()
