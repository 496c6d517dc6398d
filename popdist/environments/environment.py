"""The interface of a launcher's environment, and short readers for its variables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from popdist.errors import EnvironmentMismatchError
from popdist.instance import Instance, Launcher


class Environment(ABC):
    """A launcher's convention of telling a process which instance it is.

    The caller asks `is_active` first. If the answer is true, it calls `describe` with the same variables. Both methods
    are pure: they change nothing and may be called again, also after an error.
    """

    @abstractmethod
    def is_active(self, environ: Mapping[str, str]) -> bool:
        """Return whether the variables of this launcher are set, by the launcher or by hand."""

    @abstractmethod
    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        """Return the instance that the variables describe.

        Args:
            environ: Environment variables of the process.
            num_replicas: Total number of replicas that the program asks for. None: the number in the variables.

        Raises:
            EnvironmentMismatchError: Variables are missing, unreadable or contradictory. The message quotes them.
        """


@dataclass(frozen=True)
class LaunchedProcess:
    """A process of a launched job: its rank, the number of ranks, its rank on its host. A rank is one instance."""

    rank: int
    size: int
    local_rank: int

    @classmethod
    def read(cls, environ: Mapping[str, str], rank: str, size: str, local_rank: str) -> LaunchedProcess:
        """Read the process from the variables with the names `rank`, `size` and `local_rank`."""
        return cls(
            rank=read_whole_number(environ, rank, 0),
            size=read_whole_number(environ, size, 1),
            local_rank=read_whole_number(environ, local_rank, 0),
        )

    def instance(self, num_replicas: int | None, said: str, launcher: Launcher) -> Instance:
        """Return the instance with its even share of the replicas.

        Args:
            num_replicas: Total number of replicas that the program asks for. None: one per instance.
            said: Variable that holds the number of instances, quoted in messages.
            launcher: Name of the launcher.

        Raises:
            EnvironmentMismatchError: The replicas cannot be divided evenly.
        """
        total = self.size if num_replicas is None else num_replicas
        if total < 1 or total % self.size:
            raise EnvironmentMismatchError(
                f"num_replicas is {total}, but the number of instances is {self.size} ({said}); "
                f"replicas must divide evenly: use {nearest_multiples(max(total, 1), self.size)}"
            )
        local = total // self.size
        return Instance(
            index=self.rank,
            count=self.size,
            local_replicas=local,
            replica_offset=self.rank * local,
            total_replicas=total,
            local_index=self.local_rank,
            launcher=launcher,
        )


def quote(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """Format variables for messages: `A=1, B unset`."""
    return ", ".join(f"{name}={environ[name]}" if name in environ else f"{name} unset" for name in names)


def read_whole_number(environ: Mapping[str, str], name: str, at_least: int) -> int:
    """Read a variable that must hold a whole number of at least `at_least`.

    Raises:
        EnvironmentMismatchError: The value is something else.
    """
    try:
        number = int(environ[name])
    except ValueError:
        number = at_least - 1
    if number < at_least:
        raise EnvironmentMismatchError(
            f"{name}={environ[name]!r} is not a whole number of at least {at_least}; "
            "start the program with poprun or unset the variable"
        )
    return number


def require_all(environ: Mapping[str, str], names: Iterable[str], launcher: str) -> None:
    """Raise EnvironmentMismatchError if some of the variables are missing."""
    names = tuple(names)
    missing = [name for name in names if name not in environ]
    if missing:
        raise EnvironmentMismatchError(
            f"the variables of {launcher} are incomplete: {quote(environ, names)}; "
            f"set {', '.join(missing)} or unset the others"
        )


def nearest_multiples(number: int, divisor: int) -> str:
    """Return the multiples of `divisor` nearest to `number`, for messages: `4 or 8`."""
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"
