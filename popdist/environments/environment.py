"""The interface of a launcher's environment, and short readers for its variables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from popdist.errors import EnvironmentMismatchError
from popdist.instance import Instance, Launcher


class Environment(ABC):
    """One way in which a process can learn which instance it is.

    `describe` is called only where `is_active` is true for the same variables. Neither changes anything.
    """

    @abstractmethod
    def is_active(self, environ: Mapping[str, str]) -> bool:
        """Return whether this launcher, or a hand in its place, started the process."""

    @abstractmethod
    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        """Return the instance that the variables describe.

        Args:
            environ: the variables of the process.
            num_replicas: the replicas of all instances that the program asks for; None: what is set.

        Raises:
            EnvironmentMismatchError: variables are missing, unreadable or contradict; they are quoted.
        """


@dataclass(frozen=True)
class LaunchedProcess:
    """The place of a process among those that a launcher has started, each of which is one instance."""

    rank: int
    size: int
    local_rank: int

    @classmethod
    def read(cls, environ: Mapping[str, str], rank: str, size: str, local_rank: str) -> LaunchedProcess:
        """Return the process that the variables of these names describe."""
        return cls(
            rank=read_whole_number(environ, rank, 0),
            size=read_whole_number(environ, size, 1),
            local_rank=read_whole_number(environ, local_rank, 0),
        )

    def instance(self, num_replicas: int | None, said: str, launcher: Launcher) -> Instance:
        """Return the instance with its even share of the replicas: one, unless the program asks.

        Args:
            num_replicas: the replicas of all instances that the program asks for.
            said: the variable that holds the number of instances, for messages.
            launcher: the name of the launcher.

        Raises:
            EnvironmentMismatchError: the replicas cannot be divided evenly.
        """
        total = self.size if num_replicas is None else num_replicas
        if total < 1 or total % self.size:
            raise EnvironmentMismatchError(
                f"asked for {total} replicas on {self.size} instances ({said}); "
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
    """Return the variables as `A=1, B unset`, for messages."""
    return ", ".join(f"{name}={environ[name]}" if name in environ else f"{name} unset" for name in names)


def read_whole_number(environ: Mapping[str, str], name: str, at_least: int) -> int:
    """Return the value of a variable that must hold a whole number of at least `at_least`."""
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
    """Refuse a set of variables of which some are missing."""
    names = tuple(names)
    missing = [name for name in names if name not in environ]
    if missing:
        raise EnvironmentMismatchError(
            f"the variables of {launcher} are incomplete: {quote(environ, names)}; "
            f"set {', '.join(missing)} or unset the others"
        )


def nearest_multiples(number: int, divisor: int) -> str:
    """Return the positive multiples of `divisor` on both sides of `number`, for messages: `4 or 8`."""
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"
