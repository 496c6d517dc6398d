"""The interface of a scheduler, the allocation that it returns, and short readers for its variables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from popdist.environments.environment import quote
from poprun.cli.wording import count
from poprun.errors import UsageError
from poprun.hosts.hosts import Host, first_twice, is_host_name

ReadText = Callable[[str], str]
"""A function that returns the contents of a file, and raises OSError if it cannot."""

NAME_HOSTS = "name the hosts with --host"


@dataclass(frozen=True)
class Allocation:
    """The hosts that a scheduler has reserved for this job.

    Attributes:
        hosts: The hosts in the scheduler's order, each once, with the number of instances that it takes.
        source: The owner of the allocation, for messages: `Slurm job 12`.
        way_to_more: The way to ask for more slots, for messages.
        variables: Further environment variables that mpirun needs.
        shell: The words that run a command on one of the hosts, in place of ssh. Empty: ssh.
        may_be_starting: Whether hosts may start later than poprun, which then waits for them.
    """

    hosts: tuple[Host, ...]
    source: str
    way_to_more: str
    variables: tuple[tuple[str, str], ...] = ()
    shell: tuple[str, ...] = ()
    may_be_starting: bool = False

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not names:
            raise UsageError(f"{self.source} has no host; {NAME_HOSTS}")
        wrong = [name for name in names if not is_host_name(name)]
        if wrong:
            raise UsageError(f"{self.source} names {wrong[0]!r}, which is not the name of a host; {NAME_HOSTS}")
        if (twice := first_twice(names)) is not None:
            raise UsageError(f"{self.source} names the host {twice} twice; {NAME_HOSTS}")

    @property
    def slots(self) -> int | None:
        """The number of instances that fit in all hosts; None: any number."""
        known = [host.slots for host in self.hosts if host.slots is not None]
        return sum(known) if len(known) == len(self.hosts) else None


class Scheduler(ABC):
    """A source from which poprun can learn the hosts of a job.

    `find_allocation` asks each scheduler whose variables are set, once for each launch.
    """

    variables: ClassVar[tuple[str, ...]]
    """Environment variables; the scheduler is asked only if at least one of them is set."""

    @abstractmethod
    def allocation(self, environ: Mapping[str, str], read_text: ReadText) -> Allocation | None:
        """Return the hosts of this job, or None if this scheduler did not start it.

        The method changes nothing, neither its arguments nor the system, so it may be called again after an error.

        Args:
            environ: Environment variables of poprun.
            read_text: Function that returns the contents of a file named by a variable.

        Raises:
            UsageError: Variables or files are missing, unreadable or contradict each other; the message quotes them.
        """


def read_file(environ: Mapping[str, str], name: str, read_text: ReadText) -> str:
    """Return the contents of the file that a variable names."""
    try:
        return read_text(environ[name])
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{name}={environ[name]} cannot be read: {reason}; {NAME_HOSTS}, or unset {name}") from None


def host_for_each_line(lines: Iterable[str]) -> tuple[Host, ...]:
    """Return the hosts in a file that has a line for each slot, in the order of their first lines."""
    slots = Counter(line.strip() for line in lines if line.strip())
    return tuple(Host(name, number) for name, number in slots.items())


def check_slots(environ: Mapping[str, str], system: str, names: tuple[str, str], hosts: Sequence[Host]) -> None:
    """Refuse hosts whose number of slots differs from another variable, if that variable is set.

    Args:
        environ: Environment variables.
        system: The batch system, for the message.
        names: The variable that lists the hosts, and the variable with the number of slots.
        hosts: The hosts, all with slots.
    """
    slots = sum(host.slots or 0 for host in hosts)
    if environ.get(names[1], str(slots)) != str(slots):
        raise UsageError(
            f"the variables of {system} contradict each other: {quote(environ, names)}, and the hosts have "
            f"{count(slots, 'slot')}; {NAME_HOSTS}"
        )


def describe_slots(hosts: Sequence[Host]) -> str:
    """Return the hosts and their slots, for messages; a long list is cut short."""
    shown = ", ".join(host.name if host.slots is None else f"{host.name}: {host.slots}" for host in hosts[:4])
    return shown if len(hosts) <= 4 else f"{shown}, ... {count(len(hosts), 'host')} in all"
