"""The interface of a launcher's environment, and short readers for its variables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from popdist.errors import EnvironmentMismatchError
from popdist.instance import Instance


class Environment(ABC):
    """One way in which a process can learn which instance it is.

    `describe` is called only where `is_active` is true for the same variables. Neither changes anything.
    """

    @abstractmethod
    def is_active(self, environ: Mapping[str, str]) -> bool:
        """Whether this launcher, or a hand in its place, started the process."""

    @abstractmethod
    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        """The instance that the variables describe.

        Args:
            environ: the variables of the process.
            num_replicas: the replicas of all instances that the program asks for; None: what is set.

        Raises:
            EnvironmentMismatchError: variables are missing, unreadable or contradict; they are quoted.
        """


def quote(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """The variables as `A=1, B unset`, for messages."""
    return ", ".join(f"{name}={environ[name]}" if name in environ else f"{name} unset" for name in names)


def read_whole_number(environ: Mapping[str, str], name: str, at_least: int) -> int:
    """The value of a variable that must hold a whole number of at least `at_least`."""
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


def replicas_of_each(num_replicas: int | None, instances: int, said: str) -> int:
    """How many replicas each instance drives when all drive equally many; one unless the program asks.

    Args:
        num_replicas: the replicas of all instances that the program asks for.
        instances: how many there are.
        said: the variable that says so, for messages.

    Raises:
        EnvironmentMismatchError: the replicas cannot be divided evenly.
    """
    total = instances if num_replicas is None else num_replicas
    if total < 1 or total % instances:
        raise EnvironmentMismatchError(
            f"asked for {total} replicas on {instances} instances ({said}); "
            f"replicas must divide evenly: use {nearest_multiples(max(total, 1), instances)}"
        )
    return total // instances


def nearest_multiples(number: int, divisor: int) -> str:
    """The positive multiples of `divisor` on both sides of `number`, for messages: `4 or 8`."""
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"
