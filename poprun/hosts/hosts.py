"""The hosts of a job: parsers for lists of hosts and hostfiles, and checks. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from poprun.cli.settings import LaunchSettings
from poprun.cli.wording import count
from poprun.errors import UsageError
from poprun.hosts.this_machine import LOCAL_NAMES

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_LIST_CHARACTERS = re.compile(r"[A-Za-z0-9_.,\[\]/ -]*")


@dataclass(frozen=True)
class Host:
    """A machine of the job.

    Attributes:
        name: The name, as the user wrote it.
        slots: Largest number of instances for this host. None: any number.
        is_this_machine: Whether poprun runs on this host.
    """

    name: str
    slots: int | None = None
    is_this_machine: bool = False


def parse_hosts(lists: Iterable[str]) -> tuple[Host, ...]:
    """Return the hosts in lists such as `node[0-2,4],login`, in the order of the lists.

    Ranges follow ClusterShell's NodeSet (https://clustershell.readthedocs.io): several brackets, zero padding, steps
    `[0-8/2]`. Inside brackets the order is ascending.

    Raises:
        UsageError: A list cannot be understood, a word is no host name, or a host is given twice.
    """
    names = [name for text in lists for part in _split_list(text) for name in _expand(part)]
    return tuple(Host(name) for name in _check_names(names))


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Return the hosts in a hostfile in the format of Open MPI and of Kubernetes' MPI Operator.

    Each line is `name` or `name slots=N`; `#` begins a comment. If a host stands on several lines, their slots add up,
    and a line without `slots=` adds one.

    Raises:
        UsageError: A line cannot be understood, or the file names no host.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if words:
            host = _read_hostfile_line(words, f"hostfile {path}, line {number}")
            hosts[host.name] = _add_slots(hosts[host.name], host) if host.name in hosts else host
    if not hosts:
        raise UsageError(f"hostfile {path} names no host; write one `name slots=N` on each line")
    return tuple(hosts.values())


def recognise_this_machine(hosts: Sequence[Host], is_here: Callable[[str], bool]) -> tuple[Host, ...]:
    """Mark the host that poprun runs on.

    Args:
        hosts: All hosts of the job.
        is_here: Function that tells whether a name is one of this machine's, such as `this_machine.is_this_machine`.

    Raises:
        UsageError: Several hosts are this machine, or `localhost` is one of several hosts.
    """
    marked = tuple(replace(host, is_this_machine=is_here(host.name)) for host in hosts)
    local = [host.name for host in marked if host.is_this_machine]
    if len(local) > 1:
        raise UsageError(f"hosts {' and '.join(local)} are both this machine; name each machine once")
    if len(hosts) > 1 and local and local[0] in LOCAL_NAMES:
        raise UsageError(
            f"host {local[0]} is one of {len(hosts)} hosts, and on each of them that name means itself; "
            "use the name that this machine has for the other hosts"
        )
    return marked


def shares_of(hosts: Sequence[Host], instances: int) -> tuple[int, ...]:
    """Divide the instances over the hosts: equally, or as equally as their slots allow.

    Every host gets at least one instance. If that is impossible, or the slots are too few, return an empty tuple.
    """
    share, rest = divmod(instances, len(hosts))
    if not rest and share and all(host.slots is None or host.slots >= share for host in hosts):
        return (share,) * len(hosts)
    slots = [host.slots for host in hosts if host.slots is not None]
    if not len(hosts) == len(slots) <= instances <= sum(slots):
        return ()
    full = next(level for level in range(1, max(slots) + 1) if sum(min(each, level) for each in slots) >= instances)
    shares = [min(each, full - 1) for each in slots]
    for index in [index for index, each in enumerate(slots) if each >= full][: instances - sum(shares)]:
        shares[index] += 1
    return tuple(shares)


def check_hosts(hosts: Sequence[Host], settings: LaunchSettings) -> None:
    """Refuse hosts that cannot share the instances evenly or, if all hosts have slots, by slots.

    Raises:
        UsageError: There are too few instances, they do not divide evenly, or hosts have too few slots.
    """
    instances, number = settings.num_instances, len(hosts)
    if shares_of(hosts, instances):
        return
    slots = sum(host.slots or 0 for host in hosts)
    if all(host.slots is not None for host in hosts) and instances > slots:
        raise UsageError(
            f"the hosts have {count(slots, 'slot')}, but {count(instances, 'instance')} are asked for: "
            f"use {_most_fitting(settings, range(number, slots + 1))}, or give them more slots"
        )
    if instances % number:
        what = f"asked for {count(instances, 'instance')} on {count(number, 'host')}"
        rule = "each host needs at least one" if instances < number else "instances must divide evenly"
        fewer = count(max(n for n in range(1, number) if instances % n == 0), "host")
        raise UsageError(f"{what}; {rule}: use {_nearest_instances(settings, number)}, or {fewer}")
    share = instances // number
    full = next(host for host in hosts if host.slots is not None and host.slots < share)
    most = min(host.slots for host in hosts if host.slots is not None) * number
    fitting = _most_fitting(settings, range(number, most + 1, number))
    raise UsageError(
        f"host {full.name} has {count(full.slots or 0, 'slot')}, but {count(instances, 'instance')} on "
        f"{count(number, 'host')} need {share} on each: use {fitting}, "
        "give that host more slots, or give the number of slots for all hosts"
    )


def most_instances(num_replicas: int, at_most: int) -> int:
    """Return the largest number of instances, up to a limit, among which the replicas divide evenly."""
    return next(number for number in range(at_most, 0, -1) if num_replicas % number == 0)


def is_host_name(text: str) -> bool:
    """Return whether a word can name a host or is an IPv4 address; mpirun and ssh may interpret other words."""
    return _NAME.fullmatch(text) is not None


def first_twice(names: Iterable[str]) -> str | None:
    """Return the first name that occurs more than once, if any."""
    return next((name for name, times in Counter(names).items() if times > 1), None)


def _split_list(text: str) -> Iterator[str]:
    """Yield the parts between the commas outside of brackets."""
    if not _LIST_CHARACTERS.fullmatch(text):
        wrong = next(character for character in text if not _LIST_CHARACTERS.fullmatch(character))
        hint = ": slots are given in a hostfile" if wrong == ":" else ""
        raise UsageError(f"--host {text!r} contains {wrong!r}{hint}; write hosts like 'node[0-2,4],login'")
    # A bracket that is never closed keeps its commas, so that the message shows all of it.
    for part in re.sub(r"\[[^\]]*", lambda inside: inside[0].replace(",", "\0"), text).split(","):
        if not part.strip():
            raise UsageError(f"--host {text!r} has an empty name; write host0,host1 without blanks or a last comma")
        yield part.strip().replace("\0", ",")


def _expand(part: str) -> list[str]:
    if "[" not in part and "]" not in part:
        return [part]
    # takes 70 ms to load, and only ranges need it
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # type: ignore[import-untyped]

    try:
        return [str(name) for name in NodeSet(part, resolver=RESOLVER_NOGROUP)]
    except NodeSetException as error:
        raise UsageError(f"--host {part!r} cannot be understood: {error}; write ranges like 'node[0-2,4]'") from None


def _check_names(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        _check_name(name, "--host")
    if (twice := first_twice(names)) is not None:
        raise UsageError(f"host {twice} is given twice; name each host once, and set the total with --num-instances")
    return names


def _check_name(name: str, where: str) -> None:
    if not is_host_name(name):
        hint = "host names consist of letters, digits, dots and dashes"
        if "[" in name:
            hint = "use ranges with --host; a hostfile has each host on its own line"
        elif "@" in name:
            hint = "set the user in ~/.ssh/config"
        raise UsageError(f"{where}: {name!r} is not the name of a host; {hint}")


def _read_hostfile_line(words: Sequence[str], where: str) -> Host:
    _check_name(words[0], where)
    slots = None
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in ("slots", "max_slots", "max-slots") or not value.isdecimal() or not int(value):
            raise UsageError(f"{where}: {word!r} is not understood; a line is `name` or `name slots=N`")
        slots = int(value) if key == "slots" or slots is None else slots
    return Host(words[0], slots)


def _add_slots(first: Host, second: Host) -> Host:
    return replace(first, slots=(first.slots or 1) + (second.slots or 1))


def _nearest_instances(settings: LaunchSettings, hosts: int) -> str:
    """Return the nearest smaller and larger numbers of instances that divide over the hosts and divide the replicas."""
    fitting = [n for n in range(hosts, settings.num_replicas + 1, hosts) if settings.num_replicas % n == 0]
    below = [n for n in fitting if n < settings.num_instances][-1:]
    above = [n for n in fitting if n > settings.num_instances][:1]
    if below or above:
        return f"{' or '.join(map(str, below + above))} (--num-instances)"
    least = -(-settings.num_instances // hosts) * hosts
    return f"{least} (--num-instances) with a multiple of {least} replicas (--num-replicas)"


def _most_fitting(settings: LaunchSettings, possible: range) -> str:
    """Return the largest of the possible numbers of instances that divides the replicas."""
    fitting = [number for number in possible if settings.num_replicas % number == 0]
    if fitting:
        return f"{fitting[-1]} (--num-instances)"
    return f"{possible[-1]} (--num-instances) with a multiple of {possible[-1]} replicas (--num-replicas)"
