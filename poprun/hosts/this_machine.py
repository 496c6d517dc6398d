"""The machine on which poprun runs: its names, and the cores that it lets us use."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import starmap

from popdist.instance import this_host
from poprun.hosts import survey_script

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "ip6-localhost"))
"""Names that every machine takes for itself."""

_IPV4 = re.compile(r"(?!0+\.)\d{1,3}(\.\d{1,3}){3}")


@dataclass(frozen=True, order=True)
class Core:
    """One hardware thread. Sorting brings the threads of a core, and the cores of a NUMA node, together.

    Attributes:
        node: the NUMA node whose memory is near.
        package: the processor.
        core: the physical core inside the processor.
        cpu: the number that the kernel uses.
    """

    node: int
    package: int
    core: int
    cpu: int


def usable_cores() -> tuple[Core, ...]:
    """Return the cores that this process may run on, sorted; if the machine tells nothing, all on one node."""
    return tuple(starmap(Core, survey_script.cores()))


@cache  # a job asks often, and a name that has to be looked up may take a second
def is_this_machine(host: str) -> bool:
    """Return whether a host, as the user wrote it, is a name or an IPv4 address that this machine has for itself.

    Only a name that agrees with its own as far as the first dot is looked up: `n1.west` may be another machine than
    `n1`. An alias in /etc/hosts or ~/.ssh/config is not known; the answer of the host tells it instead.
    """
    return is_named(host, {this_host(), *LOCAL_NAMES}, _addresses_of, _is_own_address)


def is_named(
    host: str,
    own_names: Collection[str],
    addresses_of: Callable[[str], Sequence[str]],
    is_own_address: Callable[[str], bool],
) -> bool:
    """Return whether a name is one of a machine.

    Args:
        host: the name, or an IPv4 address.
        own_names: those by which the machine knows itself.
        addresses_of: looks a name up; asked only where a short name agrees with the beginning of a full one.
        is_own_address: whether an address is one of the machine.
    """
    if any(host.lower() == own.lower() for own in own_names):
        return True
    if _IPV4.fullmatch(host):
        return is_own_address(host)
    is_likely = any(short_name(host) == short_name(own) for own in own_names if not _IPV4.fullmatch(own))
    return is_likely and any(map(is_own_address, addresses_of(host)))


def short_name(host: str) -> str:
    """Return the part before the first dot, in lower case; all of an IPv4 address."""
    return host if _IPV4.fullmatch(host) else host.lower().partition(".")[0]


def look_up(hosts: Sequence[str], limit_s: float = 1.0) -> dict[str, tuple[str, ...]]:
    """Look up the addresses of host names, all at the same time.

    Returns:
        For each host its addresses; none where the name is unknown, or unknown within the limit.
    """
    import threading  # costs some milliseconds, needed only for names that have to be looked up

    found: dict[str, tuple[str, ...]] = {}
    threads = [threading.Thread(target=_look_up, args=(host, found), daemon=True) for host in hosts]
    deadline_s = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return {host: found.get(host, ()) for host in hosts}


def _addresses_of(name: str) -> tuple[str, ...]:
    return look_up([name])[name]


def _is_own_address(address: str) -> bool:
    """Return whether an address is one of this machine: only then a socket can be bound to it."""
    import socket  # costs some milliseconds, needed only where hosts are given by address

    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _look_up(host: str, found: dict[str, tuple[str, ...]]) -> None:
    import socket

    with suppress(OSError, UnicodeError):
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(each[4][0]) for each in answers)
        found[host] = tuple(sorted(addresses, key=lambda address: ":" in address))
