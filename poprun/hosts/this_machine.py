"""Which names mean the machine on which poprun runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import cache

from popdist.instance import this_host

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "ip6-localhost"))
"""Names that every machine takes for itself."""

_IPV4 = re.compile(r"(?!0+\.)\d{1,3}(\.\d{1,3}){3}")


@cache  # a job asks often, and a name that has to be looked up may take a second
def is_this_machine(host: str) -> bool:
    """Whether a host, as the user wrote it, is a name or an IPv4 address that this machine has for itself.

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
    """Whether a name is one of a machine.

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
    """What stands before the first dot, in lower case; all of an IPv4 address."""
    return host if _IPV4.fullmatch(host) else host.lower().partition(".")[0]


def _addresses_of(name: str) -> tuple[str, ...]:
    from poprun.hosts.interfaces import look_up  # costs some milliseconds, needed only for such names

    return look_up([name])[name]


def _is_own_address(address: str) -> bool:
    """Whether an address is one of this machine: only then a socket can be bound to it."""
    import socket  # costs some milliseconds, needed only where hosts are given by address

    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
