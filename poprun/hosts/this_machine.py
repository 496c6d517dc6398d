"""The machine that runs poprun: its names, and the cores that this process may use."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import starmap

from popdist.instance import this_host
from poprun.hosts import survey_script

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "ip6-localhost"))
"""The names that mean itself on every machine."""

_IPV4 = re.compile(r"(?!0+\.)\d{1,3}(\.\d{1,3}){3}")


@dataclass(frozen=True, order=True)
class Core:
    """A hardware thread. Sorting brings together the threads of a core, and the cores of a NUMA node.

    Attributes:
        node: The NUMA node whose memory is near.
        package: The processor (socket).
        core: The physical core in the processor.
        cpu: The kernel's number of the thread.
    """

    node: int
    package: int
    core: int
    cpu: int


def usable_cores() -> tuple[Core, ...]:
    """Return the cores that this process may run on, sorted; all on one node if the machine reports no topology."""
    return tuple(starmap(Core, survey_script.cores()))


@cache  # a job asks often, and looking a name up may take a second
def is_this_machine(host: str) -> bool:
    """Return whether a host, as the user wrote it, is a name or an IPv4 address of this machine.

    A name is looked up only if it agrees with the machine's own name up to the first dot: `n1.west` and `n1` may be
    two machines. An alias in /etc/hosts or ~/.ssh/config is not recognised here; the host's answer reveals it later.
    """
    return is_named(
        host, {this_host(), *LOCAL_NAMES}, lambda name: look_up([name])[name], _is_own_address, _own_full_name
    )


def is_named(
    host: str,
    own_names: Collection[str],
    addresses_of: Callable[[str], Sequence[str]],
    is_own_address: Callable[[str], bool],
    full_name: Callable[[], str] = str,
) -> bool:
    """Return whether a name or an IPv4 address is one of a machine's.

    Args:
        host: The name or the IPv4 address.
        own_names: The machine's names for itself.
        addresses_of: Function that looks a name up; called if the name agrees with an own name up to the first dot.
        is_own_address: Function that tells whether an address is one of the machine's.
        full_name: Function that returns the machine's own name with its domain. A pod has it in /etc/hosts before the
            cluster's name server knows the pod; a hostfile names the pod by the beginning, such as `pod.service`.
    """
    if any(host.lower() == own.lower() for own in own_names):
        return True
    if _IPV4.fullmatch(host):
        return is_own_address(host)
    is_likely = any(short_name(host) == short_name(own) for own in own_names if not _IPV4.fullmatch(own))
    is_beginning = is_likely and "." in host and f"{full_name()}.".lower().startswith(f"{host}.".lower())
    return is_beginning or (is_likely and any(map(is_own_address, addresses_of(host))))


def short_name(host: str) -> str:
    """Return the part of a name before the first dot, in lower case; an IPv4 address stays whole."""
    return host if _IPV4.fullmatch(host) else host.lower().partition(".")[0]


def look_up(hosts: Sequence[str], limit_s: float = 1.0) -> dict[str, tuple[str, ...]]:
    """Look up the addresses of host names, all at the same time.

    Returns:
        The addresses of each host; none if the name is unknown, or not found within the limit.
    """
    found: dict[str, tuple[str, ...]] = {}
    threads = [threading.Thread(target=_look_up, args=(host, found), daemon=True) for host in hosts]
    deadline_s = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return {host: found.get(host, ()) for host in hosts}


def _own_full_name(limit_s: float = 1.0) -> str:
    """Return this machine's name with its domain; empty if none is known within the limit."""
    found: list[str] = []

    def ask() -> None:
        with suppress(OSError, UnicodeError):
            found.append(socket.getaddrinfo(this_host(), None, flags=socket.AI_CANONNAME)[0][3])

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else ""


def _is_own_address(address: str) -> bool:
    """Return whether an address is one of this machine's; a socket can be bound to no other address."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _look_up(host: str, found: dict[str, tuple[str, ...]]) -> None:
    with suppress(OSError, UnicodeError):
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(each[4][0]) for each in answers)
        found[host] = tuple(sorted(addresses, key=lambda address: ":" in address))
