"""A profiler of a library, as the timeline needs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path


class Profiler(ABC):
    """Starts and stops once. Errors of the library come as RuntimeError, those of files as OSError.

    Args:
        folder: of what is written; it does not exist, and is made.
    """

    @abstractmethod
    def __init__(self, folder: Path) -> None: ...

    @abstractmethod
    def start(self) -> None:
        """Begin to see what this process does."""

    @abstractmethod
    def marker(self, name: str) -> AbstractContextManager[object]:
        """What lasts in the profile, under this name, as long as it is entered."""

    @abstractmethod
    def stop(self) -> Path:
        """End, and write what was seen.

        Returns:
            The profile, in the format of chrome://tracing, compressed by gzip.
        """
